"""Writes and reads the records of finished jobs.

    records/{tenant}/{base}/{job}/record.json                      Archived
    records/{tenant}/{base}/{job}/parts.{sha256}                   events and checkpoints, one behind the other
    records/{tenant}/{base}/{job}/samples/...  answers/...         see below: written while the job ran
    records/{tenant}/{base}/{job}/late/{sequence}                  EventRecord: one written after the job was moved here
    records/{tenant}/{base}/jobs/{day}/{ms}.{job}                  empty: jobs in the order in which they were made
    records/{tenant}/{base}/models/{ms}.{job}.{version}.{suffix}   empty: a tuned model that was not deleted

`day` and `ms` are of the job's creation: yyyymmdd, and milliseconds since 1970. Only `record.json` is mutable: the model's
deletion replaces it. Whoever writes a job again writes the same.

Samples are objects of their own, one a step and one an evaluation, which owners write while the job runs.

records/{tenant}/{base}/{job}/samples/{version}.json      a list of SampleRecord: what a step was trained on
records/{tenant}/{base}/{job}/answers/{version}.json      a list of SampleRecord: what an evaluation's first items were answered
"""

import contextlib
import hashlib
import itertools
import re
import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from common.errors import AlreadyExists, NotFound
from common.store.objects import Objects
from manager_service.records.job_records import LEDGER, JobSpec, JobState, tuned_model
from manager_service.records.keys import JSON
from manager_service.records.sample_records import CheckpointRecord, EventRecord, Kept, SampleKind
from manager_service.records.usage import USAGE_COUNTERS


class SampleFiles:
    """The files of one kind, of one base model's jobs. Raises Unavailable."""

    def __init__(self, objects: Objects, base_model: str, kind: SampleKind = "samples") -> None:
        self._objects = objects
        self._base_model = base_model
        self._kind = kind

    def _folder(self, tenant: str, job: str) -> str:
        return f"records/{tenant}/{self._base_model}/{job}/{self._kind}"

    async def write(self, tenant: str, job: str, version: int, samples: bytes) -> None:
        """Replaces what a step that was lost, and made again, had left there."""
        await self._objects.write(f"{self._folder(tenant, job)}/{version}.json", samples)

    async def read(self, tenant: str, job: str, version: int) -> bytes:
        """An empty list if there are none of this version."""
        try:
            return await self._objects.get(f"{self._folder(tenant, job)}/{version}.json")
        except NotFound:
            return b"[]"

    async def has(self, tenant: str, job: str, version: int) -> bool:
        return await self._objects.exists(f"{self._folder(tenant, job)}/{version}.json")

    async def versions(self, tenant: str, job: str) -> list[int]:
        """Versions that have a file, ascending. Lists all files of the job."""
        names = await self._objects.paths(self._folder(tenant, job))
        return sorted(int(name.rpartition("/")[2].removesuffix(".json")) for name in names)

    async def drop(self, tenant: str, job: str, versions: Iterable[int]) -> None:
        folder = self._folder(tenant, job)
        await self._objects.delete(*(f"{folder}/{version}.json" for version in versions))

    async def delete(self, tenant: str, job: str) -> None:
        """Deletes all of a job's."""
        await self._objects.delete_folder(self._folder(tenant, job))

    async def drop_below(self, tenant: str, job: str, first: int) -> None:
        """Deletes whatever is there of versions below `first`."""
        await self.drop(tenant, job, [version for version in await self.versions(tenant, job) if version < first])


def sample_versions(state: JobState) -> list[int]:
    """A job's versions that may have samples of a step, ascending. Looks at no file."""
    kept = state.kept.get("samples", Kept())
    return list(range(max(1, kept.first), kept.newest + 1))


T = TypeVar("T")
Row = TypeVar("Row", EventRecord, CheckpointRecord)
ROWS_A_PART = 500
"""Events or checkpoints that are read together."""
ARCHIVE_FILES = ("record.json", "parts.")  # how names begin of what a job is archived with, and what stays of it
_ID = re.compile(r"[A-Za-z0-9-]{1,100}")
"""More than any job's id may be."""


class Archived(msgspec.Struct, frozen=True, kw_only=True):
    """Everything of a finished job but its events, checkpoints and samples, and where those are."""

    spec: JobSpec
    state: JobState
    deleted: bool
    created_ms: int  # since 1970, the moment by which jobs are ordered
    ledger: dict[str, int]  # with `in_flight`
    usage: dict[str, float]  # counter -> amount
    parts: dict[str, tuple[int, int]] = {}  # kind/number of its first row -> first byte, bytes
    parts_file: str = ""


