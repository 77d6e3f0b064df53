"""Reads jobs and their events, from Redis or, once they are there, from the archive."""

from dataclasses import dataclass
from typing import Any

import msgspec

from common.bus.bus import Bus
from manager_service.records.archive import Archive, Archived
from manager_service.records.job_records import JobSpec, JobState
from manager_service.records.sample_records import EventRecord


@dataclass(frozen=True, slots=True)
class FoundJob:
    """A job, and where it is."""

    spec: JobSpec
    state: JobState
    archived: Archived | None = None
    written: bytes = b""  # the state as it stands in Redis


@dataclass(frozen=True, slots=True)
class JobCell:
    """The jobs of one base model."""

    bus: Bus
    archive: Archive

    async def job(self, tenant: str, job: str) -> FoundJob | None:
        """None if there is no such job."""
        (record,) = await self.bus.read_hashes([self.bus.cell.job(job)])
        if b"spec" in record:
            spec = msgspec.json.decode(record[b"spec"], type=JobSpec)
            state = msgspec.json.decode(record[b"state"], type=JobState)
            return FoundJob(spec, state, written=record[b"state"])
        archived = await self.archive.find(tenant, job)
        return archived and FoundJob(archived.spec, archived.state, archived)

    async def events(self, found: FoundJob, *, after: int, limit: int) -> list[EventRecord]:
        """Events with a sequence number above `after`, oldest first."""
        if found.archived is None:
            key = self.bus.cell.events(found.spec.id)
            entries: Any = await self.bus.retrying(
                lambda: self.bus.client.xrange(key, min=f"{after + 1}-0", count=limit)
            )
            return [msgspec.json.decode(fields[b"event"], type=EventRecord) for _, fields in entries]
        events: list[EventRecord] = []
        async for event in self.archive.records(found.archived).events_after(after):
            events.append(event)
            if len(events) == limit:
                break
        return events
