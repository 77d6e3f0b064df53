"""Reads what a job has written: events, checkpoints, ledger and use; from Redis, or from the archive once it is there."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from manager_service.http.context import Base
from manager_service.records.archive import ArchivedRecords
from manager_service.records.job_records import LEDGER
from manager_service.records.sample_records import CheckpointRecord, EventRecord
from manager_service.records.usage import USAGE_COUNTERS, usage_fields, usage_of

EVENTS_AT_ONCE = 500
"""Events that are read, and decoded, before others have their turn."""


@dataclass(frozen=True, slots=True)
class LiveRecords:
    """The records that a job in Redis has written so far."""

    base: Base
    tenant: str
    job: str

    async def events(self, *, before: int | None, limit: int) -> list[EventRecord]:
        """The newest with a sequence number below `before`, newest first."""
        if before == 0:
            return []
        highest = "+" if before is None else f"({before}-0"
        found = await self.base.redis.xrevrange(self.base.cell.events(self.job), max=highest, count=limit)
        return [msgspec.json.decode(fields[b"event"], type=EventRecord) for _, fields in found]

    async def stretches(self, starts: Sequence[int], length: int) -> list[list[EventRecord]]:
        """For each start, ascending, the events that have this sequence number or one of the next, `length` at most."""
        found: list[list[EventRecord]] = []
        at_once = max(1, EVENTS_AT_ONCE // length)
        for first in range(0, len(starts), at_once):
            pipe = self.base.redis.pipeline(transaction=False)
            for start in starts[first : first + at_once]:
                pipe.xrange(self.base.cell.events(self.job), f"{start}-0", f"{start + length - 1}-0")
            found += [_decoded(entries) for entries in await pipe.execute()]
        return found

    async def checkpoints(self, *, before: int | None, limit: int) -> list[CheckpointRecord]:
        """The newest of a version below `before`, newest first."""
        key = self.base.cell.checkpoints(self.job)
        versions = sorted((int(v) for v in await self.base.redis.hkeys(key)), reverse=True)
        wanted = [version for version in versions if before is None or version < before][:limit]
        values = await self.base.redis.hmget(key, wanted) if wanted else []
        return [msgspec.json.decode(value, type=CheckpointRecord) for value in values if value is not None]

    async def ledger(self) -> dict[str, int]:
        """Its counts and `in_flight`, of one moment."""
        pipe = self.base.redis.pipeline(transaction=True)
        pipe.hmget(self.base.cell.ledger(self.job), LEDGER)
        pipe.hlen(self.base.cell.open(self.job))
        counts, in_flight = await pipe.execute()
        return {name: int(value or 0) for name, value in zip(LEDGER, counts, strict=True)} | {"in_flight": in_flight}

    async def usage(self) -> dict[str, float]:
        """Counter -> amount."""
        amounts: list[Any] = await self.base.redis.hmget(self.base.cell.usage(self.tenant), usage_fields(self.job))
        return dict.fromkeys(USAGE_COUNTERS, 0.0) | usage_of(amounts)


def _decoded(entries: list[tuple[bytes, dict[bytes, bytes]]]) -> list[EventRecord]:
    return [msgspec.json.decode(fields[b"event"], type=EventRecord) for _, fields in entries]


JobRecords = LiveRecords | ArchivedRecords
"""The records that a job has written."""
