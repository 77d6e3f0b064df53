"""Computes for many jobs and runs together: a step joins between two micro-batches and leaves when its own are done.

waits for: a step (a TrainStep, or a stretch of a run's operations)   unblocked by: the handlers

Steps are served by age, so none waits for the slowest, and none is overtaken for ever. The error of a step goes to its own
caller. An error of a micro-batch that cannot be put down to one step (memory that ran out, a fault of ours) makes each step
begin again, alone, so that only the step that causes it fails.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import structlog

from base_model.device import compute_clock
from common.messages import TrainStep
from trainer_service.open_step import OpenBatch, Trained, TrainState
from trainer_service.training import Trainer


class Opened(Protocol):
    """A step under way."""

    @property
    def opened(self) -> OpenBatch: ...


T = TypeVar("T")
O = TypeVar("O", bound=Opened)  # noqa: E741
log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class _Member:
    """A step that a caller waits for."""

    begin: Callable[[], Opened]
    finish: Callable[[Any], object]
    beat: Callable[[], None]
    result: "asyncio.Future[Any]"
    step: Opened | None = None
    alone: bool = False


@dataclass(slots=True)
class Fusion:
    """Runs a trainer in a thread for the callers that wait for a step."""

    trainer: Trainer
    compute_s: float = 0.0
    """Seconds in forward, backward and optimiser since the start: of the thread on a processor; on a GPU, of the clock."""
    _members: list[_Member] = field(default_factory=list[_Member])  # by age
    _driver: "asyncio.Task[None] | None" = None

    async def train(self, message: TrainStep, state: TrainState, beat: Callable[[], None]) -> Trained:
        """Trains the step; returns its result, and raises as `Trainer.begin` and `finish`."""
        return await self.run(lambda: self.trainer.begin(message, state), self.trainer.finish, beat)

    async def run(self, begin: Callable[[], O], finish: Callable[[O], T], beat: Callable[[], None]) -> T:
        """Opens a step, computes it beside the others and returns what `finish` makes of it; raises as these two, which run in the
        computing thread. `finish` closes the step. `beat` is called after every micro-batch.

        `begin` may be called again. A caller that is cancelled takes its step out before the next micro-batch.
        """
        member = _Member(begin, finish, beat, asyncio.get_running_loop().create_future())
        self._members.append(member)
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive())
        return await member.result

    async def _drive(self) -> None:
        while self._members:
            outcomes = await asyncio.to_thread(self._round, [*self._members])
            for member in self._members:
                member.beat()
            for member, outcome in outcomes.items():
                self._members.remove(member)
                if member.result.done():  # cancelled
                    continue
                if isinstance(outcome, Exception):
                    member.result.set_exception(outcome)
                else:
                    member.result.set_result(outcome)

    def _round(self, members: list[_Member]) -> "dict[_Member, object]":
        """Runs one micro-batch, in the computing thread. Returns the members that leave, each with its result or error."""
        now = compute_clock(self.trainer.backbone.device)
        since = now()
        outcomes = self._advanced(members)
        self.compute_s += now() - since
        return outcomes

    def _advanced(self, members: list[_Member]) -> "dict[_Member, object]":
        outcomes: dict[_Member, object] = {}
        for member in members:
            if member.result.cancelled():
                self._discard(member)
                outcomes[member] = asyncio.InvalidStateError("nobody waits for this step")
            elif member.step is None:
                began = _tried(member.begin)
                if isinstance(began, Exception):
                    outcomes[member] = began
                else:
                    member.step = began
        company = [m for m in members if m not in outcomes]
        company = company[:1] if company and company[0].alone else [m for m in company if not m.alone]
        return outcomes | self._micro_batch(company) | self._finish(company)

    def _micro_batch(self, company: list[_Member]) -> "dict[_Member, object]":
        steps = [m.step.opened for m in company if m.step is not None and not m.step.opened.done]
        failed = _tried(lambda: self.trainer.micro_batch(steps)) if steps else None
        if failed is None:
            return {}
        log.warning("micro_batch_failed", num_jobs=len(company), reason=f"{type(failed).__name__}: {failed}")
        outcomes: dict[_Member, object] = {m: failed for m in company if m.alone}
        for member in company:
            self._discard(member)
            member.alone = True
        return outcomes

    def _finish(self, company: list[_Member]) -> "dict[_Member, object]":
        done = [(m, m.step) for m in company if m.step is not None and m.step.opened.done]
        return {member: _tried(lambda member=member, step=step: member.finish(step)) for member, step in done}

    def _discard(self, member: _Member) -> None:
        if member.step is not None:
            self.trainer.discard(member.step.opened)
            member.step = None


def _tried(call: Callable[[], T]) -> T | Exception:
    """Returns the call's result or its error, for the caller that waits for the step."""
    try:
        return call()
    except Exception as error:
        return error
