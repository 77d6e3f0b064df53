"""The owner over a real Redis and a real store, with stand-in workers around it."""

import asyncio
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from common.bus.bus import Bus
from common.bus.streams import GROUP_MANAGER, NUM_PARTITIONS, OWNER, Cell, partition_of
from common.cancellation import cancel_all
from common.errors import Fenced
from common.store.adapters import AdapterStore
from common.store.objects import Objects
from common.wire.codec import decode, encode
from common.wire.messages import AdapterRef, AdapterUpdate, Cancel, DeadLetter, Failure, Init, Start, TrainStep, Usage
from harness.standin import (
    FixedSlots,
    StandInTrainer,
    balanced,
    command,
    create_job,
    job_spec,
    ledger_of,
    state_of,
    until_status,
)
from manager_service.http.quota import count_inference
from manager_service.owner import big_steps
from manager_service.owner.big_steps import PayloadTidier
from manager_service.owner.job_reader import JobReader
from manager_service.owner.jobs.changes import Changes
from manager_service.owner.jobs.items import Items
from manager_service.owner.jobs.job import Job
from manager_service.owner.leases import Leases, LeaseState
from manager_service.owner.partition import Partition
from manager_service.owner.surroundings import Surroundings
from manager_service.owner.transaction import COMMIT, Commits, Fence, Lost
from manager_service.records.job_records import JobState, Training
from manager_service.records.keys import JSON
from manager_service.records.sample_records import LIMITS
from manager_service.records.stored import StoredBytes
from manager_service.records.tenants import TENANTS, TenantRecord, Tenants
from manager_service.scheduling.allocator import Allocator
from tests.common.test_worker import length, until
from tests.support.owning import System


async def test_a_job_trains_its_steps_and_the_ledger_balances(system: System) -> None:
    spec = job_spec(num_steps=5)
    state = await system.run_job(spec, "succeeded", "failed")
    assert (state.status, state.version) == ("succeeded", 5)
    ledger = await ledger_of(system.bus, spec.id)
    assert ledger == {"issued": 80, "trained": 80, "in_flight": 0}
    steps = [e.data["step"] for e in await system.events(spec.id) if e.type == "metrics"]
    assert steps == [1, 2, 3, 4, 5]
    for key in (system.bus.cell.active(partition_of(spec.tenant)), system.bus.cell.begun):
        assert await system.bus.client.scard(key) == 0


async def test_a_masked_trajectory_is_left_out_and_a_failed_group_replaced(system: System) -> None:
    def reward(start: Start, sample: int) -> float | Failure:
        if start.group == 1 and sample < 3:
            return Failure("grader", "it raised")
        return Failure("tool", "gone") if (start.group, sample) == (2, 0) else 1.0

    system.env.reward = reward
    spec = job_spec(num_steps=1)
    await system.run_job(spec)
    (step,) = system.trainer.seen
    assert sorted(set(step.rows.groups.numpy().tolist())) == [0, 2, 3, 4]
    assert await ledger_of(system.bus, spec.id) == {"issued": 20, "trained": 15, "failed": 5, "in_flight": 0}
    assert step.next_group == 5


def common_and_rare(start: Start, sample: int) -> Failure:
    return Failure("grader", "common" if start.group else "rare")


def not_a_number(start: Start, sample: int) -> float:
    return float("nan")


@pytest.mark.parametrize(("reward", "said"), [(common_and_rare, "common"), (not_a_number, "not a finite number")])
async def test_a_job_that_no_grader_can_score_fails_with_the_commonest_reason(
    system: System, reward: Any, said: str
) -> None:
    system.env.reward = reward
    spec = job_spec()
    state = await system.run_job(spec, "failed")
    assert state.error is not None and said in state.error.message and state.error.code == "grader"
    ledger = await ledger_of(system.bus, spec.id)
    assert balanced(ledger) and ledger["in_flight"] == 0


