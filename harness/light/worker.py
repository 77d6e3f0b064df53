"""The loop of a light worker: see `harness.light`.

reads: its inbox   writes: what its answers are, telemetry   waits for: an entry, the next end
"""

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

from common.bus.bus import Bus, Settlement
from common.bus.scripts import SETTLE
from common.cancellation import running
from common.wire.codec import decode, encode
from common.wire.messages import Message
from common.worker.settler import MOST_S
from common.worker.takeover import LOOK_EVERY_S
from common.worker.telemetry import KEEP_S, MAX_SPANS, Reporter
from common.worker.underway import Inbox
from common.worker.worker import GATHER_S, MOST_READ_S, REPORT_EVERY_S

BLOCK_MS = 500
"""Time for which Redis waits for an entry, as in `Worker`."""
Output = tuple[str, list[Any]]
"""The name of a stream, and an entry's fields as the script that settles takes them."""
Taken = tuple[bytes, bytes]
"""An entry, and its payload."""


class Answers(Protocol):
    def outputs(self, payloads: Sequence[bytes]) -> list[list[Output]]:
        """Makes what follows on each entry. `payloads`: theirs, in the order in which one script settles them."""
        ...


class Work(NamedTuple):
    """An entry under way. `noted`: its message, if the worker's report tells of it."""

    end_s: float
    number: int
    entry: bytes
    payload: bytes
    noted: Message | None


