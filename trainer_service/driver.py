"""Computes many steps in one thread, by micro-batches: a step joins between two and leaves when its own are done.

A step's error goes to its caller. A micro-batch's error of unknown cause (memory that ran out, a fault of ours) makes each
step begin again by itself, so that only the cause fails. Where memory ran out, the step's micro-batches get half the
tokens, and half again, down to one row.
"""

import asyncio
import contextlib
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import structlog

from base_model.device import compute_clock, give_back_memory
from common.errors import InvalidInput
from common.sharing.fairness import Fairness
from trainer_service.open_step import OpenBatch
from trainer_service.packing import WINDOW_BATCHES, Budget
from trainer_service.training import DoesNotFit, Trainer

LEAST_CHARGED_PART = 1 / 32
"""The least part of a micro-batch's tokens that a tenant is charged: the smallest takes time too."""
FOLLOWER_WAIT_PART = 0.25
"""The longest wait for a small next step, by way of its run's owner, as a part of a micro-batch's time."""
TENANTS_MET_S, TENANTS_MET_PART = 10.0, 0.5
"""For so many seconds after steps of several tenants met, a large step's micro-batch takes this part of the budget, so that
a newcomer waits less."""

T = TypeVar("T")
log = structlog.get_logger()


class Opened(Protocol):
    """A step under way."""

    @property
    def opened(self) -> OpenBatch: ...


@dataclass(slots=True, eq=False)
class FusedStep:
    """A step that a caller waits for."""

    tenant: str
    weight: float
    begin: Callable[[Trainer], Opened]
    finish: Callable[[Any], object]
    beat: Callable[[], None]
    goes_on: bool
    tokens: int  # that it has to go at its begin; before that, about
    result: "asyncio.Future[Any]"
    step: Opened | None = None
    is_alone: bool = False  # its micro-batches hold no other step: one that failed together with others
    most_tokens: int = sys.maxsize  # of its micro-batches, except a row that is longer
    under_way: int = 0  # tokens that it had left before the micro-batch that is computed now

    @property
    def tokens_left(self) -> int:
        """Tokens left; an estimate until the step has begun."""
        return self.tokens if self.step is None else self.step.opened.tokens_left

    @property
    def tokens_unserved(self) -> int:
        """Tokens left, with those of the micro-batch that is computed now."""
        return max(self.tokens_left, self.under_way)


