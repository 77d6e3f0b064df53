"""Places that tenants share: no more than there are, and fair by weight."""

import asyncio

import pytest

from common.errors import Unavailable
from manager_service.http.errors import ApiError
from manager_service.http.sampling.places import MAX_WAITING, SharedPlaces
from manager_service.records.tenants import TenantRecord


def tenant(name: str, weight: float = 1.0) -> TenantRecord:
    return TenantRecord(id=name, weight=weight, created_at=0)


async def test_there_is_always_one_place() -> None:
    places = SharedPlaces("places", lambda: 0)
    async with places.one(tenant("a"), 1):
        with pytest.raises(Unavailable, match="all places are taken; try again"):
            await places.take(tenant("a"), 0.05)


async def test_too_many_waiting_requests_of_one_tenant_are_refused() -> None:
    places = SharedPlaces("places", lambda: 1)
    async with places.one(tenant("a"), 1):
        tasks = [asyncio.create_task(places.take(tenant("a"), 60)) for _ in range(MAX_WAITING)]
        await asyncio.sleep(0.05)
        with pytest.raises(ApiError, match="wait for places already") as refused:
            await places.take(tenant("a"), 60)
        assert refused.value.status_code == 429
        other = asyncio.create_task(places.take(tenant("b"), 60))
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    places.give_back(await other)
