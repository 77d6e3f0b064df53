"""Reads jobs, from Redis or the archive, and creates them by one script. Only owners write a job's state."""

import asyncio
import hashlib
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import msgspec

from common.bus.streams import partition_of
from common.errors import NotFound, Unavailable
from common.suggestions import quoted
from common.wire.messages import AdapterRef, JobCommand
from common.wire.operations import NameChange
from manager_service.http.context import ANSWER_S, Api, Base
from manager_service.http.errors import ApiError
from manager_service.records.archive import Archived, ArchivedRecords, TunedModel, nearest
from manager_service.records.job_records import (
    DELETED,
    FINAL,
    LEDGER,
    MOVING,
    SUFFIX,
    VERSION,
    JobSpec,
    JobState,
    newest_stored,
    tuned_model,
)
from manager_service.records.keys import JSON
from manager_service.records.run_records import is_run, use
from manager_service.records.sample_records import CheckpointRecord, EventRecord
from manager_service.records.usage import USAGE_COUNTERS, usage_fields, usage_of

# KEYS: job, tenant-jobs, jobs-all, active, jobs stream, unfinished, idempotency record (or the job again: none), exports (the same).
# ARGV: job id, score, spec, state, fingerprint, seconds to remember, most jobs, most bytes, tenant, the model's suffix, then the
# fields of the stream entry.
# Answers with the idempotency record that was there before, if one was; with the number of unfinished jobs and the bytes of their
# records, if this one is too many; otherwise everything was written.
# All checks come before the first write, because a script that fails half way is not undone. The stream's entry, which wakes the
# owner, is written together with the job: an owner never reads of a job that is not there. A client that repeats the request, since
# it has not heard the answer, gets the job that there is: by its Idempotency-Key, or because the id is there already.
CREATE = """
local remembers = KEYS[7] ~= KEYS[1]
local known = remembers and redis.call('GET', KEYS[7])
if known then return known end
if redis.call('EXISTS', KEYS[1]) == 1 then return false end
local sizes, size, total = redis.call('HVALS', KEYS[6]), #ARGV[3] + #ARGV[4], 0
for _, each in ipairs(sizes) do total = total + each end
if #sizes >= tonumber(ARGV[7]) or total + size > tonumber(ARGV[8]) then return {#sizes, total} end
redis.call('XADD', KEYS[5], '*', unpack(ARGV, 11))
redis.call('HSET', KEYS[6], ARGV[1], size)
redis.call('HSET', KEYS[1], 'spec', ARGV[3], 'state', ARGV[4], 'suffix', ARGV[10])
redis.call('ZADD', KEYS[2], ARGV[2], ARGV[1])
redis.call('ZADD', KEYS[3], ARGV[2], ARGV[1])
redis.call('SADD', KEYS[4], ARGV[1])
if KEYS[8] ~= KEYS[1] then redis.call('HSET', KEYS[8], ARGV[1], ARGV[9]) end
if remembers then redis.call('SET', KEYS[7], ARGV[1] .. ' ' .. ARGV[5], 'EX', ARGV[6]) end
return false
"""

# KEYS: job. ARGV: the fields `deleted` and `moving`.
DELETE = """
if redis.call('EXISTS', KEYS[1]) == 0 then return 'archived' end
if redis.call('HGET', KEYS[1], ARGV[2]) then return 'moving' end
redis.call('HSET', KEYS[1], ARGV[1], '1')
return 'done'
"""

# KEYS: of several jobs. ARGV: a command on one key, and what follows the key. The answers, in the order of the keys, as one: the
# client takes 0.1 ms for each answer of a pipeline, in which the manager serves nobody.
OF_EACH = "local r = {} for i, key in ipairs(KEYS) do r[i] = redis.call(ARGV[1], key, unpack(ARGV, 2)) end return r"
POLL_S = 0.05
IDEMPOTENCY_S = 86_400
"""Seconds for which an Idempotency-Key is remembered."""

PORTION_BYTES = 1 << 20
"""Bytes of specifications that are read together, unless one job has more. An archived one, of unknown size, counts a 16th."""
MODELS_AT_ONCE = 100
"""Small records that are read together."""
EVENTS_AT_ONCE = 500
"""Events that are read, and decoded, before others have their turn."""
T = TypeVar("T")