async def test_a_refused_step_fails_the_job_and_keeps_its_last_version(system: System) -> None:
    system.trainer.refuse = lambda step: Failure("non_finite", "loss is nan") if step.adapter.version == 1 else None
    spec = job_spec()
    state = await system.run_job(spec, "failed")
    assert state.version == 1 and state.error is not None and "loss is nan" in state.error.message
    await until(lambda: _balanced(system.bus, spec.id))
    assert (await ledger_of(system.bus, spec.id))["in_flight"] == 0


async def _balanced(bus: Bus, job: str) -> bool:
    return balanced(await ledger_of(bus, job))


async def test_dynamic_sampling_draws_on_and_stops_at_three_batches(system: System) -> None:
    system.env.reward = lambda start, sample: 1.0 if start.group % 2 else float(sample % 2)
    spec = job_spec(num_steps=1, dynamic_sampling=True)
    await system.run_job(spec)
    (step,) = system.trainer.seen
    assert sorted(set(step.rows.groups.numpy().tolist())) == [0, 2, 4, 6]
    ledger = await ledger_of(system.bus, spec.id)
    assert ledger["filtered"] == 12 and balanced(ledger)


async def test_without_any_signal_the_version_is_committed_unchanged(system: System) -> None:
    system.env.reward = lambda start, sample: 1.0
    spec = job_spec(num_steps=1, dynamic_sampling=True)
    await system.run_job(spec)
    (step,) = system.trainer.seen
    assert len(step.rows.lengths) == 0
    ledger = await ledger_of(system.bus, spec.id)
    assert ledger == {"issued": 48, "filtered": 48, "in_flight": 0}


async def test_cancel_settles_everything(system: System) -> None:
    system.env.delay_s = 0.05
    spec = job_spec(num_steps=50)
    await create_job(system.bus, spec)
    await until(lambda: len(system.trainer.seen) >= 2)
    await command(system.bus, spec, "cancel")
    state = await until_status(system.bus, spec.id, "cancelled")
    assert state.finished_at is not None
    await until(lambda: _settled(system.bus, spec.id))
    await until(lambda: _no_entries(system.bus))


async def _settled(bus: Bus, job: str) -> bool:
    ledger = await ledger_of(bus, job)
    return balanced(ledger) and ledger["in_flight"] == 0


async def _no_entries(bus: Bus) -> bool:
    cell, partition = bus.cell, partition_of("acme")
    streams = [cell.env, cell.rollout, cell.train, cell.scored(partition), cell.adapters(partition)]
    return not any([await bus.client.xlen(s) for s in streams])


async def test_a_tenants_jobs_beyond_its_quota_wait_their_turn(system: System) -> None:
    record = TenantRecord(id="acme", created_at=0, max_jobs=1)
    await system.bus.client.hset(TENANTS, "acme", msgspec.json.encode(record))
    await asyncio.sleep(0.5)
    system.env.delay_s = 0.02
    first, second = job_spec("job-a", created_at=1), job_spec("job-b", created_at=2)
    await create_job(system.bus, first)
    await create_job(system.bus, second)
    await until_status(system.bus, first.id, "running")
    assert (await state_of(system.bus, second.id)).status in ("validating_files", "queued")
    await until_status(system.bus, first.id, "succeeded")
    await until_status(system.bus, second.id, "succeeded")


async def test_tokens_of_completions_count_where_tenants_share_rollouts(system: System) -> None:
    await system.kill_owner()
    owner = system.start_owner()
    await create_job(system.bus, job_spec(num_steps=10_000))
    allocator = owner._allocator  # pyright: ignore[reportPrivateUsage]
    await until(lambda: "acme" in owner._surroundings._completed)  # pyright: ignore[reportPrivateUsage]
    await count_inference(system.bus.client, system.bus.cell, "acme", Usage(10**9, 10**9))
    await until(lambda: allocator._rollouts.virtual_time("acme") >= 2 * 10**9)  # pyright: ignore[reportPrivateUsage]


