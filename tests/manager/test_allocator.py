"""The owner's decisions within a tenant and about the engines' memory; `test_policies.py` has the policies."""

import random
from dataclasses import dataclass
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from common.tasks.environments import SUPERVISED
from common.wire.messages import EnvSpec
from harness.standin import FixedSlots, job_spec
from manager_service.records.job_records import JobSpec
from manager_service.records.tenants import TenantRecord
from tests.support.owner_world import World

SEEDS = st.integers(0, 10**9)


def test_the_job_with_the_higher_priority_then_the_earlier_deadline_is_sampled_first() -> None:
    world = World(random.Random(1), cluster=FixedSlots(rollout=2, trainer=1, env=0))
    hyper: dict[str, Any] = {"batch_size": 8, "group_size": 3, "num_steps": 1}
    world.add(job_spec("none", created_at=1, **hyper))
    world.add(job_spec("later", created_at=1, deadline_s=900.0, **hyper))
    world.add(job_spec("soon", created_at=1, deadline_s=60.0, **hyper))
    world.add(job_spec("first", created_at=1, priority=1, deadline_s=9000.0, **hyper))
    ends: list[str] = []
    while world.jobs:
        before = set(world.jobs)
        world.turn()
        ends += before - set(world.jobs)
    assert ends == ["first", "soon", "later", "none"]


def test_queued_jobs_start_by_urgency_and_every_fourth_time_by_age() -> None:
    world = World(random.Random(1))
    world.allocator.tenants = {"acme": TenantRecord(id="acme", created_at=0, max_jobs=1)}
    for n in range(8):
        world.add(job_spec(f"job-{n}", created_at=1 + n, batch_size=1, group_size=2, num_steps=1, priority=n))
    world.run()
    assert world.started == [f"job-{n}" for n in (7, 6, 5, 0, 4, 3, 2, 1)]


def test_while_the_stores_disk_is_full_nothing_starts_and_no_step_is_published() -> None:
    few: dict[str, Any] = {"batch_size": 1, "group_size": 2, "num_steps": 2}
    world = World(random.Random(1))
    job = world.add(job_spec("begun", created_at=1, **few))
    while job.state.version < 0:
        world.turn()
    world.allocator.disk_full = True
    world.add(job_spec("new", created_at=1, **few))
    while not job.next_batch():
        world.turn()
    world.turn()
    assert job.next_batch() and (world.trained, world.started) == ([], ["begun"])
    world.allocator.disk_full = False
    world.run()


@dataclass(frozen=True)
class SmallMemory(FixedSlots):
    held: int = 0

    def kv_tokens(self) -> int | None:
        return self.held


def small_world() -> World:
    """Memory for 1.5 x 100 tokens."""
    cluster = SmallMemory(rollout=64, trainer=1, env=0, held=100)
    return World(random.Random(1), cluster=cluster, ends=("succeeded", "failed"))


@settings(max_examples=4, deadline=None)
@given(SEEDS)
def test_the_engines_memory_is_respected_and_a_long_job_is_not_kept_out_by_short_ones(seed: int) -> None:
    """Room for 1.5 x 400 tokens; a group of the long job needs 3 x 100, one of a short job 3 x 10."""
    world = World(random.Random(seed), cluster=SmallMemory(rollout=64, trainer=1, env=0, held=400))
    hyper: dict[str, Any] = {"batch_size": 2, "group_size": 3}
    world.add(job_spec("long", "tenant-long", created_at=1, num_steps=2, max_tokens=100, **hyper))
    for n in range(6):
        world.add(job_spec(f"short-{n}", f"tenant-{n}", created_at=1, num_steps=60, max_tokens=10, **hyper))
    while "long" in world.jobs:
        world.turn()
        needed = sum(job.num_waiting * job.lengths.kv_tokens for job in world.jobs.values())
        # Estimates grow by the prompt's token while a job learns
        assert needed <= 600 + 64
        assert len(world.jobs) > 1, "the long job was kept out"


def test_a_job_whose_group_never_fits_fails_with_the_numbers_and_blocks_nobody() -> None:
    """Memory for 1.5 x 100 tokens: since a smaller worker joined, the large job's groups of 3 x 100 never fit."""
    world = small_world()
    large = job_spec("large", "tenant-a", created_at=1, batch_size=2, group_size=3, num_steps=2, max_tokens=100)
    world.add(large)
    small = job_spec("small", "tenant-a", created_at=2, batch_size=2, group_size=3, num_steps=2, max_tokens=10)
    world.add(small)
    job = world.jobs["large"]
    for _ in range(300):
        world.turn()
    assert job.state.error is not None and job.state.error.code == "group_too_large"
    assert "300 tokens at once" in job.state.error.message and "at most 150" in job.state.error.message
    assert world.issued["large"] == 0 and "small" not in world.jobs


def test_a_group_needs_no_more_than_its_job_s_own_context() -> None:
    """Groups of 3 x 100 do not fit into 1.5 x 100 tokens; of 3 x 40 they do."""
    world = small_world()
    hyper: dict[str, Any] = {"batch_size": 2, "group_size": 3, "num_steps": 2, "max_tokens": 100}
    job = world.add(job_spec("short", "tenant-a", created_at=1, max_context=40, **hyper))
    for _ in range(300):
        world.turn()
    assert job.state.status == "succeeded"