@dataclass(frozen=True, slots=True)
class TunedModel:
    """The entry of a tuned model in the list of models."""

    name: str  # `ft:…`
    tenant: str
    created_ms: int
    job: str
    version: int


class Archive:
    """The finished jobs of one base model."""

    def __init__(self, objects: Objects, base_model: str) -> None:
        self.objects = objects
        self._base_model = base_model
        self.sample_files = SampleFiles(objects, base_model)
        self.answer_files = SampleFiles(objects, base_model, "answers")

    def folder(self, tenant: str) -> str:
        return f"records/{tenant}/{self._base_model}"

    # ---- writing ----------------------------------------------------------------------------------------------------

    async def write(self, job: Archived, parts: Mapping[str, bytes]) -> None:
        """Writes a job, the record after all that it names, so that a job is there whole or not at all."""
        folder, spec = self.folder(job.spec.tenant), job.spec
        content = b"".join(parts.values())
        file = f"parts.{hashlib.sha256(content).hexdigest()}"
        if content:
            await self.objects.write(f"{folder}/{spec.id}/{file}", content)
        await self.objects.write(f"{folder}/jobs/{_day(job.created_ms)}/{job.created_ms}.{spec.id}", b"")
        if job.state.version >= 1 and not job.deleted:
            await self.objects.write(self._model(job), b"")
        await self._write_record(msgspec.structs.replace(job, parts=_spans(parts), parts_file=file))

    async def mark_deleted(self, job: Archived) -> None:
        """Notes that the user deleted the tuned model."""
        await self._write_record(msgspec.structs.replace(job, deleted=True))
        await self.objects.delete(self._model(job))

    async def add_event(self, job: Archived, event_of: Callable[[int], EventRecord]) -> None:
        """Adds an event behind all others. `event_of`: makes it of its sequence number."""
        for number in itertools.count(job.state.num_events + 1):
            with contextlib.suppress(AlreadyExists):
                await self.objects.create(f"{self.late(job)}/{number}", JSON.encode(event_of(number)))
                return

    def late(self, job: Archived) -> str:
        return f"{self.folder(job.spec.tenant)}/{job.spec.id}/late"

    def _model(self, job: Archived) -> str:
        name = f"{job.created_ms}.{job.spec.id}.{job.state.version}.{job.spec.suffix}"
        return f"{self.folder(job.spec.tenant)}/models/{name}"

    async def _write_record(self, job: Archived) -> None:
        content = JSON.encode(job) + b" " * job.deleted  # `true` is shorter: its size, which is counted once, stays
        await self.objects.write(f"{self.folder(job.spec.tenant)}/{job.spec.id}/record.json", content)

    # ---- reading ----------------------------------------------------------------------------------------------------

    async def find(self, tenant: str, job: str) -> Archived | None:
        if not _ID.fullmatch(job):
            return None  # no job has such an id, and some are no names for a store
        try:
            record = await self.objects.get(f"{self.folder(tenant)}/{job}/record.json")
        except NotFound:
            return None
        return msgspec.json.decode(record, type=Archived)

    async def newest_first(self, tenant: str, before_ms: int | None = None) -> AsyncIterator[tuple[int, str]]:
        """Creation (ms, at most `before_ms`) and id of a tenant's jobs, also of those dated ahead by a fast clock."""
        folder = f"{self.folder(tenant)}/jobs"
        last_day = None if before_ms is None else _day(before_ms)
        for day in reversed([day for day in await self.objects.folders(folder) if last_day is None or day <= last_day]):
            names = (path.rpartition("/")[2].partition(".") for path in await self.objects.paths(f"{folder}/{day}"))
            for ms, job in sorted(((int(ms), job) for ms, _, job in names), reverse=True):
                if before_ms is None or ms <= before_ms:
                    yield ms, job

    async def models(self, tenant: str) -> list[TunedModel]:
        """All that were not deleted, oldest first."""
        paths = await self.objects.paths(f"{self.folder(tenant)}/models")
        names = (path.rpartition("/")[2].split(".", 3) for path in paths)
        return [
            TunedModel(tuned_model(self._base_model, tenant, suffix, job), tenant, int(ms), job, int(version))
            for ms, job, version, suffix in names
        ]

    def records(self, job: Archived) -> "ArchivedRecords":
        return ArchivedRecords(self, job)


