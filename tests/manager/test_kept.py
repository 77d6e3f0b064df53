"""Records for people to read have a limit in bytes, and dropped ones are counted."""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.bus import Bus
from common.errors import StoreUnavailable
from common.messages import AdapterRef, ScoredTrajectory, TrajectoryRef
from common.objects import Objects
from common.tasks import running
from harness.standin import create_job, held_out, job_spec, state_of, until_status
from manager_service.archive.archiver import Archiver
from manager_service.archive.samples import SampleFiles, by_version, joined
from manager_service.archive.store import Archive
from manager_service.jobs.changes import Changes
from manager_service.jobs.groups import Group, Scored
from manager_service.jobs.items import Items
from manager_service.jobs.job import Job
from manager_service.jobs.samples import chosen
from manager_service.kept import LIMITS, Kept, Limits
from manager_service.owner import sample_mover
from manager_service.owner.memory import bound
from manager_service.owner.owner import Owner
from manager_service.owner.sample_mover import SampleMover
from manager_service.records import JSON, JobSpec, JobState
from manager_service.scheduling.members import MemberTable
from tests.common.test_worker import until
from tests.manager.test_owner import System

LIMIT = 1 << 16


@given(st.lists(st.integers(1, LIMIT // 4), min_size=1, max_size=400))
def test_what_is_kept_stays_within_the_limit_and_is_all_that_is_not_dropped(sizes: list[int]) -> None:
    kept, there = Kept(), dict[int, int]()
    for number, size in enumerate(sizes, 1):
        there[number] = size
        for gone in range(*(kept.add(number, size, LIMIT) or (0, 0))):
            del there[gone]
        assert sum(there.values()) <= LIMIT
        assert sum(there.values()) == sum(num_bytes for _, num_bytes in kept.runs)
        assert (kept.dropped, len(there)) == (number - len(there), number - kept.dropped)
        assert not kept.has_dropped(min(there)) and (min(there) == 1 or kept.has_dropped(min(there) - 1))
        assert len(kept.runs) <= 40, "a job's state stays small"
    assert max(there) == len(sizes), "the newest is kept"


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, LIMIT // 4)), min_size=1, max_size=400))
def test_what_comes_late_is_counted_and_goes_with_its_number(late: list[tuple[int, int]]) -> None:
    kept, there = Kept(), dict[int, int]()
    for newest, (age, size) in enumerate(late, 1):
        number = max(0, newest - age)
        kept.add(newest, 1, LIMIT)
        if kept.has_dropped(number):
            continue
        there[number] = there.get(number, 0) + size
        kept.add_late(number, size, LIMIT)
        there = {number: size for number, size in there.items() if not kept.has_dropped(number)}
        assert sum(there.values()) <= sum(num_bytes for _, num_bytes in kept.runs)
        assert len(kept.runs) == 1 or sum(num_bytes for _, num_bytes in kept.runs) <= LIMIT


async def kept_answers(bus: Bus, objects: Objects, job: str, version: int) -> list[dict[str, Any]]:
    """The answers of an evaluation, as readers see them: in Redis, or else in their file."""
    there: Any = await bus.client.hgetall(bus.cell.answers(job))
    found = by_version(there)
    files = SampleFiles(objects, bus.cell.base_model, "answers")
    return json.loads(joined(found[version]) if version in found else await files.read("acme", job, version))


class Bounded(System):
    """With an owner that keeps little."""

    def start_owner(self) -> Owner:
        owner = super().start_owner()
        owner._reader._limits = Limits(events=LIMIT // 8, samples=LIMIT // 16)  # pyright: ignore[reportPrivateUsage]
        return owner


async def test_a_job_keeps_its_newest_events_and_samples_and_says_how_many_it_dropped(
    bus: Bus, objects: Objects
) -> None:
    system, spec = Bounded(bus, objects), job_spec(num_steps=30, batch_size=2, group_size=2, eval_interval=1)
    spec = await held_out(objects, spec, 1)
    await system.start()
    await create_job(bus, spec)
    state = await until_status(bus, spec.id, "succeeded", seconds=60)
    rows: Any = await bus.client.xrange(bus.cell.events(spec.id))

    async def versions(kind: Literal["samples", "answers"], key: str) -> list[int]:
        names: Any = await bus.client.hkeys(key)
        there = {int(name.partition(b"/")[0]) for name in names}
        return sorted(there | {*await SampleFiles(objects, "tiny", kind).versions(spec.tenant, spec.id)})

    first = state.kept["samples"].first
    await until(lambda: _is(lambda: versions("samples", bus.cell.samples(spec.id)), list(range(first, 31))))
    await until(lambda: _is(lambda: versions("answers", bus.cell.answers(spec.id)), list(range(first, 31))))
    dropped = {kind: kept.dropped for kind, kept in state.kept.items()}
    assert dropped["events"] > 0 and int(rows[0][0].split(b"-")[0]) == dropped["events"] + 1
    assert dropped["samples"] > 0
    assert sum(len(fields[b"event"]) for _, fields in rows) <= LIMIT // 8
    # And the next owner goes on counting
    await system.kill_owner()
    assert (await state_of(bus, spec.id)).kept == state.kept
    await system.stop()


async def _is(found: Callable[[], Awaitable[list[int]]], expected: list[int]) -> bool:
    return await found() == expected


async def test_samples_move_to_object_storage_and_are_read_as_before(bus: Bus, objects: Objects) -> None:
    system, spec = System(bus, objects), job_spec(num_steps=8, batch_size=2, group_size=2, eval_interval=4)
    spec = await held_out(objects, spec, LIMITS.sample_items + 2)
    await system.start()
    await create_job(bus, spec)
    await until_status(bus, spec.id, "succeeded", seconds=60)
    files = SampleFiles(objects, "tiny")
    await until(lambda: _is(lambda: files.versions(spec.tenant, spec.id), list(range(1, 8))))
    assert await bus.client.hkeys(bus.cell.samples(spec.id)) == [b"8"], "Redis has the newest alone"
    for version in range(1, 8):
        rows = json.loads(await files.read(spec.tenant, spec.id, version))
        assert {row["group"] for row in rows} == {2 * version - 2, 2 * version - 1}
        assert {row["step"] for row in rows} == {version}
    # And of each evaluation one sampled answer to each of the first items
    await until(lambda: _has_moved(bus, objects, spec, [0, 4]))
    for version in (0, 4, 8):
        rows = await kept_answers(bus, objects, spec.id, version)
        shown = [(row["item"], row["sample"], row["prompt"], row["step"], row["version"], row["kept"]) for row in rows]
        items = range(LIMITS.sample_items)
        assert shown == [(item, 0, f"item {item}", version, version, "evaluation") for item in items]
        assert all(row["written"]["tokens"] == [1, 2, 3] for row in rows)
    await system.stop()
    # Also in the archive
    (moved,) = await Archiver(bus, objects).copy([spec.id])
    archive = Archive(objects, "tiny")
    archived = await archive.find(spec.tenant, moved.job)
    assert archived and await archive.records(archived).answer_versions() == [0, 4, 8]
    assert json.loads(await archive.records(archived).answers(None)) == rows
    assert len(json.loads(await archive.records(archived).answers(0))) == len(rows)


async def _has_moved(bus: Bus, objects: Objects, spec: JobSpec, versions: list[int]) -> bool:
    """Are the answers of these versions in files alone?"""
    files = await SampleFiles(objects, "tiny", "answers").versions(spec.tenant, spec.id)
    there: Any = await bus.client.hgetall(bus.cell.answers(spec.id))
    return {*files} >= {*versions} and not {*by_version(there)} & {*versions}


async def test_samples_that_changed_while_they_were_moved_stay(bus: Bus, objects: Objects) -> None:
    mover, job = SampleMover(bus, objects), Job(bus.cell, job_spec(), JobState(), Items(), Items())
    key, jobs = bus.cell.samples(job.id), MemberTable[Job]()
    jobs.add(job)
    await bus.client.hset(key, mapping={"1": b"old", "2": b"newest"})
    real = SampleFiles.write

    async def changed(self: SampleFiles, tenant: str, name: str, version: int, samples: bytes) -> None:
        await real(self, tenant, name, version, samples)
        if samples == b"old":
            await bus.client.hset(key, "1", b"new")

    moving = asyncio.create_task(mover.run())
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(SampleFiles, "write", changed)
        mover.follow(Changes(samples=[(job.id, 1, b"old")]), jobs)
        files = SampleFiles(objects, "tiny")
        await until(lambda: _is(lambda: files.versions("acme", job.id), [1]))
        mover.follow(Changes(samples=[(job.id, 1, b"new")]), jobs)
        await until(lambda: _reads(files, job.id, b"new"))
    moving.cancel()


async def test_while_the_storage_is_away_redis_holds_the_newest_samples_of_some_megabytes(
    bus: Bus, objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_mover, "MAX_WAITING_BYTES", 25)
    mover, job = SampleMover(bus, objects), Job(bus.cell, job_spec(), JobState(), Items(), Items())
    key, jobs = bus.cell.samples(job.id), MemberTable[Job]()
    jobs.add(job)
    await bus.client.hset(key, mapping={str(version): bytes(10) for version in (8, 9, 10, 11)})

    async def away(self: SampleFiles, tenant: str, name: str, version: int, samples: bytes) -> None:
        raise StoreUnavailable("away")

    monkeypatch.setattr(SampleFiles, "write", away)
    mover.follow(Changes(samples=[(job.id, 11, bytes(10))]), jobs)
    async with running(mover.run()):
        await until(lambda: _has(bus, key, {b"10", b"11"}))


async def test_a_slow_call_for_one_jobs_samples_delays_no_other_jobs(
    bus: Bus, objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    mover, jobs, files = SampleMover(bus, objects), MemberTable[Job](), SampleFiles(objects, "tiny")
    slow, quick = (Job(bus.cell, job_spec(name), JobState(), Items(), Items()) for name in ("job-a", "job-b"))
    for job in (slow, quick):
        jobs.add(job)
        await bus.client.hset(bus.cell.samples(job.id), mapping={"1": b"old", "2": b"newest"})
    real, under_way = SampleFiles.write, list[str]()

    async def write(self: SampleFiles, tenant: str, name: str, version: int, samples: bytes) -> None:
        under_way.append(name)
        if name == slow.id:
            await asyncio.Event().wait()
        await real(self, tenant, name, version, samples)

    monkeypatch.setattr(SampleFiles, "write", write)
    mover.follow(Changes(samples=[(slow.id, 2, b"newest")]), jobs)
    async with running(mover.run()):
        await until(lambda: under_way == [slow.id])
        for _ in range(2):  # the slow one's next step waits for its last, so that an older file never replaces a newer
            mover.follow(Changes(samples=[(slow.id, 3, b"x"), (quick.id, 2, b"newest")]), jobs)
        await until(lambda: _is(lambda: files.versions("acme", quick.id), [1]))
        assert under_way.count(slow.id) == 1


async def test_files_of_dropped_samples_are_deleted_by_the_next_owner(
    bus: Bus, objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    system, spec = Bounded(bus, objects), job_spec(num_steps=400, batch_size=2, group_size=2)
    files, real, left = SampleFiles(objects, "tiny"), SampleFiles.drop, list[int]()

    async def dies(self: SampleFiles, tenant: str, job: str, versions: Iterable[int]) -> None:
        left.extend(versions)
        await asyncio.Event().wait()

    monkeypatch.setattr(SampleFiles, "drop", dies)
    await system.start()
    await create_job(bus, spec)
    await until(lambda: bool(left), seconds=30)
    await system.kill_owner()
    monkeypatch.setattr(SampleFiles, "drop", real)
    before = await files.versions(spec.tenant, spec.id)
    assert set(before) & set(left), "the first owner left files"
    # When another owns the job, which makes no further step
    monkeypatch.setattr(Owner, "_pass", _nothing)
    system.start_owner()

    async def gone() -> bool:
        return not set(await files.versions(spec.tenant, spec.id)) & set(left)

    await until(gone, seconds=30)
    await system.kill_owner()


async def _nothing(*_: object) -> None:
    pass


async def test_files_of_dropped_samples_go_when_their_job_is_archived(bus: Bus, objects: Objects) -> None:
    spec, files = job_spec(), SampleFiles(objects, "tiny")
    kept = Kept(runs=[(3, 10), (5, 10)], dropped=2, cleared=3)
    state = JobState(status="succeeded", version=5, finished_at=1, kept={"samples": kept})
    await bus.client.hset(bus.cell.job(spec.id), mapping={"spec": JSON.encode(spec), "state": JSON.encode(state)})
    await bus.client.hset(bus.cell.samples(spec.id), "5", b"[]")
    for version in (2, 3, 4):  # 2 was written by an owner that came back after its job had another
        await files.write(spec.tenant, spec.id, version, b"[]")
    await Archiver(bus, objects).copy([spec.id])
    assert await files.versions(spec.tenant, spec.id) == [3, 4]


async def _has(bus: Bus, key: str, versions: set[bytes]) -> bool:
    return set(await bus.client.hkeys(key)) == versions


async def _reads(files: SampleFiles, job: str, expected: bytes) -> bool:
    return await files.read("acme", job, 1) == expected


async def test_dead_letters_beyond_their_bytes_are_dropped_and_counted(bus: Bus) -> None:
    rng = random.Random(0)
    for _ in range(200):
        await bus.client.xadd(bus.cell.dead, {"payload": rng.randbytes(4096)})
    await bound(bus, bus.cell.dead, 100 * 4096)
    left, used = await bus.client.xlen(bus.cell.dead), await bus.client.memory_usage(bus.cell.dead)
    assert 0 < left < 100 and used is not None and used <= 100 * 4096
    assert await bus.client.hgetall(bus.cell.dropped) == {b"dead": str(200 - left).encode()}
    await bound(bus, bus.cell.dead, 100 * 4096)
    assert await bus.client.xlen(bus.cell.dead) == left


def scored_group(number: int, rewards: list[float]) -> tuple[int, Group]:
    about: dict[str, Any] = {"id": "m", "tenant": "a", "job": "j", "partition": 0, "adapter": AdapterRef("a", "j", 0)}
    refs = [TrajectoryRef("train", 0, number, sample) for sample in range(len(rewards))]
    messages = [
        ScoredTrajectory(**about, trajectory=ref, reward=reward, stop_reason="stop")
        for ref, reward in zip(refs, rewards, strict=True)
    ]
    return number, Group(0, scored={n: Scored(f"0-{n}", message) for n, message in enumerate(messages)})


def test_a_steps_first_groups_are_kept_and_the_best_and_worst_of_the_others() -> None:
    batch = [scored_group(3, [0.0, 1.0]), scored_group(5, [0.5, 0.9]), scored_group(6, [0.1, 0.9, 0.2])]
    found = [(number, place, kept) for number, place, _, kept in chosen(batch, groups=1, others=1)]
    assert found == [(3, 0, "first"), (3, 1, "first"), (5, 1, "best"), (6, 0, "worst")]
    assert chosen(batch, groups=0, others=0) == []
    both = [(number, place, kept) for number, place, _, kept in chosen(batch[:1], groups=0, others=4)]
    assert both == [(3, 0, "best"), (3, 1, "best")], "none is kept twice"
