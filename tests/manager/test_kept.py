"""Records for people to read have a limit in bytes, and dropped ones are counted."""

import asyncio
import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.bus.bus import Bus
from common.cancellation import running
from common.errors import StoreUnavailable
from common.store.objects import Objects
from common.wire.messages import AdapterRef, ScoredTrajectory, TrajectoryRef
from harness.standin import held_out, job_spec, state_of
from manager_service.owner import sample_writer
from manager_service.owner.archiver import Archiver
from manager_service.owner.jobs.changes import Changes, KeptSamples
from manager_service.owner.jobs.groups import Group, Scored
from manager_service.owner.jobs.samples import chosen
from manager_service.owner.owner import Owner
from manager_service.owner.sample_writer import SampleWriter
from manager_service.records.archive import SampleFiles
from manager_service.records.job_records import JobSpec, JobState
from manager_service.records.keys import JSON
from manager_service.records.sample_records import LIMITS, Kept, Limits
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
    state = await system.run_job(spec, seconds=60)
    rows: Any = await bus.client.xrange(bus.cell.events(spec.id))

    first = state.kept["samples"].first
    for kind in ("samples", "answers"):
        files = SampleFiles(objects, "tiny", kind)
        await until(lambda files=files: has_versions(files, spec, range(first, 31)))
    dropped = {kind: kept.dropped for kind, kept in state.kept.items()}
    assert dropped["events"] > 0 and int(rows[0][0].split(b"-")[0]) == dropped["events"] + 1
    assert dropped["samples"] > 0
    assert sum(len(fields[b"event"]) for _, fields in rows) <= LIMIT // 8
    # And the next owner goes on counting
    await system.kill_owner()
    assert (await state_of(bus, spec.id)).kept == state.kept
    await system.stop()


async def has_versions(files: SampleFiles, spec: JobSpec, expected: Iterable[int]) -> bool:
    return await files.versions(spec.tenant, spec.id) == list(expected)


async def test_samples_are_objects_which_stay_when_their_job_is_archived(bus: Bus, objects: Objects) -> None:
    system, spec = System(bus, objects), job_spec(num_steps=8, batch_size=2, group_size=2, eval_interval=4)
    spec = await held_out(objects, spec, LIMITS.sample_items + 2)
    files, answers = SampleFiles(objects, "tiny"), SampleFiles(objects, "tiny", "answers")
    await system.start()
    await system.run_job(spec, seconds=60)
    await until(lambda: has_versions(files, spec, range(1, 9)))
    await until(lambda: has_versions(answers, spec, [0, 4, 8]))
    await system.stop()
    await Archiver(bus, objects).copy([spec.id])
    for version in range(1, 9):
        rows = json.loads(await files.read(spec.tenant, spec.id, version))
        assert {row["group"] for row in rows} == {2 * version - 2, 2 * version - 1}
        assert {row["step"] for row in rows} == {version}
    # And of each evaluation one sampled answer to each of the first items
    for version in (0, 4, 8):
        rows = json.loads(await answers.read(spec.tenant, spec.id, version))
        shown = [(row["item"], row["sample"], row["prompt"], row["step"], row["version"], row["kept"]) for row in rows]
        items = range(LIMITS.sample_items)
        assert shown == [(item, 0, f"item {item}", version, version, "evaluation") for item in items]
        assert all(row["written"]["tokens"] == [1, 2, 3] for row in rows)


def of_job(job: str, version: int, records: bytes = b"[]") -> Changes:
    return Changes(samples=[KeptSamples("samples", "acme", job, version, records)])


async def test_samples_wait_while_the_storage_is_away_as_far_as_there_is_memory(
    objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_writer, "MAX_WAITING_BYTES", 25)
    writer, files, real, away = SampleWriter(objects, "tiny"), SampleFiles(objects, "tiny"), SampleFiles.write, True

    async def write(self: SampleFiles, *what: Any) -> None:
        if away:
            raise StoreUnavailable("away")
        await real(self, *what)

    monkeypatch.setattr(SampleFiles, "write", write)
    async with running(writer.run()):
        for version in (1, 2, 3):
            writer.follow(of_job("job-a", version, bytes(10)))
        await asyncio.sleep(0.05)
        assert await files.versions("acme", "job-a") == []
        away = False
        await until(lambda: has_versions(files, job_spec("job-a"), [1, 2]))
        writer.follow(of_job("job-a", 4, bytes(10)))
        await until(lambda: has_versions(files, job_spec("job-a"), [1, 2, 4]))


async def test_files_of_dropped_samples_go_when_their_job_is_archived(bus: Bus, objects: Objects) -> None:
    spec, files = job_spec(), SampleFiles(objects, "tiny")
    kept = Kept(runs=[(3, 10), (5, 10)], dropped=2, newest=5)
    state = JobState(status="succeeded", version=5, finished_at=1, kept={"samples": kept})
    await bus.client.hset(bus.cell.job(spec.id), mapping={"spec": JSON.encode(spec), "state": JSON.encode(state)})
    for version in (2, 3, 4):  # 2 was left by an owner that died
        await files.write(spec.tenant, spec.id, version, b"[]")
    await Archiver(bus, objects).copy([spec.id])
    assert await files.versions(spec.tenant, spec.id) == [3, 4]


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