@dataclass(frozen=True, slots=True)
class ArchivedRecords:
    """The records that a finished job has written, as `LiveRecords` (http/stores/job_store.py) has them."""

    archive: Archive
    job: Archived

    async def events(self, *, before: int | None, limit: int) -> list[EventRecord]:
        late = [row for row in await self._late_events() if before is None or row.sequence < before]
        found = await self._newest("events", EventRecord, lambda row: row.sequence, before, limit)
        return [*reversed(late), *found][:limit]

    async def events_after(self, last: int) -> AsyncIterator[EventRecord]:
        """Events with a sequence number above `last`, oldest first."""
        starts = _starts(self.job, "events")
        for start, following in zip(starts, [*starts[1:], None], strict=True):
            if following is None or following > last + 1:
                for row in await self._rows(f"events/{start}", EventRecord):
                    if row.sequence > last:
                        yield row
        for row in await self._late_events():
            if row.sequence > last:
                yield row

    async def stretches(self, starts: Sequence[int], length: int) -> list[list[EventRecord]]:
        found: list[list[EventRecord]] = [[] for _ in starts]
        async for event in self.events_after(min(starts, default=0) - 1):
            at = bisect_right(starts, event.sequence) - 1
            if event.sequence < starts[at] + length:
                found[at].append(event)
        return found

    async def checkpoints(self, *, before: int | None, limit: int) -> list[CheckpointRecord]:
        return await self._newest("checkpoints", CheckpointRecord, lambda row: row.version, before, limit)

    async def nearest(self, version: int) -> int:
        """The version that is kept and nearest to this one."""
        state, starts = self.job.state, _starts(self.job, "checkpoints")
        if version == state.version:
            return version
        at = bisect_right(starts, version)
        parts = [
            await self._rows(f"checkpoints/{start}", CheckpointRecord) for start in starts[max(0, at - 1) : at + 1]
        ]
        return nearest([0, *(row.version for rows in parts for row in rows)], version)

    async def ledger(self) -> dict[str, int]:
        return dict.fromkeys(LEDGER, 0) | self.job.ledger

    async def usage(self) -> dict[str, float]:
        return dict.fromkeys(USAGE_COUNTERS, 0.0) | self.job.usage

    async def _newest(
        self, kind: str, of: type[Row], number: Callable[[Row], int], before: int | None, limit: int
    ) -> list[Row]:
        found: list[Row] = []
        for start in reversed(_starts(self.job, kind)):
            if len(found) < limit and (before is None or start < before):
                rows = await self._rows(f"{kind}/{start}", of)
                found += [row for row in reversed(rows) if before is None or number(row) < before]
        return found[:limit]

    async def _rows(self, part: str, of: type[T]) -> list[T]:
        return msgspec.json.decode(await self._part(part), type=list[of])

    async def _part(self, part: str) -> bytes:
        """A list of rows as JSON; an empty one if there is no such part."""
        if part not in self.job.parts:
            return b"[]"
        path = f"{self.archive.folder(self.job.spec.tenant)}/{self.job.spec.id}/{self.job.parts_file}"
        return await self.archive.objects.get_part(path, *self.job.parts[part])

    async def _late_events(self) -> list[EventRecord]:
        """Oldest first."""
        paths = await self.archive.objects.paths(self.archive.late(self.job))
        rows = [msgspec.json.decode(await self.archive.objects.get(path), type=EventRecord) for path in paths]
        return sorted(rows, key=lambda row: row.sequence)


def nearest(versions: Sequence[int], version: int) -> int:
    """The newer of two that are equally near; -1: there is none."""
    return min(versions, key=lambda each: (abs(each - version), -each), default=-1)


def in_parts(kind: str, rows: Sequence[tuple[int, bytes]]) -> dict[str, bytes]:
    """Parts of many rows each. `rows`: numbered, ascending, as JSON."""
    parts: dict[str, bytes] = {}
    for at in range(0, len(rows), ROWS_A_PART):
        some = rows[at : at + ROWS_A_PART]
        parts[f"{kind}/{some[0][0]}"] = b"[" + b",".join(row for _, row in some) + b"]"
    return parts


def _day(ms: int) -> str:
    return time.strftime("%Y%m%d", time.gmtime(ms / 1000))


def _spans(parts: Mapping[str, bytes]) -> dict[str, tuple[int, int]]:
    spans: dict[str, tuple[int, int]] = {}
    at = 0
    for name, content in parts.items():
        spans[name] = (at, len(content))
        at += len(content)
    return spans


def _starts(job: Archived, kind: str) -> list[int]:
    """Numbers of the first rows of the parts of a kind, ascending."""
    names = (name.split("/") for name in job.parts)
    return sorted(int(start) for found, start in names if found == kind)
