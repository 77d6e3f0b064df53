"""The loop of every worker: reads, works, settles, renews, takes over, reports, and hands back when it stops.

Services know nothing of this. Settling is in settler.py, take-over in takeover.py, what is under way in underway.py.

    reads: its inboxes, `control`   writes: what the handler returns, `telemetry`, `dead`
    holds: the deliveries it works on; they are pending in Redis too
    waits for: an entry and a free slot   unblocked by: whoever publishes, a finished handler
    after a crash: other workers take over the entries not renewed within the lease, from the saved progress

A service is a Handler: a message in, messages out. What a handler raises decides what happens:

    StoreUnavailable   tried again here for as long as it lasts; the worker's reports say so
    Unavailable        tried again here, with backoff and without counting; after UNAVAILABLE_LIMIT_S it has failed
    anything else      tried again here, `MAX_ATTEMPTS` times in all; then it is a dead letter
    (process death)    delivered elsewhere; after `max_deliveries` it is a dead letter

A delivery's own task moves its large payload to and from object storage: while the storage is slow no other waits. A dead
letter is written together with `handler.failed(...)`, so that the job's owner hears of it too.
"""

import asyncio
import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import structlog
from msgspec.structs import replace

from common.bus.bus import Bus, Delivery, Out, Settlement, Undecodable, Unfetched
from common.bus.deliveries import dead_letter
from common.bus.fullness import MAX_MEMORY_USED, Gauge, memory_used
from common.cancellation import beating, done_before, running
from common.errors import StoreUnavailable, Unavailable
from common.pool.gate import Awake, Closed, Gate, Pulse
from common.wire.messages import AdapterNew, Cancel, Failure, Message
from common.worker.handlers import Beat, Handler, Holds, Parks, Resumes, Retries
from common.worker.own_streams import OwnStreams
from common.worker.settler import Settler
from common.worker.takeover import Takeover
from common.worker.telemetry import KEEP_S, Reporter
from common.worker.underway import Inbox, Underway, Voided

MAX_ATTEMPTS = 3
UNAVAILABLE_LIMIT_S = 600.0
REPORT_EVERY_S = 1.0
BLOCK_MS = 500
FIRST_LOOK_S, LOOK_EVERY_S = 0.004, 0.04
"""Pauses between two looks for leftovers: the first after a delivery, since another often follows; the longest."""
GATHER_S = 0.002
MOST_READ_S = 0.01
"""The longest time between two reads: a person may wait for what comes."""

M = TypeVar("M", bound=Message)
log = structlog.get_logger()


def worker_id(service: str) -> str:
    return f"{service}-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """A service's way with deliveries: the handler has at most the slots and `ahead` more at once."""

    ahead: int = 0
    """Deliveries beyond the slots: the handler decides which of them it works on first."""
    orphan_slots: int = 0
    """Places for deliveries of dead workers beyond the slots; 0: a few, which take the next slots that come free."""
    has_room: Callable[[], bool] = lambda: True
    """Is there room for one more delivery? Asked after each that ends; else the worker reads no shared one."""
    takes_leftovers: Callable[[], bool] = lambda: False
    """Without room, does it take one at a time what no idle worker took? Waiting workers get new entries first."""
    drain_s: float = 0.0
    """Time in which work may finish after SIGTERM, before it is handed back."""
    progress_s: float = 0.0
    """Time between two writes of work's progress, if the handler gives any; 0: none is kept."""
    gather_s: float = GATHER_S
    """Time between two reads, and two settling scripts, for each delivery under way: one costs nearly as much as ten."""
    on_adapter_new: Callable[[AdapterNew], None] | None = None


