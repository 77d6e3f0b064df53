"""Places that tenants share: no more than there are."""

import pytest

from common.errors import Unavailable
from manager_service.http.sampling.places import SharedPlaces
from manager_service.records.tenants import TenantRecord


async def test_there_is_always_one_place() -> None:
    places, tenant = SharedPlaces("places", lambda: 0), TenantRecord(id="a", created_at=0)
    async with places.one(tenant, 1):
        with pytest.raises(Unavailable, match="all places are taken; try again"):
            await places.take(tenant, 0.05)
