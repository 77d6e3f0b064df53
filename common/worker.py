"""The loop of every worker: the only place that knows acknowledgement, renewal, take-over, retry and shutdown.

    reads: its inboxes, `control`   writes: what the handler returns, `telemetry`, `dead`
    holds: the deliveries it works on (pending in Redis: lost here, found there)
    waits for: an entry and a free slot   unblocked by: whoever publishes, a finished handler
    after a crash: entries that were not renewed within the lease are taken over by another worker, one at a time

A service is a Handler: a message in, messages out. What a handler raises decides what happens:

    Unavailable        tried again here, with backoff; counts as nothing; after `unavailable_limit_s` it has failed
    anything else      tried again here, `MAX_ATTEMPTS` times in all; then it is a dead letter
    (process death)    delivered elsewhere; after `max_deliveries` it is a dead letter

A dead letter is written together with `handler.failed(...)`, so that the job's owner hears of it too.
"""

import asyncio
import contextlib
import os
import secrets
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import structlog

from common.bus import Bus, Delivery, Out, Settlement, Undecodable
from common.dead_letters import dead_letter
from common.errors import Unavailable
from common.messages import AdapterNew, Cancel, Failure, Message
from common.tasks import cancel_all, running
from common.telemetry import KEEP_S, Reporter

MAX_ATTEMPTS = 3
REPORT_EVERY_S = 1.0
MAX_VOIDED = 100_000

Beat = Callable[[], None]
log = structlog.get_logger()


class Handler(Protocol):
    """All of a service's meaning. No bus, no retry. Every method may be called concurrently."""

    async def __call__(self, message: Any, beat: Beat) -> list[Out]:
        """Do the work. Call `beat` whenever it advanced: only advancing work is renewed."""
        ...

    def hand_back(self, message: Any) -> list[Out] | None:
        """What another worker needs to go on with it, progress included; None: the message as it was."""
        ...

    def failed(self, message: Any, failure: Failure) -> list[Out]:
        """What tells the owner that this message will never be worked on."""
        ...


@runtime_checkable
class Parks(Protocol):
    """What a handler has besides if its work becomes void when the job is paused or ends. Without it, all work is done."""

    def park(self, message: Any) -> list[Out]:
        """What remains of a message whose job was paused."""
        ...

    def drop(self, message: Any) -> list[Out]:
        """What remains of a message whose job has ended: what it cost so far."""
        ...


@dataclass(frozen=True, slots=True)
class Inbox:
    stream: str
    group: str
    at_once: int | None = None
    """Entries taken by one read; None: as many as there are free slots. Fewer let others share a burst."""


@dataclass(slots=True, eq=False)
class Active:
    """A delivery under way."""

    delivery: Delivery
    task: "asyncio.Task[None]"
    advanced: bool = True  # since the last renewal


@dataclass(slots=True)
class Voided:
    """Which epochs of which jobs are void, as far as this worker has heard."""

    _epochs: "OrderedDict[str, tuple[int, bool]]" = field(default_factory=OrderedDict)

    def add(self, cancel: Cancel) -> None:
        known = self._epochs.get(cancel.job, (-1, False))
        if cancel.epoch >= known[0]:
            self._epochs[cancel.job] = (cancel.epoch, cancel.park)
            self._epochs.move_to_end(cancel.job)
        while len(self._epochs) > MAX_VOIDED:
            self._epochs.popitem(last=False)

    def verdict(self, message: Message) -> str | None:
        """None: valid. Otherwise `park` or `drop`."""
        epoch, park = self._epochs.get(message.job, (-1, False))
        if message.epoch > epoch:
            return None
        return "park" if park else "drop"


def worker_id(service: str) -> str:
    return f"{service}-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"


