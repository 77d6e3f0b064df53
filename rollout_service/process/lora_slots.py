"""Gives adapters the process's slots in order of arrival, chats before all else; one slot of several is kept for chats.

    hold(a)   a has a slot, no chat waits, and the first in line has waited for less than MAX_OVERTAKEN_S: at once
              else: behind those that wait, so that a busy adapter does not keep its slot
    a slot comes free when nobody holds its adapter; the adapter stays until another one needs the slot

Used from one event loop.
"""

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field

from common.cancellation import cancel_all
from rollout_service.process.core import AdapterFolder

MAX_OVERTAKEN_S = 20.0
"""While a turn waits for less, turns of adapters that have slots go before it: slots stay full, and no adapter is exchanged."""


@dataclass(slots=True, eq=False)
class Slot:
    """An adapter in a slot."""

    adapter: AdapterFolder
    ready: "asyncio.Task[None]"
    users: int = 0
    others: int = 0  # of the users: all but chats


@dataclass(slots=True, eq=False)
class Place:
    """An adapter's place in the queue, shared by all who wait for it."""

    adapter: AdapterFolder
    waiting: "list[asyncio.Future[Slot]]" = field(default_factory=list)
    since_s: float = field(default_factory=time.monotonic)


class LoraSlots:
    """The slots of one life of the process. A `load` that raises fails only those waiting for that adapter."""

    def __init__(self, num_slots: int, known: "KnownAdapters") -> None:
        self._num_slots = num_slots
        self._most_others = max(1, num_slots - 1)
        self._known = known
        self._slots: OrderedDict[int, Slot] = OrderedDict()  # by number of the adapter, least recently used first
        self._queues = {True: OrderedDict[int, Place](), False: OrderedDict[int, Place]()}  # of chats, of others

    @property
    def num_waiting(self) -> int:
        """Turns that wait for a slot."""
        return sum(len(place.waiting) for queue in self._queues.values() for place in queue.values())

    @contextlib.asynccontextmanager
    async def hold(self, adapter: AdapterFolder, *, chat: bool = False) -> AsyncGenerator[None]:
        """Keeps the adapter loaded inside. Raises what `load` raised."""
        slot = await self._enter(adapter, chat)
        try:
            await asyncio.shield(slot.ready)
            yield
        finally:
            self._end_use(slot, chat)

    async def drop(self, adapter: AdapterFolder) -> None:
        """Unloads an adapter that nobody holds, if it has a slot."""
        slot = self._slots.get(adapter.number)
        if slot is not None and not slot.users:
            del self._slots[adapter.number]
            if await _was_loaded(slot):
                self._known.release(adapter)
            self._advance()

    async def close(self) -> None:
        """Stops what still loads. The process is gone."""
        await cancel_all([slot.ready for slot in self._slots.values()])

    def _end_use(self, slot: Slot, chat: bool) -> None:
        slot.users -= 1
        slot.others -= not chat
        self._advance()

    async def _enter(self, adapter: AdapterFolder, chat: bool) -> Slot:
        """Waits until the adapter has a slot, and counts one user more in it."""
        place = self._queues[chat].setdefault(adapter.number, Place(adapter))
        waiting: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()
        place.waiting.append(waiting)
        self._advance()
        try:
            return await waiting
        except asyncio.CancelledError:
            self._leave(place, waiting, chat)
            raise

    def _leave(self, place: Place, waiting: "asyncio.Future[Slot]", chat: bool) -> None:
        """Takes out a user that gave up while it waited, or at the moment in which it was let in."""
        if waiting.done() and not waiting.cancelled():
            self._end_use(waiting.result(), chat)
            return
        place.waiting.remove(waiting)
        if not place.waiting and self._queues[chat].get(place.adapter.number) is place:
            del self._queues[chat][place.adapter.number]
            self._advance()

    def _advance(self) -> None:
        """Lets in all who can be: chats in order, then the others."""
        for chat, queue in self._queues.items():
            for place in list(queue.values()):
                if slot := self._slot_of(place.adapter, chat):
                    del queue[place.adapter.number]
                    self._let_in(place, slot, chat)
                elif chat or time.monotonic() - place.since_s >= MAX_OVERTAKEN_S:
                    return

    def _let_in(self, place: Place, slot: Slot, chat: bool) -> None:
        self._slots.move_to_end(place.adapter.number)
        for waiting in place.waiting:
            if not waiting.cancelled():
                slot.users += 1
                slot.others += not chat
                waiting.set_result(slot)

    def _slot_of(self, adapter: AdapterFolder, chat: bool) -> Slot | None:
        """The adapter's slot, or one that it is given now; None: it must wait."""
        slot = self._slots.get(adapter.number)
        used = sum(each.others > 0 for each in self._slots.values())
        if not chat and not (slot and slot.others) and used >= self._most_others:
            return None
        return slot or self._give_slot(adapter)

    def _give_slot(self, adapter: AdapterFolder) -> Slot | None:
        """Gives the adapter a slot that is free or that nobody uses; None: all are in use."""
        idle = None
        if len(self._slots) >= self._num_slots:
            idle = next((slot for slot in self._slots.values() if not slot.users), None)
            if idle is None:
                return None
            del self._slots[idle.adapter.number]
        ready = asyncio.create_task(self._exchange(idle, adapter), name=f"load {adapter.name}")
        slot = self._slots[adapter.number] = Slot(adapter, ready)
        ready.add_done_callback(lambda _: self._forget_failed(slot))
        return slot

    async def _exchange(self, old: Slot | None, new: AdapterFolder) -> None:
        if old is not None and await _was_loaded(old):
            self._known.release(old.adapter)
        await self._known.load(new)

    def _forget_failed(self, slot: Slot) -> None:
        """Frees the slot of an adapter that could not be loaded; the next user tries again."""
        if not slot.ready.cancelled() and slot.ready.exception() is None:
            return
        if self._slots.get(slot.adapter.number) is slot:
            del self._slots[slot.adapter.number]
            self._advance()


