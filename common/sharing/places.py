"""A number of places that tenants share by weight, of turns for each, rounds of the event loop, and threads for long computations."""

import asyncio
import os
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import TypeVar
from weakref import WeakValueDictionary

from common.sharing.fairness import Fairness

T = TypeVar("T")

TELL_EVERY_S = 0.25
"""Least time between two signs to the waiting that the queue moves."""
SPARE_PLACES = 1
"""Extra places, for tenants that hold none: one tenant's long calls keep no other waiting."""


@dataclass(slots=True, eq=False)
class Claim:
    """One call that waits for a place, or holds one."""

    tenant: str
    weight: float
    advanced: Callable[[], None]
    given: asyncio.Event = field(default_factory=asyncio.Event)
    since_s: float = 0.0  # by the clock, when it was given its place


@dataclass(slots=True)
class Holdings:
    """The places that one tenant holds."""

    num: int = 0
    rate: float = 0.0  # sum of 1 / weight
    since: float = 0.0  # sum of since_s / weight

    def add(self, claim: Claim, sign: int) -> None:
        self.num += sign
        self.rate += sign / claim.weight
        self.since += sign * claim.since_s / claim.weight

    def served(self, now: float) -> float:
        """Seconds over weight for which they are held."""
        return now * self.rate - self.since


class Places:
    """Gives a free place to the waiting tenant that held places for the fewest seconds over its weight; of equals, to the
    one that holds the fewest. One tenant's requests keep their order. Safe to use from many tasks."""

    def __init__(self, num: Callable[[], int], *, clock: Callable[[], float] = time.monotonic) -> None:
        """`num`: how many there are, asked whenever a call begins or ends; there is always one."""
        self._num = num
        self._clock = clock
        self._held: dict[str, Holdings] = {}  # by tenant; no tenant without a place
        self._num_held = 0
        self._told_s = float("-inf")
        self._waiting: dict[str, dict[Claim, None]] = {}  # by tenant, in order of arrival; no tenant without a claim
        self._fairness = Fairness()

    @asynccontextmanager
    async def one(self, tenant: str, weight: float, advanced: Callable[[], None]) -> AsyncGenerator[None]:
        """Holds a place while the block runs. Calls `advanced` whenever another's place becomes free meanwhile."""
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
        if not self._waiting and self._may_have(tenant):
            self._give(claim)
            self._fairness.busy(self._held)
            return claim
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
        now, held = self._clock(), self._held[claim.tenant]
        held.add(claim, -1)
        self._num_held -= 1
        if not held.num:
            del self._held[claim.tenant]
        self._fairness.charge(claim.tenant, now - claim.since_s, claim.weight)
        if now - self._told_s >= TELL_EVERY_S and self._waiting:
            self._told_s = now
            for waiting in [one for claims in self._waiting.values() for one in claims]:
                waiting.advanced()
        if self._waiting:
            self.serve()
        else:
            self._fairness.busy(self._held)

    def _leave(self, claim: Claim) -> None:
        """Takes a claim out of those that wait."""
        del self._waiting[claim.tenant][claim]
        if not self._waiting[claim.tenant]:
            del self._waiting[claim.tenant]

    def serve(self) -> None:
        """Gives away what is free. Call when there may be more places than before."""
        self._fairness.busy(self._waiting.keys() | self._held.keys())
        while claim := self._next():
            self._leave(claim)
            self._give(claim)

    def _give(self, claim: Claim) -> None:
        claim.since_s = self._clock()
        self._held.setdefault(claim.tenant, Holdings()).add(claim, 1)
        self._num_held += 1
        claim.given.set()

    def _may_have(self, tenant: str) -> bool:
        return self._num_held < max(1, self._num()) + (0 if tenant in self._held else SPARE_PLACES)

    def _next(self) -> Claim | None:
        """The claim whose turn it is; None if it must wait."""
        firsts = (next(iter(claims)) for tenant, claims in self._waiting.items() if self._may_have(tenant))
        return min(firsts, key=self._served, default=None)

    def _served(self, claim: Claim) -> tuple[float, float]:
        """A tenant's seconds over weight, those of its places now included; and their number."""
        held = self._held.get(claim.tenant, Holdings())
        return self._fairness.virtual_time(claim.tenant) + held.served(self._clock()), held.num / claim.weight


class PerTenant:
    """Lets a few calls of each tenant run at once: `async with reads.of(tenant)`. The others wait in order."""

    def __init__(self, num: int) -> None:
        self._num = num
        self._of = WeakValueDictionary[str, asyncio.Semaphore]()  # of tenants that have calls

    def of(self, tenant: str) -> asyncio.Semaphore:
        return self._of.setdefault(tenant, asyncio.Semaphore(self._num))


EMPTY_ROUNDS = 5
"""A short call of another tenant takes fourteen rounds. Empty ones cost next to nothing."""


class Rounds:
    """Lets one call of each tenant go on in a round of the event loop, and none in the next EMPTY_ROUNDS: whoever computes for long
    calls `next` between parts, and others wait for few of a tenant's parts, however many calls it has. For one event loop."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by tenant, in order; no tenant without a call

    async def next(self, tenant: str) -> None:
        """Waits for the tenant's turn. It is over with the next `await`."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        if tenant not in self._waiting:
            self._waiting[tenant] = deque()
            loop.call_soon(self._serve, tenant)
        self._waiting[tenant].append(turn)
        await turn

    def _serve(self, tenant: str, empty_rounds: int = 0) -> None:
        call_soon = asyncio.get_running_loop().call_soon
        if empty_rounds:
            call_soon(self._serve, tenant, empty_rounds - 1)
            return
        waiting = self._waiting[tenant]
        if not (turn := waiting.popleft()).done():  # or its call was cancelled
            turn.set_result(None)
        if waiting:
            call_soon(self._serve, tenant, EMPTY_ROUNDS)
        else:
            del self._waiting[tenant]


class SharedThreads:
    """A number of threads; tenants take turns, see `Places`. Safe to use from many tasks."""

    def __init__(self, num: int = os.cpu_count() or 1) -> None:
        """`num`: calls at once."""
        self._places = Places(lambda: num)
        self._pool = ThreadPoolExecutor(num + SPARE_PLACES, "work")

    async def run(
        self, function: Callable[[], T], tenant: str, weight: float, advanced: Callable[[], None] = lambda: None
    ) -> T:
        """Calls the function, in this context, at its tenant's turn. `advanced`: see `Places.one`."""
        async with self._places.one(tenant, weight, advanced):
            return await asyncio.get_running_loop().run_in_executor(self._pool, copy_context().run, function)
