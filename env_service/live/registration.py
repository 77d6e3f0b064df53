"""Registers an env worker, whose own stream gets its live sessions' turns; passes on the turns of workers that are gone.

reads: -   writes: `env-workers`, and to `env` what lies in the streams of workers that are gone
waits for: nothing   unblocked by: -   after a crash: the others find it gone after `hold_s`
after an outage of Redis: each has `hold_s` to come back, with its sessions, unless somebody has its turns
"""

import asyncio
from typing import Any

import structlog

from common.bus.bus import Bus
from common.bus.scripts import ATTEND
from common.bus.streams import GROUP_ENV
from env_service.live.sessions import Sessions

log = structlog.get_logger()


class Registration:
    """Announces this worker, and passes dead workers' turns on. `begin` before use; while `run` runs, others leave this worker
    its turns; `close` when done."""

    def __init__(self, bus: Bus, worker: str, sessions: Sessions, *, hold_s: float) -> None:
        """`hold_s`: how long it counts as being there after it said so."""
        self._bus = bus
        self._worker = worker
        self._sessions = sessions
        self._hold_s = hold_s
        self._script = bus.client.register_script(ATTEND)

    async def begin(self) -> None:
        await self._register(self._hold_s)

    async def run(self) -> None:
        """Without it sessions are worth nothing: its error must end the worker."""
        while True:
            await asyncio.sleep(self._hold_s / 3)
            if await self._register(self._hold_s):
                log.warning("taken_for_gone", worker=self._worker)

    async def close(self) -> None:
        """Gives to all what lies in this worker's stream."""
        await self._register(-1)

    async def _register(self, hold_s: float) -> bool:
        """Returns whether others have taken this worker for gone, or it is new."""
        cell, clock, began_s = self._bus.cell, asyncio.get_running_loop(), 0.0
        words = [self._worker, int(hold_s * 1000), cell.env_worker(""), cell.looked(cell.env_worker("")), GROUP_ENV]

        async def call() -> Any:
            nonlocal began_s
            began_s = clock.time()
            return await self._script(keys=[cell.env_workers, cell.env], args=words)

        was_absent, more = False, True
        while more:
            absent, more = await self._bus.retrying(call)
            was_absent = was_absent or bool(absent)
        if was_absent:
            self._sessions.missed()
        self._sessions.trusted_until(began_s + hold_s)
        return was_absent
