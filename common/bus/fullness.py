"""Redis' memory, and its disk: above a share of its limit, nothing is put into it that can wait or be done without."""

import math
import time
from collections.abc import Awaitable, Callable
from typing import Any

from common.bus.bus import Bus
from common.bus.streams import Cell

MAX_MEMORY_USED = 0.6
"""Share of Redis' memory limit above which owners issue nothing new, and workers keep no progress."""
MAX_USED_FOR_NEW = 0.8
"""Share above which the API takes no new work either."""
DISK_FULL = math.inf
"""The share while the disk of `marlaas up`'s Redis is full, whatever the memory."""
ASK_EVERY_S = 1.0


async def used_by(client: Any, cell: Cell) -> float:
    """`memory_used`, or DISK_FULL. `client`: of Redis. Raises its errors."""
    return DISK_FULL if await client.exists(cell.disk_full) else used_of(await client.info("memory"))


async def memory_used(bus: Bus) -> float:
    """Redis' memory over its limit, 0 to 1 or somewhat above; 0 without a limit."""
    return used_of(await bus.retrying(lambda: bus.client.info("memory")))


def used_of(memory: Any) -> float:
    """The same, from the answer of INFO. What waits for clients to read it does not count: it goes by itself, and no new work is in it."""
    limit = int(memory.get("maxmemory", 0))
    used = int(memory["used_memory"]) - int(memory.get("mem_clients_normal", 0))
    return max(0, used) / limit if limit else 0.0


class Gauge:
    """Asks, at most every ASK_EVERY_S, how full Redis is."""

    def __init__(self, ask: Callable[[], Awaitable[float]]) -> None:
        self._ask = ask
        self._used = 0.0
        self._asked = float("-inf")

    async def used(self) -> float:
        if time.monotonic() - self._asked >= ASK_EVERY_S:
            self._used, self._asked = await self._ask(), time.monotonic()
        return self._used
