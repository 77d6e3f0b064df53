"""An owner whose object storage is slow: nothing waits for it but the job whose payload or version it is."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import pytest

from common.bus.bus import Bus
from common.bus.streams import Cell, partition_of
from common.errors import StoreUnavailable
from common.store.objects import Objects
from common.wire.messages import ScoredTrajectory, Start
from common.wire.transcript import wrote
from harness.standin import StandInEnv, command, create_job, job_spec, ledger_of, state_of, until_status
from manager_service.owner import arriving, job_reader, partition
from manager_service.owner.partition import Partition
from manager_service.records.job_records import JobSpec
from tests.common.test_worker import until
from tests.support.gated_store import GatedStore
from tests.support.owning import LEASE_S, System

OTHER = next(f"tenant-{n}" for n in range(1000) if partition_of(f"tenant-{n}") == partition_of("acme"))
"""Shares its owner, its partition and its lock with `acme`."""
"""Its partition is the last that an owner gives back because it has more than its share."""
SMALL: dict[str, Any] = {"batch_size": 2, "group_size": 2}


class BigEnv(StandInEnv):
    """Answers the job `big` with trajectories of so many tokens."""

    num_tokens = 40_000

    def scored(self, start: Start, sample: int) -> ScoredTrajectory:
        scored = super().scored(start, sample)
        if start.job != "big":
            return scored
        n = self.num_tokens
        return ScoredTrajectory(
            **{name: getattr(scored, name) for name in scored.__struct_fields__ if name != "transcript"},
            transcript=wrote(np.ones(n), -np.ones(n)),
        )


class Owning(System):
    """Workers with a store that answers at once, and an owner with one that does not."""

    def __init__(self, bus: Bus, owner_bus: Bus, objects: Objects, gated: GatedStore) -> None:
        super().__init__(bus, objects)
        self.env = BigEnv(bus.cell)
        self.gated = gated
        self.owners = System(owner_bus, gated)

    def start_owner(self) -> Any:
        owner = self.owners.start_owner()
        self.owner_task = self.owners.owner_task
        return owner


@pytest.fixture
async def system(bus: Bus, redis_url: str, objects: Objects) -> AsyncIterator[Owning]:
    gated = GatedStore(objects)
    owner_bus = Bus.connect(redis_url, Cell("tiny"), gated)
    system = Owning(bus, owner_bus, objects, gated)
    await system.start()
    yield system
    gated.gate.set()
    system.owners._stop.set()  # pyright: ignore[reportPrivateUsage]
    await system.stop()
    await owner_bus.close()


async def create(bus: Bus, *specs: JobSpec) -> None:
    for spec in specs:
        await create_job(bus, spec)


async def test_a_big_step_that_is_being_written_keeps_no_other_job_waiting(system: Owning) -> None:
    # Given a store that does not answer the owner
    big, other = job_spec("big", num_steps=2, **SMALL), job_spec("small", OTHER, num_steps=3, **SMALL)
    await create(system.bus, big)
    await until(lambda: system.gated.asked)
    # Then another job of the same partition ends, while the big step is not published
    await create(system.bus, other)
    assert (await until_status(system.bus, other.id, "succeeded")).version == 3
    assert (await state_of(system.bus, big.id)).training is None
    # And once the store answers, each step is published once, in order
    system.gated.gate.set()
    await until_status(system.bus, big.id, "succeeded")
    assert [s.adapter.version for s in system.trainer.seen if s.job == "big"] == [0, 1]
    assert [len(s.rows.tokens) for s in system.trainer.seen if s.job == "big"] == [160_000, 160_000]
    assert await ledger_of(system.bus, big.id) == {"issued": 8, "trained": 8, "in_flight": 0}


async def test_an_owner_that_dies_between_writing_a_step_and_publishing_it_loses_nothing(system: Owning) -> None:
    big = job_spec("big", num_steps=1, **SMALL)
    await create(system.bus, big)
    await until(lambda: system.gated.written)
    await system.kill_owner()
    assert system.trainer.seen == []
    system.gated.gate.set()
    system.start_owner()
    await until_status(system.bus, big.id, "succeeded")
    assert [step.id for step in system.trainer.seen] == ["big/step1/0"]
    assert await ledger_of(system.bus, big.id) == {"issued": 4, "trained": 4, "in_flight": 0}
    assert len(system.env.seen) == 2, "nothing was sampled again"


async def test_a_step_that_a_pause_made_void_while_it_was_written_is_written_anew(system: Owning) -> None:
    big = job_spec("big", num_steps=1, **SMALL)
    await create(system.bus, big)
    await until(lambda: system.gated.written)
    await command(system.bus, big, "pause")
    await until_status(system.bus, big.id, "paused")
    await command(system.bus, big, "resume")
    await until(lambda: len(system.gated.written) == 2)
    system.gated.gate.set()
    await until_status(system.bus, big.id, "succeeded")
    assert [(step.id, step.epoch) for step in system.trainer.seen] == [("big/step1/1", 2)]
    await until(lambda: _none_left(system.objects))


async def _none_left(objects: Objects) -> bool:
    return not await objects.paths("payloads")


async def test_a_big_result_that_is_being_fetched_keeps_no_other_job_waiting(system: Owning) -> None:
    # Given results that travel as claim checks, and a store that does not answer the owner
    system.env.num_tokens = 270_000
    big, other = job_spec("big", num_steps=1, **SMALL), job_spec("small", OTHER, num_steps=3, **SMALL)
    await create(system.bus, big)
    await until(lambda: len(system.gated.payloads()) == 4)
    # Then another job ends, however often lost messages are looked for meanwhile
    await create(system.bus, other)
    await until_status(system.bus, other.id, "succeeded")
    await asyncio.sleep(3 * LEASE_S)
    assert len(system.gated.payloads()) == 4
    system.gated.gate.set()
    await until_status(system.bus, big.id, "succeeded")
    assert await ledger_of(system.bus, big.id) == {"issued": 4, "trained": 4, "in_flight": 0}
    assert len(system.env.seen) == 2 + 6, "nothing was sampled again"


async def test_a_version_that_is_looked_for_keeps_no_other_job_waiting(system: Owning) -> None:
    # Given a job whose version exists, though Redis has lost the message that says so
    quiet, other = job_spec("quiet", num_steps=1, **SMALL), job_spec("small", OTHER, num_steps=3, **SMALL)
    publish = type(system.trainer).__call__

    class Mute(type(system.trainer)):
        async def __call__(self, message: Any, beat: Any) -> Any:
            answer = await publish(self, message, beat)
            return [] if message.id == "quiet/step1/0" else answer

    system.trainer.__class__ = Mute
    await create(system.bus, quiet)
    # When its owner looks in a store that does not answer
    await until(lambda: system.gated.asked)
    # Then another job ends
    await create(system.bus, other)
    await until_status(system.bus, other.id, "succeeded")
    # And the version counts once the store answers
    system.gated.gate.set()
    await until_status(system.bus, quiet.id, "succeeded")
    assert await ledger_of(system.bus, quiet.id) == {"issued": 4, "trained": 4, "in_flight": 0}


# ---- files that cannot be read ---------------------------------------------------------------------------------------


def _with_file(spec: JobSpec) -> JobSpec:
    return msgspec.structs.replace(spec, training_file="file-1", num_items=4)


ITEMS = b'{"messages": [{"role": "user", "content": "hi"}]}\n' * 4


def fill_disk(patched: pytest.MonkeyPatch) -> None:
    """Leaves no room on the disk for temporary files."""
    patched.setattr(job_reader.tempfile, "TemporaryFile", partial(Path("/dev/full").open, "rb+", 0))
    patched.setattr(arriving, "RETRY_S", 0.1)


async def waiting(system: System, job: str) -> bool:
    text = "The job waits, because its files cannot be read: the manager's disk"
    return any(text in event.message for event in await system.events(job))


async def test_a_job_whose_file_finds_no_room_for_long_fails(
    system: Owning, objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_disk(monkeypatch)
    monkeypatch.setattr(partition, "GIVE_UP_S", 0.5)
    await objects.write("files/acme/file-1", ITEMS)
    spec = _with_file(job_spec("filed", num_steps=1, **SMALL))
    await create(system.bus, spec)
    state = await until_status(system.bus, spec.id, "failed")
    assert state.error is not None and state.error.code == "files_unavailable"
    assert await waiting(system, spec.id)
    active = system.bus.cell.active(partition_of(spec.tenant))
    await until(lambda: _is_empty(system.bus, active))


async def test_a_new_job_waits_for_a_store_that_is_away_however_long(
    system: Owning, objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a store that is away for longer than a full disk may last
    monkeypatch.setattr(partition, "GIVE_UP_S", 0.0)
    monkeypatch.setattr(arriving, "RETRY_S", 0.1)
    tries = 0

    async def away(path: str, file: BinaryIO) -> None:
        nonlocal tries
        tries += 1
        raise StoreUnavailable(f"object storage, {path}: away")

    system.gated.gate.set()
    system.gated.download = away
    await objects.write("files/acme/file-1", ITEMS)
    spec = _with_file(job_spec("filed", num_steps=1, **SMALL))
    await create(system.bus, spec)
    await until(lambda: _is(tries >= 3))
    # Then the job waits, has said so once, and goes on when the store is back
    assert (await state_of(system.bus, spec.id)).status == "validating_files"
    assert [event.message.partition(": ")[0] for event in await system.events(spec.id)] == [
        "The job waits, because its files cannot be read"
    ]
    del system.gated.download
    await until_status(system.bus, spec.id, "succeeded")


async def test_a_slow_file_keeps_only_its_own_job_out_of_a_partition_that_is_taken_over(
    system: Owning, objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partition, "FILES_S", 0.1)
    system.gated.gate.set()
    await objects.write("files/acme/file-1", ITEMS)
    spec, other = _with_file(job_spec("filed", num_steps=8, **SMALL)), job_spec("small", OTHER, num_steps=2, **SMALL)
    system.env.delay_s = 0.05
    await create(system.bus, spec)
    await until(lambda: system.trainer.seen)
    await system.kill_owner()
    answers, begun, download = asyncio.Event(), list[str](), system.gated.download

    async def slow(path: str, file: BinaryIO) -> None:
        begun.append(path)
        await answers.wait()
        await download(path, file)

    system.gated.download = slow
    system.start_owner()
    await create(system.bus, other)
    await until_status(system.bus, other.id, "succeeded")
    answers.set()
    await until_status(system.bus, spec.id, "succeeded")
    assert await ledger_of(system.bus, spec.id) == {"issued": 32, "trained": 32, "in_flight": 0}
    assert begun == ["files/acme/file-1"], "it was read once"


async def test_a_partition_that_an_owner_cannot_load_goes_to_another(
    bus: Bus, objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given two owners, the first of which can load nothing
    loads, broken = Partition.load, set[int]()

    async def load(self: Partition, now: float, changes: Any) -> None:
        if id(self._reader) in broken:  # pyright: ignore[reportPrivateUsage]
            raise StoreUnavailable("broken on purpose")
        await loads(self, now, changes)

    monkeypatch.setattr(Partition, "load", load)
    first, second = System(bus, objects), System(bus, objects)
    await first.start()
    await asyncio.sleep(LEASE_S)
    await first.kill_owner()
    broken.add(id(first.start_owner()._reader))  # pyright: ignore[reportPrivateUsage]
    second.start_owner()
    # Then a job of every partition ends with the second
    spec = job_spec("any", num_steps=1, **SMALL)
    await second.run_job(spec)
    await first.stop()
    await second.stop()


async def _is(holds: bool) -> bool:
    return holds


async def _is_empty(bus: Bus, key: str) -> bool:
    return not await bus.client.scard(key)
