"""A TCP relay that can be shut or silent, and that delays, halves or answers what passes."""

import asyncio
import contextlib
import random
import socket
import struct
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from common.peers.server import Pace
from harness.redis_server import free_port

PIECE_BYTES = 65536
LINGER = struct.pack("ii", 1, 0)
Answer = Callable[[bytes], bytes]


def nothing(piece: bytes) -> bytes:
    """Answers nothing, so that every piece passes."""
    return b""


@dataclass
class Proxy:
    """Relays connections to a port of this machine. Shut, it refuses connections and has cut the open ones."""

    target_port: int
    """New connections lead there."""
    port: int = field(default_factory=free_port)
    delay_s: float = 0.0
    """Each piece of at most `PIECE_BYTES` waits this long."""
    bytes_per_s: int | None = None
    """The most that passes, of all connections and both ways together; None: as fast as it can."""
    halved: float = 0.0
    """The share of pieces of which one half passes; then their connection ends."""
    answer: Answer = nothing
    """Asked about each piece from a client: what it returns goes back in the target's place, and the connection ends."""
    chance: random.Random = field(default_factory=random.Random)
    num_passed: int = 0
    """Pieces so far, also those that wait."""
    num_bytes: int = 0
    """Bytes so far from the target to clients."""
    num_halves: int = 0
    """Number of those of which one half passed."""
    num_swallowed: int = 0
    """Pieces that came on mute connections, besides."""
    _server: asyncio.Server | None = None
    _open: set[asyncio.StreamWriter] = field(default_factory=set)
    _mute: set[asyncio.StreamWriter] = field(default_factory=set)
    _silent: bool = False
    _pace: Pace = field(init=False)

    def __post_init__(self) -> None:
        self._pace = Pace(self.bytes_per_s)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", self.port)

    async def shut(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        self.cut()

    def cut(self) -> int:
        """Resets all open connections. Returns how many there were."""
        writers = list(self._open)
        for writer in writers:
            _reset(writer)
        return len(writers) // 2

    def fall_silent(self) -> None:
        """Behaves as a host that has vanished: connections stay open, and neither side hears of the other again. So do new ones until
        it speaks again; those of before stay mute until their client ends them."""
        self._silent = True
        self._mute |= self._open

    def speak(self) -> None:
        """Serves new connections again."""
        self._silent = False

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
        except OSError:
            return _reset(writer)
        both = {writer, far_writer}
        self._open |= both
        self._mute |= both if self._silent else set()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._to_target(reader, far_writer, writer))
                group.create_task(self._to_client(far_reader, writer))
        finally:
            self._open -= both
            self._mute -= both
            writer.close()
            far_writer.close()

    async def _to_target(
        self, reader: asyncio.StreamReader, target: asyncio.StreamWriter, client: asyncio.StreamWriter
    ) -> None:
        try:
            async for piece in self._heard(reader, client):
                if told := self.answer(piece):
                    client.write(told)
                    break
                await self._pass(piece, target)
            target.write_eof()
        except OSError:
            target.close()

    async def _to_client(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            async for piece in self._heard(reader, client):
                self.num_bytes += len(piece)
                await self._pass(piece, client)
        if client not in self._mute:
            client.close()

    async def _heard(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> AsyncGenerator[bytes]:
        """Pieces of a client's connection from either side, as long as it is not mute; to its end all the same."""
        while piece := await reader.read(PIECE_BYTES):
            if client in self._mute:
                self.num_swallowed += 1
            else:
                yield piece

    async def _pass(self, piece: bytes, writer: asyncio.StreamWriter) -> None:
        """Raises ConnectionAbortedError after half of a piece."""
        self.num_passed += 1
        await self._pace.take(len(piece))
        await asyncio.sleep(self.delay_s)
        half = self.halved > self.chance.random()
        self.num_halves += half
        writer.write(piece[: len(piece) // 2] if half else piece)
        await writer.drain()
        if half:
            raise ConnectionAbortedError


def _reset(writer: asyncio.StreamWriter) -> None:
    """Ends a connection as a machine does that has lost it: the other side's next call fails."""
    if not writer.transport.is_closing():
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER)
    writer.transport.abort()