async def test_work_that_redis_lost_is_found_missing_and_done_again(system: System) -> None:
    # Given trajectories whose messages vanish, as when Redis loses its last moment
    system.env.delay_s = 0.2
    spec = job_spec(num_steps=2)
    await create_job(system.bus, spec)
    await until(lambda: system.env.seen)
    await system.bus.client.xtrim(system.bus.cell.env, maxlen=0)
    # Then they are issued again, and the job ends as if nothing had been
    await until_status(system.bus, spec.id, "succeeded")
    assert await ledger_of(system.bus, spec.id) == {"issued": 32, "trained": 32, "in_flight": 0}


async def test_turns_of_live_sessions_are_under_way_until_their_env_worker_has_settled_them(bus: Bus) -> None:
    allocator = Allocator(FixedSlots())
    surroundings = Surroundings(bus, Tenants(bus.client), StoredBytes(bus.client, {}, 1), allocator, LIMITS)
    inboxes = [bus.cell.scored(0), bus.cell.adapters(0)]
    for stream in inboxes:
        await bus.ensure_group(stream, GROUP_MANAGER)
    await bus.client.zadd(bus.cell.env_workers, {"env-1": 1, "env-2": 2})
    assert await surroundings.nothing_under_way(inboxes, [])
    # When a turn waits for one of the env workers
    await bus.client.xadd(bus.cell.env_worker("env-2"), {"payload": "x" * 4096})
    # Then work is under way, and it is counted as such
    assert not await surroundings.nothing_under_way(inboxes, [])
    assert await surroundings.env_backlog() == 1


async def test_turns_in_a_rollout_workers_own_stream_are_under_way(bus: Bus) -> None:
    surroundings = Surroundings(
        bus, Tenants(bus.client), StoredBytes(bus.client, {}, 1), Allocator(FixedSlots()), LIMITS
    )
    await bus.client.zadd(bus.cell.rollout_workers, {"rollout-1": 1})
    assert await surroundings.nothing_under_way([], [])
    await bus.client.xadd(bus.cell.rollout_worker("rollout-1"), {"payload": "x"})
    assert not await surroundings.nothing_under_way([], []) and await surroundings.env_backlog() == 0


async def test_a_step_that_redis_lost_is_sampled_and_trained_again(system: System) -> None:
    lost = 0

    class Losing(StandInTrainer):
        async def __call__(self, message: Any, beat: Any) -> Any:
            nonlocal lost
            if isinstance(message, TrainStep) and not lost:
                lost += 1
                await system.bus.client.xtrim(system.bus.cell.train, maxlen=0)
                return []
            return await super().__call__(message, beat)

    system.trainer.__class__ = Losing
    spec = job_spec(num_steps=2)
    await system.run_job(spec)
    assert lost == 1
    assert await ledger_of(system.bus, spec.id) == {"issued": 32, "trained": 32, "in_flight": 0}


async def test_a_reward_beyond_all_bounds_fails_its_own_job_alone(system: System) -> None:
    # Given a grader whose rewards are finite but whose squares are not
    system.env.reward = lambda start, sample: 1e154 if start.job == "job-a" else float(sample % 2)
    bad, good = job_spec("job-a", num_steps=1), job_spec("job-b", num_steps=2)
    await create_job(system.bus, bad)
    await create_job(system.bus, good)
    assert (await until_status(system.bus, bad.id, "failed")).error is not None
    # Then the next owner can read its record, and the other job ends well
    await system.kill_owner()
    system.start_owner()
    await until_status(system.bus, good.id, "succeeded")


async def test_a_job_whose_records_cannot_be_read_stops_nobody_else(system: System) -> None:
    system.env.delay_s = 0.02
    bad, good = job_spec("job-a", num_steps=9), job_spec("job-b", num_steps=9)
    await create_job(system.bus, bad)
    await create_job(system.bus, good)
    await until(lambda: len(system.trainer.seen) >= 2)
    await system.kill_owner()
    await system.bus.client.hset(system.bus.cell.job(bad.id), "state", b'{"status": 7')
    system.start_owner()
    await until_status(system.bus, good.id, "succeeded")


