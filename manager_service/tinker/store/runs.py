"""Finds runs and their checkpoints, and creates runs by one script. Only the partition's owner writes a run's state."""

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from common.errors import InvalidInput, NotFound
from common.messages import AdapterRef, JobCommand, LoraSpec
from common.streams import partition_of
from manager_service.api.context import Api, Base
from manager_service.api.job_store import JobStore
from manager_service.jobs.retention import has_version
from manager_service.records import JSON
from manager_service.runs.records import RunSpec, RunState, run_of
from manager_service.tinker.names import Path, parse_path
from manager_service.tinker.store.uses import use

NUM_KEPT = 10_000
"""Runs whose specs a replica remembers: they never change."""

# KEYS: run, seqs, tenant-runs, jobs stream, active. ARGV: sha256 of what was asked, run id, score, spec, state, what was asked, then the
# fields of the stream entry. Answers `new`, `known`, or `other` if something else was asked under the same id.
_CREATE = """
local known = redis.call('HGET', KEYS[2], '0')
if known then return string.sub(known, 1, 64) == ARGV[1] and 'known' or 'other' end
redis.call('XADD', KEYS[4], '*', unpack(ARGV, 7))
redis.call('HSET', KEYS[1], 'spec', ARGV[4], 'state', ARGV[5])
redis.call('ZADD', KEYS[3], ARGV[3], ARGV[2])
redis.call('SADD', KEYS[5], ARGV[2])
redis.call('HSET', KEYS[2], '0', ARGV[1] .. ' ' .. ARGV[6] .. ' 0')
return 'new'
"""


@dataclass(frozen=True, slots=True)
class RunRow:
    base: Base
    spec: RunSpec

    @property
    def id(self) -> str:
        return self.spec.id

    async def state(self) -> RunState:
        """Raises NotFound if Redis has lost it."""
        record = await self.base.redis.hget(self.base.cell.run(self.id), "state")
        if record is None:
            raise NotFound(f"there is no run {self.spec.public_id!r} any more")
        return msgspec.json.decode(record, type=RunState)


@dataclass(frozen=True, slots=True)
class Source:
    """A version that can be sampled from, or trained further."""

    base: Base
    adapter: AdapterRef
    lora: LoraSpec
    asked_model: str