class KnownAdapters:
    """Adapters in one life's memory: those in slots, and some that wait for their next turn, so that they get a slot again without
    a file being read, until another needs the place."""

    def __init__(
        self,
        most: int,
        add: Callable[[AdapterFolder], Awaitable[None]],
        remove: Callable[[AdapterFolder], Awaitable[None]],
    ) -> None:
        """`most`: how many the process knows at once; at least as many as there are slots."""
        self._most = most
        self._add = add
        self._remove = remove
        self._known: OrderedDict[int, AdapterFolder] = OrderedDict()  # by number, least recently used first
        self._in_slots: set[int] = set()
        self._one_by_one = asyncio.Lock()

    async def load(self, adapter: AdapterFolder) -> None:
        """Raises what `add` raised; the adapter is not known then."""
        async with self._one_by_one:
            if adapter.number not in self._known:
                while len(self._known) >= self._most:
                    await self._forget(next(number for number in self._known if number not in self._in_slots))
                await self._add(adapter)
                self._known[adapter.number] = adapter
            self._known.move_to_end(adapter.number)
            self._in_slots.add(adapter.number)

    def release(self, adapter: AdapterFolder) -> None:
        self._in_slots.discard(adapter.number)

    async def drop(self, adapter: AdapterFolder) -> None:
        """Removes an adapter that has no slot, if the process knows it."""
        async with self._one_by_one:
            if adapter.number in self._known and adapter.number not in self._in_slots:
                await self._forget(adapter.number)

    async def _forget(self, number: int) -> None:
        await self._remove(self._known.pop(number))


async def _was_loaded(slot: Slot) -> bool:
    await asyncio.wait([slot.ready])
    return not slot.ready.cancelled() and slot.ready.exception() is None