async def test_what_an_owner_cannot_work_on_is_kept_as_a_dead_letter(system: System) -> None:
    # Given a job at work
    spec, bus = job_spec(num_steps=3), system.bus
    system.env.delay_s = 0.05
    await system.run_job(spec, "running")
    # When its owner reads a message of a kind that is not for it, and one that is none
    partition = partition_of(spec.tenant)
    stray = Cancel(id="stray", tenant=spec.tenant, job=spec.id, partition=partition)
    await bus.publish([(bus.cell.jobs(partition), stray)])
    await bus.client.xadd(bus.cell.jobs(partition), {"payload": b"garbage"})
    # Then both are dead letters, which hold what was read, and the job goes on
    await until(lambda: length(bus, bus.cell.dead, 2))
    rows: Any = await bus.client.xrange(bus.cell.dead)
    letters = [decode(fields[b"payload"]) for _, fields in rows]
    assert [letter.payload for letter in letters if isinstance(letter, DeadLetter)] == [encode(stray), b"garbage"]
    assert [letter.job for letter in letters] == [spec.id, ""]
    await until_status(bus, spec.id, "succeeded")


async def test_an_owner_that_slept_through_its_lease_forgets_what_it_knew(bus: Bus) -> None:
    one, other = Leases(bus, "one", 60), Leases(bus, "other", 60)
    ones, others = Fence(bus, 3, "one"), Fence(bus, 3, "other")
    assert (await one.round({})).leases[3] is LeaseState.TAKEN
    await ones.read_stamp()
    # While it sleeps, another takes the lease, writes once, and leaves
    await forget_leases(bus)
    assert (await other.round({})).leases[3] is LeaseState.TAKEN
    await others.read_stamp()
    commits, x = Commits(bus), bus.cell.key("x")
    assert await commits.apply([(others, [["SET", x, "by the other"]])]) == [None]
    await other.leave()
    # Then the first sees that its lease was not renewed, and its write is refused, not taken for done
    assert (await one.round({})).leases[3] is LeaseState.TAKEN
    (refused,) = await commits.apply([(ones, [["SET", x, "by the first"]])])
    assert isinstance(refused, Lost)
    assert await bus.client.get(x) == b"by the other"


async def test_a_late_owner_writes_nothing_though_the_next_has_not_written_yet(bus: Bus) -> None:
    one, other = Leases(bus, "one", 60), Leases(bus, "other", 60)
    fence = Fence(bus, 3, "one")
    await one.round({})
    await fence.read_stamp()
    await forget_leases(bus)
    assert (await other.round({})).leases[3] is LeaseState.TAKEN
    x = bus.cell.key("x")
    (refused,) = await Commits(bus).apply([(fence, [["SET", x, "late"]])])
    assert isinstance(refused, Fenced)
    assert await bus.client.get(x) is None


async def test_a_commit_that_is_sent_twice_is_applied_once(bus: Bus) -> None:
    await Leases(bus, "one", 60).round({})
    fence, x = Fence(bus, 3, "one"), bus.cell.key("x")
    await fence.read_stamp()
    _, words = fence.words([["INCR", x]])
    commit = bus.client.register_script(COMMIT)
    assert [await commit(keys=[words[0]], args=words) for _ in range(2)] == [[b"done"], [b"done"]]
    assert await bus.client.get(x) == b"1"


