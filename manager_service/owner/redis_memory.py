"""Measures what fills Redis, by kind of key: the cell's streams one by one, all else by a random sample.

A kind is the first word of a key: `events` of `marlaas:{tiny}:events:<job>`. The owner of partition 0 measures for all.
"""

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from common.bus.bus import Bus
from common.bus.streams import NUM_PARTITIONS
from manager_service.records.cluster import own_streams

MEASURE_EVERY_S = 30.0
NUM_SAMPLED_KEYS = 256
"""Keys that are drawn at random at a time, whatever the number of keys."""
PREFIX = "marlaas:{"

# Both begin with a write that needs no memory: then Redis refuses none of the others, however full it is.
# KEYS: the hash. ARGV: fields and values.
RENEW = """
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], unpack(ARGV))
"""
# KEYS: a stream, and the hash that counts. ARGV: entries to keep, the field.
TRIM = """
local num = redis.call('XTRIM', KEYS[1], 'MAXLEN', ARGV[1])
redis.call('HINCRBY', KEYS[2], ARGV[2], num)
"""


class RedisMemory:
    """Bytes of Redis' memory by kind of key, at most `MEASURE_EVERY_S` old."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._renew = bus.client.register_script(RENEW)
        self._due_s = 0.0  # monotonic
        self.by_kind: dict[str, int] = {}

    async def look(self, *, measures: bool) -> None:
        """Renews old figures. `measures`: this owner measures; the others read what it wrote."""
        if time.monotonic() < self._due_s:
            return
        self._due_s = time.monotonic() + MEASURE_EVERY_S
        if measures:
            self.by_kind = await measured(self._bus)
            await self._write()
        else:
            (found,) = await self._bus.read_hashes([self._bus.cell.memory])
            self.by_kind = {kind.decode(): int(num) for kind, num in found.items()}

    async def _write(self) -> None:
        words: list[str | int] = ["other", 0, *(word for pair in self.by_kind.items() for word in pair)]
        await self._bus.retrying(lambda: self._renew(keys=[self._bus.cell.memory], args=words))

    def largest(self) -> str:
        """The two largest kinds with their shares of the total: "events 61%, scored 20%"; empty if unknown."""
        total = sum(self.by_kind.values())
        return ", ".join(f"{kind} {num / total:.0%}" for kind, num in Counter(self.by_kind).most_common(2) if num)


async def measured(bus: Bus) -> dict[str, int]:
    """Bytes by kind. Costs a few hundred commands, each in short time."""
    client, cell = bus.client, bus.cell
    streams = [stream for stream, _ in cell.work] + [cell.control, cell.adapters_new, cell.telemetry, cell.dead]
    streams += [stream for stream, _ in await bus.retrying(lambda: own_streams(client, cell))]
    streams += [name for partition in range(NUM_PARTITIONS) for name in cell.inboxes(partition)]
    exactly = dict(zip(streams, await _usages(bus, streams), strict=True))
    num_keys: Any = await bus.retrying(client.dbsize)
    drawn = [key for key in await _drawn(bus) if key.startswith(PREFIX) and key not in exactly]
    share = (num_keys - sum(map(bool, exactly.values()))) / max(1, len(drawn))
    by_kind: Counter[str] = Counter()
    for key, num in exactly.items():
        by_kind[kind_of(key)] += num
    for key, num in zip(drawn, await _usages(bus, drawn), strict=True):
        by_kind[kind_of(key)] += int(num * share)
    return dict(by_kind)


async def bound(bus: Bus, stream: str, max_bytes: int) -> None:
    """Drops a stream's oldest entries if it has too many bytes, a tenth more than needed, and counts them."""
    (used,) = await _usages(bus, [stream])
    if used <= max_bytes:
        return
    length: Any = await bus.retrying(lambda: bus.client.xlen(stream))
    kept = int(length * 0.9 * max_bytes / used)
    trim, words = bus.client.register_script(TRIM), [kept, kind_of(stream)]
    await bus.retrying(lambda: trim(keys=[stream, bus.cell.dropped], args=words))


def kind_of(key: str) -> str:
    """The first word of a key's name behind the cell's prefix."""
    return key.partition("}:")[2].partition(":")[0]


async def _drawn(bus: Bus) -> list[str]:
    return [key.decode() for key in await bus.pipelined([("RANDOMKEY",)] * NUM_SAMPLED_KEYS) if key is not None]


async def _usages(bus: Bus, keys: Sequence[str]) -> list[int]:
    """Bytes of each key; 0 of one that is not there."""
    return [num or 0 for num in await bus.pipelined(("MEMORY USAGE", key) for key in keys)]
