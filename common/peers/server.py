"""Sends what this worker has to its followers.

A follower says one line, `<key> <sha256> <first part>`; then come the parts from there on, each behind the byte PART. BEAT between two
says that there is no newer part yet: so a follower hears the difference between a holder that waits itself and one that is gone.
Whoever says `<key> stage 0` speaks from then on with the stage of a convoy.

reads: files of the node folder   writes: followers' connections
waits for: the next part, a slow follower   unblocked by: chain.py, the follower; SEND_S
after a crash: followers join elsewhere
"""

import asyncio
import contextlib
import hmac
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from common.cancellation import cancel_all, set_within
from common.store.parts import StoredFile

PART, BEAT = b"+", b"."
BEAT_S = 0.5
HEAR_S = 2.0
"""Seconds without a byte after which the other side counts as gone."""
SEND_S = 30.0
"""Seconds in which a follower takes CHUNK_BYTES."""
CHUNK_BYTES = 256 << 10
BURST_S = 0.05
MAX_LINE = 256
STAGE = "stage"
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
NUM_PORTS = 16
"""Ports from the first on of which a worker takes a free one: several may share a machine or a container."""
log = structlog.get_logger()


@dataclass(slots=True)
class Offer:
    """One file as far as this worker has it, checked. It only grows, until it is over."""

    file: StoredFile
    path: Path
    num_parts: int = 0
    number: int = 0
    """Its worker's among the holders (holders.py); 0: none yet."""
    source: str = ""
    """The worker that its worker follows for the rest, or the store."""
    over: bool = False
    """Nothing more comes."""
    stays: bool = False
    """It is offered as long as its worker runs: a base model's."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_whole(self) -> bool:
        return self.num_parts == len(self.file.parts)

    def has(self, num_parts: int) -> None:
        self.num_parts = num_parts
        self._tell()

    def end(self) -> None:
        self.over = True
        self._tell()

    async def grows(self, beyond: int, timeout_s: float) -> bool:
        """Waits until it has more parts than `beyond`. False: not yet, or it is over."""
        if self.num_parts <= beyond and not self.over:
            await set_within(self._changed, timeout_s)
        return self.num_parts > beyond

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class Pace:
    """Bytes a second, for all who send together."""

    def __init__(self, bytes_per_s: int | None) -> None:
        """None: as fast as they can."""
        self._bytes_per_s = bytes_per_s
        self._free_at_s = 0.0

    async def take(self, num_bytes: int) -> None:
        """Waits until so many more may go."""
        if self._bytes_per_s is not None:
            now = time.monotonic()
            self._free_at_s = max(self._free_at_s, now - BURST_S) + num_bytes / self._bytes_per_s
            await asyncio.sleep(max(0.0, self._free_at_s - now))


class PeerServer:
    """Serves followers that know the key."""

    def __init__(self, offers: Mapping[str, Offer], key: Callable[[], str], bytes_per_s: int | None) -> None:
        """`offers`: by sha256; they come and go."""
        self._offers = offers
        self._key = key
        self._pace = Pace(bytes_per_s)
        self.serve_stage: Serve | None = None
        self._serving = set[asyncio.Task[None]]()
        self._server: asyncio.Server | None = None

    async def open(self, host: str, first_port: int) -> str:
        """Listens, and returns its address. `first_port` 0: any. Raises OSError."""
        for port in range(first_port, first_port + NUM_PORTS) if first_port else (0,):
            with contextlib.suppress(OSError):  # another worker has it
                self._server = await asyncio.start_server(self._begin, host, port, limit=MAX_LINE)
                return f"{host}:{self._server.sockets[0].getsockname()[1]}"
        raise OSError(f"no port from {first_port} on is free at {host}")

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        await cancel_all(self._serving)

    def _begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer), name="follower")
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one follower. If anything fails, that one hears the connection end, and joins elsewhere."""
        try:
            async with asyncio.timeout(HEAR_S):
                key, sha256, part = (await reader.readline()).decode().split()
            if not hmac.compare_digest(key.encode(), self._key().encode()):
                raise ValueError("it does not know the key")
            if sha256 == STAGE and self.serve_stage is not None:
                await self.serve_stage(reader, writer)
            elif (offer := self._offers.get(sha256)) is not None:
                await self._send(offer, int(part), writer)
        # a timeout is an OSError, a line that is too long a ValueError, and `sendfile` over a lost connection a RuntimeError
        except (OSError, ValueError, RuntimeError) as error:
            log.info("follower_lost", reason=repr(error))
        finally:
            writer.close()

    async def _send(self, offer: Offer, part: int, writer: asyncio.StreamWriter) -> None:
        with offer.path.open("rb") as file:
            for number in range(part, len(offer.file.parts)):
                while not await offer.grows(number, BEAT_S):
                    if offer.over:
                        return
                    writer.write(BEAT)
                    await writer.drain()
                writer.write(PART)
                start, size = offer.file.span(number)
                for at in range(start, start + size, CHUNK_BYTES):
                    num_bytes = min(CHUNK_BYTES, start + size - at)
                    await self._pace.take(num_bytes)
                    async with asyncio.timeout(SEND_S):
                        await asyncio.get_running_loop().sendfile(writer.transport, file, at, num_bytes)
