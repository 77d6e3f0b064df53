"""One exporter works at a time, and a full Redis does not end its work."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from common.bus.bus import Bus
from common.cancellation import running
from manager_service.export.lease import KEY, Lease


class Exporters:
    """Exporters, and which of them work."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.redis: Any = bus.client
        self.working = list[str]()
        self.most = 0

    async def run(self, name: str) -> None:
        await Lease(self.redis, self._bus, lease_s=0.4).work(lambda: self._work(name))

    @asynccontextmanager
    async def _work(self, name: str) -> AsyncGenerator[None]:
        self.working.append(name)
        self.most = max(self.most, len(self.working))
        try:
            yield
        finally:
            self.working.remove(name)

    async def until(self, names: list[str]) -> None:
        async with asyncio.timeout(60):
            while self.working != names:
                await asyncio.sleep(0.01)


async def test_one_exporter_works_and_another_goes_on_once_it_is_gone(bus: Bus) -> None:
    exporters = Exporters(bus)
    async with running(exporters.run("b")) as waits:
        await exporters.until(["b"])
        async with running(exporters.run("a")):
            waits[0].cancel()
            await exporters.until(["a"])
            await exporters.redis.set(KEY, "c", px=600)
            await exporters.until([])
            await exporters.until(["a"])
    assert exporters.most == 1


async def test_a_full_redis_does_not_take_the_lease_from_who_has_it(bus: Bus) -> None:
    exporters = Exporters(bus)
    async with running(exporters.run("a")):
        await exporters.until(["a"])
        await exporters.redis.config_set("maxmemory", "1")
        try:
            for _ in range(4):
                await exporters.redis.pexpire(KEY, 300)
                async with asyncio.timeout(60):
                    while await exporters.redis.pttl(KEY) <= 300:
                        await asyncio.sleep(0.01)
            assert exporters.working == ["a"]
        finally:
            await exporters.redis.config_set("maxmemory", "0")
