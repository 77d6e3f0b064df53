"""Moves samples from Redis to object storage, so that Redis holds those of a job's newest step alone.

    a step's script writes them to Redis ─► follow ─► run: write the file, then delete in Redis what is still the same

The answers of an evaluation come one by one, each by the script that settles it, and are moved together once it has ended.

They are read there and here, so a move may be late, may be repeated, and may never happen: what a dead owner left is moved after the
job's next step, or archived with the job. While the storage is away, the oldest are dropped beyond some megabytes a job.

Files of dropped samples are deleted behind the commit that drops them. The job's state says which samples are dropped, and how far their
files are deleted; so the next owner goes on, and the archiver deletes what is left.
"""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import structlog

from common.bus import Bus
from common.errors import Unavailable
from common.objects import Objects
from common.tasks import running
from manager_service.archive.samples import SampleFiles, by_version, joined
from manager_service.jobs.changes import Changes
from manager_service.jobs.job import Job
from manager_service.kept import Kept
from manager_service.records import JobState
from manager_service.scheduling.members import MemberTable

AT_ONCE = 8
"""Jobs served at once, so that slow calls hold up few others."""
AGAIN_S = 5.0
"""Time to the next attempt after the storage was away."""
MAX_WAITING_BYTES = 8 << 20
"""Bytes of a job's samples that Redis keeps while the storage is away."""
# KEYS: samples:<job> or answers:<job>. ARGV: fields, each with what was written of it to the file.
DELETE_IF_SAME = """
for at = 1, #ARGV, 2 do
  if redis.call('HGET', KEYS[1], ARGV[at]) ~= ARGV[at + 1] then return end
end
for at = 1, #ARGV, 2 do redis.call('HDEL', KEYS[1], ARGV[at]) end
"""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Due:
    """A job that has samples to move, and the first version that it keeps, if files below may be there."""

    job: Job
    first: int = 0


class SampleMover:
    """Works for the jobs of an owner: for some at once, and in one task for each."""

    def __init__(self, bus: Bus, objects: Objects) -> None:
        self._bus = bus
        self._files = SampleFiles(objects, bus.cell.base_model)
        self._answer_files = SampleFiles(objects, bus.cell.base_model, "answers")
        self._delete_if_same = bus.client.register_script(DELETE_IF_SAME)
        self._due: dict[str, Due] = {}
        self._busy: set[str] = set()  # jobs that are worked for; what is due of them comes behind that
        self._waiting = asyncio.Queue[str]()  # jobs that are due and not busy
        self._away = asyncio.Event()  # the storage refused something

    def follow(self, changes: Changes, jobs: "MemberTable[Job]") -> None:
        """Takes in what was committed. Samples of a job that has left stay in Redis, and are archived with it."""
        for name in [*(name for name, *_ in changes.samples), *changes.evaluated]:
            self._want(jobs.get(name))
        for name, _, end in changes.dropped_samples:
            self._want(jobs.get(name), end)

    def resume(self, jobs: Iterable[Job]) -> None:
        """Takes in jobs of another owner, which may have left files of dropped samples."""
        for job in jobs:
            if (kept := job.state.kept.get("samples")) and kept.dropped and kept.cleared < kept.first:
                self._want(job, kept.first)

    async def run(self) -> None:
        """Works until cancelled."""
        async with running(self._keep_short(), *(self._work() for _ in range(AT_ONCE))):
            await asyncio.Event().wait()

    def _want(self, job: Job | None, first: int = 0) -> None:
        if job is None:
            return
        known = self._due.get(job.id)
        self._due[job.id] = Due(job, max(first, known.first if known else 0))
        if known is None and job.id not in self._busy:
            self._waiting.put_nowait(job.id)

    async def _work(self) -> None:
        while True:
            name = await self._waiting.get()
            due = self._due.pop(name)
            self._busy.add(name)
            try:
                await self._move(due.job.spec.tenant, name)
                if due.job.spec.num_eval_items:
                    await self._move_answers(due.job.spec.tenant, name)
                await self._clear(due)
            except Unavailable as error:
                log.warning("samples_not_moved", job_id=name, reason=str(error))
                self._want(due.job, due.first)
                self._away.set()
                await asyncio.sleep(AGAIN_S)
            self._busy.remove(name)
            if name in self._due:
                self._waiting.put_nowait(name)

    async def _move(self, tenant: str, job: str) -> None:
        """Moves all but the newest version's, which readers ask for most."""
        key = self._bus.cell.samples(job)
        found: Any = await self._bus.retrying(lambda: self._bus.client.hgetall(key))
        for version in sorted(found, key=int)[:-1]:
            samples: Any = found[version]
            await self._files.write(tenant, job, int(version), samples)
            await self._bus.retrying(lambda version=version, samples=samples: self._delete(key, {version: samples}))

    async def _move_answers(self, tenant: str, job: str) -> None:
        """Moves those of the evaluations that have ended, by what one moment of Redis says."""
        key, client = self._bus.cell.answers(job), self._bus.client

        async def read() -> list[Any]:
            pipe = client.pipeline(transaction=True)
            pipe.hgetall(key)
            pipe.hget(self._bus.cell.job(job), "state")
            return await pipe.execute()

        found, encoded = await self._bus.retrying(read)
        if not found:
            return
        state = msgspec.json.decode(encoded, type=JobState)
        kept = state.kept.get("samples", Kept())
        for version, answers in by_version(found).items():
            if str(version) in state.evals:
                continue
            if not kept.has_dropped(version):
                await self._answer_files.write(tenant, job, version, joined(answers))
            await self._bus.retrying(lambda answers=answers: self._delete(key, answers))

    async def _clear(self, due: Due) -> None:
        """Deletes the files of samples that are dropped. The job's state says so from its next step on."""
        kept = due.job.state.kept.get("samples")
        if kept is None or kept.cleared >= due.first:
            return
        tenant, job = due.job.spec.tenant, due.job.id
        for files in (self._files, self._answer_files) if due.job.spec.num_eval_items else (self._files,):
            if kept.cleared:
                await files.drop(tenant, job, range(kept.cleared, due.first))
            else:  # whatever is there
                await files.drop_below(tenant, job, due.first)
        kept.cleared = due.first

    # ---- while the storage is away ----------------------------------------------------------------------------------

    async def _keep_short(self) -> None:
        while True:
            await self._away.wait()
            self._away.clear()
            try:
                for job in [*self._due, *self._busy]:
                    await self._shorten(job)
            except Unavailable as error:
                log.warning("samples_not_shortened", reason=str(error))
            await asyncio.sleep(AGAIN_S)

    async def _shorten(self, job: str) -> None:
        """Drops a job's oldest samples while the storage takes none: Redis has room for a few steps' alone."""
        for key in (self._bus.cell.samples(job), self._bus.cell.answers(job)):
            left = MAX_WAITING_BYTES
            found: Any = await self._bus.retrying(lambda key=key: self._bus.client.hgetall(key))
            for name in sorted(found, key=lambda name: int(name.partition(b"/")[0]), reverse=True):
                left -= len(found[name])
                if left < 0:
                    log.warning("samples_dropped", job_id=job, version=name.decode(), reason="the storage is away")
                    gone: dict[bytes, bytes] = {name: found[name]}
                    await self._bus.retrying(lambda key=key, gone=gone: self._delete(key, gone))

    async def _delete(self, key: str, same: Mapping[bytes, bytes]) -> None:
        await self._delete_if_same(keys=[key], args=[word for pair in same.items() for word in pair])
