"""The deliveries that a worker works on, and where it reads them.

A delivery is under way from the moment its task is made until `end`. Only what advanced since the last renewal is
renewed, so that another worker takes over what hangs.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

from common.bus import Delivery


@dataclass(frozen=True, slots=True)
class Inbox:
    stream: str
    group: str
    at_once: int | None = None
    """Entries taken by one read; None: as many as there are free slots. Fewer let others share a burst."""


@dataclass(slots=True, eq=False)
class Active:
    delivery: Delivery
    task: "asyncio.Task[None]"
    advanced: bool = True
    """Since the last renewal."""


class Underway:
    """All deliveries under way, by entry."""

    def __init__(self) -> None:
        self._active: dict[str, Active] = {}
        self._ended = asyncio.Event()

    def __len__(self) -> int:
        return len(self._active)

    def __contains__(self, entry: str) -> bool:
        return entry in self._active

    def begin(self, delivery: Delivery, work: Coroutine[None, None, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work, name=delivery.entry)
        self._active[delivery.entry] = Active(delivery, task)
        return task

    def beat(self, entry: str) -> None:
        """Notes that the work on an entry advanced."""
        active = self._active.get(entry)
        if active is not None:
            active.advanced = True

    def take_advanced(self, stream: str) -> list[str]:
        """Returns the stream's entries that advanced since the last call."""
        found = [a for a in self._active.values() if a.delivery.stream == stream and a.advanced]
        for active in found:
            active.advanced = False
        return [active.delivery.entry for active in found]

    def cancel(self, chosen: Callable[[Delivery], bool] = lambda _: True) -> None:
        """Cancels the tasks of the chosen deliveries; each still ends by `end`."""
        for active in list(self._active.values()):
            if chosen(active.delivery):
                active.task.cancel()

    def end(self, entry: str) -> None:
        self._active.pop(entry, None)
        self._ended.set()

    async def one_ended(self) -> None:
        """Waits until the next delivery ends."""
        self._ended.clear()
        await self._ended.wait()

    async def all_ended(self, timeout_s: float | None = None) -> bool:
        """Waits until the deliveries under way at the call have ended. Returns whether none is under way now."""
        if tasks := [active.task for active in self._active.values()]:
            await asyncio.wait(tasks, timeout=timeout_s)
        return not self._active
