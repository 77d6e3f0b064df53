"""A real Redis for a benchmark: the one that `marlaas up` runs, with its settings, in a folder of its own."""

import asyncio
import contextlib
import subprocess
import tempfile
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path

import psutil

from common.bus import Bus
from common.streams import Cell
from manager_service.embedded_redis import EmbeddedRedis, new_password
from manager_service.supervisor import choose_port


@dataclass(frozen=True, slots=True)
class Server:
    url: str
    process: psutil.Process

    def bus(self) -> Bus:
        """A connection of its own."""
        return Bus.connect(self.url, Cell("bench"))

    def cpu_s(self) -> float:
        """Processor seconds that the server has used so far."""
        times = self.process.cpu_times()
        return times.user + times.system


@contextlib.asynccontextmanager
async def running() -> AsyncGenerator[Server]:
    with tempfile.TemporaryDirectory() as folder:
        embedded = EmbeddedRedis(folder=Path(folder), port=choose_port("127.0.0.1", 0), password=new_password())
        embedded.prepare()
        child = subprocess.Popen(embedded.argv, stdout=subprocess.DEVNULL)  # noqa: ASYNC220
        try:
            server = Server(embedded.url, psutil.Process(child.pid))
            await answers(server)
            yield server
        finally:
            child.kill()
            await asyncio.to_thread(child.wait)


async def answers(server: Server) -> None:
    """Until it does; the bus waits for it."""
    bus = server.bus()
    await bus.retrying(bus.client.ping)
    await bus.close()
