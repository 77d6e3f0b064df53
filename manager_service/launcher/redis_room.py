"""Keeps room for the Redis of `marlaas up` on its disk: a file beside its append-only file.

    kept ─► Redis ended, since it could not write: the file is removed, and Redis starts again ─► the disk has its reserve: kept again

In between `disk-full` stands in each cell: owners issue nothing, and the API takes no new work. Reads, deletes and cancels need little.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable, Mapping

from redis.exceptions import RedisError

from common.bus.redis_connection import make_client
from common.bus.streams import Cell
from common.settings import parse_base_models
from common.store.disk_room import free_bytes
from manager_service.launcher.embedded_redis import EmbeddedRedis
from manager_service.launcher.settings import LocalSettings

KEPT_BYTES = 64 << 20
LOOK_EVERY_S = 1.0
NOT_WRITTEN = "AOF write error"
"""Redis says so at its end if its disk, or a quota of it, is full."""


class RedisRoom:
    """The file of one Redis."""

    def __init__(self, server: EmbeddedRedis, environment: Mapping[str, str], tell: Callable[[str], None]) -> None:
        """`tell` hears that the disk is full, and that there is room again."""
        self._server = server
        self._environment = environment
        self._tell = tell
        self._file = server.folder / "room"
        self._keep()

    def redis_ended(self, last_words: str) -> None:
        """Makes room for its next start if it ended for want of space; of a full disk its log may say nothing."""
        if self._file.exists() and (NOT_WRITTEN in last_words or free_bytes(self._server.folder) < KEPT_BYTES):
            self._file.unlink()
            self._tell(
                f"the disk of {self._server.folder} is full: only reads, deletes and cancels are served until it has room"
            )

    async def watch(self) -> None:
        """Tells the cells whether there is room, until cancelled. Raises ValueError for wrong settings."""
        wanted = LocalSettings.of(self._environment).disk_reserve_bytes + KEPT_BYTES
        bases = parse_base_models(self._environment.get("MARLAAS_BASE_MODELS", "tiny"))
        told = None
        async with make_client(self._server.url, "", retry=None) as redis:
            while True:
                with contextlib.suppress(RedisError, OSError):
                    if not self._file.exists() and free_bytes(self._server.folder) >= wanted:
                        self._keep()
                    if (is_full := not self._file.exists()) is not told:
                        for key in (Cell(base).disk_full for base in bases):
                            await (redis.set(key, 1) if is_full else redis.delete(key))
                        if told:
                            self._tell(f"the disk of {self._server.folder} has room again")
                        told = is_full
                await asyncio.sleep(LOOK_EVERY_S)

    def _keep(self) -> None:
        """Makes the file if it is not there, and its disk has so much."""
        draft = self._file.with_suffix(".part")
        try:
            if not self._file.exists():
                with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
                    os.posix_fallocate(file.fileno(), 0, KEPT_BYTES)
                draft.replace(self._file)
        except OSError:
            draft.unlink(missing_ok=True)