class ListedJob(NamedTuple):
    """A job in the list of a tenant's jobs."""

    created_ms: int
    job: str
    base: Base


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
        return _events(found)

    async def stretches(self, starts: Sequence[int], length: int) -> list[list[EventRecord]]:
        """For each start, ascending, the events from this sequence number on, `length` at most."""
        found: list[list[EventRecord]] = []
        at_once = max(1, EVENTS_AT_ONCE // length)
        for first in range(0, len(starts), at_once):
            pipe = self.base.redis.pipeline(transaction=False)
            for start in starts[first : first + at_once]:
                pipe.xrange(self.base.cell.events(self.job), f"{start}-0", f"{start + length - 1}-0")
            found += [_events(entries) for entries in await pipe.execute()]
        return found

    async def checkpoints(self, *, before: int | None, limit: int) -> list[CheckpointRecord]:
        """The newest of a version below `before`, newest first."""
        key = self.base.cell.checkpoints(self.job)
        versions = sorted(await self.versions() or (int(v) for v in await self.base.redis.hkeys(key)), reverse=True)
        wanted = [version for version in versions if before is None or version < before][:limit]
        values = await self.base.redis.hmget(key, wanted) if wanted else []
        return [msgspec.json.decode(value, type=CheckpointRecord) for value in values if value is not None]

    async def versions(self) -> list[int]:
        """The versions that are kept; none of a job that keeps all."""
        return [int(version) for version in await self.base.redis.hkeys(self.base.cell.versions(self.job))]

    async def nearest(self, version: int) -> int:
        """The version that is kept and nearest to this one."""
        return nearest(await self.versions(), version)

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


JobRecords = LiveRecords | ArchivedRecords
"""The records that a job has written."""


@dataclass(frozen=True, slots=True)
class JobRow:
    """One job as it stands in Redis, or in the archive."""

    base: Base
    spec: JobSpec
    state: JobState
    deleted: bool = False
    archived: Archived | None = None

    @property
    def records(self) -> JobRecords:
        if self.archived is not None:
            return self.base.archive.records(self.archived)
        return LiveRecords(self.base, self.spec.tenant, self.spec.id)


@dataclass(frozen=True, slots=True)
class Once:
    """An Idempotency-Key and the body that came with it."""

    key: str
    fingerprint: str  # sha256 of the body

    def record(self, base: Base, tenant: str) -> str:
        return base.cell.key(f"idempotency:{tenant}:{hashlib.sha256(self.key.encode()).hexdigest()}")


class JobStore:
    """All jobs of all cells."""

    def __init__(self, api: Api) -> None:
        self._api = api

    async def find(self, tenant: str, job: str) -> JobRow:
        """Raises NotFound, also for another tenant's job."""
        found = await asyncio.gather(*(self._row(base, tenant, job) for base in self._api.bases.values()))
        for row in found:
            if row is not None:
                return row
        raise NotFound(f"there is no fine-tuning job {quoted(job)}")

    async def _row(self, base: Base, tenant: str, job: str) -> JobRow | None:
        async with self._api.reads.of(tenant):
            live = _decoded(base, await base.redis.hmget(base.cell.job(job), "spec", "state", DELETED))
        if live is not None:
            return live if live.spec.tenant == tenant else None
        return await _in_archive(base, tenant, job)

    async def read(self, row: JobRow, call: Callable[[JobRecords], Awaitable[T]]) -> T:
        """Reads of a job's records; once more from the archive if the job moved there meanwhile."""
        found = await call(row.records)
        if row.archived is None and not await row.base.redis.exists(row.base.cell.job(row.spec.id)):
            return await call((await self.find(row.spec.tenant, row.spec.id)).records)
        return found

    async def version(self, row: JobRow, version: int) -> AdapterRef:
        """A version of a job that is in the store, noted as used. Raises NotFound, with the code `version_deleted` for one that was."""
        spec, newest = row.spec, newest_stored(row.spec, row.state)
        if row.deleted or not 0 <= version <= newest:
            raise NotFound(f"the model was deleted, or the job has no version {version}: its newest is {newest}")
        adapter = AdapterRef(spec.tenant, spec.id, version)
        if spec.hyper.keep_versions is None or (row.archived is None and await use(row.base.bus, adapter)):
            return adapter
        kept = await self.read(row, lambda records: records.nearest(version))
        if kept != version:
            why = f"its job keeps at most {spec.hyper.keep_versions} besides the newest and the best (keep_versions)"
            raise NotFound(f"version {version} is deleted: {why}; the nearest is {kept}", code="version_deleted")
        return adapter

    async def newest_first(self, tenant: str, after: str | None = None) -> AsyncIterator[ListedJob]:
        """A tenant's jobs, in Redis and the archive, behind the job `after`. Raises NotFound if there is none such."""
        first = None if after is None else await self._place(await self.find(tenant, after))
        before_ms = None if first is None else first[0]
        sources = [self._live(base, tenant) for base in self._api.bases.values()]
        sources += [_archived(base, tenant, before_ms) for base in self._api.bases.values()]
        last = first
        async for entry in _merged(sources):
            if last is None or entry[:2] < last:  # one that moves meanwhile is in both
                last = entry[:2]
                yield entry

    async def _place(self, row: JobRow) -> tuple[int, str]:
        """A job's place in the order."""
        if row.archived is not None:
            return row.archived.created_ms, row.spec.id
        score = await row.base.redis.zscore(row.base.cell.tenant_jobs(row.spec.tenant), row.spec.id)
        return _ms(score or row.spec.created_at), row.spec.id

    async def _listed(self, base: Base, tenant: str) -> list[ListedJob]:
        """A tenant's jobs in Redis, newest first."""
        rows = await base.redis.zrange(base.cell.tenant_jobs(tenant), 0, -1, withscores=True)
        return [
            ListedJob(*place, base)
            for place in sorted(((_ms(score), job.decode()) for job, score in rows), reverse=True)
        ]

    async def _live(self, base: Base, tenant: str) -> AsyncIterator[ListedJob]:
        for entry in await self._listed(base, tenant):
            yield entry

    async def rows(self, tenant: str, entries: Sequence[ListedJob]) -> AsyncIterator[JobRow]:
        """The entries of the tenant's jobs that exist, in their order, a portion at a time: Redis holds what is not read yet.
        Each is decoded in a round of its own: a specification may have 240 KB."""
        for portion in await self._portions(entries):
            async with self._api.reads.of(tenant):
                records = await _of_each(portion, "HMGET", "spec", "state", DELETED)
                gone = [entry for entry in portion if None in records[entry.job][:2]]
                archived = await asyncio.gather(*(_in_archive(entry.base, tenant, entry.job) for entry in gone))
            moved = {row.spec.id: row for row in archived if row is not None}
            for entry in portion:
                await self._api.rounds.next(tenant)
                if row := _decoded(entry.base, records[entry.job]) or moved.get(entry.job):
                    yield row

    async def _portions(self, entries: Sequence[ListedJob]) -> list[list[ListedJob]]:
        sizes = await _of_each(entries, "HSTRLEN", "spec")
        portions, room = list[list[ListedJob]](), 0
        for entry in entries:
            size = sizes[entry.job] or PORTION_BYTES // 16
            if size > room:
                portions.append([])
                room = PORTION_BYTES
            portions[-1].append(entry)
            room -= size
        return portions

    async def models(self, base: Base, tenant: str) -> list[TunedModel]:
        """The tuned models of jobs in Redis, as `Archive.models` has the others."""
        found, entries = list[TunedModel](), await self._listed(base, tenant)
        for start in range(0, len(entries), MODELS_AT_ONCE):
            some = entries[start : start + MODELS_AT_ONCE]
            async with self._api.reads.of(tenant):
                records = await _of_each(some, "HMGET", SUFFIX, VERSION, DELETED)
            for created_ms, job, _ in some:
                suffix, version, deleted = records[job]
                if int(version or 0) >= 1 and deleted is None:
                    name = tuned_model(base.name, tenant, (suffix or b"").decode(), job)
                    found.append(TunedModel(name, tenant, created_ms, job, int(version)))
        return found

    async def unfinished_user(self, tenant: str, needs: Callable[[JobSpec], bool]) -> str | None:
        """An unfinished job of the tenant's that needs something."""
        for base in self._api.bases.values():
            jobs = await base.redis.hkeys(base.cell.unfinished(tenant))
            entries = [ListedJob(0, job.decode(), base) for job in jobs if not is_run(job.decode())]
            async for row in self.rows(tenant, entries):
                if row.state.status not in FINAL and needs(row.spec):
                    return row.spec.id
        return None

    async def create(self, base: Base, spec: JobSpec, *, score: float, once: Once | None) -> str | None:
        """Writes the job and tells its owner, in one script. Returns the idempotency record if the key was used before. Raises ApiError
        429 for too many unfinished jobs."""
        cell, partition = base.cell, partition_of(spec.tenant)
        keys = [
            cell.job(spec.id),
            cell.tenant_jobs(spec.tenant),
            cell.jobs_all,
            cell.active(partition),
            cell.jobs(partition),
            cell.unfinished(spec.tenant),
            once.record(base, spec.tenant) if once else cell.job(spec.id),
            cell.exports if spec.integrations else cell.job(spec.id),
        ]
        fields = await base.bus.fields(command(spec, "create", epoch=0))
        fingerprint = once.fingerprint if once else ""
        most_jobs, most_bytes = self._api.settings.max_unfinished_jobs, self._api.limits.max_unfinished_bytes
        args = [spec.id, repr(score), JSON.encode(spec), JSON.encode(JobState()), fingerprint, IDEMPOTENCY_S]
        args += [most_jobs, most_bytes, spec.tenant, spec.suffix, *fields]
        known: bytes | list[int] | None = await base.redis.register_script(CREATE)(keys=keys, args=args)
        if isinstance(known, list):
            raise _too_many(known[0], known[1], most_jobs, most_bytes)
        return None if known is None else known.decode()

    async def known(self, tenant: str, once: Once) -> str | None:
        """The idempotency record of a key: `<job> <fingerprint>`."""
        for base in self._api.bases.values():
            found = await base.redis.get(once.record(base, tenant))
            if found is not None:
                return found.decode()
        return None

    async def send(self, row: JobRow, action: Any) -> None:
        """Sends a command to the job's owner."""
        await tell_owner(row.base, command(row.spec, action, epoch=row.state.epoch))

    async def mark_deleted(self, row: JobRow) -> None:
        """Notes that the user deleted the tuned model. Raises Unavailable while the job is archived and the store is away."""
        deadline = time.monotonic() + ANSWER_S
        key, mark = row.base.cell.job(row.spec.id), row.base.redis.register_script(DELETE)
        while (answer := await mark(keys=[key], args=[DELETED, MOVING])) == b"moving":
            if time.monotonic() > deadline:
                raise Unavailable(f"{row.spec.id} is being archived: try again")
            await asyncio.sleep(POLL_S)
        if answer == b"archived" and (archived := await row.base.archive.find(row.spec.tenant, row.spec.id)):
            await row.base.archive.mark_deleted(archived)


def _events(entries: list[tuple[bytes, dict[bytes, bytes]]]) -> list[EventRecord]:
    return [msgspec.json.decode(fields[b"event"], type=EventRecord) for _, fields in entries]


def _too_many(num_jobs: int, num_bytes: int, most_jobs: int, most_bytes: int) -> ApiError:
    return ApiError(
        429,
        f"you have {num_jobs} unfinished jobs and runs, whose records have {num_bytes} bytes; with this one that is more than"
        f" {most_jobs} jobs or {most_bytes} bytes: wait until some have finished, cancel jobs,"
        " or unload models of the Tinker protocol",
        code="too_many_jobs",
        retry=False,
    )


def command(spec: JobSpec, action: Any, *, epoch: int) -> JobCommand:
    return JobCommand(
        id=f"{spec.id}/{action}/{epoch}",
        tenant=spec.tenant,
        job=spec.id,
        partition=partition_of(spec.tenant),
        epoch=epoch,
        action=action,
    )


async def tell_owner(base: Base, message: JobCommand | NameChange) -> None:
    fields = await base.bus.fields(message)
    entry = dict(zip(fields[::2], fields[1::2], strict=True))
    await base.redis.xadd(base.cell.jobs(message.partition), entry)


async def _in_archive(base: Base, tenant: str, job: str) -> JobRow | None:
    archived = await base.archive.find(tenant, job)
    return archived and JobRow(base, archived.spec, archived.state, archived.deleted, archived)


async def _of_each(entries: Sequence[ListedJob], *command: str) -> dict[str, Any]:
    """Job -> the answer to a command on its hash."""
    found: dict[str, Any] = {}
    for base in {entry.base.name: entry.base for entry in entries}.values():
        keys = {entry.job: base.cell.job(entry.job) for entry in entries if entry.base is base}
        found |= zip(keys, await base.redis.register_script(OF_EACH)([*keys.values()], command), strict=True)
    return found


def _decoded(base: Base, values: list[bytes | None]) -> JobRow | None:
    spec, state, deleted = values
    if spec is None or state is None:
        return None
    decoded = msgspec.json.decode(state, type=JobState)
    return JobRow(base, msgspec.json.decode(spec, type=JobSpec), decoded, deleted is not None)


async def _archived(base: Base, tenant: str, before_ms: int | None) -> AsyncIterator[ListedJob]:
    async for created_ms, job in base.archive.newest_first(tenant, before_ms):
        yield ListedJob(created_ms, job, base)


async def _merged(sources: Sequence[AsyncIterator[ListedJob]]) -> AsyncIterator[ListedJob]:
    """The entries of sources that are each sorted, newest first."""
    heads = [(entry, source) for source in sources if (entry := await anext(source, None))]
    while heads:
        at = max(range(len(heads)), key=lambda i: heads[i][0][:2])
        entry, source = heads.pop(at)
        yield entry
        if (following := await anext(source, None)) is not None:
            heads.append((following, source))


def _ms(seconds: float) -> int:
    return math.floor(1000 * seconds)