def test_an_evaluation_whose_samples_never_fit_fails_its_job() -> None:
    world = small_world()
    spec = job_spec("large", created_at=1, group_size=2, eval_samples=3, max_tokens=60)
    world.add(msgspec.structs.replace(spec, num_eval_items=4))
    job = world.jobs["large"]
    for _ in range(300):
        if job.state.error is None:
            world.turn()
    assert job.state.error is not None and "181 tokens at once" in job.state.error.message


@settings(max_examples=4, deadline=None)
@given(SEEDS, st.integers(1, 40))
def test_a_job_begins_at_once_though_others_fill_the_slots_but_not_without_limit(seed: int, num_late: int) -> None:
    """8 slots, so 12 trajectories under way but for first groups, and 32 with them."""
    world = World(random.Random(seed), cluster=FixedSlots(rollout=8, trainer=1, env=0))
    hyper: dict[str, Any] = {"batch_size": 16, "group_size": 2, "num_steps": 2}
    world.add(job_spec("early", "tenant-early", created_at=1, **hyper))
    while not world.issued["early"]:
        world.turn()
    assert world.open_work == 12
    for n in range(num_late):
        world.add(job_spec(f"late-{n}", f"tenant-{n}", created_at=2, **hyper))
    for _ in range(300):
        world.turn()
        has_room = world.open_work < 32
        waiting = [name for name, job in world.jobs.items() if job.state.version == 0 and not world.issued[name]]
        assert not (has_room and waiting)
        assert world.open_work <= 33, "one group may begin where one trajectory has room"


# ---- supervised jobs ------------------------------------------------------------------------------------------------


def supervised(name: str, tenant: str, *, num_eval_items: int = 0, **hyper: Any) -> JobSpec:
    """Its examples never visit a rollout worker, but for held-out ones."""
    spec = job_spec(name, tenant, created_at=1, group_size=1, max_staleness=1, **hyper)
    return msgspec.structs.replace(spec, env=EnvSpec(SUPERVISED), num_eval_items=num_eval_items)


def rollouts_of(world: World, *tenants: str) -> list[int]:
    """Groups that were issued to each tenant's jobs of rewards."""
    return [world.issued[f"job-{tenant}"] for tenant in tenants]


def test_examples_of_a_supervised_job_take_no_room_from_rollouts() -> None:
    """Room for 12 trajectories, and for 1.5 x 100 tokens of keys and values."""
    world = World(random.Random(1), cluster=SmallMemory(rollout=8, trainer=1, env=8, held=100))
    world.add(supervised("learner", "a", batch_size=8, num_steps=200, max_tokens=1))
    while len(world.examples) < 6:
        world.turn()
    world.add(job_spec("job-b", "b", created_at=2, batch_size=8, group_size=2, num_steps=1, max_tokens=10))
    most = 0
    while "job-b" in world.jobs:
        world.turn()
        demand = world.allocator.demand
        most = max(most, demand.open_work)
        assert demand.open_examples.total() == len(world.examples)
        assert demand.open_work == world.open_work - len(world.examples)
    assert most >= 12


@settings(max_examples=3, deadline=None)
@given(SEEDS)
def test_a_supervised_job_leaves_its_tenants_share_of_rollouts_as_it_was(seed: int) -> None:
    world = World(random.Random(seed), cluster=FixedSlots(rollout=8, trainer=1, env=4))
    for tenant in ("a", "b"):
        world.add(job_spec(f"job-{tenant}", tenant, created_at=1, batch_size=4000, group_size=2, num_steps=1))
    world.add(supervised("learner", "a", batch_size=4, num_steps=1000))
    for _ in range(400):
        world.turn()
    one, other = rollouts_of(world, "a", "b")
    assert abs(one - other) <= 0.05 * (one + other) + 4
    assert world.issued["learner"] > 25, "and it is not kept waiting"


def test_a_supervised_job_goes_on_without_a_rollout_worker() -> None:
    world = World(random.Random(1), cluster=FixedSlots(rollout=0, trainer=1, env=4))
    world.add(supervised("learner", "a", batch_size=4, num_steps=5))
    world.run()


def test_held_out_examples_need_rollout_workers() -> None:
    world = World(random.Random(1), cluster=FixedSlots(rollout=8, trainer=1, env=4))
    world.add(supervised("learner", "a", batch_size=4, num_steps=5, num_eval_items=6))
    world.run()
    assert world.issued["learner"] == 20 + 2 * 6


@settings(max_examples=3, deadline=None)
@given(SEEDS)
def test_tenants_share_env_workers_for_their_examples_by_weight(seed: int) -> None:
    world = World(random.Random(seed), cluster=FixedSlots(rollout=8, trainer=4, env=4))
    world.allocator.tenants = {name: TenantRecord(id=name, created_at=0, weight=w) for name, w in (("a", 3), ("b", 1))}
    for tenant in ("a", "b"):
        world.add(supervised(f"learner-{tenant}", tenant, batch_size=500, num_steps=100))
    while world.issued["learner-a"] < 300:
        world.turn()
    assert abs(world.issued["learner-b"] - 100) <= 10
