"""Says how full Redis is: above a share of its limit, nothing is put into it that can wait or be done without."""

import time

from common.bus import Bus

MAX_MEMORY_USED = 0.6
"""Share of Redis' memory limit above which owners issue nothing new, and workers keep no progress."""
ASK_EVERY_S = 1.0


async def memory_used(bus: Bus) -> float:
    """Redis' memory over its limit, 0 to 1; 0 without a limit."""
    memory = await bus.retrying(lambda: bus.client.info("memory"))
    limit = int(memory.get("maxmemory", 0))
    return int(memory["used_memory"]) / limit if limit else 0.0


class Gauge:
    """Asks Redis, at most every ASK_EVERY_S, whether it is too full."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._used = 0.0
        self._asked = float("-inf")

    async def too_full(self) -> bool:
        if time.monotonic() - self._asked >= ASK_EVERY_S:
            self._used, self._asked = await memory_used(self._bus), time.monotonic()
        return self._used > MAX_MEMORY_USED
