"""A number of places that the requests of all tenants share, by weight."""

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from common.errors import Unavailable
from common.fairness import Fairness
from manager_service.api.errors import RETRY_AFTER_S, ApiError
from manager_service.records import TenantRecord

MAX_WAITING = 1024
"""Requests of one tenant that wait at once for the same places."""


@dataclass(slots=True, eq=False)
class Place:
    """One place that a tenant holds. `FairPlaces.give_back` it."""

    tenant: TenantRecord
    since_s: float  # monotonic


class FairPlaces:
    """Gives a free place to the waiting tenant that was served least for its weight: in seconds that it held places, with those
    that it holds now by estimate. What one tenant asks for waits in its own order.
    """

    def __init__(self, name: str, num: Callable[[], int]) -> None:
        """`name`: of the places, for errors. `num`: how many there are at the moment; there is always one."""
        self._name = name
        self._num = num
        self._held: Counter[str] = Counter()
        self._waiting: dict[str, deque[tuple[TenantRecord, asyncio.Future[Place]]]] = {}
        self._fairness = Fairness()
        self._typical_s = 1.0
        """How long a place is held: a moving mean."""

    @asynccontextmanager
    async def one(self, tenant: TenantRecord, timeout_s: float) -> AsyncGenerator[None]:
        """Holds a place while the block runs. Raises as `take` does."""
        place = await self.take(tenant, timeout_s)
        try:
            yield
        finally:
            self.give_back(place)

    async def take(self, tenant: TenantRecord, timeout_s: float) -> Place:
        """Waits for a place. Raises Unavailable after `timeout_s`, ApiError 429 if too many of the tenant's requests wait."""
        queue = self._waiting.setdefault(tenant.id, deque())
        if len(queue) >= MAX_WAITING:
            raise _too_many(self._name)
        future: asyncio.Future[Place] = asyncio.get_running_loop().create_future()
        queue.append((tenant, future))
        self._serve()
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(future)
        except (TimeoutError, asyncio.CancelledError) as error:
            self._give_up(tenant.id, future)
            if isinstance(error, TimeoutError):
                raise Unavailable(f"all {self._name} are taken; try again in a moment") from error
            raise

    def give_back(self, place: Place) -> None:
        tenant, held_s = place.tenant, time.monotonic() - place.since_s
        self._held[tenant.id] -= 1
        self._typical_s += (held_s - self._typical_s) / 16
        self._fairness.charge(tenant.id, held_s, tenant.weight)
        self._serve()

    def _give_up(self, tenant: str, future: "asyncio.Future[Place]") -> None:
        """Takes back a request that timed out or was cancelled, perhaps just when it was served."""
        if future.done():
            self.give_back(future.result())
            return
        queue = self._waiting[tenant]
        queue.remove(next(entry for entry in queue if entry[1] is future))

    def _serve(self) -> None:
        """Gives away what is free."""
        while self._held.total() < max(1, self._num()) and (tenant := self._next()):
            record, future = self._waiting[tenant].popleft()
            self._held[tenant] += 1
            future.set_result(Place(record, time.monotonic()))

    def _next(self) -> str | None:
        """The tenant whose turn it is; None if nobody waits."""
        self._waiting = {tenant: queue for tenant, queue in self._waiting.items() if queue}
        self._fairness.busy([*self._waiting, *(tenant for tenant, num in self._held.items() if num)])
        return min(self._waiting, key=self._served, default=None)

    def _served(self, tenant: str) -> float:
        """Seconds over weight."""
        weight = self._waiting[tenant][0][0].weight
        return self._fairness.virtual_time(tenant) + self._held[tenant] * self._typical_s / weight


def _too_many(name: str) -> ApiError:
    error = ApiError(
        429, f"{MAX_WAITING} of your requests wait for {name} already; ask again when some have ended", code="too_many"
    )
    error.headers = {"Retry-After": str(RETRY_AFTER_S)}
    return error
