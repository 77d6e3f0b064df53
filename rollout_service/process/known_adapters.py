"""Adapters that the process has in its memory, those in slots and some that wait for their next turn.

    load(a)      the process knows a: nothing is read        else: the least recently used without a slot goes, a is read
    release(a)   a has no slot any more, and stays known until another one needs its place

Used from one event loop.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from rollout_service.process.core import AdapterFolder


class KnownAdapters:
    """The adapters known in one life of the process."""

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

    async def release(self, adapter: AdapterFolder) -> None:
        self._in_slots.discard(adapter.number)

    async def drop(self, adapter: AdapterFolder) -> None:
        """Removes an adapter that has no slot, if the process knows it."""
        async with self._one_by_one:
            if adapter.number in self._known and adapter.number not in self._in_slots:
                await self._forget(adapter.number)

    async def _forget(self, number: int) -> None:
        await self._remove(self._known.pop(number))
