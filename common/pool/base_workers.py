"""Starts, opens, closes and ends the base workers of one place: a process for each base model, forked out of the pool worker.

waits for: a base worker's packets, its end   unblocked by: the base worker, the kernel, SIGKILL after a hang
after a crash: the kernel ends the base workers with their pool worker
"""

import asyncio
import contextlib
import math
import signal
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from common.cancellation import cancel_all, set_within
from common.children.forking import Forked, fork
from common.children.prefork import ForkRequest
from common.children.processes import describe, kill_session, last_error, size
from common.errors import Unavailable
from common.pool.gate import Awake, Channel, Close, Closed, FromBase, Loaded, NotTaken, Open, Pulse
from common.wire.reported import Tier

LOG = Path("/proc/self/fd/2")
"""The output of this process and its base workers, where that is a file."""
HANG_LEASES = 2
"""A base worker that is to close and in which nothing advances for so many leases hangs."""
SILENT_LEASES = 6
"""A loaded one says something each second: silent for so long, it hangs, also while it is to end."""
LOADING_S, SLOW_BYTES_A_SECOND = 600.0, 20e6
"""The longest time to load what is on the disk: a start, and then so many bytes a second."""
LAST_WORDS_S = 1.0
"""The longest time for what an ended one has said to arrive."""


@dataclass(eq=False)
class BaseWorker:
    """One base model's process, closed at first."""

    base: str
    child: Forked
    channel: Channel
    news: asyncio.Event
    """Set at each change."""
    tier: Tier
    """The tier from which the next opening takes it."""
    worker: str = ""
    """Its id, once it is loaded."""
    num_bytes: int = 0
    refused: str = ""
    """The reason why its cell does not take it."""
    ended: str = ""
    """The end of its process, in words; empty before that."""
    status: int | None = None
    is_open: bool = False
    pulse: Pulse = field(default_factory=Pulse)
    operation_s: float | None = None
    """Time of one delivery, a moving average."""
    busy_at_s: float = field(default_factory=time.monotonic)
    advanced_at_s: float = field(default_factory=time.monotonic)
    heard_at_s: float = field(default_factory=time.monotonic)
    closed_at_s: float = field(default_factory=time.monotonic)

    async def follow(self) -> None:
        """Hears what it says until its process has ended."""
        hearing = asyncio.create_task(self._hear())
        since = size(LOG)
        self.status = status = await self.child.wait()
        kill_session(self.child.pid)  # what it started itself and left behind
        await asyncio.wait([hearing], timeout=LAST_WORDS_S)
        await cancel_all([hearing])
        self.channel.close()
        self.ended = describe(status) + (f": {last}" if status > 0 and (last := last_error(LOG, start=since)) else "")
        self.is_open = False
        self.news.set()

    async def _hear(self) -> None:
        while packet := await self.channel.receive():
            self.heard_at_s = time.monotonic()
            message: FromBase = msgspec.json.decode(packet, type=FromBase)
            match message:
                case Loaded(worker, num_bytes):
                    self.worker, self.num_bytes = worker, num_bytes
                case NotTaken(reason):
                    self.refused = reason
                case Awake():
                    self.is_open = True
                case Closed(num_bytes):
                    self.is_open, self.closed_at_s, self.num_bytes = False, time.monotonic(), num_bytes
                case Pulse() as pulse:
                    self._count(pulse)
            self.news.set()

    def _count(self, pulse: Pulse) -> None:
        now, before = time.monotonic(), self.pulse
        if pulse.in_use or before.in_use or pulse.num_ended > before.num_ended:
            self.busy_at_s = now
        if pulse.num_advanced > before.num_advanced or pulse.num_ended > before.num_ended:
            self.advanced_at_s = now
        if (num := pulse.num_ended - before.num_ended) > 0:
            mean_s = (pulse.ended_s - before.ended_s) / num
            self.operation_s = averaged(self.operation_s, mean_s)
        self.pulse = pulse

    async def open(self, waited_s: float = 0.0) -> None:
        """Returns once it reads, or has ended. `waited_s`: age of the oldest entry that waits for it."""
        await self.channel.send(Open(self.tier, waited_s))
        while not (self.is_open or self.ended):
            await self.changed()
        self.tier = "device"

    async def close(self, drain_s: float | None, lease_s: float) -> None:
        """Returns once nothing is under way in it, or it has ended: it is killed where nothing advances any more."""
        await self.channel.send(Close(drain_s))
        self.advanced_at_s = time.monotonic()
        while self.is_open:
            left_s = self.advanced_at_s + (drain_s or 0.0) + HANG_LEASES * lease_s - time.monotonic()
            if left_s <= 0:
                self.signal(signal.SIGKILL)
            await self.changed(max(left_s, 0.1))

    def kill_if_silent(self, lease_s: float) -> None:
        """Kills one that hangs, wherever it does. A download may last."""
        limit_s = LOADING_S + self.num_bytes / SLOW_BYTES_A_SECOND if self.tier != "away" else math.inf
        if time.monotonic() - self.heard_at_s > (SILENT_LEASES * lease_s if self.worker else limit_s):
            self.signal(signal.SIGKILL)

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            self.child.send_signal(number)

    async def changed(self, timeout_s: float | None = None) -> None:
        """Waits for the next change of any base worker, or until the time is over."""
        self.news.clear()
        await set_within(self.news, timeout_s)


