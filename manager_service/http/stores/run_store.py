"""Finds runs and their checkpoints, and creates runs by one script. Only the partition's owner writes a run's state, also when a
checkpoint is deleted, or is to expire at another time.
"""

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import msgspec

from common.bus.streams import partition_of
from common.errors import InvalidInput, NotFound, Unavailable
from common.wire.messages import AdapterRef, JobCommand, LoraSpec
from common.wire.operations import NameChange
from manager_service.http.context import Api, Base
from manager_service.http.errors import ApiError
from manager_service.http.quota import storage_fault
from manager_service.http.stores.job_store import JobStore, tell_owner
from manager_service.http.stores.tinker_names import Path, parse_path
from manager_service.records.keys import JSON
from manager_service.records.run_records import (
    MAX_KEPT,
    Checkpoint,
    RunSpec,
    RunState,
    meant,
    run_of,
    session_of,
    use,
)

NUM_KEPT = 1000
"""Runs whose specs a replica remembers, for they never change: a user's metadata may take a quarter of a megabyte each."""

WAIT_S = 20.0
"""Seconds that a request waits for the owner: another takes over within a lease."""

PAGE = 16
"""Runs that are read together: their states have up to a thousand checkpoints each."""

# KEYS: run, seqs, tenant-runs, jobs stream, active, unfinished. ARGV: sha256 of the request, run id, score, spec, state, its status, its
# head, the kind of request, most unfinished jobs and runs, most bytes of their records, most runs that are kept, whether the tenant may
# store more (1 or 0), then the fields of the stream entry. Answers `new`, `known`, `other` if another request had the same id, or why there
# is no room for one more.
_CREATE = """
-- Number 0 of the run's operations is its creation: a client that got no answer sends it again, and must not make a second run.
local known = redis.call('HGET', KEYS[2], '0')
if known then return string.sub(known, 1, 64) == ARGV[1] and 'known' or 'other' end
if redis.call('EXISTS', KEYS[1]) == 1 then return 'other' end
if ARGV[12] == '0' then return 'full' end
if redis.call('ZCARD', KEYS[3]) >= tonumber(ARGV[11]) then return 'kept' end
local sizes, size, total = redis.call('HVALS', KEYS[6]), #ARGV[4] + #ARGV[5], 0
for _, each in ipairs(sizes) do total = total + each end
if #sizes >= tonumber(ARGV[9]) or total + size > tonumber(ARGV[10]) then return 'unfinished ' .. #sizes end
redis.call('XADD', KEYS[4], '*', unpack(ARGV, 13))
redis.call('HSET', KEYS[6], ARGV[2], size)
redis.call('HSET', KEYS[1], 'spec', ARGV[4], 'state', ARGV[5], 'status', ARGV[6], 'head', ARGV[7])
redis.call('ZADD', KEYS[3], ARGV[3], ARGV[2])
redis.call('SADD', KEYS[5], ARGV[2])
redis.call('HSET', KEYS[2], '0', ARGV[1] .. ' ' .. ARGV[8] .. ' 0')
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
        self, tenant: str, *, limit: int, offset: int
    ) -> tuple[AsyncIterator[list[tuple[RunRow, RunState]]], int]:
        """A tenant's runs with their states, some at a time, and how many it has in all."""
        rows = await self._newest_first(tenant)
        return self._pages(tenant, rows[offset : offset + limit]), len(rows)

    async def pages(
        self, tenant: str, sessions: Collection[str] | None = None
    ) -> AsyncIterator[list[tuple[RunRow, RunState]]]:
        """A tenant's runs with their states, newest first, some at a time; with `sessions`, only theirs."""
        rows = await self._newest_first(tenant)
        async for page in self._pages(
            tenant, [row for row in rows if sessions is None or session_of(row[0]) in sessions]
        ):
            yield page

    async def _pages(
        self, tenant: str, chosen: Sequence[tuple[str, Base]]
    ) -> AsyncIterator[list[tuple[RunRow, RunState]]]:
        for start in range(0, len(chosen), PAGE):
            async with self._api.reads.of(tenant):
                page = await self._with_states(tenant, chosen[start : start + PAGE])
            yield page

    async def _newest_first(self, tenant: str) -> list[tuple[str, Base]]:
        rows: list[tuple[float, str, Base]] = []
        for base in self._api.bases.values():
            found = await base.redis.zrange(base.cell.tenant_runs(tenant), 0, -1, withscores=True)
            rows += [(score, run.decode(), base) for run, score in found]
        rows.sort(key=lambda row: row[:2], reverse=True)
        return [(run, base) for _, run, base in rows]

    async def _with_states(self, tenant: str, chosen: Sequence[tuple[str, Base]]) -> list[tuple[RunRow, RunState]]:
        """One round trip for each base model. Each state is decoded in a round of its own: it may have a thousand checkpoints."""
        found: dict[str, tuple[RunRow, RunState]] = {}
        for base in self._api.bases.values():
            runs = [run for run, of in chosen if of is base]
            pipe = base.redis.pipeline(transaction=False)
            for run in runs:
                pipe.hmget(base.cell.run(run), "spec", "state")
            for run, (spec, state) in zip(runs, await pipe.execute(), strict=True):
                if spec is not None and state is not None:
                    await self._api.rounds.next(tenant)
                    row = RunRow(base, msgspec.json.decode(spec, type=RunSpec))
                    found[run] = (row, msgspec.json.decode(state, type=RunState))
        return [found[run] for run, _ in chosen if run in found]

    async def create(self, base: Base, spec: RunSpec, *, body: msgspec.Struct, kind: str) -> None:
        """Writes the run and tells its owner, in one script, once. `kind`: of the request. Raises InvalidInput if something else was
        asked under the same id, ApiError if the tenant has too many."""
        cell, partition = base.cell, partition_of(spec.tenant)
        command = JobCommand(
            id=f"{spec.id}/create/0", tenant=spec.tenant, job=spec.id, partition=partition, action="create"
        )
        keys = [cell.run(spec.id), cell.seqs(spec.id), cell.tenant_runs(spec.tenant), cell.jobs(partition)]
        keys += [cell.active(partition), cell.unfinished(spec.tenant)]
        digest = hashlib.sha256(msgspec.json.encode(body)).hexdigest()
        words = [digest, spec.id, repr(time.time()), JSON.encode(spec), *RunState().fields().values(), kind]
        words += [self._api.settings.max_unfinished_jobs, self._api.limits.max_unfinished_bytes, MAX_KEPT]
        full = await storage_fault(self._api.stored, await self._api.tenants.get(spec.tenant))
        words.append(int(not full))
        fields = await base.bus.fields(command)
        answer: bytes = await base.redis.register_script(_CREATE)(keys=keys, args=[*words, *fields])
        if answer == b"other":
            raise InvalidInput(f"{spec.public_id} was created before, with other arguments", code="conflict")
        if answer == b"full":  # a 429 would be repeated by the SDK for minutes
            raise ApiError(400, full, code="storage_exceeded", retry=False)
        if answer not in (b"new", b"known"):
            raise _no_room(answer.decode())

    async def source(self, tenant: str, path: str, *, with_optimizer: bool = False) -> Source:
        """The version of a run or a job that a path names, noted as used. Raises InvalidInput, NotFound."""
        named = parse_path(path)
        found = await (self._of_job(tenant, named) if named.is_jobs else self._of_run(tenant, named))
        if not await use(found.base.bus, found.adapter, with_optimizer=with_optimizer):
            raise NotFound(f"there is no checkpoint {path} any more")
        return found

    async def check(self, tenant: str, path: str) -> None:
        """Raises NotFound if a path names nothing any more."""
        named = parse_path(path)
        await (self._of_job(tenant, named) if named.is_jobs else self.checkpoint(tenant, named))

    async def checkpoint(self, tenant: str, path: Path) -> tuple[RunRow, Checkpoint]:
        """The version that a run's user saved under a name. Raises NotFound, also for another tenant's."""
        run = await self.named(tenant, path.run)
        for checkpoint in (await run.state()).kept(time.time()):
            if (checkpoint.kind, checkpoint.name) == (path.kind, path.name):
                return run, checkpoint
        raise NotFound(f"there is no checkpoint {path}: it was deleted, it has expired, or nothing was saved under it")

    async def _of_run(self, tenant: str, path: Path) -> Source:
        run, checkpoint = await self.checkpoint(tenant, path)
        adapter = AdapterRef(tenant, run.id, checkpoint.version)
        return Source(run.base, adapter, run.spec.lora, run.spec.asked_model)

    async def _of_job(self, tenant: str, path: Path) -> Source:
        row = await JobStore(self._api).find(tenant, path.run)
        names_one = path.name.isascii() and path.name.isdecimal() and len(path.name) <= 8
        version = int(path.name) if path.kind == "sampler_weights" and names_one else -1
        try:
            adapter = await JobStore(self._api).version(row, version)
        except NotFound as error:
            told = f"there is no checkpoint {path}: a job's are …/sampler_weights/VERSION; {error}"
            raise NotFound(told, code=error.code) from error
        return Source(row.base, adapter, row.spec.hyper.lora, row.base.name)