@dataclass(slots=True)
class Driver:
    """Runs a trainer in a thread for the callers that wait for a step."""

    trainer: Trainer
    served: Fairness  # tokens computed for each tenant
    members: list[FusedStep] = field(default_factory=list[FusedStep])  # by age
    compute_s: float = 0.0
    """Seconds in forward, backward and optimiser since the start: of the thread; on a GPU, of the clock."""
    _forwarded: int = 0  # tokens, since the start
    _driving: "asyncio.Task[None] | None" = None
    _came: asyncio.Event = field(default_factory=asyncio.Event)  # a step, since the driver last waited
    _waited: bool = False  # after the last round, for a step that follows
    _hurried: bool = False  # the last round had no micro-batch
    _shared_at: float = -TENANTS_MET_S  # monotonic time when steps of several tenants were last together

    async def run(self, member: FusedStep) -> Any:
        """Returns the member's result. Cancelling takes the step out before the next micro-batch."""
        self.members.append(member)
        self._came.set()
        if self._driving is None or self._driving.done():
            self._driving = asyncio.create_task(self._drive())
        return await member.result

    async def _drive(self) -> None:
        while self.members:
            outcomes = await asyncio.to_thread(self._round, [*self.members])
            for member in self.members:
                member.beat()
            for member, outcome in outcomes.items():
                self.members.remove(member)
                if member.result.done():  # cancelled
                    continue
                if isinstance(outcome, Exception):
                    member.result.set_exception(outcome)
                else:
                    member.result.set_result(outcome)
            self._waited = not self._waited and any(self._awaits_next(member) for member in outcomes)
            if self._waited:
                await self._next_step()

    def _awaits_next(self, left: FusedStep) -> bool:
        """Is the next step worth waiting for? Not with others of its tenant there, nor with smaller ones."""
        larger = [m.tenant != left.tenant and m.step is not None and m.tokens_left > left.tokens for m in self.members]
        return left.goes_on and bool(larger) and all(larger)

    async def _next_step(self) -> None:
        """Returns when a step comes, or after FOLLOWER_WAIT_PART of what a micro-batch takes."""
        self._came.clear()
        micro_batch_s = self.compute_s / max(1, self._forwarded) * self.trainer.budget.tokens * TENANTS_MET_PART
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._came.wait(), FOLLOWER_WAIT_PART * micro_batch_s)

    def _round(self, members: list[FusedStep]) -> dict[FusedStep, object]:
        """Runs one micro-batch, in the computing thread. Returns members that leave, with results or errors."""
        now = compute_clock(self.trainer.backbone.device)
        since = now()
        outcomes = self._advanced(members)
        self.compute_s += now() - since
        return outcomes

    def _advanced(self, members: list[FusedStep]) -> dict[FusedStep, object]:
        outcomes: dict[FusedStep, object] = {}
        for member in members:
            if member.result.cancelled():
                self._discard(member)
                outcomes[member] = asyncio.InvalidStateError("nobody waits for this step")
            elif member.step is None:
                began = _tried(lambda member=member: self._begun(member))
                if isinstance(began, Exception):
                    outcomes[member] = began
                else:
                    member.step = began
                    member.tokens = member.tokens_left
        outcomes |= self._finish([m for m in members if m not in outcomes])
        left = [m for m in members if m not in outcomes]
        self._hurried = bool(outcomes) and not self._hurried
        if self._hurried or not left:
            return outcomes  # what needs no micro-batch, such as an optimiser's step, waits for none; every other round has one
        company = _together(self._in_turn(left))
        return outcomes | self._micro_batch(company) | self._finish(company)

    def _begun(self, member: FusedStep) -> Opened:
        step = member.begin(self.trainer)
        self.trainer.cut(step.opened, member.most_tokens)
        return step

    def _in_turn(self, company: Sequence[FusedStep]) -> list[FusedStep]:
        """Sorts the members by their tenants' tokens until each ends; tenants that were served too much come last."""
        if len({member.tenant for member in company}) > 1:
            self._shared_at = time.monotonic()
        first = self.first_finish(company)
        to_go: Counter[str] = Counter()
        # Shortest remaining time first: a small step waits for no large one. That alone would starve the large, and serve tenants of like
        # steps in bursts, so nobody is served beyond the moment at which fair queueing would end another's step.
        keys: dict[FusedStep, tuple[float, int]] = {}
        for member in company:
            to_go[member.tenant] += member.tokens_left
            served = self.served.virtual_time(member.tenant)
            keys[member] = (served if served >= first else 0.0, to_go[member.tenant])
        return sorted(company, key=keys.__getitem__)

    def first_finish(self, members: Sequence[FusedStep]) -> float:
        """The earliest virtual time at which a tenant will have got its oldest step; who has reached it is served last."""
        oldest = {member.tenant: member for member in reversed(members)}
        times = (self.served.virtual_time(t) + member.tokens_unserved / member.weight for t, member in oldest.items())
        return min(times, default=0.0)

    def _micro_batch(self, company: Sequence[FusedStep]) -> dict[FusedStep, object]:
        going = [(m, m.step.opened) for m in company if m.step is not None and not m.step.opened.done]
        before = [one.sums.num_forward for _, one in going]
        budget = self._budget([member for member, _ in going])
        for member, one in going:
            member.under_way = one.tokens_left
        failed = _tried(lambda: self.trainer.micro_batch([one for _, one in going], budget)) if going else None
        least = int(LEAST_CHARGED_PART * self.trainer.budget.tokens)
        for (member, one), num_forward in zip(going, before, strict=True):
            tokens, member.under_way = one.sums.num_forward - num_forward, 0
            self.served.charge(member.tenant, max(tokens, least) if tokens else 0, member.weight)
            self._forwarded += tokens
        if failed is None:
            return {}
        log.warning("micro_batch_failed", num_jobs=len(company), reason=f"{type(failed).__name__}: {failed}")
        for member in company:
            self._discard(member)
        ended: object = failed
        if isinstance(failed, DoesNotFit):
            give_back_memory()
            ended = self._beyond_memory(failed) if failed.is_least else None
        outcomes: dict[FusedStep, object] = {m: ended for m in company if m.is_alone and ended is not None}
        for member in company:
            member.is_alone = True
            if isinstance(failed, DoesNotFit):
                member.most_tokens = max(1, failed.tokens // 2)
        return outcomes

    def _beyond_memory(self, failed: DoesNotFit) -> InvalidInput:
        free_mb = self.trainer.backbone.free_bytes() / 1e6
        return InvalidInput(
            f"memory ran out in a row of {failed.tokens} tokens, computed by itself, with {free_mb:,.0f} MB free before it "
            f"({failed.reason}): make rows shorter (max_tokens, MARLAAS_MAX_CONTEXT), or let them need less on the "
            "trainer (MARLAAS_TRAINER_CHECKPOINTING=true, MARLAAS_TRAINER_DTYPE=bfloat16, a larger MARLAAS_TRAINER_RANKS)"
        )

    def _budget(self, company: Sequence[FusedStep]) -> Budget:
        """The budget of the company's next micro-batch. Its first member is first in turn."""
        budget = self.trainer.budget
        tokens_left = company[0].tokens_left if company else 0
        shared = time.monotonic() - self._shared_at < TENANTS_MET_S and tokens_left > WINDOW_BATCHES * budget.tokens
        tokens = int(budget.tokens * TENANTS_MET_PART) if shared else budget.tokens
        return replace(budget, tokens=min([tokens, *(member.most_tokens for member in company)]))

    def _finish(self, company: Sequence[FusedStep]) -> dict[FusedStep, object]:
        done = [(m, m.step) for m in company if m.step is not None and m.step.opened.done]
        return {member: _tried(lambda member=member, step=step: member.finish(step)) for member, step in done}

    def _discard(self, member: FusedStep) -> None:
        if member.step is not None:
            self.trainer.discard(member.step.opened)
            member.step = None


def _together(in_turn: Sequence[FusedStep]) -> Sequence[FusedStep]:
    """The first step and those that may share its micro-batch: none that must be alone, or that would make it smaller."""
    first, *others = in_turn
    return [first, *(m for m in others if not (first.is_alone or m.is_alone) and m.most_tokens >= first.most_tokens)]


def _tried(call: Callable[[], T]) -> T | Exception:
    """Returns the call's result or its error, for the caller that waits for the step."""
    try:
        return call()
    except Exception as error:
        return error