class BaseWorkers:
    """The base workers of one place, by base model."""

    def __init__(self, requests: socket.socket, module: str, pool_worker: str) -> None:
        """`requests`: of the server that forks them. `module`: the service's program."""
        self._requests, self._module, self.pool_worker = requests, module, pool_worker
        self.news = asyncio.Event()
        self.running: dict[str, BaseWorker] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def loaded(self) -> dict[str, BaseWorker]:
        return {base: worker for base, worker in self.running.items() if worker.worker and not worker.ended}

    async def load(self, base: str, tier: Tier, num_bytes: int) -> BaseWorker:
        """Starts a base worker, whose files are in this tier and which needs so much memory. Returns once it is loaded, or has ended; one
        that its cell refuses is ended.

        Raises Unavailable if the server that forks them is gone.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        settings = {"MARLAAS_BASE_MODEL": base, "MARLAAS_POOL_WORKER": self.pool_worker}
        with theirs:
            child = await fork(self._requests, ForkRequest(self._module, settings), theirs.fileno())
        if child is None:
            raise Unavailable("the server that forks base workers has ended")
        worker = self.running[base] = BaseWorker(base, child, Channel(ours), self.news, tier, num_bytes=num_bytes)
        self._tasks[base] = asyncio.create_task(self._follow(worker))
        while not (worker.worker or worker.ended or worker.refused):
            await worker.changed()
        if worker.refused:
            await self.end(base)
        return worker

    async def _follow(self, worker: BaseWorker) -> None:
        await worker.follow()
        del self.running[worker.base]

    async def changed(self, timeout_s: float) -> None:
        """Waits as a base worker's `changed`."""
        self.news.clear()
        await set_within(self.news, timeout_s)

    async def end(self, base: str) -> None:
        """Returns once its process has ended."""
        if worker := self.running.get(base):
            worker.signal(signal.SIGTERM)
            await asyncio.wait([self._tasks[base]])

    def frees(self, num_bytes: int, room: int) -> list[str] | None:
        """The closed base workers to end so that all and one more have that room, used longest ago first, and last those that hold
        something; None if the open one has it."""
        needed = num_bytes + sum(worker.num_bytes for worker in self.running.values()) - room
        ends = list[str]()
        for worker in sorted(self.loaded.values(), key=lambda each: (each.pulse.num_held > 0, each.closed_at_s)):
            if needed > 0 and not worker.is_open:
                ends.append(worker.base)
                needed -= worker.num_bytes
        return ends if needed <= 0 else None


def averaged(before: float | None, new: float) -> float:
    return new if before is None else 0.8 * before + 0.2 * new
