"""Take-over: works on the entries that other workers left behind, those that nobody renewed within the lease.

reads: its inboxes' idle entries   writes: nothing itself: what it begins is settled like all work
waits for: its own work to end, at most a lease   unblocked by: finished deliveries
while it runs: the reader begins nothing, so that an entry which kills its worker harms no neighbour
"""

import asyncio
from collections.abc import Callable, Sequence

import structlog

from common.bus import Bus, Delivery
from common.underway import Inbox, Underway

log = structlog.get_logger()


class Takeover:
    """Begins one idle entry at a time, with nothing else under way, and waits until it has ended."""

    def __init__(
        self,
        bus: Bus,
        worker: str,
        inboxes: Sequence[Inbox],
        underway: Underway,
        *,
        lease_s: float,
        begin: Callable[[Delivery], "asyncio.Task[None]"],
    ) -> None:
        self._bus = bus
        self._worker = worker
        self._inboxes = inboxes
        self._underway = underway
        self._lease_s = lease_s
        self._begin = begin
        self._over = asyncio.Event()
        self._over.set()

    @property
    def running(self) -> bool:
        """True from the moment that it waits for the other work to end until the idle entry has ended."""
        return not self._over.is_set()

    async def over(self) -> None:
        """Waits until it is not running."""
        await self._over.wait()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 4)
            for inbox in self._inboxes:
                while await self._has_idle(inbox) and await self._run_alone(inbox):
                    pass

    async def _has_idle(self, inbox: Inbox) -> bool:
        entries = await self._bus.idle(inbox.stream, inbox.group, min_idle_ms=self._lease_ms)
        return any(entry not in self._underway for entry in entries)

    async def _run_alone(self, inbox: Inbox) -> bool:
        """Returns False if its own work did not end within a lease, or if nothing is idle any more."""
        self._over.clear()
        try:
            if not await self._underway.all_ended(self._lease_s):
                return False
            taken = await self._bus.claim(inbox.stream, inbox.group, self._worker, min_idle_ms=self._lease_ms, count=1)
            for delivery in taken:
                if delivery.entry not in self._underway:
                    log.warning("taken_over", entry=delivery.entry, deliveries=delivery.deliveries)
                    await asyncio.wait([self._begin(delivery)])
            return bool(taken)
        finally:
            self._over.set()

    @property
    def _lease_ms(self) -> int:
        return int(self._lease_s * 1000)
