"""Settling: publishes the outputs of finished deliveries and acknowledges them, by one script for all that have finished.

reads: -   writes: what the handlers returned   waits for: a finished delivery   unblocked by: the worker's tasks

It waits for Redis alone: the tasks have written large payloads (`Bus.written`) before.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

from common.bus import Bus, Out, Settlement
from common.telemetry import Reporter


class Settler:
    """Collects settlements while a script runs; the next script takes them all."""

    def __init__(self, bus: Bus, reporter: Reporter, lost: Callable[[Sequence[Out]], None] = lambda _: None) -> None:
        """`lost`: told of outputs that were not published."""
        self._bus = bus
        self._lost = lost
        self._reporter = reporter
        self._finished: list[Settlement] = []
        self._added = asyncio.Event()
        self._one_script = asyncio.Lock()

    def add(self, settlement: Settlement) -> None:
        self._finished.append(settlement)
        self._added.set()

    async def run(self) -> None:
        while True:
            await self._added.wait()
            self._added.clear()
            await self.settle()

    async def settle(self) -> None:
        """Settles all that was added before the call, and waits until it is settled."""
        async with self._one_script:
            batch, self._finished = self._finished, []
            since = time.monotonic()
            done = await self._bus.settle(batch)
        for settlement, published in zip(batch, done, strict=True):
            if not published:
                self._lost(settlement.outputs or ())
        self._reporter.count("settle_s", (time.monotonic() - since) * len(done))
        self._reporter.count("settled", sum(done))
        self._reporter.count("lost_races", len(done) - sum(done))
