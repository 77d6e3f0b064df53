"""Settling: publishes the outputs of finished deliveries and acknowledges them, by one script for all.

reads: -   writes: what the handlers returned   waits for: a finished delivery   unblocked by: the worker's tasks

It waits only for Redis: the tasks have written large payloads (`Bus.written`) before.
"""

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence

import structlog

from common.bus.bus import Bus, Out, Settlement
from common.wire.messages import DeadLetter, Start
from common.worker.telemetry import Reporter

MOST_SOON_S, MOST_S = 0.01, 0.06
"""The longest time between two scripts: for what somebody may wait for, and for all else."""
MOST_BYTES = 4 << 20
"""The bytes of outputs of one script, since Redis serves nobody else meanwhile. One settlement may have more."""
log = structlog.get_logger()


class Settler:
    """Collects settlements until a window after the last script's start ends; the next script takes all."""

    def __init__(
        self,
        bus: Bus,
        reporter: Reporter,
        window_s: Callable[[float], float],
        lost: Callable[[Sequence[Out]], None] = lambda _: None,
    ) -> None:
        """`window_s`: seconds between the starts of two scripts, at most the given. `lost`: told of unpublished outputs."""
        self._bus = bus
        self._window_s = window_s
        self._lost = lost
        self._reporter = reporter
        self._finished: list[Settlement] = []
        self._due = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._since_s = -math.inf  # no script has begun yet
        self._one_script = asyncio.Lock()

    def add(self, settlement: Settlement) -> None:
        self._finished.append(settlement)
        loop = asyncio.get_running_loop()
        due_s = self._since_s + self._window_s(MOST_SOON_S if self._is_awaited(settlement) else MOST_S)
        if self._timer is None or due_s < self._timer.when():
            self._stop_timer()
            self._timer = loop.call_at(max(due_s, loop.time()), self._due.set)

    def _is_awaited(self, settlement: Settlement) -> bool:
        """Does somebody wait for it: a person behind an API replica, or an engine without work?"""
        begins = isinstance(settlement.delivery.message, Start)
        return begins or any(not self._bus.cell.instead_of(stream) for stream, _ in settlement.outputs or ())

    def _stop_timer(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None

    async def run(self) -> None:
        while True:
            await self._due.wait()
            self._due.clear()
            self._stop_timer()
            self._since_s = asyncio.get_running_loop().time()
            await self.settle()

    async def settle(self) -> None:
        """Settles all that was added before the call, and waits until it is settled."""
        async with self._one_script:
            batch, self._finished = self._finished, []
            since = time.monotonic()
            done = [published for script in _scripts(batch) for published in await self._bus.settle(script)]
        for settlement, published in zip(batch, done, strict=True):
            if not published:
                self._lost(settlement.outputs or ())
            elif letter := next((out for _, out in settlement.outputs or () if isinstance(out, DeadLetter)), None):
                self._reporter.count("dead_letters")
                log.error("dead_letter", stream=letter.stream, entry=letter.entry, reason=letter.reason)
        self._reporter.count("settle_s", (time.monotonic() - since) * len(done))
        self._reporter.count("settled", sum(done))
        self._reporter.count("lost_races", len(done) - sum(done))


def _scripts(settlements: Sequence[Settlement]) -> Iterator[list[Settlement]]:
    """The settlements in their order, as many at once as one script takes."""
    script, num_bytes = list[Settlement](), 0
    for settlement in settlements:
        size = sum(len(value) for fields in settlement.fields or () for value in fields if isinstance(value, bytes))
        if script and num_bytes + size > MOST_BYTES:
            yield script
            script, num_bytes = [], 0
        script.append(settlement)
        num_bytes += size
    if script:
        yield script
