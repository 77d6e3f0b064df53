"""Places that the requests of all tenants share by weight: with a limit on their wait, and on how many of a tenant wait."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sized
from contextlib import asynccontextmanager, contextmanager

from common.errors import Unavailable
from common.sharing.places import Claim, Places
from manager_service.http.errors import too_many
from manager_service.http.sampling.cell_share import Asked
from manager_service.records.tenants import TenantRecord

MAX_WAITING = 1024
"""Requests of one tenant that wait at once for the same places."""


class SharedPlaces:
    """`common.sharing.places.Places` for requests."""

    def __init__(
        self, name: str, num: Callable[[], int], weight: Callable[[str, float], float] = lambda _, weight: weight
    ) -> None:
        """`name`: of the places, for errors. `num`: of them now; there is always one. `weight`: what counts here of a tenant's."""
        self._name = name
        self._weight = weight
        self._open: dict[str, Asked] = {}
        self._places = Places(num)
        self._waiting: Counter[str] = Counter()
        self._behind: dict[int, tuple[str, Sized]] = {}  # by identity

    @asynccontextmanager
    async def one(self, tenant: TenantRecord, timeout_s: float, most: int = MAX_WAITING) -> AsyncGenerator[None]:
        """Holds a place while the block runs. Raises as `take` does."""
        claim = await self.take(tenant, timeout_s, most)
        try:
            yield
        finally:
            self.give_back(claim)

    async def take(self, tenant: TenantRecord, timeout_s: float | None, most: int = MAX_WAITING) -> Claim:
        """Waits for a place. Raises Unavailable after `timeout_s`, ApiError 429 if `most` of the tenant's wait."""
        if self._waiting[tenant.id] >= most:
            raise too_many(f"{most} of your requests wait for {self._name} already; ask again when some have ended")
        self._waiting[tenant.id] += 1
        self._ask(tenant.id, tenant.weight, 1)
        try:
            async with asyncio.timeout(timeout_s):
                return await self._places.take(tenant.id, self._weight(tenant.id, tenant.weight))
        except (TimeoutError, asyncio.CancelledError) as error:
            # Whoever gets a place stays counted until `give_back`; whoever leaves the queue is not counted any more: otherwise this
            # replica would claim a part of the cell for nobody.
            self._ask(tenant.id, tenant.weight, -1)
            if isinstance(error, asyncio.CancelledError):
                raise
            raise Unavailable(f"all {self._name} are taken; try again in a moment") from error
        finally:
            self._waiting[tenant.id] -= 1

    @contextmanager
    def behind(self, tenant: TenantRecord, rest: Sized) -> Generator[None]:
        """Counts all in `rest` as asked for too while the block runs: the caller will take places for them next."""
        self._behind[id(rest)] = (tenant.id, rest)
        try:
            yield
        finally:
            del self._behind[id(rest)]

    def take_now(self, tenant: TenantRecord) -> Claim | None:
        """Takes a place if one is the tenant's at this moment."""
        claim = self._places.take_now(tenant.id, self._weight(tenant.id, tenant.weight))
        if claim is not None:
            self._ask(tenant.id, tenant.weight, 1)
        return claim

    def give_back(self, claim: Claim) -> None:
        self._ask(claim.tenant, self._open[claim.tenant].weight, -1)
        self._places.end(claim)

    def serve(self) -> None:
        """Gives away what is free. Call when there may be more places than before."""
        self._places.serve()

    def asks(self, tenant: str) -> bool:
        """Says whether the tenant holds or waits for a place."""
        return tenant in self._open

    def asking(self) -> Mapping[str, Asked]:
        """Places that tenants ask for now: those that they hold, wait for, or will take next."""
        behind = Counter[str]()
        for tenant, rest in self._behind.values():
            behind[tenant] += len(rest)
        return {tenant: Asked(asked.weight, asked.num + behind[tenant]) for tenant, asked in self._open.items()}

    def _ask(self, tenant: str, weight: float, num: int) -> None:
        before = self._open.pop(tenant, None)
        if total := num + (before.num if before else 0):
            self._open[tenant] = Asked(weight, total)