class RunStore:
    def __init__(self, api: Api) -> None:
        self._api = api
        self._known: OrderedDict[str, RunRow] = OrderedDict()

    async def named(self, tenant: str, public_id: str) -> RunRow:
        """The run that its user names so. Raises NotFound, also for another tenant's."""
        run = run_of(public_id)
        if run is None:
            raise NotFound(f"there is no run {public_id[:64]!r}")
        return await self.find(tenant, run)

    async def find(self, tenant: str, run: str) -> RunRow:
        """Raises NotFound, also for another tenant's."""
        found = self._known.get(run) or await self._read(run)
        if found is None or found.spec.tenant != tenant:
            raise NotFound(f"there is no run {run[:64]!r}")
        return found

    async def _read(self, run: str) -> RunRow | None:
        bases = list(self._api.bases.values())
        records = await asyncio.gather(*(base.redis.hget(base.cell.run(run), "spec") for base in bases))
        for base, record in zip(bases, records, strict=True):
            if record is not None:
                found = RunRow(base, msgspec.json.decode(record, type=RunSpec))
                self._known[run] = found
                while len(self._known) > NUM_KEPT:
                    self._known.popitem(last=False)
                return found
        return None

    async def newest_first(
        self, tenant: str, *, limit: int | None, offset: int
    ) -> tuple[list[tuple[RunRow, RunState]], int]:
        """A tenant's runs with their states, and how many it has in all."""
        rows: list[tuple[float, str, Base]] = []
        for base in self._api.bases.values():
            found = await base.redis.zrange(base.cell.tenant_runs(tenant), 0, -1, withscores=True)
            rows += [(score, run.decode(), base) for run, score in found]
        rows.sort(key=lambda row: row[:2], reverse=True)
        chosen = rows[offset:] if limit is None else rows[offset : offset + limit]
        return await self._with_states([(run, base) for _, run, base in chosen]), len(rows)

    async def _with_states(self, chosen: Sequence[tuple[str, Base]]) -> list[tuple[RunRow, RunState]]:
        """One round trip for each base model."""
        found: dict[str, tuple[RunRow, RunState]] = {}
        for base in self._api.bases.values():
            runs = [run for run, of in chosen if of is base]
            pipe = base.redis.pipeline(transaction=False)
            for run in runs:
                pipe.hmget(base.cell.run(run), "spec", "state")
            for run, (spec, state) in zip(runs, await pipe.execute(), strict=True):
                if spec is not None and state is not None:
                    known = RunRow(base, msgspec.json.decode(spec, type=RunSpec))
                    found[run] = (known, msgspec.json.decode(state, type=RunState))
        return [found[run] for run, _ in chosen if run in found]

    async def create(self, base: Base, spec: RunSpec, *, asked: msgspec.Struct, kind: str) -> None:
        """Writes the run and tells its owner, in one script; once, however often it is asked for. `kind`: which request asked.

        Raises InvalidInput if something else was asked under the same id.
        """
        cell, partition = base.cell, partition_of(spec.tenant)
        command = JobCommand(
            id=f"{spec.id}/create/0", tenant=spec.tenant, job=spec.id, partition=partition, action="create"
        )
        keys = [cell.run(spec.id), cell.seqs(spec.id), cell.tenant_runs(spec.tenant), cell.jobs(partition)]
        keys.append(cell.active(partition))
        digest = hashlib.sha256(msgspec.json.encode(asked)).hexdigest()
        words = [digest, spec.id, repr(time.time()), JSON.encode(spec), JSON.encode(RunState()), kind]
        fields = await base.bus.fields(command)
        answer = await base.redis.register_script(_CREATE)(keys=keys, args=[*words, *fields])
        if answer == b"other":
            raise InvalidInput(f"{spec.public_id} was created before, with other arguments", code="conflict")

    async def source(self, tenant: str, path: str, *, with_optimizer: bool = False) -> Source:
        """The version that a path names: a run's checkpoint, or a version of a managed job. It is noted as used. Raises
        InvalidInput, NotFound.
        """
        named = parse_path(path)
        found = await (self._of_job(tenant, named) if named.run.startswith("ftjob-") else self._of_run(tenant, named))
        if not await use(found.base.bus, found.adapter, with_optimizer=with_optimizer):
            raise NotFound(f"there is no checkpoint {path} any more")
        return found

    async def _of_run(self, tenant: str, path: Path) -> Source:
        run = await self.named(tenant, path.run)
        now = time.time()
        for checkpoint in (await run.state()).checkpoints:
            alive = checkpoint.expires_at is None or checkpoint.expires_at > now
            if (checkpoint.kind, checkpoint.name) == (path.kind, path.name) and alive:
                adapter = AdapterRef(tenant, run.id, checkpoint.version)
                return Source(run.base, adapter, run.spec.lora, run.spec.asked_model)
        raise NotFound(f"there is no checkpoint {path}")

    async def _of_job(self, tenant: str, path: Path) -> Source:
        row = await JobStore(self._api).find(tenant, path.run)
        known = path.kind == "sampler_weights" and path.name.isascii() and path.name.isdecimal() and len(path.name) <= 8
        version = int(path.name) if known else -1
        if row.deleted or not 0 <= version <= row.state.version or not has_version(row.spec, row.state, version):
            raise NotFound(
                f"there is no checkpoint {path}: a job's are …/sampler_weights/VERSION, up to {row.state.version}"
            )
        return Source(row.base, AdapterRef(tenant, row.spec.id, version), row.spec.hyper.lora, row.base.name)