def _no_room(answer: str) -> ApiError:
    """`answer`: the script's."""
    why, _, num = answer.partition(" ")
    if why == "kept":
        told = (
            f"you have {MAX_KEPT:,} runs, with those that have ended: delete checkpoints that you need no more; runs without any are"
            " forgotten seven days after their end"
        )
        return ApiError(400, told, code="too_many_runs", retry=False)
    told = (
        f"you have {num} unfinished jobs and runs, and their records have a limit too: unload models, finish sessions, or wait until"
        " some jobs have finished"
    )
    return ApiError(400, told, code="too_many_jobs", retry=False)  # after a 429, the SDK would repeat for minutes


# ---- checkpoints ----------------------------------------------------------------------------------------------------


Announcements = AbstractContextManager[asyncio.Event]
"""Sets its event when the run's owner has carried out a change."""


async def change_checkpoint(run: RunRow, checkpoint: Checkpoint, announced: Announcements, **to: Any) -> None:
    """Waits until the owner has made a change. `to`: `deletes`, or `expires_at` in seconds since 1970; None: never. Raises
    Unavailable, and NotFound for a new end of what is gone meanwhile."""
    change = NameChange(
        id=f"{run.id}/{checkpoint.kind}/{checkpoint.name}@{checkpoint.version}/{to}",
        tenant=run.spec.tenant,
        job=run.id,
        partition=partition_of(run.spec.tenant),
        checkpoint=checkpoint.kind,
        name=checkpoint.name,
        version=checkpoint.version,
        created_at=checkpoint.created_at,
        **to,
    )
    with announced as event:
        await tell_owner(run.base, change)
        try:
            async with asyncio.timeout(WAIT_S):
                while not _is_done(state := await run.state(), change):
                    await event.wait()
                    event.clear()
        except TimeoutError:
            raise Unavailable("the run's owner is away for a moment: it carries this out when it is back") from None
    if not change.deletes and meant(state, change) is None:
        raise NotFound(f"the checkpoint {change.checkpoint}/{change.name} was deleted or saved again at this moment")


def _is_done(state: RunState, change: NameChange) -> bool:
    checkpoint = meant(state, change)
    return checkpoint is None or (not change.deletes and checkpoint.expires_at == change.expires_at)
