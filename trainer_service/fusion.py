"""Computes for many jobs and runs together.

waits for: a step (a TrainStep, or a segment of a run's operations)   unblocked by: the handlers

A tenant's steps go by age. Between tenants the step with the fewest tokens left is first (shortest remaining processing
time), so that a small one waits for no large one; but a tenant that has reached the virtual time at which weighted fair
queueing ends another's step comes after it: nobody's step waits longer than in fair shares, and like steps go in turn
(as in the Fair Sojourn Protocol: Friedman and Henderson, SIGMETRICS 2003).

A micro-batch under way cannot be overtaken, and holds at least one row of a large step. So where the base model computes in
two threads at once, the *express* driver takes small steps, next to the main one.

    step ─┬─► main driver      a thread: all that is there, fused
          └─► express driver   another: at most EXPRESS_PART of a micro-batch at a time, next to another tenant's larger step

Elsewhere, after a small step that the same tenant follows at once, as an optimiser's follows a gradient, the driver waits a
moment before it goes on with larger ones (anticipatory scheduling: Iyer and Druschel, SOSP 2001).
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar, cast

from common.sharing.fairness import Fairness
from common.wire.messages import TrainStep
from trainer_service.driver import Driver, FusedStep, Opened
from trainer_service.open_step import Trained, TrainState
from trainer_service.training import Trainer

EXPRESS_PART = 0.25
"""The part of a micro-batch, in tokens and in memory, that the express driver has."""

T = TypeVar("T")
O = TypeVar("O", bound=Opened)  # noqa: E741


class Fusion:
    """Runs a trainer for the callers that wait for a step."""

    def __init__(self, trainer: Trainer) -> None:
        self.again: dict[str, int] = {}
        """Earlier deliveries of messages, by id: a process that had them may have run out of memory."""
        self._served = Fairness()
        self._express: Driver | None = None
        if trainer.backbone.concurrent:
            self._express = Driver(_part(trainer, EXPRESS_PART), self._served)
            trainer = _part(trainer, 1 - EXPRESS_PART, tokens=trainer.budget.tokens)
        self.trainer = trainer
        self._main = Driver(trainer, self._served)

    @property
    def compute_s(self) -> float:
        """Seconds in forward, backward and optimiser since the start: of the threads; on a GPU, of the clock."""
        return sum(driver.compute_s for driver in self._drivers)

    @property
    def _drivers(self) -> list[Driver]:
        return [self._main, self._express] if self._express else [self._main]

    async def train(self, message: TrainStep, state: TrainState, beat: Callable[[], None]) -> Trained:
        """Trains the step; returns its result, and raises as `Trainer.begin` and `finish`."""
        tokens = len(message.rows.tokens)
        return await self.run(
            message.tenant,
            lambda trainer: trainer.begin(message, state),
            self.trainer.finish,
            beat,
            tokens=tokens,
            weight=message.weight,
            halvings=self.again.pop(message.id, 0),
        )

    async def run(
        self,
        tenant: str,
        begin: Callable[[Trainer], O],
        finish: Callable[[O], T],
        beat: Callable[[], None],
        *,
        tokens: int,
        weight: float = 1.0,
        goes_on: bool = False,
        halvings: int = 0,
    ) -> T:
        """Opens a tenant's step, computes it with the others and returns what `finish` makes of it; raises as `begin` and `finish`,
        which run in a computing thread. `finish` closes the step. `beat`: called after each micro-batch. `tokens`: about its
        size. `weight`: the tenant's. `goes_on`: another step follows this one's result. `halvings`: of its micro-batches' tokens.

        `begin` may be called again. Cancelling takes the step out before the next micro-batch.
        """
        result = asyncio.get_running_loop().create_future()
        member = FusedStep(tenant, weight, begin, finish, beat, goes_on, tokens, result)
        if halvings:
            member.most_tokens = max(1, self.trainer.budget.tokens >> halvings)
        self._served.busy({tenant, *(other.tenant for driver in self._drivers for other in driver.members)})
        driver = self._express if self._express and self._is_express(member, self._express) else self._main
        return cast(T, await driver.run(member))

    def _is_express(self, new: FusedStep, express: Driver) -> bool:
        """True for a small step that would wait for another tenant's larger one, even for its last micro-batch.

        Its tenant's own go by age, and one that was served much more than those that wait goes behind them.
        """
        # The two drivers share only the base model's weights, and torch computes in both threads at once. The express driver has a part
        # of the memory (`_part`), so it holds only what fits there; and it takes only steps that the main driver would keep waiting:
        # for all others one fused micro-batch is cheaper than two.
        waiting = self._main.members
        return (
            express.trainer.budget.holds(1, new.tokens + sum(m.tokens_left for m in express.members), branched=False)
            and any(m.tokens_unserved > express.trainer.budget.tokens for m in waiting)
            and all(member.tenant != new.tenant for member in waiting)
            and self._served.virtual_time(new.tenant) < self._main.first_finish(waiting)
        )


def _part(trainer: Trainer, part: float, *, tokens: int | None = None) -> Trainer:
    """A trainer of the same base model with a part of the budget, or so many `tokens`, and batches of its own."""
    budget = trainer.budget
    limits = replace(budget, tokens=tokens or int(part * budget.tokens), num_bytes=part * budget.num_bytes)
    return replace(trainer, budget=limits, _stacks={})
