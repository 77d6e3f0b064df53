"""An env worker's own stream, to which the turns of its live sessions go, and what becomes of it when the worker is gone.

reads: -   writes: `env-workers`, and to `env` what lies in the streams of workers that are gone
waits for: nothing   unblocked by: -   after a crash: the others find it gone after `hold_s`
"""

import asyncio
from typing import Any

import structlog

from common.bus import Bus
from common.scripts import ATTEND
from common.tasks import cancel_all
from env_service.live.sessions import Sessions

log = structlog.get_logger()


class Attendance:
    """Says that this worker is there, and does for those that are not what they can no longer do. `close` when done."""

    def __init__(self, bus: Bus, worker: str, sessions: Sessions, *, hold_s: float) -> None:
        """`hold_s`: how long it counts as being there after it said so."""
        self._bus = bus
        self._worker = worker
        self._sessions = sessions
        self._hold_s = hold_s
        self._script = bus.client.register_script(ATTEND)
        self._task: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        await self._attend(self._hold_s)
        self._task = asyncio.create_task(self._run(), name="attendance")

    async def close(self) -> None:
        """Gives to all what lies in this worker's stream."""
        if self._task:
            await cancel_all([self._task])
            await self._attend(-1)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._hold_s / 3)
            if await self._attend(self._hold_s):
                log.warning("taken_for_gone", worker=self._worker)
                self._sessions.missed()

    async def _attend(self, hold_s: float) -> bool:
        """Returns whether this worker counted as gone, or is new."""
        until_s = asyncio.get_running_loop().time() + hold_s
        absent, more = await self._call(hold_s)
        while more:
            _, more = await self._call(hold_s)
        self._sessions.trusted_until(until_s)
        return bool(absent)

    async def _call(self, hold_s: float) -> Any:
        cell = self._bus.cell
        words = [self._worker, int(hold_s * 1000), cell.env_worker(""), cell.looked(cell.env_worker(""))]
        return await self._bus.retrying(lambda: self._script(keys=[cell.env_workers, cell.env], args=words))
