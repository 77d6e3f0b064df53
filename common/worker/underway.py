"""The deliveries that a worker works on, where it reads them, the places that they take, and which were cancelled.

A delivery is under way from the creation of its task until `end`. Only what advanced since the last renewal is renewed, so
that another worker takes over what hangs.
"""

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field

from common.bus.bus import Delivery, Progress, Undecodable, Unfetched
from common.cancellation import set_within
from common.wire.messages import Cancel, Message
from common.worker.handlers import Resumes

MAX_VOIDED = 100_000


@dataclass(frozen=True, slots=True)
class Inbox:
    stream: str
    group: str
    at_once: int | None = None
    """Entries taken by one read; None: as many as free slots. Fewer let others share a burst."""
    own_slots: int = 0
    """Places that only this stream's deliveries take, beyond the slots: it is read also while those are taken."""
    keep_s: int | None = None
    """The stream is this worker's own, and expires so long after its last sign of life; None: it stays."""
    own: str = ""
    """A stream of what this worker should get, read before this one: to which goes what it has no room for."""

    @property
    def streams(self) -> list[str]:
        return [self.own, self.stream] if self.own else [self.stream]


@dataclass(slots=True, eq=False)
class Active:
    delivery: Delivery
    task: "asyncio.Task[None]"
    orphan: bool
    """Taken over, and not advanced yet."""
    since_s: float = field(default_factory=time.monotonic)
    advanced: bool = True
    """Since the last renewal."""
    num_saved: int = 0
    """Bytes of its progress that Redis has."""

    def new_progress(self, resumes: Resumes) -> Progress | None:
        """Returns what has come since the last write; None if nothing has."""
        message = self.delivery.message
        progress = None if isinstance(message, Undecodable) else resumes.progress(message)
        if progress is None or len(progress[1]) <= self.num_saved:
            return None
        head, body = progress
        return Progress(head, len(head) + self.num_saved, body[self.num_saved :])


class Underway:
    """All deliveries under way, by stream and entry."""

    def __init__(self, inboxes: Sequence[Inbox]) -> None:
        self._own_slots = Counter({inbox.stream: inbox.own_slots for inbox in inboxes})
        self._instead = {inbox.own: inbox.stream for inbox in inboxes}  # whose places an own stream's deliveries take
        self._num: Counter[str] = Counter()  # by stream
        self._active: dict[tuple[str, str], Active] = {}
        self.num_taken_over = 0
        self.num_ended, self.ended_s = 0, 0.0
        """Deliveries that have ended, and the seconds that they took, each for itself."""
        self.num_beats = 0
        self._ended = asyncio.Event()
        self._changed = asyncio.Event()
        self._idle = asyncio.Event()
        self._turned = asyncio.Event()

    def __len__(self) -> int:
        return len(self._active)

    def __contains__(self, place: tuple[str, str]) -> bool:
        return place in self._active

    def room(self, slots: int, stream: str = "") -> int:
        """Free places: of so many slots, and of those that the stream has of its own."""
        in_slots = sum(max(0, num - self._own_slots[other]) for other, num in self._num.items())
        own = max(0, self._own_slots[stream] - self._num[stream]) if stream else 0
        return max(0, slots - in_slots) + own

    @property
    def num_orphans(self) -> int:
        """Deliveries that were taken over and have not advanced yet."""
        return sum(active.orphan for active in self._active.values())

    @property
    def fetching(self) -> bool:
        """Does one wait for its payload?"""
        return any(isinstance(active.delivery.message, Unfetched) for active in self._active.values())

    @property
    def streams(self) -> set[tuple[str, str]]:
        """The streams of what is under way, each with its group."""
        return {(active.delivery.stream, active.delivery.group) for active in self._active.values()}

    def of(self, stream: str) -> list[Active]:
        return [active for active in self._active.values() if active.delivery.stream == stream]

    def begin(self, delivery: Delivery, work: Coroutine[None, None, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work, name=delivery.entry)
        self._idle.clear()
        if not self._active:
            self._turned.set()
        self._active[delivery.place] = Active(delivery, task, orphan=delivery.deliveries > 1)
        self._num[self._places_of(delivery)] += 1
        self.num_taken_over += delivery.deliveries > 1
        return task

    def _places_of(self, delivery: Delivery) -> str:
        return self._instead.get(delivery.stream, delivery.stream)

    def beat(self, place: tuple[str, str]) -> None:
        """Notes that the work on an entry advanced."""
        active = self._active.get(place)
        if active is None:
            return
        active.advanced = True
        self.num_beats += 1
        if active.orphan:
            active.orphan = False
            self._changed.set()

    def opened(self, delivery: Delivery) -> None:
        """Takes a delivery in place of the one whose work began: it has its payload now."""
        self._active[delivery.place].delivery = delivery
        self._ended.set()

    def take_advanced(self, stream: str) -> list[str]:
        """Returns the stream's entries that advanced since the last call."""
        advanced = [active for active in self.of(stream) if active.advanced]
        for active in advanced:
            active.advanced = False
        return [active.delivery.entry for active in advanced]

    def cancel(self, chosen: Callable[[Delivery], bool] = lambda _: True) -> None:
        """Cancels the tasks of the chosen deliveries; each still ends by `end`."""
        for active in list(self._active.values()):
            if chosen(active.delivery):
                active.task.cancel()

    def end(self, place: tuple[str, str]) -> None:
        if active := self._active.pop(place, None):
            self.num_taken_over -= active.delivery.deliveries > 1
            self._num[self._places_of(active.delivery)] -= 1
            self.num_ended += 1
            self.ended_s += time.monotonic() - active.since_s
        self._ended.set()
        self._changed.set()
        if not self._active:
            self._idle.set()
            self._turned.set()

    async def idle(self, timeout_s: float) -> None:
        """Waits until nothing is under way, or the time is over."""
        if timeout_s > 0 and self._active:
            await set_within(self._idle, timeout_s)

    async def turned(self, timeout_s: float) -> None:
        """Waits until work begins where none was under way, or none is left, or the time is over."""
        await set_within(self._turned, timeout_s)
        self._turned.clear()

    async def one_ended(self, timeout_s: float | None = None) -> bool:
        """Waits until the next delivery ends, or has its payload. False if the time is over before."""
        self._ended.clear()
        return await set_within(self._ended, timeout_s)

    async def changed(self, timeout_s: float) -> None:
        """Waits until an orphan advances or a delivery ends."""
        self._changed.clear()
        await set_within(self._changed, timeout_s)

    async def all_ended(self, timeout_s: float | None = None) -> bool:
        """Waits until the deliveries under way at the call have ended. Returns whether none is under way now."""
        if tasks := [active.task for active in self._active.values()]:
            await asyncio.wait(tasks, timeout=timeout_s)
        return not self._active


@dataclass(slots=True)
class Voided:
    """Remembers, for each job, the newest epoch that this worker heard to be void."""

    _epochs: "OrderedDict[str, tuple[int, bool]]" = field(default_factory=OrderedDict)

    def add(self, cancel: Cancel) -> None:
        known = self._epochs.get(cancel.job, (-1, False))
        if cancel.epoch >= known[0]:
            self._epochs[cancel.job] = (cancel.epoch, cancel.park)
            self._epochs.move_to_end(cancel.job)
        while len(self._epochs) > MAX_VOIDED:
            self._epochs.popitem(last=False)

    def verdict(self, message: Message) -> str | None:
        """Returns `park` or `drop` for a void message; None for a valid one."""
        epoch, park = self._epochs.get(message.job, (-1, False))
        if message.epoch > epoch:
            return None
        return "park" if park else "drop"
