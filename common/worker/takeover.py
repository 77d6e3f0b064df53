"""Take-over: works on the entries that their workers did not renew within the lease.

reads: its inboxes' idle entries   writes: nothing itself: what it begins is settled like all work
waits for: an orphan to advance, or its own work to end   unblocked by: handlers

An entry that was delivered once before runs in company: nothing waits for quiet. One that was delivered more often may have
killed several workers: unless the last saved progress on it, it runs with no others, which it could harm, and only then does
the worker stop reading, for a while. It has one suspect at a time, and what that harmed twice is a suspect too, so that only the
deliveries of who kills add up to a dead letter.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

import structlog

from common.bus.bus import Bus, Delivery, Idle
from common.cancellation import set_within
from common.worker.telemetry import Reporter
from common.worker.underway import Inbox, Underway

LOOK_EVERY_S = 1.0
"""Time between two searches for idle entries, of all workers together; shorter with a short lease."""
UNPROVEN_SHARE = 4
"""One part in so many of a worker's slots may be orphans that have not advanced yet: any of them may end this worker."""
SUSPECT_AFTER = 5
"""Deliveries after which an entry runs with no others whatever its progress: it may kill its worker late."""
MOST_ALONE_S = 10.0
"""The longest time for which a worker reads nothing while its other work ends, and again while a suspect runs; then as long it reads."""
log = structlog.get_logger()


class Takeover:
    """Begins idle entries: several together with the worker's own work, or a suspect one alone."""

    def __init__(
        self,
        bus: Bus,
        reporter: Reporter,
        inboxes: Callable[[], Sequence[Inbox]],
        underway: Underway,
        *,
        most: int,
        orphan_slots: int,
        lease_s: float,
        begin: Callable[[Delivery], "asyncio.Task[None]"],
    ) -> None:
        """`inboxes`: where to look now. `most`: deliveries that the worker has at once, besides orphans. `orphan_slots`: see `Habits`."""
        self._bus = bus
        self._worker = reporter.worker
        self._inboxes = inboxes
        self._underway = underway
        self._unproven = max(1, reporter.about.slots // UNPROVEN_SHARE)
        self._most = most + max(orphan_slots, self._unproven)
        self._lease_s, self._lease_ms = lease_s, int(lease_s * 1000)
        self._every_s = min(LOOK_EVERY_S, lease_s / 4)
        self._begin = begin
        self._over = asyncio.Event()
        self._over.set()
        self._suspect: asyncio.Task[None] | None = None
        self._open_until = 0.0  # monotonic time: before it, no suspect begins
        self.is_short = False
        """More is to be taken over than there is room for: the worker's own work gives way."""

    @property
    def running_alone(self) -> bool:
        """True from the moment that it waits for other work to end until the suspect entry has ended, or has run for a while."""
        return not self._over.is_set()

    async def over(self, timeout_s: float | None = None) -> None:
        """Waits until nothing runs alone, or the time is over."""
        await set_within(self._over, timeout_s)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            for inbox in self._inboxes():
                # Who leaves suspects to others leaves the look at them to others too
                idle = await self._find(inbox, every_s=self._every_s / 2 if self._takes_suspects else 0.0)
                while idle:
                    await self._take(inbox, idle)
                    idle = await self._find(inbox)
                self.is_short = False

    async def _find(self, inbox: Inbox, every_s: float = 0.0) -> list[Idle]:
        own = [active.delivery.entry for active in self._underway.of(inbox.stream)]
        found = await self._bus.find_idle(
            inbox.stream, inbox.group, min_idle_ms=self._lease_ms, every_ms=int(every_s * 1000), own=own
        )
        known = [idle for idle in found if (inbox.stream, idle.entry) not in self._underway]
        return known if self._takes_suspects else [idle for idle in known if not is_suspect(idle)]

    @property
    def _takes_suspects(self) -> bool:
        return (self._suspect is None or self._suspect.done()) and time.monotonic() >= self._open_until

    async def _take(self, inbox: Inbox, idle: Sequence[Idle]) -> None:
        """Takes what may run in company, else one of the suspects alone."""
        innocent = [each for each in idle if not is_suspect(each)]
        if not innocent:
            await self._run_alone(inbox, idle[0])
            return
        places = self._underway.room(self._most, inbox.stream)
        room = min(self._unproven - self._underway.num_orphans, places)
        self.is_short = places < len(innocent)
        if room <= 0:
            await self._underway.changed(self._every_s)
        for delivery in await self._claim(inbox, innocent[: max(0, room)]):
            self._begin(delivery)

    async def _run_alone(self, inbox: Inbox, idle: Idle) -> None:
        """Holds the entry, lets all other work end, and runs it, each for MOST_ALONE_S at most; then it is work like other.

        If it kills this process, only this entry is delivered once more: its neighbours, which would count the death too
        and might become dead letters, are settled.
        """
        since = time.monotonic()
        self._over.clear()  # from now on the worker reads nothing
        try:
            for delivery in await self._claim(inbox, [idle]):
                while not await self._underway.all_ended(self._lease_s / 3) and time.monotonic() - since < MOST_ALONE_S:
                    await self._bus.renew(inbox.stream, inbox.group, self._worker, [delivery.entry])
                self._suspect = self._begin(delivery)
                await asyncio.wait([self._suspect], timeout=MOST_ALONE_S)
        finally:
            self._over.set()
            self._open_until = 2 * time.monotonic() - since

    async def _claim(self, inbox: Inbox, idle: Sequence[Idle]) -> list[Delivery]:
        taken = await self._bus.claim(inbox.stream, inbox.group, self._worker, idle, min_idle_ms=self._lease_ms)
        for delivery in taken:
            log.warning("taken_over", entry=delivery.entry, deliveries=delivery.deliveries)
        return taken


def is_suspect(idle: Idle) -> bool:
    """May it have ended its workers? One death proves nothing: all that the worker held is delivered again."""
    return idle.deliveries > 1 and not (idle.advanced and idle.deliveries < SUSPECT_AFTER)
