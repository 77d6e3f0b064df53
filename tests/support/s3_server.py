"""An S3 server of a test's own over HTTP (moto, in memory), and a gate before it that can be shut."""

import asyncio
import contextlib
import subprocess
import sys
import time
from dataclasses import dataclass, field

import httpx

from harness.redis_server import free_port

BUCKET = "marlaas"


def environment(endpoint: str) -> dict[str, str]:
    """The variables by which any S3 client finds the server."""
    return {
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
    }


@dataclass
class S3Server:
    port: int
    process: "subprocess.Popen[bytes]"

    @classmethod
    def start(cls) -> "S3Server":
        """Returns once it answers and has the bucket."""
        port = free_port()
        argv = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        server = cls(port, subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        server.reset()
        return server

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def reset(self) -> None:
        """Empty, but for the bucket."""
        for _ in range(200):
            try:
                httpx.post(f"{self.endpoint}/moto-api/reset", trust_env=False).raise_for_status()
                break
            except httpx.TransportError:
                time.sleep(0.1)
        httpx.put(f"{self.endpoint}/{BUCKET}", trust_env=False).raise_for_status()

    def check_keys(self, after: int) -> None:
        """Refuse unknown access keys once `after` more requests have been answered."""
        httpx.post(f"{self.endpoint}/moto-api/reset-auth", content=str(after), trust_env=False).raise_for_status()

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@dataclass
class Gate:
    """A TCP relay on a port of its own. Shut, it refuses connections and has cut the open ones."""

    target_port: int
    port: int = field(default_factory=free_port)
    _server: asyncio.Server | None = None
    _open: set[asyncio.StreamWriter] = field(default_factory=set)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", self.port)

    async def shut(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self._open):
            writer.transport.abort()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
        self._open |= {writer, far_writer}
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_copy(reader, far_writer))
                group.create_task(_copy(far_reader, writer))
        finally:
            self._open -= {writer, far_writer}


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()