class Worker:
    """Runs a handler over its inboxes (earlier ones first) until `stop` is set, then hands open work back."""

    def __init__(
        self,
        bus: Bus,
        handler: Handler,
        *,
        inboxes: Sequence[Inbox],
        reporter: Reporter,
        lease_s: float = 10.0,
        max_deliveries: int = 10,
        drain_s: float = 0.0,
        unavailable_limit_s: float = 600.0,
        on_adapter_new: Callable[[AdapterNew], None] | None = None,
        has_room: Callable[[], bool] = lambda: True,
    ) -> None:
        """`reporter.slots` deliveries are worked on at once, fewer while `has_room` says no: asked after each that ends.

        `drain_s`: how long SIGTERM lets work finish before hand-back.
        """
        self._bus = bus
        self._handler = handler
        self._parks: Parks | None = handler if isinstance(handler, Parks) else None
        self._inboxes = list(inboxes)
        self._reporter = reporter
        self._lease_s = lease_s
        self._max_deliveries = max_deliveries
        self._drain_s = drain_s
        self._unavailable_limit_s = unavailable_limit_s
        self._on_adapter_new = on_adapter_new
        self._has_room = has_room
        self._active: dict[str, Active] = {}
        self._finished: list[Settlement] = []
        self._flush = asyncio.Event()
        self._settling = asyncio.Lock()
        self._freed = asyncio.Event()
        self._voided = Voided()
        self._alone = False
        self._drained = False  # the last read took all that there was
        self._stopping = False

    @property
    def name(self) -> str:
        return self._reporter.worker

    async def run(self, stop: asyncio.Event) -> None:
        """Returns once everything is settled or handed back."""
        if not await self._ready(stop):
            return
        loops = [self._settle(), self._renew(), self._claim(), self._control(), self._report()]
        if self._on_adapter_new:
            loops.append(self._prefetch(self._on_adapter_new))
        async with running(self._read(), *loops) as (reader, *_):
            await stop.wait()
            self._stopping = True
            await cancel_all([reader])
            await self._hand_back_all()
        await self._say_goodbye()

    async def _ready(self, stop: asyncio.Event) -> bool:
        """The groups are there; False: told to stop before Redis was."""
        making, stopped = asyncio.create_task(self._make_groups()), asyncio.create_task(stop.wait())
        await asyncio.wait({making, stopped}, return_when=asyncio.FIRST_COMPLETED)
        ready = making.done()
        await cancel_all([stopped, making])
        return ready

    async def _make_groups(self) -> None:
        for inbox in self._inboxes:
            await self._bus.ensure_group(inbox.stream, inbox.group)

    # ---- reading ----------------------------------------------------------------------------------------------------

    @property
    def _free(self) -> int:
        return self._reporter.slots - len(self._active) if not self._active or self._has_room() else 0

    async def _read(self) -> None:
        while not self._stopping:
            if self._alone or self._free <= 0:
                self._drained = False  # what comes meanwhile is read in order
                self._freed.clear()
                await self._freed.wait()
                continue
            found = await self._next()
            while self._alone:
                self._freed.clear()
                await self._freed.wait()
            for delivery in found:
                self._begin(delivery)

    async def _next(self) -> list[Delivery]:
        """Up to the free slots, first inboxes first; once all of them were empty, blocks until one is not."""
        streams, group, free = [inbox.stream for inbox in self._inboxes], self._inboxes[0].group, self._free
        if len(streams) > 1 and not self._drained:
            found = await self._bus.read_in_order(streams, group, self.name, count=free)
            self._drained = len(found) < free
            if found or self._alone:
                return found
        count = min(max(1, free // len(streams)), *(inbox.at_once or free for inbox in self._inboxes))
        found = await self._bus.read(streams, group, self.name, count=count, block_ms=500)
        self._drained = len(found) < count
        return found

    def _begin(self, delivery: Delivery) -> Active:
        active = Active(delivery, asyncio.create_task(self._work(delivery), name=delivery.entry))
        self._active[delivery.entry] = active
        if delivery.deliveries == 1:
            self._reporter.first_read(delivery.entry)
        active.task.add_done_callback(lambda _: self._never_began(delivery))
        return active

    def _never_began(self, delivery: Delivery) -> None:
        """A task that is cancelled before its first step runs none of its code, so its end is written here."""
        if delivery.entry in self._active:
            self._finish(Settlement(delivery, self._interrupted(delivery)))

    # ---- one delivery -----------------------------------------------------------------------------------------------

    async def _work(self, delivery: Delivery) -> None:
        message = delivery.message
        try:
            if isinstance(message, Undecodable):
                outputs = self._dead(delivery, message.reason)
            elif (remains := self._remains(message)) is not None:
                outputs = remains
            elif delivery.deliveries > self._max_deliveries:
                outputs = self._dead(delivery, f"delivered {delivery.deliveries} times without a result")
            else:
                outputs = await self._attempts(delivery, message)
        except asyncio.CancelledError:
            outputs = self._interrupted(delivery)
        self._finish(Settlement(delivery, outputs))

    async def _attempts(self, delivery: Delivery, message: Message) -> list[Out]:
        beat = self._beat(delivery)
        phase = self._reporter.service
        away_since: float | None = None
        attempt = 1
        while True:
            self._reporter.timeline.begin(message.tenant, message.job, phase)
            try:
                return await self._handler(message, beat)
            except Unavailable as error:
                away_since = away_since or time.monotonic()
                if time.monotonic() - away_since > self._unavailable_limit_s:
                    log.error("unavailable_for_too_long", message_id=message.id, reason=str(error))
                    return self._handler.failed(message, Failure("infrastructure", str(error)))
                log.warning("unavailable", message_id=message.id, reason=str(error))
            except Exception as error:  # the boundary: a handler's error ends as a dead letter, not as a dead worker
                log.exception("handler_failed", message_id=message.id, attempt=attempt)
                attempt += 1
                if attempt > MAX_ATTEMPTS:
                    return self._dead(delivery, f"{type(error).__name__}: {error}")
            finally:
                self._reporter.timeline.end(message.tenant, message.job, phase)
            await self._wait_and_beat(beat, 0.2 * attempt if away_since is None else 2.0)

    async def _wait_and_beat(self, beat: Beat, seconds: float) -> None:
        beat()
        await asyncio.sleep(min(seconds, self._lease_s / 3))

    def _beat(self, delivery: Delivery) -> Beat:
        def beat() -> None:
            active = self._active.get(delivery.entry)
            if active is not None:
                active.advanced = True

        return beat

    def _dead(self, delivery: Delivery, reason: str) -> list[Out]:
        message = delivery.message
        self._reporter.count("dead_letters")
        log.error("dead_letter", stream=delivery.stream, entry=delivery.entry, reason=reason)
        letter = (self._bus.cell.dead, dead_letter(delivery, reason))
        if isinstance(message, Undecodable):
            return [letter]
        return [letter, *self._handler.failed(message, Failure("dead_letter", reason))]

    def _interrupted(self, delivery: Delivery) -> list[Out]:
        """The work was cancelled: its job was paused or cancelled, or this worker shuts down."""
        message = delivery.message
        if isinstance(message, Undecodable):
            return []
        remains = self._remains(message)
        if remains is not None:
            return remains
        handed = self._handler.hand_back(message)
        return [(delivery.stream, message)] if handed is None else handed

    def _remains(self, message: Message) -> list[Out] | None:
        """What is published in place of a void message's work; None: it is not void."""
        verdict = self._voided.verdict(message)
        if self._parks is None or verdict is None:
            return None
        return self._parks.park(message) if verdict == "park" else self._parks.drop(message)

    def _finish(self, settlement: Settlement) -> None:
        self._active.pop(settlement.delivery.entry, None)
        self._finished.append(settlement)
        self._flush.set()
        self._freed.set()

    # ---- loops beside the reader ------------------------------------------------------------------------------------

    async def _settle(self) -> None:
        while True:
            await self._flush.wait()
            self._flush.clear()
            await self._settle_finished()

    async def _settle_finished(self) -> None:
        async with self._settling:
            batch, self._finished = self._finished, []
            since = time.monotonic()
            done = await self._bus.settle(batch)
        self._reporter.count("settle_s", (time.monotonic() - since) * len(done))
        self._reporter.count("settled", sum(done))
        self._reporter.count("lost_races", len(done) - sum(done))

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 3)
            for inbox in self._inboxes:
                mine = [a for a in self._active.values() if a.delivery.stream == inbox.stream and a.advanced]
                for active in mine:
                    active.advanced = False
                await self._bus.renew(inbox.stream, inbox.group, self.name, [a.delivery.entry for a in mine])

    async def _claim(self) -> None:
        """Take over what others left behind, one entry at a time and with nothing else under way."""
        while not self._stopping:
            await asyncio.sleep(self._lease_s / 4)
            for inbox in self._inboxes:
                while not self._stopping and await self._run_alone(inbox):
                    pass

    async def _run_alone(self, inbox: Inbox) -> bool:
        if not await self._has_idle(inbox):
            return False
        self._alone = True
        try:
            if not await self._quiet():
                return False
            taken = await self._bus.claim(inbox.stream, inbox.group, self.name, min_idle_ms=self._lease_ms, count=1)
            for delivery in taken:
                if delivery.entry not in self._active:
                    log.warning("taken_over", entry=delivery.entry, deliveries=delivery.deliveries)
                    await asyncio.wait([self._begin(delivery).task])
            return bool(taken)
        finally:
            self._alone = False
            self._freed.set()

    @property
    def _lease_ms(self) -> int:
        return int(self._lease_s * 1000)

    async def _has_idle(self, inbox: Inbox) -> bool:
        rows = await self._bus.idle(inbox.stream, inbox.group, min_idle_ms=self._lease_ms)
        return any(entry not in self._active for entry in rows)

    async def _quiet(self) -> bool:
        """Wait, at most a lease, until nothing is under way here."""
        tasks = [active.task for active in self._active.values()]
        if tasks:
            await asyncio.wait(tasks, timeout=self._lease_s)
        return not self._active

    async def _control(self) -> None:
        cursor = "0"
        while True:
            for entry, message in await self._bus.follow(self._bus.cell.control, cursor, block_ms=500):
                cursor = entry
                if isinstance(message, Cancel):
                    self._voided.add(message)
                    self._cancel(message)

    def _cancel(self, cancel: Cancel) -> None:
        for active in list(self._active.values()) if self._parks else ():
            message = active.delivery.message
            if not isinstance(message, Undecodable) and message.job == cancel.job and self._voided.verdict(message):
                active.task.cancel()

    async def _prefetch(self, hear: Callable[[AdapterNew], None]) -> None:
        cursor = "$"
        while True:
            for entry, message in await self._bus.follow(self._bus.cell.adapters_new, cursor, block_ms=500):
                cursor = entry
                if isinstance(message, AdapterNew):
                    hear(message)

    async def _report(self) -> None:
        while True:
            await self._broadcast("draining" if self._stopping else "busy" if self._active else "idle")
            await asyncio.sleep(REPORT_EVERY_S)

    async def _broadcast(self, state: str) -> None:
        report = self._reporter.report(state, len(self._active))
        await self._bus.broadcast(self._bus.cell.telemetry, report, keep_s=KEEP_S)

    # ---- shutdown ---------------------------------------------------------------------------------------------------

    async def _hand_back_all(self) -> None:
        """Let work finish for `drain_s`, then give the rest back, what was delivered but not begun included."""
        tasks = [active.task for active in self._active.values()]
        if tasks and self._drain_s:
            await asyncio.wait(tasks, timeout=self._drain_s)
        for active in list(self._active.values()):
            active.task.cancel()
        while self._active:
            await asyncio.wait([active.task for active in self._active.values()])
        await self._settle_finished()
        for inbox in self._inboxes:
            after = "0"
            while held := await self._bus.read_pending(inbox.stream, inbox.group, self.name, after=after):
                known = [(d, d.message) for d in held if isinstance(d.message, Message)]
                await self._bus.settle([Settlement(d, [(d.stream, message)]) for d, message in known])
                after = held[-1].entry

    async def _say_goodbye(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await self._broadcast("stopped")
