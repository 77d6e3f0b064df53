"""A Redis that another version of MARLaaS wrote is refused before anything is read from it."""

import pytest

from common.bus.bus import Bus
from common.errors import InvalidInput
from manager_service.records.tenants import FORMAT, FORMAT_KEY, TENANTS, check_format


async def test_an_empty_redis_is_marked_and_opens_again(bus: Bus) -> None:
    await check_format(bus.client)
    assert await bus.client.get(FORMAT_KEY) == FORMAT.encode()
    await bus.client.hset(TENANTS, "alice", "{}")
    await check_format(bus.client)


@pytest.mark.parametrize("mark,named", [(None, "format 1"), ("4", "format 4"), ("99", "format 99")])
async def test_data_of_another_version_is_refused_in_one_line(bus: Bus, mark: str | None, named: str) -> None:
    await bus.client.hset(TENANTS, "alice", "{}")
    if mark is not None:
        await bus.client.set(FORMAT_KEY, mark)
    with pytest.raises(InvalidInput, match=named) as refused:
        await check_format(bus.client)
    assert len(str(refused.value).splitlines()) == 1 and "--data" in str(refused.value)
    assert await bus.client.get(FORMAT_KEY) == (mark.encode() if mark else None)