async def test_a_command_that_redis_refuses_harms_no_other_partition(bus: Bus) -> None:
    # Given an owner of three partitions
    leases = await Leases(bus, "one", 60).round({})
    assert {leases.leases[number] for number in (1, 2, 3)} == {LeaseState.TAKEN}
    fences, key = [Fence(bus, number, "one") for number in (1, 2, 3)], bus.cell.key
    for fence in fences:
        await fence.read_stamp()
    commits, good = Commits(bus), ["SET", key("x"), "1"]
    # When Redis refuses the second command for one of them
    bad = [["SET", key("y"), "1"], ["LPUSH", key("x"), "1"], ["SET", key("z"), "1"]]
    first, refused, last = await commits.apply(list(zip(fences, ([good], bad, [["SET", key("v"), "1"]]), strict=True)))
    # Then it is refused for that one alone, and what stands behind it is not written
    assert (first, last) == (None, None)
    assert isinstance(refused, Lost) and "WRONGTYPE" in str(refused)
    assert await bus.client.mget([key("x"), key("y"), key("z"), key("v")]) == [b"1", b"1", None, b"1"]
    # And the others go on writing, where it may not
    assert await commits.apply([(fences[0], [good]), (fences[2], [good])]) == [None, None]


async def test_an_entry_that_was_delivered_and_reached_nobody_is_found(system: System) -> None:
    # Given a job that never lets the cell be idle, an owner that has both tenants' partitions in memory, and a job whose
    # result is read by an owner that then forgets it
    system.env.delay_s = 0.02
    busy, before = job_spec("job-a", "bluebird", num_steps=10_000), job_spec("job-b", num_steps=1)
    other = job_spec("job-c", num_steps=2)
    for spec in (busy, before):
        await create_job(system.bus, spec)
    await until_status(system.bus, before.id, "succeeded")
    scored = system.bus.cell.scored(partition_of(other.tenant))
    # The one that waits longest is served first
    reading = system.bus.read([scored], GROUP_MANAGER, OWNER, count=1, block_ms=60_000)
    reader = asyncio.create_task(reading)
    await until(lambda: _blocks_longest(system.bus))
    await create_job(system.bus, other)
    assert len(await reader) == 1
    # Then its owner finds the entry within a lease or two, and the job ends
    await until_status(system.bus, other.id, "succeeded")
    assert await ledger_of(system.bus, other.id) == {"issued": 32, "trained": 32, "in_flight": 0}


async def _blocks_longest(bus: Bus) -> bool:
    """Somebody waits in an XREADGROUP for longer than an owner ever does."""
    return any(row["cmd"] == "xreadgroup" and int(row["idle"]) >= 1 for row in await bus.client.client_list())


async def forget_leases(bus: Bus) -> None:
    """Ends all leases, as when they have run out."""
    await bus.client.delete(bus.cell.owners, *(bus.cell.lease(p) for p in range(NUM_PARTITIONS)))


@pytest.mark.parametrize("kind", ["Start", "TurnResult"])
async def test_an_entry_whose_id_names_nothing_fails_its_job_in_words(system: System, kind: str) -> None:
    # Given a job under way, and an entry of it that nobody can read
    system.env.delay_s = 60
    spec = job_spec()
    await create_job(system.bus, spec)
    await until(lambda: len(system.env.seen) > 0)
    about = {"id": 123, "tenant": ["x"], "job": spec.id, "partition": partition_of(spec.tenant)}
    # When a worker has read it, then the job says what is wrong
    with capture_logs() as logs:
        await system.bus.client.xadd(system.bus.cell.env, {"payload": msgspec.msgpack.encode({"type": kind, **about})})
        state = await until_status(system.bus, spec.id, "failed")
    assert state.error is not None and state.error.code == "dead_letter"
    said = "a message could not be read, and its id '123' names none of the job's trajectories: ValidationError: "
    assert state.error.message.startswith(said)
    assert "transition_failed" not in [log["event"] for log in logs]


async def test_payloads_go_once_no_message_can_name_their_version(system: System) -> None:
    """Payloads that a crash left go too: nobody remembers them."""
    spec = job_spec(num_steps=10_000)
    for version in (0, 1, 9_999):
        await system.objects.write(f"payloads/{spec.id}/{version:08d}/left", b"by a crash")
    await create_job(system.bus, spec)
    await until(lambda: len(system.trainer.seen) >= 1)
    await system.kill_owner()
    system.start_owner()
    await until(lambda: kept(system.objects, spec.id, minimum=1))
    await command(system.bus, spec, "cancel")
    await until(lambda: kept(system.objects, spec.id, minimum=None))