class Worker:
    """Runs a handler over its inboxes (own places, then earlier ones first) until `stop` is set, then hands open work back."""

    def __init__(
        self,
        bus: Bus,
        handler: Handler,
        inboxes: Sequence[Inbox],
        reporter: Reporter,
        *,
        lease_s: float = 10.0,
        max_deliveries: int = 10,
        habits: Habits = Habits(),
        gate: Gate | None = None,
    ) -> None:
        """`gate`: it reads while that is open; None: always."""
        self._bus = bus
        self._handler = handler
        self._parks: Parks | None = handler if isinstance(handler, Parks) else None
        self._resumes: Resumes | None = handler if isinstance(handler, Resumes) and habits.progress_s else None
        self._holds: Holds | None = handler if isinstance(handler, Holds) else None
        self._retries: Retries | None = handler if isinstance(handler, Retries) else None
        self._inboxes = inboxes
        self._shared = [inbox for inbox in inboxes if not inbox.own_slots]
        self._streams = [stream for inbox in self._shared for stream in inbox.streams]
        self._reporter, self._habits, self._gate = reporter, habits, gate
        self._most = reporter.about.slots + habits.ahead
        self._lease_s, self._max_deliveries = lease_s, max_deliveries
        self._underway, self._voided = Underway(inboxes), Voided()
        lost = [self._holds.unpublished] if self._holds else []
        self._settler = Settler(bus, reporter, self._window_s, *lost)
        places = {"most": self._most, "orphan_slots": habits.orphan_slots}
        self._own = OwnStreams(bus, reporter.worker, inboxes, lease_s)
        self._takeover = Takeover(
            bus, reporter, self._all, self._underway, **places, lease_s=lease_s, begin=self._begin
        )
        self._shares = any(inbox.at_once for inbox in inboxes)
        self._reads = True  # and does not hand back
        self._drained = False  # the last read took all that there was
        self._look_s = LOOK_EVERY_S
        self._read_s = float("-inf")  # when all that there was, or that there was room for, was read

    @property
    def name(self) -> str:
        return self._reporter.worker

    async def run(self, stop: asyncio.Event) -> None:
        """Works until `stop` is set. Returns once everything is settled or handed back."""
        if not await done_before(stop, self._make_groups()):
            return
        loops = [self._settler.run(), self._renew(), self._report(stop)]
        loops.append(self._follow(self._bus.cell.control, "0", Cancel, self._hear_cancel))
        if self._resumes:
            loops.append(self._keep_progress(self._resumes))
        if self._habits.on_adapter_new:
            loops.append(self._follow(self._bus.cell.adapters_new, "$", AdapterNew, self._habits.on_adapter_new))
        if self._gate:
            loops += [self._gate.follow(stop), self._tell_gate(self._gate)]
        async with running(*loops):
            while not stop.is_set() and (self._gate is None or await done_before(stop, self._gate.opened())):
                await self._slice(stop, self._gate)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await self._broadcast("stopped")

    async def _slice(self, stop: asyncio.Event, gate: Gate | None) -> None:
        """Works until `stop`, or until the gate closes. Returns once everything is settled or handed back."""
        if gate and await done_before(stop, gate.wake()):
            await gate.tell(Awake())
        takers = [self._takeover.run(), self._read(), *(self._read_own(i) for i in self._inboxes if i.own_slots)]
        await self._own.begin()
        async with running(self._own.run(self._room, lambda: self._reads and not self._takeover.running_alone)):
            self._reads = True
            async with running(*takers):
                await (done_before(stop, gate.closing()) if gate else stop.wait())
            self._reads = False
            await self._hand_back_all(gate.drain_s if gate and not stop.is_set() else self._habits.drain_s)
        await self._own.leave()
        if gate and not stop.is_set():
            await gate.sleep()
            await gate.tell(Closed(gate.num_bytes()))

    async def _tell_gate(self, gate: Gate) -> None:
        while True:
            work = self._underway
            await gate.tell(Pulse(len(work), work.num_ended, work.ended_s, work.num_beats, gate.num_held()))
            await work.turned(REPORT_EVERY_S)

    async def _make_groups(self) -> None:
        for inbox in self._inboxes:
            await self._bus.ensure_group(inbox.stream, inbox.group, keep_s=inbox.keep_s)

    # ---- reading ----------------------------------------------------------------------------------------------------

    def _all(self) -> list[Inbox]:
        return [*self._inboxes, *self._own.pending()]

    def _room(self, inbox: Inbox) -> int:
        return self._underway.room(self._most, inbox.stream) if inbox.own_slots else self._free

    @property
    def _free(self) -> int:
        """Slots for shared deliveries. None while payloads of a burst are on their way: their size is unknown."""
        unknown = self._shares and self._underway.fetching
        if self._underway and (unknown or not self._habits.has_room()):
            return 0
        extra = 0 if self._takeover.is_short else min(self._habits.orphan_slots, self._underway.num_taken_over)
        return self._underway.room(self._most + extra)

    def _window_s(self, most_s: float) -> float:
        """Seconds for which entries wait for others: none where nothing is under way."""
        return min(self._habits.gather_s * len(self._underway), most_s)

    async def _read(self) -> None:
        while True:
            await self._underway.idle(self._read_s + self._window_s(MOST_READ_S) - time.monotonic())
            if self._takeover.running_alone or self._free <= 0:
                self._drained = False  # what comes meanwhile is read in order
            if self._takeover.running_alone:
                await self._takeover.over()
                continue
            found = await (self._next() if self._free > 0 else self._leftovers())
            await self._take(found)
            if found:
                self._read_s = time.monotonic() if self._drained or self._free <= 0 else float("-inf")
            await asyncio.sleep(0)  # the handler has them now, and counts them in what it says of its room

    async def _read_own(self, inbox: Inbox) -> None:
        """Reads a stream as its entries come, into its own places and into slots that are free."""
        while True:
            if self._takeover.running_alone:
                await self._takeover.over()
            elif room := self._underway.room(self._most, inbox.stream):
                await self._take(
                    await self._bus.read(inbox.streams, inbox.group, self.name, count=room, block_ms=BLOCK_MS)
                )
            else:
                await self._underway.one_ended()

    async def _take(self, found: Sequence[Delivery]) -> None:
        """Begins what was read."""
        await self._hold(found)
        for delivery in found:
            self._begin(delivery)
        if found:
            self._reporter.first_read([delivery.entry for delivery in found])

    async def _hold(self, found: Sequence[Delivery]) -> None:
        """Keeps what was read just as an entry began to run alone, for as long as that runs alone."""
        while self._takeover.running_alone:
            for stream, group in {(delivery.stream, delivery.group) for delivery in found}:
                entries = [delivery.entry for delivery in found if delivery.stream == stream]
                await self._bus.renew(stream, group, self.name, entries)
            await self._takeover.over(self._lease_s / 3)

    async def _next(self) -> list[Delivery]:
        """Reads up to the free slots, first inboxes first; if all were empty, waits until one is not. If several fill at that
        moment more may come, up to the free slots of each."""
        group, free = self._shared[0].group, self._free
        streams, tells = self._streams, self._own.tells
        count = min(free, *(inbox.at_once or free for inbox in self._shared))
        if tells or (len(streams) > 1 and not self._drained):
            found = await self._bus.read_in_order(streams, group, self.name, count=count, tells=tells)
            self._drained = len(found) < count
            if found or self._takeover.running_alone:
                return found
        found = await self._bus.read(streams, group, self.name, count=count, block_ms=BLOCK_MS)
        self._drained = len(found) < count
        return found

    async def _leftovers(self) -> list[Delivery]:
        """Reads an entry that no idle worker wants, if it may take one. Else waits until a delivery ends, or a while."""
        if not self._underway.room(self._most) or not self._habits.takes_leftovers():
            await self._underway.one_ended()
            return []
        found = await self._bus.read_in_order(self._streams, self._shared[0].group, self.name, count=1)
        if not found and self._free <= 0:
            ended = await self._underway.one_ended(self._look_s)
            self._look_s = FIRST_LOOK_S if ended else min(2 * self._look_s, LOOK_EVERY_S)
        return found

    def _begin(self, delivery: Delivery) -> "asyncio.Task[None]":
        task = self._underway.begin(delivery, self._work(delivery))
        task.add_done_callback(partial(self._cut_short, delivery))
        return task

    def _cut_short(self, delivery: Delivery, task: "asyncio.Task[None]") -> None:
        """Ends a delivery whose task was cancelled before its first step, and so runs none of its code. After an error of ours
        it stays pending, as if this process had died."""
        if delivery.place not in self._underway:
            return
        if task.cancelled():
            self._finish(Settlement(delivery, None))
        else:
            log.error("work_failed", entry=delivery.entry, exc_info=task.exception())
            self._underway.end(delivery.place)

    # ---- one delivery -----------------------------------------------------------------------------------------------

    async def _work(self, delivery: Delivery) -> None:
        settlement, beat = Settlement(delivery, None), partial(self._underway.beat, delivery.place)
        with contextlib.suppress(asyncio.CancelledError):  # a second time: it goes back as it is
            try:
                if delivery.progress or isinstance(delivery.message, Unfetched):
                    delivery = await self._opened(delivery, beat)
                settlement = await self._bus.written(Settlement(delivery, await self._outputs(delivery, beat)), beat)
            except asyncio.CancelledError:
                settlement = await self._bus.written(Settlement(delivery, self._interrupted(delivery)), beat)
        self._finish(settlement)

    async def _opened(self, delivery: Delivery, beat: Beat) -> Delivery:
        """Returns it with its payload, and with what was done of it before."""
        opened = delivery
        if isinstance(delivery.message, Unfetched):
            opened = replace(delivery, message=(await beating(beat, delivery.message.fetch())).message)
        if opened.progress and self._resumes and isinstance(opened.message, Message):
            opened = replace(opened, message=self._resumes.resumed(opened.message, opened.progress))
        self._underway.opened(opened)
        return opened

    async def _outputs(self, delivery: Delivery, beat: Beat) -> list[Out]:
        message = delivery.message
        if isinstance(message, Undecodable):
            return self._dead(delivery, message.reason)
        if (remains := self._remains(message)) is not None:
            return remains
        if delivery.deliveries > self._max_deliveries:
            return self._dead(delivery, f"delivered {delivery.deliveries} times without a result")
        return await self._attempts(delivery, message, beat)

    async def _attempts(self, delivery: Delivery, message: Message, beat: Beat) -> list[Out]:
        phase = self._reporter.service
        away_since: float | None = None
        attempt = 1
        if self._retries and delivery.deliveries > 1:
            self._retries.delivered_again(message, delivery.deliveries - 1)
        while True:
            pause_s = 2.0
            self._reporter.timeline.begin(message.tenant, message.job, phase)
            try:
                return await self._handler(message, beat)
            except StoreUnavailable as error:
                self._reporter.waits_for(str(error))
                log.warning("store_unavailable", message_id=message.id, reason=str(error))
            except Unavailable as error:
                away_since = away_since or time.monotonic()
                if time.monotonic() - away_since > UNAVAILABLE_LIMIT_S:
                    log.error("unavailable_for_too_long", message_id=message.id, reason=str(error))
                    return self._handler.failed(message, Failure("infrastructure", str(error)))
                log.warning("unavailable", message_id=message.id, reason=str(error))
            except Exception as error:  # the boundary: a handler's error ends as a dead letter, not as a dead worker
                log.exception("handler_failed", message_id=message.id, attempt=attempt)
                attempt, pause_s = attempt + 1, 0.2 * (attempt + 1)
                if attempt > MAX_ATTEMPTS:
                    return self._dead(delivery, f"{type(error).__name__}: {error}")
            finally:
                self._reporter.timeline.end(message.tenant, message.job, phase)
            beat()  # to wait is to advance: whoever took the work over would wait for the same
            await asyncio.sleep(min(pause_s, self._lease_s / 3))

    def _dead(self, delivery: Delivery, reason: str) -> list[Out]:
        message = delivery.message
        letter = (self._bus.cell.dead, dead_letter(delivery, reason))
        if isinstance(message, Undecodable):
            owner = self._bus.cell.owner_inbox(delivery.stream, letter[1].partition)
            return [letter, (owner, letter[1])] if letter[1].job else [letter]
        return [letter, *self._handler.failed(message, Failure("dead_letter", reason))]

    def _interrupted(self, delivery: Delivery) -> list[Out] | None:
        """Returns what is published for cancelled work (job paused or ended, worker stops). None: the entry as it is."""
        message = delivery.message
        if isinstance(message, Undecodable):
            return None
        remains = self._remains(message)
        return self._handler.hand_back(message) if remains is None else remains

    def _remains(self, message: Message) -> list[Out] | None:
        """Returns what is published in place of a void message's work; None if it is not void."""
        verdict = self._voided.verdict(message)
        if self._parks is None or verdict is None:
            return None
        return self._parks.park(message) if verdict == "park" else self._parks.drop(message)

    def _finish(self, settlement: Settlement) -> None:
        self._underway.end(settlement.delivery.place)
        self._settler.add(settlement)

    # ---- loops next to the reader -----------------------------------------------------------------------------------

    async def _renew(self) -> None:
        # Three times in a lease, so that one lost call costs no entry. Only what advanced: work that hangs in a live process must move
        # to another worker too. A renewal is no delivery, so it brings no entry nearer to a dead letter.
        while True:
            await asyncio.sleep(self._lease_s / 3)
            for stream, group in self._underway.streams:
                await self._bus.renew(stream, group, self.name, self._underway.take_advanced(stream))
            for inbox in self._inboxes:
                if inbox.keep_s is not None:  # the worker's own stream, which must outlive a short silence
                    await self._bus.retrying(partial(self._bus.client.expire, inbox.stream, inbox.keep_s))

    async def _keep_progress(self, resumes: Resumes) -> None:
        """Writes new progress of the work under way, which also renews it; nothing while Redis is too full."""
        gauge = Gauge(partial(memory_used, self._bus))
        while True:
            await asyncio.sleep(self._habits.progress_s)
            for stream, group in self._underway.streams:
                actives = self._underway.of(stream)
                found = {active: progress for active in actives if (progress := active.new_progress(resumes))}
                if not found or await gauge.used() > MAX_MEMORY_USED:
                    continue
                new = {active.delivery.entry: progress for active, progress in found.items()}
                await self._bus.renew(stream, group, self.name, list(new), new)
                for active, progress in found.items():
                    active.num_saved += len(progress.tail)

    async def _follow(self, stream: str, cursor: str, kind: type[M], hear: Callable[[M], None]) -> None:
        while True:
            for entry, message in await self._bus.follow(stream, cursor, block_ms=BLOCK_MS):
                cursor = entry
                if isinstance(message, kind):
                    hear(message)

    def _hear_cancel(self, cancel: Cancel) -> None:
        self._voided.add(cancel)
        if self._holds:
            self._holds.voided(cancel)
        if self._parks:
            self._underway.cancel(partial(self._voided_by, cancel))

    def _voided_by(self, cancel: Cancel, delivery: Delivery) -> bool:
        message = delivery.message
        if isinstance(message, Undecodable) or message.job != cancel.job:
            return False
        return self._voided.verdict(message) is not None

    async def _report(self, stop: asyncio.Event) -> None:
        while True:
            is_closed = self._gate is not None and not self._gate.is_open and not self._underway
            state = "closed" if is_closed else "busy" if self._underway else "idle"
            await self._broadcast("draining" if stop.is_set() else state)
            await asyncio.sleep(REPORT_EVERY_S)

    async def _broadcast(self, state: str) -> None:
        report = self._reporter.report(state, len(self._underway))
        await self._bus.broadcast(self._bus.cell.telemetry, report, keep_s=KEEP_S)

    # ---- shutdown ---------------------------------------------------------------------------------------------------

    async def _hand_back_all(self, drain_s: float | None) -> None:
        """Lets work finish for `drain_s`, then gives back the rest, also what was delivered and not begun. None: all finishes."""
        if drain_s != 0:
            await self._underway.all_ended(drain_s)
        self._underway.cancel()
        while not await self._underway.all_ended(self._lease_s):
            self._underway.cancel()
        await self._settler.settle()
        for inbox in self._all():
            after = "0"
            while held := await self._bus.read_pending(inbox.stream, inbox.group, self.name, after=after):
                await self._bus.settle([Settlement(delivery, None) for delivery in held])
                after = held[-1].entry
