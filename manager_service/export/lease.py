"""Lets one exporter work at a time, on whatever machine: two would write rows twice.

marlaas:{@}:exporter   string   the token of the exporter that works, for some seconds after it last said so

On one machine the lock of the folder decides, which the kernel drops with the process. The token lies in that file, so that an
exporter that starts after one was killed takes its lease over at once.
"""

import asyncio
import contextlib
import fcntl
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import structlog

from common.bus import Bus
from manager_service.records import GLOBAL

KEY = GLOBAL + "exporter"
WAIT_S = 1.0
"""Time between two looks at a lock."""

# KEYS: the lease. ARGV: token, milliseconds. A renewal needs no memory, which Redis may be out of.
HOLD = """
local holder = redis.call('GET', KEYS[1])
if holder == ARGV[1] then return redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
if holder then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""

log = structlog.get_logger()


class Lease:
    def __init__(self, redis: Any, bus: Bus, token: str, lease_s: float) -> None:
        """`redis`: a client for keys outside of cells. `bus`: any, for its patience."""
        self._bus = bus
        self._token = token
        self._lease_s = lease_s
        self._hold = redis.register_script(HOLD)

    async def work(self, working: Callable[[], AbstractAsyncContextManager[object]]) -> None:
        """Enters `working` whenever this exporter gets the lease, and leaves it before another one can have it. Until cancelled."""
        while True:
            valid_until = await self._taken()
            log.info("lease_taken")
            async with working():
                await self._kept(valid_until)
            log.warning("lease_lost")

    async def _taken(self) -> float:
        """Time up to which it is held, by the monotonic clock."""
        told = False
        while True:
            began = time.monotonic()
            if await self._round():
                return began + self._lease_s
            if not told:
                log.info("another_exporter_works")
            told = True
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


@asynccontextmanager
async def locked(folder: Path) -> AsyncGenerator[str]:
    """Holds the folder's lock while the block runs, and waits for it. Yields the folder's token."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (folder / "lock").open("a+") as file:
        told = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not told:
                    log.info("another_exporter_runs", folder=str(folder))
                told = True
                await asyncio.sleep(WAIT_S)
        file.seek(0)
        token = file.read()
        if len(token) != 32:
            token = secrets.token_hex(16)
            file.truncate(0)
            file.write(token)
            file.flush()
        yield token
