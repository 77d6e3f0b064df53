"""Lets one exporter work at a time, on whatever machine.

marlaas:{@}:exporter   string   the exporter that works, for some seconds after it last said so
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import structlog

from common.bus.bus import Bus
from manager_service.records.keys import GLOBAL

KEY = GLOBAL + "exporter"

# KEYS: the lease. ARGV: token, milliseconds. Its first write needs no memory, which Redis may be out of.
# The lease only saves work. An exporter that was stopped for longer than its lease goes on next to the new one for a
# moment: nothing fences loggers and webhooks. That does no harm: what both send has the same keys (a row: job and event;
# a call: job), by which the receiver drops the second.
HOLD = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""

log = structlog.get_logger()


class Lease:
    def __init__(self, redis: Any, bus: Bus, lease_s: float) -> None:
        """`redis`: a client for keys outside of cells. `bus`: any, for its patience."""
        self._bus = bus
        self._token = secrets.token_hex(16)
        self._lease_s = lease_s
        self._hold = redis.register_script(HOLD)

    async def work(self, working: Callable[[], AbstractAsyncContextManager[object]]) -> None:
        """Enters `working` whenever it gets the lease, and leaves it before another can have it. Until cancelled."""
        while True:
            began = time.monotonic()
            if await self._round():
                log.info("lease_taken")
                async with working():
                    await self._kept(began + self._lease_s)
                log.warning("lease_lost")
            await asyncio.sleep(self._lease_s / 4)

    async def _kept(self, valid_until: float) -> None:
        """Returns once the lease is another's, or may be so soon."""
        with contextlib.suppress(TimeoutError):
            while True:
                async with asyncio.timeout(valid_until - self._lease_s / 4 - time.monotonic()):
                    await asyncio.sleep(self._lease_s / 4)
                    began = time.monotonic()
                    if not await self._round():
                        return
                valid_until = began + self._lease_s

    async def _round(self) -> bool:
        arguments = [self._token, int(self._lease_s * 1000)]
        return bool(await self._bus.retrying(lambda: self._hold(keys=[KEY], args=arguments)))