async def test_old_payloads_of_completions_and_grader_runs_go(
    objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [f"payloads/{job}/00000000/large" for job in ("chat-1", "ftjob-1", "grade-1")]
    for path in paths:
        await objects.write(path, b"of a message")
    await objects.delete_older("payloads/chat-1", 3600.0)
    assert await objects.paths("payloads") == paths
    monkeypatch.setattr(big_steps, "ENDED_S", -3600.0)
    task = asyncio.create_task(PayloadTidier(objects).run())
    await until(lambda: is_left(objects, paths[1:2]))
    await cancel_all([task])


async def is_left(objects: Objects, paths: list[str]) -> bool:
    return await objects.paths("payloads") == paths


async def kept(objects: Objects, job: str, *, minimum: int | None) -> bool:
    """Is the oldest version with payloads at least this one? None: has none any?"""
    versions = [int(folder) for folder in await objects.folders(f"payloads/{job}")]
    return not versions if minimum is None else bool(versions) and min(versions) >= minimum


def test_a_version_that_groups_are_sampled_by_keeps_its_payloads() -> None:
    spec = job_spec(batch_size=1, group_size=2, max_staleness=1)
    job = Job(Cell("tiny"), spec, JobState(status="running", version=0), Items(), Items())
    for _ in range(2):
        job.issue_group(Changes())
    changes, training = Changes(), Training("b", (), 0, (0,))
    job.state.training = training
    job.open.groups.pop(0)
    update = AdapterUpdate(id="u", **job.orders.about(job.state), adapter=AdapterRef("acme", spec.id, 1), batch="b")
    job.on_adapter(update, 1.0, changes)
    assert changes.oldest_in_use == {spec.id: 0}


async def test_a_corrupt_manifest_fails_its_own_job(system: System) -> None:
    # Given an owner that dies while a step is under way, and a manifest that was cut short
    waiting = asyncio.Event()

    class Hanging(StandInTrainer):
        async def __call__(self, message: Any, beat: Any) -> Any:
            if isinstance(message, TrainStep) and message.job == "job-a":
                beat()
                await waiting.wait()
            return await super().__call__(message, beat)

    system.trainer.__class__ = Hanging
    bad = job_spec("job-a", num_steps=2)
    await create_job(system.bus, bad)
    async with asyncio.timeout(60):
        while not (await state_of(system.bus, bad.id)).training:
            await asyncio.sleep(0.02)
    await system.kill_owner()
    await system.objects.create(f"adapters/acme/{bad.id}/00000001/manifest.json", b'{"adapter":')
    system.start_owner()
    # Then the next owner says so, and goes on
    state = await until_status(system.bus, bad.id, "failed")
    assert state.error is not None and state.error.code == "corrupt_adapter"
    waiting.set()


async def test_lost_work_is_found_though_the_owners_clock_has_gone_back(bus: Bus, objects: Objects) -> None:
    # Given a job whose Init is lost, in the memory of an owner whose clock then goes back
    spec, changes = msgspec.structs.replace(job_spec(), source=AdapterRef("acme", "other", 1)), Changes()
    state = JSON.encode(JobState(status="running", initialising=True))
    await bus.client.hset(bus.cell.job(spec.id), mapping={"spec": JSON.encode(spec), "state": state})
    await bus.client.sadd(bus.cell.active(partition_of(spec.tenant)), spec.id)
    partition = Partition(partition_of(spec.tenant), bus, JobReader(bus, objects, AdapterStore(objects)))
    await partition.load(10_000.0, changes)

    async def nothing_under_way() -> bool:
        return True

    # Then it is sent again as soon as nothing has come for a while by the clock as it is now
    for now in (5_000.0, 5_002.0, 5_003.0):
        await partition.reconcile(now, changes, quiet_s=1.0, nothing_under_way=nothing_under_way)
        await partition.search()
    assert [type(message) for _, message in changes.published] == [Init]
