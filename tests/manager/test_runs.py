"""Runs in an owner over a real Redis and a real store, with trainers that compute hashes."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import msgspec
import pytest

from common.bus.bus import Bus
from common.bus.streams import GROUP_MANAGER, OWNER
from common.store.adapters import AdapterStore
from common.store.objects import Objects
from common.wire.messages import AdapterRef, Failure
from common.wire.operations import Action, Outputs, Saved, SaveWeights
from harness.standin import create_job, job_spec, until_status
from manager_service.owner.job_reader import JobReader
from manager_service.owner.jobs.changes import Changes, commands
from manager_service.owner.partition import Partition
from manager_service.owner.runs import kept_results, runs
from manager_service.owner.transaction import Commits, Fence, Lost
from manager_service.records.keys import JSON
from manager_service.records.run_records import USED_S, Checkpoint, RunState, RunStatus
from manager_service.records.tenants import TENANTS, TenantRecord
from manager_service.records.usage import day_field
from tests.common.test_worker import until
from tests.support.owning import LEASE_S
from tests.support.run_world import PARTITION, SESSION, TENANT, World


@pytest.fixture
async def world(bus: Bus, objects: Objects) -> AsyncIterator[World]:
    world = World(bus, objects)
    world.start_owner()
    yield world
    await world.stop()


async def test_an_optim_step_commits_a_version_and_every_operation_has_a_result(world: World) -> None:
    async with world.hashing_trainer() as trainer:
        run = await world.create()
        await world.send(run, (1, "forward_backward"), (2, "forward"), (3, "forward_backward"), (4, "optim_step"))
        outputs = msgspec.msgpack.decode((await world.result(run, 4)).outputs, type=Outputs)
        assert outputs.metrics == {"loss:sum": 4.0}
        assert [bool((await world.result(run, seq)).outputs) for seq in range(4)] == [True] * 4
        assert (await world.state(run)).version == 1
        await until(lambda: world.open_operations(0))
        assert [op.seq for message in trainer.seen for op in message.operations] == [1, 2, 3, 4]
    usage = await world.bus.client.hget(world.bus.cell.usage(TENANT), f"{run}/trained_tokens")
    assert float(usage or 0) == len(trainer.seen)


async def test_the_oldest_results_of_a_tenant_go_beyond_so_many_bytes(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_results, "MAX_BYTES", 3 * kept_results.LEAST_BYTES)
    async with world.hashing_trainer():
        first, second = await world.create(), await world.create(1)
        for run in (first, second):
            await world.result(run, 0)
        for run in (first, second):
            await world.send(run, (1, "forward"), (2, "forward"))
            await world.result(run, 2)
    kept = [await world.bus.client.hkeys(world.bus.cell.results(run)) for run in (first, second)]
    assert kept == [[b"2"], [b"1", b"2"]]


async def test_a_large_payload_goes_when_nobody_reads_its_operation_again(world: World) -> None:
    async with world.hashing_trainer():
        run, other = await world.create(), await world.create(1)
        await world.publish(run, 1, "forward_backward", bytes(2 << 20))
        await world.publish(other, 1, "forward", bytes(2 << 20))
        for name in (run, other):
            await world.result(name, 1)

        async def kept(name: str, num: int) -> bool:
            return len(await world.objects.paths(f"payloads/{name}")) == num

        await until(lambda: kept(other, 0))
        assert await kept(run, 1), "its gradient may have to begin again"
        await world.send(run, (2, "optim_step"))
        await until(lambda: kept(run, 0))
        assert (await world.state(run)).status == "ready"


async def test_operations_are_carried_out_in_the_order_of_their_numbers_and_once(world: World) -> None:
    async with world.hashing_trainer() as trainer:
        run = await world.create()
        await world.send(run, (3, "optim_step"), (2, "forward_backward"), (2, "forward_backward"))
        await world.result(run, 0)
        assert not trainer.seen
        await world.send(run, (1, "forward_backward"), (3, "optim_step"))
        await world.result(run, 3)
        await world.send(run, (1, "forward_backward"), (4, "forward"))
        await world.result(run, 4)
        assert [op.seq for message in trainer.seen for op in message.operations] == [1, 2, 3, 4]
        await until(lambda: world.open_operations(0))


async def test_a_gradient_stays_with_its_trainer_and_its_operations_stay_pending(world: World) -> None:
    async with world.hashing_trainer() as first, world.hashing_trainer() as second:
        run = await world.create()
        for seq in (1, 2, 3):
            await world.send(run, (seq, "forward_backward"))
            await world.result(run, seq)
        assert await world.open_operations(3)
        holder, other = (first, second) if first.seen else (second, first)
        assert [message.first for message in holder.seen] == [0, 1, 2] and not other.seen
        await world.send(run, (4, "optim_step"))
        await world.result(run, 4)
        await until(lambda: world.open_operations(0))
        assert not other.seen


async def _weights_after_two_steps(world: World) -> bytes:
    async with world.hashing_trainer():
        run = await world.create(9)
        for seq, action in enumerate(SCRIPT, start=1):
            await world.send(run, (seq, action))
        await world.result(run, len(SCRIPT))
        return await world.weights(run, 2)


SCRIPT: tuple[Action, ...] = (
    *("forward_backward", "forward_backward", "optim_step"),
    *("forward_backward", "forward", "forward_backward", "optim_step"),
)


@pytest.mark.parametrize("killed_after", range(1, len(SCRIPT)))
async def test_a_killed_trainers_gradient_is_begun_again_elsewhere(world: World, killed_after: int) -> None:
    undisturbed = await _weights_after_two_steps(world)
    run = await world.create()
    async with world.hashing_trainer() as doomed:
        for seq, action in enumerate(SCRIPT[:killed_after], start=1):
            await world.send(run, (seq, action))
            await world.result(run, seq)
        doomed.hold = asyncio.Event()
        await world.send(run, *enumerate(SCRIPT[killed_after:], start=killed_after + 1))
        await until(lambda: world.sent(run))
    async with world.hashing_trainer():
        await world.result(run, len(SCRIPT))
        assert await world.weights(run, 2) == undisturbed
        await until(lambda: world.open_operations(0))


@pytest.mark.parametrize("killed_after", range(len(SCRIPT)))
async def test_a_killed_owners_runs_go_on(world: World, killed_after: int) -> None:
    undisturbed = await _weights_after_two_steps(world)
    async with world.hashing_trainer():
        run = await world.create()
        for seq, action in enumerate(SCRIPT[:killed_after], start=1):
            await world.send(run, (seq, action))
        await world.result(run, killed_after)
        await world.kill_owner()
        await world.send(run, *enumerate(SCRIPT[killed_after:], start=killed_after + 1))
        world.start_owner()
        await world.result(run, len(SCRIPT))
        assert await world.weights(run, 2) == undisturbed
        await until(lambda: world.open_operations(0))


async def test_a_lost_message_to_a_trainer_is_sent_again(world: World) -> None:
    async with world.hashing_trainer() as trainer:
        run = await world.create()
        await world.send(run, (1, "forward_backward"))
        await world.result(run, 1)
        trainer.hold = asyncio.Event()
        await world.send(run, (2, "optim_step"))
        await until(lambda: world.sent(run))
        await world.bus.client.delete(world.bus.cell.trainer(trainer.name))
        trainer.hold.set()
        await world.result(run, 2)
        assert (await world.state(run)).version == 1


@pytest.mark.parametrize("status", ["queued", "ended"])
async def test_nothing_is_written_of_a_run_that_redis_lost_before_its_owner_wrote(
    bus: Bus, objects: Objects, status: RunStatus
) -> None:
    # Given an owner that reads a run because of a message, in a moment that Redis then loses
    world, changes = World(bus, objects), Changes()
    partition = Partition(PARTITION, bus, JobReader(bus, objects, AdapterStore(objects)))
    await partition.load(1.0, changes)
    run = await world.create()
    await bus.client.hset(bus.cell.run(run), mapping=RunState(status).fields())
    if status == "ended":
        await world.change_name(run, Checkpoint("weights", "one", 0, 0), deletes=True)
    for delivery in await bus.read([bus.cell.jobs(PARTITION)], GROUP_MANAGER, OWNER, count=2, block_ms=1000):
        await partition.handle(delivery, 1.0, changes)
    await bus.client.delete(bus.cell.run(run))
    for started in partition.runs.table.values():
        started.start(1.0, changes)
    # When it writes what follows, it finds that Redis is not what it read
    await bus.client.set(bus.cell.lease(PARTITION), "one")
    fence, writes = Fence(bus, PARTITION, "one"), commands(changes, bus.cell, PARTITION, [], 1.0)
    assert [type(error) for error in await Commits(bus).apply([(fence, writes)])] == [Lost]
    assert not await bus.client.exists(bus.cell.run(run))


async def test_a_failed_operation_fails_its_step_by_name_and_nothing_else(world: World) -> None:
    broken = Failure("invalid", "a token is outside the vocabulary")
    async with world.hashing_trainer() as trainer:
        trainer.refuse = lambda operation: broken if operation.seq == 2 else None
        run = await world.create()
        await world.send(run, (1, "forward_backward"), (2, "forward_backward"), (3, "forward_backward"))
        assert await world.failure(run, 2) == broken.reason
        assert (await world.result(run, 3)).failure is None
        await world.send(run, (4, "optim_step"))
        assert "operation 2 of this step has failed" in await world.failure(run, 4)
        assert (await world.state(run)).version == 0
        await world.send(run, (5, "forward_backward"), (6, "optim_step"))
        assert (await world.result(run, 6)).failure is None
        await until(lambda: world.open_operations(0))
        trainer.refuse = lambda operation: None
        alone = await world.create(1)
        await world.send(alone, (1, "forward"), (2, "forward"), (3, "forward"), (4, "forward"))
        await world.send(alone, (5, "forward_backward"), (6, "optim_step"))
        await world.result(alone, 6)
        assert await world.weights(run, 1) == await world.weights(alone, 1), "nothing of the failed step is in it"


async def test_a_gradient_that_its_trainer_gave_up_is_begun_again(world: World) -> None:
    """The trainer answers, and holds nothing any more, when a stretch without a part of it is refused as a whole."""
    async with world.hashing_trainer() as trainer:
        run = await world.create()
        await world.send(run, (1, "forward_backward"))
        await world.result(run, 1)
        trainer.gives_up = True
        await world.send(run, (2, "forward"))
        assert await world.failure(run, 2) == "given up"
        trainer.gives_up = False
        await world.send(run, (3, "forward_backward"))
        await world.result(run, 3)
        assert [op.seq for op in trainer.seen[-1].operations] == [1, 3]


async def test_a_failed_runs_operations_are_answered(world: World) -> None:
    async with world.hashing_trainer() as trainer:
        trainer.refuses_init = True
        run = await world.create()
        await world.send(run, (1, "forward"), (2, "optim_step"))
        assert await world.failure(run, 0) == "no such layer"
        assert [await world.failure(run, seq) for seq in (1, 2)] == ["no such layer"] * 2
        await world.send(run, (3, "forward"), (4, "unload"))
        assert await world.failure(run, 3) == "no such layer"
        await world.result(run, 4)
        assert (await world.state(run)).status == "ended"  # no longer counted as unfinished


async def test_an_operation_that_nobody_can_read_fails(world: World) -> None:
    async with world.hashing_trainer():
        run = await world.create()
        fields = {"id": f"{run}:1", "job": run, "partition": PARTITION, "epoch": 0, "kind": "Operation"}
        await world.bus.client.xadd(world.bus.cell.ops(PARTITION), {**fields, "payload": b"\xc1"})
        assert "could not be read" in await world.failure(run, 1)
        await world.send(run, (2, "forward"))
        assert (await world.result(run, 2)).failure is None


async def test_saves_name_the_newest_version(world: World) -> None:
    async with world.hashing_trainer():
        run = await world.create()
        assert await world.save(run, 1, SaveWeights("begin", ttl_s=3600), "save_weights") == Saved(0, "begin")
        assert await world.save(run, 2, SaveWeights(sampler="s:0", inflight=True)) == Saved(0, "", "s:0")
        assert await world.save(run, 3, SaveWeights(sampler="s:1")) == Saved(0, "", "s:1")
        await world.send(run, (4, "forward_backward"), (5, "optim_step"))
        assert await world.save(run, 6, SaveWeights(sampler="s:2", inflight=True)) == Saved(1, "", "s:2")
        assert 0 < await world.bus.client.ttl(world.bus.cell.sampler("s:1")) <= USED_S
        state = await world.state(run)
        samplers = [await world.sampler(f"s:{number}") for number in range(3)]
        assert [(one.adapter.version, one.inflight) for one in samplers] == [(0, True), (0, False), (1, True)]
        assert state.inflight == 1
        (found,) = state.checkpoints
        assert found.expires_at == found.created_at + 3600
        assert found == Checkpoint("weights", "begin", 0, found.created_at, found.expires_at)


async def test_a_load_makes_the_next_version_a_copy_in_its_order(world: World) -> None:
    async with world.hashing_trainer() as trainer:
        first, run = await world.create(1), await world.create()
        await world.send(first, (1, "forward_backward"), (2, "optim_step"))
        await world.result(first, 2)
        source = AdapterRef(TENANT, first, 1)
        await world.send(run, (5, "forward_backward"), (6, "optim_step"), (1, "forward_backward"))
        await world.send(run, (2, "forward_backward"), failure=Failure("invalid", "unknown loss_fn"))
        await world.load(run, 4, source)
        await world.result(run, 2)
        await world.send(run, (3, "forward"))
        loaded = msgspec.msgpack.decode((await world.result(run, 4)).outputs, type=Saved)
        assert loaded == Saved(1, "tinker://x")
        assert await world.weights(run, 1) == await world.weights(first, 1)
        assert (await world.result(run, 6)).failure is None, "what failed before the load is not of this step"
        [last] = [message for message in trainer.seen if message.job == run and message.adapter.version == 1]
        assert [one.seq for one in last.operations] == [5, 6] and last.first == 0
        await until(lambda: world.open_operations(0))


async def test_a_load_that_cannot_be_had_fails_and_leaves_the_run_as_it_was(world: World) -> None:
    async with world.hashing_trainer() as trainer:
        first, run = await world.create(1), await world.create()
        await world.send(run, (1, "forward_backward"))
        await world.result(run, 1)
        trainer.refuses_init = True
        await world.load(run, 2, AdapterRef(TENANT, first, 0))
        assert await world.failure(run, 2) == "no such layer"
        await world.send(run, (3, "optim_step"))
        assert (await world.result(run, 3)).failure is None
        assert (await world.state(run)).version == 1


@pytest.mark.parametrize("dies", ["owner", "trainer", "message"])
async def test_a_load_outlives_whoever_dies(world: World, dies: str) -> None:
    async with contextlib.AsyncExitStack() as stack:
        trainer = await stack.enter_async_context(world.hashing_trainer())
        first, run = await world.create(1), await world.create()
        await world.result(first, 0)
        await world.result(run, 0)
        trainer.hold = asyncio.Event()
        await world.load(run, 1, AdapterRef(TENANT, first, 0))
        await world.send(run, (2, "forward_backward"), (3, "optim_step"))
        await until(lambda: world.sent(run))
        if dies == "owner":
            await world.kill_owner()
            world.start_owner()
        elif dies == "message":
            await world.bus.client.delete(world.bus.cell.train)
            await world.bus.ensure_group(world.bus.cell.train, "trainer")
        else:
            await stack.aclose()
            await stack.enter_async_context(world.hashing_trainer())
        trainer.hold.set()
        assert (await world.result(run, 3)).failure is None
        assert (await world.state(run)).version == 2
        await until(lambda: world.open_operations(0))


async def test_a_run_ends_with_its_session(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "GRACE_S", 0.5)
    async with world.hashing_trainer() as trainer:
        run = await world.create()
        await world.send(run, (1, "forward_backward"))
        await world.result(run, 1)
        trainer.hold = asyncio.Event()
        await world.send(run, (2, "optim_step"))
        await world.objects.write(f"payloads/{run}/00000000/large", b"of an operation")
        await world.bus.client.delete(world.bus.cell.session(SESSION))
        assert "session has ended" in await world.failure(run, 2)
        assert (await world.state(run)).status == "ended"
        await world.send(run, (3, "forward"))
        assert "has ended" in await world.failure(run, 3)
        await until(lambda: world.open_operations(0))
        assert await world.bus.client.scard(world.bus.cell.active(PARTITION)) == 0

        async def are_gone() -> bool:
            return await world.objects.paths(f"payloads/{run}") == []

        await until(are_gone)


async def test_a_session_that_is_back_in_time_loses_no_run(world: World) -> None:
    """Redis may have been away for longer than a session counts as alive."""
    key = world.bus.cell.session(SESSION)
    async with world.hashing_trainer():
        run = await world.create()
        await world.result(run, 0)
        await world.bus.client.delete(key)
        await asyncio.sleep(2 * LEASE_S)  # owners look at sessions so often
        await world.bus.client.set(key, "{}")
        await world.send(run, (1, "forward"))
        assert (await world.result(run, 1)).failure is None


async def test_no_more_runs_are_active_than_the_tenant_may_have(world: World) -> None:
    record = TenantRecord(id=TENANT, created_at=0, max_jobs=1)
    await world.bus.client.hset(TENANTS, TENANT, JSON.encode(record))
    await asyncio.sleep(2 * LEASE_S)  # owners look at tenants so often
    async with world.hashing_trainer():
        first, second = await world.create(0), await world.create(1)
        await world.result(first, 0)
        assert (await world.state(second)).status == "queued"
        await world.send(first, (1, "unload"))
        await world.result(first, 1)
        assert (await world.result(second, 0)).failure is None


async def test_a_job_that_waits_because_live_runs_use_up_max_jobs_says_so_once(world: World) -> None:
    record = TenantRecord(id=TENANT, created_at=0, max_jobs=1)
    await world.bus.client.hset(TENANTS, TENANT, JSON.encode(record))
    await asyncio.sleep(2 * LEASE_S)  # owners look at tenants so often
    async with world.hashing_trainer():
        run = await world.create()
        await world.result(run, 0)
        job = job_spec("waits", tenant=TENANT)
        await create_job(world.bus, job)

        async def told() -> int:
            return sum("1 of them are runs of the Tinker" in event.message for event in await world.events(job.id))

        await until(told)
        await asyncio.sleep(2 * LEASE_S)  # owners look for jobs that wait so often
        assert await told() == 1
        await world.send(run, (1, "unload"))
        await until_status(world.bus, job.id, "running")


async def test_runs_stand_still_while_the_tokens_of_the_day_are_used_up(world: World) -> None:
    record = TenantRecord(id=TENANT, created_at=0, max_tokens_per_day=1)
    await world.bus.client.hset(TENANTS, TENANT, JSON.encode(record))
    await asyncio.sleep(2 * LEASE_S)  # owners look at tenants so often
    async with world.hashing_trainer() as trainer:
        run, other = await world.create(), await world.create(1)
        await world.send(run, (1, "forward_backward"))
        await world.result(run, 1)
        await world.result(other, 0)
        await asyncio.sleep(2 * LEASE_S)  # owners look at what was used so often
        await world.send(run, (2, "optim_step"))
        assert await world.save(other, 1, SaveWeights("a")), "what costs nothing is answered"
        assert not await world.sent(run) and len(trainer.seen) == 1
        await world.kill_owner()
        world.start_owner()
        assert await world.save(other, 2, SaveWeights("b"))
        assert not await world.sent(run) and len(trainer.seen) == 1
        today = day_field(time.time())
        await world.bus.client.hdel(world.bus.cell.usage(TENANT), today)  # as at midnight
        assert (await world.result(run, 2)).failure is None


# ---- names ----------------------------------------------------------------------------------------------------------


async def named(world: World) -> str:
    """A run with two checkpoints of version 0."""
    run = await world.create()
    for seq, name in ((1, "one"), (2, "two")):
        await world.save(run, seq, SaveWeights(name), "save_weights")
    return run


async def names(world: World, run: str) -> list[tuple[str, int | None]]:
    return [(known.name, known.expires_at) for known in (await world.state(run)).checkpoints]


async def test_a_change_of_a_name_outlives_the_owner(world: World) -> None:
    async with world.hashing_trainer():
        run = await named(world)
        one, two = (await world.state(run)).checkpoints
        await world.kill_owner()
        await world.change_name(run, one, deletes=True)
        await world.change_name(run, two, expires_at=1 << 40)
        await world.change_name(run, one, deletes=True)
        assert [name for name, _ in await names(world, run)] == ["one", "two"]
        world.start_owner()
        await until(lambda: is_named(world, run, [("two", 1 << 40)]))
        await world.change_name(run, two, expires_at=None)
        await until(lambda: is_named(world, run, [("two", None)]))


async def is_named(world: World, run: str, expected: list[tuple[str, int | None]]) -> bool:
    return await names(world, run) == expected


async def test_a_change_leaves_a_name_alone_that_was_saved_anew(world: World) -> None:
    async with world.hashing_trainer():
        run = await named(world)
        one, two = (await world.state(run)).checkpoints
        await world.send(run, (3, "optim_step"))
        await world.save(run, 4, SaveWeights("one"), "save_weights")
        await world.change_name(run, one, deletes=True)
        await world.change_name(run, two, expires_at=1 << 40)
        await until(lambda: is_named(world, run, [("two", 1 << 40), ("one", None)]))


async def test_an_expired_name_goes_with_the_next_save(world: World) -> None:
    async with world.hashing_trainer():
        run = await named(world)
        one, _ = (await world.state(run)).checkpoints
        await world.change_name(run, one, expires_at=1)
        await until(lambda: is_named(world, run, [("one", 1), ("two", None)]))
        await world.save(run, 3, SaveWeights("three"), "save_weights")
        assert [name for name, _ in await names(world, run)] == ["two", "three"]
