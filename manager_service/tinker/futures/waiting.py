"""Hears of the operations whose results are there: one reader per replica, however many wait.

reads: done   waits for: OperationsAnswered   unblocked by: the owners of partitions
after a crash: clients ask again, and look at the results first
"""

import asyncio
from collections.abc import Generator
from contextlib import contextmanager

from common.bus import Bus
from common.operations import OperationsAnswered

BLOCK_MS = 1000

OperationKey = tuple[str, int]  # run, number of the operation


class Answered:
    """Wakes those who wait for operations of one cell."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._waiting: dict[OperationKey, set[asyncio.Event]] = {}

    @contextmanager
    def of(self, run: str, seq: int) -> Generator[asyncio.Event]:
        """An event that is set when the operation's result is there. Look for the result after this: what came before is not told."""
        event = asyncio.Event()
        waiting = self._waiting.setdefault((run, seq), set())
        waiting.add(event)
        try:
            yield event
        finally:
            waiting.discard(event)
            if not waiting:
                self._waiting.pop((run, seq), None)

    async def run(self) -> None:
        """Reads until cancelled, beginning with what the stream still holds."""
        cursor = "0"
        while True:
            entries = await self._bus.follow(self._bus.cell.done, cursor, block_ms=BLOCK_MS)
            for entry, message in entries:
                cursor = entry
                if isinstance(message, OperationsAnswered):
                    self._tell(message)

    def _tell(self, message: OperationsAnswered) -> None:
        for seq in message.seqs:
            for event in self._waiting.get((message.job, seq), ()):
                event.set()
