"""The streams that are one worker's own: of what it does sooner than others, who can do it too. No promise depends on them.

reads, writes: `rollout-workers`, `hungry`   waits for: nothing   unblocked by: -
after a crash: the others find the worker gone after HOLD_S, and pass on what waits in its streams; what it held they take over
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from common.bus.bus import Bus
from common.bus.scripts import ATTEND_OWN, PASS_ON
from common.worker.underway import Inbox

LOOK_EVERY_S = 0.08
"""Time between two looks of a worker without room at what waits for it: nobody idles for longer."""
ATTEND_EVERY_S = 1.0
HOLD_S = 3.0
"""Time without a sign of life after which what waits for a worker goes to all; what it works on is its own for a lease."""
MOST = 100
"""Entries passed on by one script, since Redis serves nobody else meanwhile."""
HUNGRY = -1
"""Stands for as many entries as hungry workers have room for."""


class OwnStreams:
    """The own streams of a worker, by those of its inboxes that have one, and those of workers that are gone."""

    def __init__(self, bus: Bus, worker: str, inboxes: Sequence[Inbox], lease_s: float) -> None:
        self._bus = bus
        self._worker = worker
        self._inboxes = [inbox for inbox in inboxes if inbox.own]
        self._lease_s, self._every_s = lease_s, min(ATTEND_EVERY_S, lease_s / 4)
        self._attend_own = bus.client.register_script(ATTEND_OWN)
        self._pass_on = bus.client.register_script(PASS_ON)
        self._gone: list[str] = []

    @property
    def tells(self) -> str:
        """The key in which the worker tells that it has room; empty without own streams."""
        return self._bus.cell.hungry if self._inboxes else ""

    def pending(self) -> list[Inbox]:
        """Own streams with what their worker has not settled: this one's, and those of workers that are gone."""
        return [
            replace(inbox, stream=own, own="", own_slots=0)
            for worker in (self._worker, *self._gone)
            for inbox, own in self._of(worker)
        ]

    def _of(self, worker: str) -> Iterator[tuple[Inbox, str]]:
        return ((inbox, inbox.own.removesuffix(self._worker) + worker) for inbox in self._inboxes)

    async def begin(self) -> None:
        """Makes the streams, and lets others know of them."""
        if self._inboxes:
            await self._attend()

    async def run(self, room: Callable[[Inbox], int], reads: Callable[[], bool]) -> None:
        """Passes on what waits while there is no `room` for it: to places that all chats have; else to hungry workers, or to all while
        this one reads nothing. Looks after the streams of workers that are gone."""
        attended_s = time.monotonic()
        while self._inboxes:
            await asyncio.sleep(LOOK_EVERY_S)
            for inbox in self._inboxes:
                if not reads():
                    await self._pass(self._worker, MOST)
                elif room(inbox) <= 0:
                    await self._pass(self._worker, MOST if inbox.own_slots else HUNGRY, inbox)
            if time.monotonic() - attended_s >= self._every_s:
                await self._attend()
                attended_s = time.monotonic()

    async def leave(self) -> None:
        """Gives to all what waits in this worker's streams, and deletes them. Call when nothing of them is under way."""
        while self._inboxes and await self._pass(self._worker, MOST, has_gone=True) == MOST:
            pass

    async def _attend(self) -> None:
        times = [int(1000 * seconds) for seconds in (min(HOLD_S, self._lease_s), self._lease_s)]
        words = [self._inboxes[0].group, self._worker, *times, *(inbox.own for inbox in self._inboxes)]
        keys = [self._bus.cell.rollout_workers]
        gone = await self._bus.retrying(lambda: self._attend_own(keys=keys, args=words))
        self._gone = [worker.decode() for worker in gone]
        for worker in self._gone:
            await self._pass(worker, MOST, has_gone=True)

    async def _pass(self, worker: str, most: int, only: Inbox | None = None, *, has_gone: bool = False) -> int:
        cell, group = self._bus.cell, self._inboxes[0].group
        words = [group, self._worker, most, worker if has_gone else "", cell.key("moved:"), cell.key("")]
        for inbox, own in self._of(worker):
            words += [cell.name_of(own), cell.name_of(inbox.stream)] if only in (None, inbox) else []
        keys = [cell.hungry, cell.rollout_workers]
        return await self._bus.retrying(lambda: self._pass_on(keys=keys, args=words))
