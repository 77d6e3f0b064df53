"""Reads jobs, and creates them by one script. Only owners write a job's state."""

import hashlib
from dataclasses import dataclass
from typing import Any

import msgspec

from common.errors import NotFound
from common.messages import JobCommand
from common.streams import partition_of
from manager_service.api.context import Api, Base
from manager_service.records import FINAL, JSON, JobSpec, JobState

# KEYS: job, tenant-jobs, jobs-all, active, jobs stream, idempotency record (or the job again: none).
# ARGV: job id, score, spec, state, fingerprint, seconds to remember, then the fields of the stream entry.
# Answers with the idempotency record that was there before, if one was; otherwise everything was written.
CREATE = """
local remembers = KEYS[6] ~= KEYS[1]
local known = remembers and redis.call('GET', KEYS[6])
if known then return known end
if redis.call('EXISTS', KEYS[1]) == 1 then return false end
redis.call('XADD', KEYS[5], '*', unpack(ARGV, 7))
redis.call('HSET', KEYS[1], 'spec', ARGV[3], 'state', ARGV[4])
redis.call('ZADD', KEYS[2], ARGV[2], ARGV[1])
redis.call('ZADD', KEYS[3], ARGV[2], ARGV[1])
redis.call('SADD', KEYS[4], ARGV[1])
if remembers then redis.call('SET', KEYS[6], ARGV[1] .. ' ' .. ARGV[5], 'EX', ARGV[6]) end
return false
"""

DELETED = "deleted"
"""Field of `job:<job>`, set when the user deleted the tuned model."""


@dataclass(frozen=True, slots=True)
class JobRow:
    """One job as it stands in Redis."""

    base: Base
    spec: JobSpec
    state: JobState
    deleted: bool = False


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
        for base in self._api.bases.values():
            row = await self._row(base, job)
            if row is not None and row.spec.tenant == tenant:
                return row
        raise NotFound(f"there is no fine-tuning job {job!r}")

    async def _row(self, base: Base, job: str) -> JobRow | None:
        return _decoded(base, await base.redis.hmget(base.cell.job(job), "spec", "state", DELETED))

    async def state(self, row: JobRow) -> JobState:
        found = await row.base.redis.hget(row.base.cell.job(row.spec.id), "state")
        return row.state if found is None else msgspec.json.decode(found, type=JobState)

    async def ids(self, tenant: str) -> list[tuple[Base, str]]:
        """All jobs of a tenant, newest first."""
        found: list[tuple[float, str, Base]] = []
        for base in self._api.bases.values():
            rows = await base.redis.zrange(base.cell.tenant_jobs(tenant), 0, -1, withscores=True)
            found += [(score, job.decode(), base) for job, score in rows]
        found.sort(key=lambda row: row[:2], reverse=True)
        return [(base, job) for _, job, base in found]

    async def several(self, ids: list[tuple[Base, str]]) -> list[JobRow]:
        """Existing jobs, in the order of the ids."""
        found: dict[str, JobRow | None] = {}
        for base in self._api.bases.values():
            jobs = [job for cell, job in ids if cell is base]
            pipe = base.redis.pipeline(transaction=False)
            for job in jobs:
                pipe.hmget(base.cell.job(job), "spec", "state", DELETED)
            values = await pipe.execute() if jobs else []
            found.update({job: _decoded(base, record) for job, record in zip(jobs, values, strict=True)})
        rows = (found[job] for _, job in ids)
        return [row for row in rows if row is not None]

    async def unfinished_user(self, tenant: str, file: str) -> str | None:
        """An unfinished job that reads this file."""
        for base in self._api.bases.values():
            active = await base.redis.smembers(base.cell.active(partition_of(tenant)))
            for row in await self.several([(base, job.decode()) for job in active]):
                used = (row.spec.training_file, row.spec.validation_file)
                if row.spec.tenant == tenant and file in used and row.state.status not in FINAL:
                    return row.spec.id
        return None

    async def create(self, base: Base, spec: JobSpec, *, score: float, once: Once | None) -> str | None:
        """Write the job and tell its owner, in one script. Returns the idempotency record if the key was used before."""
        cell, partition = base.cell, partition_of(spec.tenant)
        keys = [
            cell.job(spec.id),
            cell.tenant_jobs(spec.tenant),
            cell.jobs_all,
            cell.active(partition),
            cell.jobs(partition),
            once.record(base, spec.tenant) if once else cell.job(spec.id),
        ]
        fields = await base.bus.fields(command(spec, "create", epoch=0))
        fingerprint, seconds = (once.fingerprint if once else ""), self._api.settings.idempotency_s
        args = [spec.id, repr(score), JSON.encode(spec), JSON.encode(JobState()), fingerprint, seconds, *fields]
        known: bytes | None = await base.redis.register_script(CREATE)(keys=keys, args=args)
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
        message = command(row.spec, action, epoch=row.state.epoch)
        fields = await row.base.bus.fields(message)
        entry = dict(zip(fields[::2], fields[1::2], strict=True))
        await row.base.redis.xadd(row.base.cell.jobs(message.partition), entry)

    async def mark_deleted(self, row: JobRow) -> None:
        await row.base.redis.hset(row.base.cell.job(row.spec.id), DELETED, "1")


def command(spec: JobSpec, action: Any, *, epoch: int) -> JobCommand:
    return JobCommand(
        id=f"{spec.id}/{action}/{epoch}",
        tenant=spec.tenant,
        job=spec.id,
        partition=partition_of(spec.tenant),
        epoch=epoch,
        action=action,
    )


def _decoded(base: Base, values: list[bytes | None]) -> JobRow | None:
    spec, state, deleted = values
    if spec is None or state is None:
        return None
    decoded = msgspec.json.decode(state, type=JobState)
    return JobRow(base, msgspec.json.decode(spec, type=JobSpec), decoded, deleted is not None)
