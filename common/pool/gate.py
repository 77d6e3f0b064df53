"""The gate of a base worker: its pool worker opens and closes it over a socket of packets.

    pool worker ─ Open, Close, Expected ─► base worker ─ Loaded, Awake, Pulse, Closed, NotTaken ─► pool worker

A base worker reads its streams between Open and Close alone. Its end of the
socket is its standard input. Whoever is left alone reads the end of the file; a base worker then ends.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from common.models.host_memory import own_bytes
from common.wire.reported import InPool, Tier

MAX_PACKET = 1 << 16


class Open(msgspec.Struct, frozen=True, tag=True):
    """Read your streams."""

    tier: Tier
    """The tier from which the base model comes."""
    waited_s: float
    """Age of the oldest entry that waits for it."""


class Close(msgspec.Struct, frozen=True, tag=True):
    """Read no more, and hand back what has not ended in time."""

    drain_s: float | None
    """Time in which work may end. None: all work that was begun ends."""


class Expected(msgspec.Struct, frozen=True, tag=True):
    """Told each second, for the base worker's reports. Seconds."""

    opens_in_s: float
    waiting_s: float


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The base worker has joined its cell and could be opened."""

    worker: str
    num_bytes: int
    """Memory that it alone has."""


class Awake(msgspec.Struct, frozen=True, tag=True):
    """It reads its streams from now on."""


class Pulse(msgspec.Struct, frozen=True, tag=True):
    """Told each second, and whenever work begins or none is left."""

    in_use: int = 0
    """Deliveries under way."""
    num_ended: int = 0
    ended_s: float = 0.0
    """Seconds that those which ended took, each for itself."""
    num_advanced: int = 0
    """Times that work advanced. A base worker in which none does hangs."""
    num_held: int = 0
    """Sessions, or gradients of runs, that end with the process."""


class Closed(msgspec.Struct, frozen=True, tag=True):
    """Nothing is under way any more, and all is settled or handed back."""

    num_bytes: int


class NotTaken(msgspec.Struct, frozen=True, tag=True):
    """The cell does not take this worker, or the service cannot be built."""

    reason: str


ToBase = Open | Close | Expected
FromBase = Loaded | Awake | Pulse | Closed | NotTaken


class Channel:
    """One end of a gate's socket."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end

    async def send(self, message: ToBase | FromBase) -> None:
        """Sends nothing to one that has ended: whoever waits for it hears of that elsewhere."""
        with contextlib.suppress(ConnectionError):
            await asyncio.get_running_loop().sock_sendall(self._end, msgspec.json.encode(message))

    async def receive(self) -> bytes:
        """The next packet; empty once the other end is gone."""
        with contextlib.suppress(ConnectionError):
            return await asyncio.get_running_loop().sock_recv(self._end, MAX_PACKET)
        return b""

    def close(self) -> None:
        self._end.close()


async def stay_awake() -> None:
    """Does nothing, for an engine that keeps its memory while it is closed."""


class Gate:
    """The base worker's side, closed at first."""

    def __init__(self, channel: Channel, pool_worker: str) -> None:
        self._channel = channel
        self._pool_worker = pool_worker
        self._expected = Expected(0.0, 0.0)
        self.tell = channel.send
        self.num_bytes: Callable[[], int] = own_bytes
        """Memory of this process, where the base worker computes."""
        self.num_held: Callable[[], int] = int
        self.sleep: Callable[[], Coroutine[Any, Any, None]] = stay_awake
        self.wake: Callable[[], Coroutine[Any, Any, None]] = stay_awake
        self._opens, self._closes = asyncio.Event(), asyncio.Event()
        self.opened, self.closing = self._opens.wait, self._closes.wait
        """Wait until the pool worker opens the gate, or closes it."""
        self.drain_s: float | None = 0.0
        """Time that the last Close gave."""
        self.counters: dict[str, float] = {}
        """Totals for the base worker's reports."""

    @classmethod
    def of_input(cls, pool_worker: str) -> "Gate":
        """The gate whose socket is this process's standard input, which its own children do not get."""
        end, nothing = socket.socket(fileno=os.dup(0)), os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        return cls(Channel(end), pool_worker)

    @property
    def is_open(self) -> bool:
        return self._opens.is_set()

    def state(self) -> InPool:
        """The part of the base worker's reports about its place."""
        expected = Expected(0.0, 0.0) if self.is_open else self._expected
        return InPool(self._pool_worker, "device", expected.opens_in_s, expected.waiting_s)

    async def follow(self, stop: asyncio.Event) -> None:
        """Hears what the pool worker says; sets `stop` once it is gone."""
        while packet := await self._channel.receive():
            message: ToBase = msgspec.json.decode(packet, type=ToBase)
            match message:
                case Open(tier, waited_s):
                    for name, amount in ((f"opened_from_{tier}", 1.0), ("opening_waited_s", waited_s)):
                        self.counters[name] = self.counters.get(name, 0.0) + amount
                    self._closes.clear()
                    self._opens.set()
                case Close(drain_s):
                    self.drain_s = drain_s
                    self._opens.clear()
                    self._closes.set()
                case Expected() as expected:
                    self._expected = expected
        stop.set()
