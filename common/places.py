"""A number of places that tenants share by weight."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from common.fairness import Fairness

KEPT = 1
"""Places beyond their number, for tenants that hold none: one tenant's long calls keep no other waiting."""


@dataclass(slots=True, eq=False)
class Claim:
    """One call that waits for a place, or holds one."""

    tenant: str
    weight: float
    advanced: Callable[[], None]
    given: asyncio.Event = field(default_factory=asyncio.Event)
    since_s: float = 0.0  # by the clock, when it was given its place


class Places:
    """Gives a free place to the waiting tenant that was served least for its weight, in seconds that it held places, and among
    equals to the one that holds the fewest. What one tenant asks for waits in its own order. Safe to use from many tasks."""

    def __init__(self, num: Callable[[], int], *, clock: Callable[[], float] = time.monotonic) -> None:
        """`num`: how many there are, asked whenever a call begins or ends; there is always one."""
        self._num = num
        self._clock = clock
        self._held: list[Claim] = []
        self._waiting: dict[str, dict[Claim, None]] = {}  # by tenant, in order of arrival; no tenant without a claim
        self._fairness = Fairness()

    @asynccontextmanager
    async def one(self, tenant: str, weight: float, advanced: Callable[[], None]) -> AsyncGenerator[None]:
        """Holds a place while the block runs. Calls `advanced` while it waits, whenever another's place becomes free."""
        claim = await self.take(tenant, weight, advanced)
        try:
            yield
        finally:
            self.end(claim)

    async def take(self, tenant: str, weight: float, advanced: Callable[[], None] = lambda: None) -> Claim:
        """Waits for a place, which is held until `end`."""
        claim = Claim(tenant, weight, advanced)
        self._waiting.setdefault(tenant, {})[claim] = None
        try:
            self.serve()
            await claim.given.wait()
        except asyncio.CancelledError:
            self.end(claim)
            raise
        return claim

    def take_now(self, tenant: str, weight: float) -> Claim | None:
        """Takes a place if one is the tenant's at this moment."""
        claim = Claim(tenant, weight, lambda: None)
        self._waiting.setdefault(tenant, {})[claim] = None
        self.serve()
        if claim.given.is_set():
            return claim
        self._leave(claim)
        return None

    def end(self, claim: Claim) -> None:
        """Takes back a place, or a claim that was cancelled while it waited."""
        if claim in self._waiting.get(claim.tenant, ()):
            self._leave(claim)
            return
        self._held.remove(claim)
        self._fairness.charge(claim.tenant, self._clock() - claim.since_s, claim.weight)
        for claims in self._waiting.values():
            for waiting in claims:
                waiting.advanced()
        self.serve()

    def _leave(self, claim: Claim) -> None:
        """Takes a claim out of those that wait."""
        del self._waiting[claim.tenant][claim]
        if not self._waiting[claim.tenant]:
            del self._waiting[claim.tenant]

    def serve(self) -> None:
        """Gives away what is free. Call when there may be more places than before."""
        self._fairness.busy([*self._waiting, *(claim.tenant for claim in self._held)])
        while claim := self._next():
            self._leave(claim)
            self._held.append(claim)
            claim.since_s = self._clock()
            claim.given.set()

    def _next(self) -> Claim | None:
        """The claim whose turn it is; None if it must wait."""
        held = Counter(claim.tenant for claim in self._held)
        firsts = [next(iter(claims)) for claims in self._waiting.values()]
        allowed = [claim for claim in firsts if self._may_have(held.total(), held[claim.tenant])]
        served = self._served()
        return min(allowed, key=lambda one: (served[one.tenant], held[one.tenant] / one.weight), default=None)

    def _may_have(self, num_held: int, num_own: int) -> bool:
        return num_held < max(1, self._num()) + (0 if num_own else KEPT)

    def _served(self) -> dict[str, float]:
        """Seconds over weight of each tenant, with those of the places that it holds now."""
        now = self._clock()
        served = {tenant: self._fairness.virtual_time(tenant) for tenant in self._waiting}
        for claim in self._held:
            if claim.tenant in served:
                served[claim.tenant] += (now - claim.since_s) / claim.weight
        return served