class LightWorker:
    """Takes entries, and answers each after `seconds`, until `stop` is set; then hands back what it holds."""

    def __init__(
        self,
        bus: Bus,
        inbox: Inbox,
        answers: Answers,
        reporter: Reporter,
        *,
        seconds: Callable[[], float] = lambda: 0.0,
        lease_s: float,
        on_read: Callable[[Sequence[str]], None] = lambda _: None,
    ) -> None:
        """`on_read`: told of entries when they have been read."""
        self._bus = bus
        self._stream, self._group = inbox.stream, inbox.group
        self._answers = answers
        self._reporter = reporter
        self._seconds = seconds
        self._lease_s = lease_s
        self._on_read = on_read
        self._name = reporter.worker
        self._script = bus.client.register_script(SETTLE)
        self._numbers = itertools.count()
        self._underway: list[Work] = []  # a heap, the next to end first
        self._ended: list[Work] = []
        self._some = asyncio.Event()
        self._num_noted = 0
        self.num = 0  # answered

    async def run(self, stop: asyncio.Event) -> None:
        await self._bus.ensure_group(self._stream, self._group)
        async with running(self._read(), self._settle(), self._renew(), self._take_over(), self._report()):
            await stop.wait()
        await self._hand_back()
        await self._broadcast("stopped")

    # ---- from the stream to the next end ----------------------------------------------------------------------------

    @property
    def _free(self) -> int:
        return self._reporter.about.slots - len(self._underway)

    def _window_s(self, most_s: float) -> float:
        """Seconds for which entries wait for others, as in `Worker`."""
        return min(GATHER_S * len(self._underway), most_s)

    async def _read(self) -> None:
        read_s = 0.0
        while True:
            await asyncio.sleep(read_s + self._window_s(MOST_READ_S) - time.monotonic())
            while not self._end_due() and self._free <= 0:
                await asyncio.sleep(self._underway[0].end_s - time.monotonic())
            words = [
                "GROUP",
                self._group,
                self._name,
                "COUNT",
                self._free,
                "BLOCK",
                BLOCK_MS,
                "STREAMS",
                self._stream,
                ">",
            ]
            call = partial(self._bus.client.execute_command, "XREADGROUP", *words)
            found: Any = await self._bus.retrying(call, block_ms=BLOCK_MS)
            rows = [row for entries in (found or {}).values() for row in entries]
            for entry, (_, payload) in rows:
                self._begin(entry, payload)
            if rows:
                entries = [entry.decode() for entry, _ in rows]
                self._on_read(entries)
                self._reporter.first_read(entries)
                read_s = time.monotonic()

    def _begin(self, entry: bytes, payload: bytes) -> None:
        message = None
        if self._num_noted < MAX_SPANS:
            message = cast(Message, decode(payload))
            self._num_noted += 1
            self._reporter.timeline.begin(message.tenant, message.job, self._reporter.service)
        work = Work(time.monotonic() + self._seconds(), next(self._numbers), entry, payload, message)
        heapq.heappush(self._underway, work)
        self._some.set()

    def _end_due(self) -> int:
        """Returns the number that ended since the last call."""
        now, before = time.monotonic(), len(self._ended)
        while self._underway and self._underway[0].end_s <= now:
            work = heapq.heappop(self._underway)
            if work.noted:
                self._num_noted -= 1
                self._reporter.timeline.end(work.noted.tenant, work.noted.job, self._reporter.service)
            self._ended.append(work)
        return len(self._ended) - before

    # ---- settling ---------------------------------------------------------------------------------------------------

    async def _settle(self) -> None:
        since_s = 0.0
        while True:
            await self._one_ended()
            await asyncio.sleep(since_s + self._window_s(MOST_S) - time.monotonic())
            since_s = time.monotonic()
            self._end_due()
            ended, self._ended = self._ended, []
            words = self.settling([(work.entry, work.payload) for work in ended])
            settled: Any = await self._bus.retrying(partial(self._script, keys=[self._stream], args=words))
            num = sum(entries != 0 for entries in settled)
            self._count(num, len(ended) - num, time.monotonic() - since_s)

    def _count(self, num: int, lost: int, seconds: float) -> None:
        self.num += num
        self._reporter.count("settle_s", seconds * (num + lost))
        self._reporter.count("settled", num)
        self._reporter.count("lost_races", lost)

    async def _one_ended(self) -> None:
        """Waits until something has ended that is not settled."""
        while not self._ended and not self._end_due():
            self._some.clear()
            if self._underway:
                await asyncio.sleep(self._underway[0].end_s - time.monotonic())
            else:
                await self._some.wait()

    def settling(self, taken: Sequence[Taken]) -> list[Any]:
        """Arguments of the script, as `Bus.settling` makes them."""
        cell, source, target = self._bus.cell, [self._bus.cell.name_of(self._stream), self._group], ""
        arguments: list[Any] = [cell.key(""), len(taken)]
        found = self._answers.outputs([payload for _, payload in taken])
        for (entry, _), outputs in zip(taken, found, strict=True):
            arguments += [*source, entry, len(outputs), "", ""]
            source = [""]
            for stream, fields in outputs:
                arguments += ["" if stream == target else stream, "=", len(fields), *fields]
                target = stream
        return arguments

    # ---- beside that ------------------------------------------------------------------------------------------------

    def _entries(self) -> list[str]:
        return [work.entry.decode() for work in self._underway]

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 3)
            await self._bus.renew(self._stream, self._group, self._name, self._entries())

    async def _take_over(self) -> None:
        every_s, lease_ms = min(LOOK_EVERY_S, self._lease_s / 4), int(1000 * self._lease_s)
        while True:
            await asyncio.sleep(every_s)
            idle = await self._bus.find_idle(
                self._stream, self._group, min_idle_ms=lease_ms, every_ms=int(500 * every_s), own=self._entries()
            )
            taken = await self._bus.claim(self._stream, self._group, self._name, idle, min_idle_ms=lease_ms)
            for delivery in taken:
                self._begin(delivery.entry.encode(), encode(cast(Message, delivery.message)))

    async def _report(self) -> None:
        while True:
            await self._broadcast("busy" if self._underway else "idle")
            await asyncio.sleep(REPORT_EVERY_S)

    async def _broadcast(self, state: str) -> None:
        report = self._reporter.report(state, len(self._underway))
        await self._bus.broadcast(self._bus.cell.telemetry, report, keep_s=KEEP_S)

    async def _hand_back(self) -> None:
        while held := await self._bus.read_pending(self._stream, self._group, self._name):
            await self._bus.settle([Settlement(delivery, None) for delivery in held])
