"""The training queue: tenants share it by weight, it wastes no slot and starves nobody."""

import random
from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.standin import FixedSlots, job_spec
from manager_service.owner.jobs.items import Items
from manager_service.owner.jobs.job import Job
from manager_service.records.job_records import JobState
from manager_service.scheduling.allocator import Allocator
from manager_service.scheduling.members import MemberTable
from manager_service.scheduling.training_queue import ReadyBatch, Room, TrainingQueue
from tests.support.owner_world import CELL, World

SIZES = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 5000)), min_size=1, max_size=12)


def same(tenant: str) -> float:
    return 1.0


def batch(job: str, tenant: str = "a", since: float = 0.0, tokens: int = 100, *urgency: float) -> ReadyBatch:
    return ReadyBatch(job, tenant, since, tokens, urgency)


def queue_of(*batches: ReadyBatch) -> TrainingQueue:
    queue = TrainingQueue()
    for each in batches:
        queue.put(each)
    return queue


def taken(queue: TrainingQueue) -> list[str]:
    """All of them, one at a time."""
    found: list[str] = []
    while queue.batches:
        found += queue.take(1, same)
    return found


@settings(max_examples=30)
@given(SIZES, st.integers(0, 10**9))
def test_who_is_ready_again_and_again_is_served_within_a_bounded_number_of_others(
    sizes: list[tuple[str, int]], seed: int
) -> None:
    """A closed system: a job's next batch is complete one step after the last was taken. Urgencies are the worst case:
    one job is always more urgent than its tenant's others."""
    rng, queue = random.Random(seed), TrainingQueue()
    waits, longest = Counter[str](), 0
    for turn in range(40 * len(sizes)):
        for n, (tenant, size) in enumerate(sizes):
            queue.put(batch(str(n), tenant, turn, size, n))
        found = queue.take(rng.randint(1, 2), same)
        for n in range(len(sizes)):
            waits[str(n)] = 0 if str(n) in found else waits[str(n)] + 1
        longest = max(longest, *waits.values())
    # Shares are by tokens: next to batches of 1 token one of 5,000 waits for as many of them. In between nobody is passed over
    ratio = max(size for _, size in sizes) / min(size for _, size in sizes)
    assert longest <= 4 * len(sizes) * (1 + ratio)


@settings(max_examples=30)
@given(st.dictionaries(st.sampled_from("abcd"), st.floats(0.5, 4), min_size=2))
def test_tenants_share_the_trainers_by_weight_whatever_their_batches_cost(weights: dict[str, float]) -> None:
    sizes = {tenant: 100 * (1 + n) for n, tenant in enumerate(weights)}
    queue, got, since = TrainingQueue(), Counter[str](), 0
    for _ in range(600):
        for tenant, size in sizes.items():
            for each in range(2):
                queue.put(batch(f"{tenant}{each}", tenant, since := since + 1, size))
        for job in queue.take(1, weights.__getitem__):
            got[job[0]] += sizes[job[0]]
    shares = [got[tenant] / weight for tenant, weight in weights.items()]
    assert max(shares) - min(shares) <= 4 * max(sizes.values()) * (1 + max(weights.values())) / min(weights.values())


def test_priorities_and_deadlines_order_a_tenants_own_batches_and_no_others() -> None:
    own = [batch("late", "a", 1, 100, 0, 900.0), batch("soon", "a", 2, 100, 0, 100.0), batch("high", "a", 3, 100, -5)]
    assert taken(queue_of(*own)) == ["high", "soon", "late"]
    both = queue_of(*own, *(batch(f"b{n}", "b", n, 100, 9) for n in range(3)))
    assert [name[0] == "b" for name in taken(both)] == [False, True] * 3


def test_a_tenant_hands_over_few_large_batches_next_to_others() -> None:
    large = [batch(f"a{n}", "a", n, 45_000) for n in range(32)]
    small = [batch(f"b{n}", "b", 40 + n, 500) for n in range(8)]
    queue, room = queue_of(*large, *small), Room(slots=64, workers=2)
    assert sorted(queue.take(128, same, room)) == ["a0", "a1", *(f"b{n}" for n in range(8))]
    assert queue.take(128, same, room) == []
    room.handed.remove("a", 45_000)
    assert queue.take(128, same, room) == ["a2"]


@pytest.mark.parametrize(("tokens", "most"), [(45_000, 4), (20_000, 4), (4_000, 17), (500, 64)])
def test_the_only_tenant_hands_over_enough_that_no_trainer_waits(tokens: int, most: int) -> None:
    """65,536 tokens, and always one batch that is computed by each trainer and one that waits."""
    queue = queue_of(*(batch(f"{n}", "a", n, tokens) for n in range(100)))
    assert len(queue.take(64, same, Room(slots=64, workers=2))) == most


def test_what_trainers_have_of_a_tenant_is_bounded_and_known_to_the_next_owner() -> None:
    """Steps of 4 x 180 trajectories of 3 tokens; 2 x 1,024 for the two slots, which would take four steps."""
    world = World(random.Random(1), cluster=FixedSlots(rollout=4000, trainer=2, env=8))
    for n in range(8):
        world.add(job_spec(f"large-{n}", created_at=1, batch_size=4, group_size=180, num_steps=1))
    most = 0
    while world.jobs:
        world.turn()
        handed = world.allocator.demand.handed
        most = max(most, handed.batches["acme"])
        assert handed.tokens["acme"] == 4 * 180 * 3 * len(world.training)
        if world.training:
            assert heir_of(world).demand.handed == handed
    assert most == 2


def heir_of(world: World) -> Allocator:
    """The allocator of an owner that reads the jobs' records."""
    heir, members = Allocator(world.cluster), MemberTable[Job]()
    for job in world.jobs.values():
        state = msgspec.json.decode(msgspec.json.encode(job.state), type=JobState)
        members.add(Job(CELL, job.spec, state, Items(), Items()))
    heir.follow(members, 0.0)
    return heir


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 10**9))
def test_every_job_is_trained_to_its_end_and_no_trainer_is_left_without_a_step(seed: int) -> None:
    world = World(random.Random(seed), cluster=FixedSlots(rollout=32, trainer=1, env=8))
    for n in range(6):
        spec = {"batch_size": 1 + n % 3, "group_size": 2, "num_steps": 3, "priority": n}
        world.add(job_spec(f"job-{n}", f"tenant-{n % 2}", created_at=1 + n, **spec))
    most = 0
    while world.jobs:
        world.turn()
        most = max(most, len(world.training))
        free = 2 - len(world.training)
        assert free <= 0 or not world.allocator.demand.ready, "a trainer was left without a step"
    assert most <= 2 and Counter(world.trained) == {f"job-{n}": 3 for n in range(6)}
