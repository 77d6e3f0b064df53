"""The sums over all jobs equal what a fresh look at each would give."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from manager_service.scheduling.demand import Demand, View
from manager_service.scheduling.fairness import LONGEST_WAITING_EVERY

URGENCY = st.none() | st.tuples(st.integers(-2, 2), st.integers(0, 1), st.integers(0, 3))
VIEWS = st.builds(
    View,
    tenant=st.just("a"),
    queued=st.booleans(),
    active=st.booleans(),
    running=st.booleans(),
    behind=st.booleans(),
    waiting=st.integers(0, 64),
    tokens=st.integers(0, 1000).map(float),
    kv_tokens=st.integers(0, 1000).map(float),
    training=st.booleans(),
    training_tokens=st.integers(0, 1000),
    ready=st.booleans(),
    urgency=URGENCY,
    examples=st.integers(0, 16),
    example_urgency=URGENCY,
).map(
    lambda view: replace(
        view,
        behind=view.behind and view.active,
        tokens=view.tokens * view.waiting,
        kv_tokens=view.kv_tokens * view.waiting,
    )
)


@settings(max_examples=30)
@given(st.lists(st.tuples(st.sampled_from("123456"), st.none() | VIEWS), max_size=60))
def test_updates_keep_the_sums(updates: list[tuple[str, View | None]]) -> None:
    demand, now = Demand(), dict[str, View]()
    for job, view in updates:
        now.pop(job, None)
        if view is not None:
            now[job] = view = replace(view, tenant="abc"[int(job) % 3])
        demand.update(job, view)
    assert demand.open_work == sum(v.waiting for v in now.values())
    assert demand.num_training == sum(v.training for v in now.values())
    handed = Counter(v.tenant for v in now.values() if v.training)
    tokens = {
        tenant: sum(v.training_tokens for v in now.values() if v.training and v.tenant == tenant) for tenant in handed
    }
    assert (demand.handed.batches, demand.handed.tokens) == (handed, tokens)
    assert demand.open_examples.total() == sum(v.examples for v in now.values())
    assert demand.num_running == sum(v.running for v in now.values())
    assert demand.kv_tokens == sum(v.kv_tokens for v in now.values())
    assert demand.ready == {job: v.tenant for job, v in now.items() if v.ready}
    for tenant in "abc":
        mine = {job: v for job, v in now.items() if v.tenant == tenant}
        assert demand.behind[tenant] == sum(v.behind for v in mine.values())
        assert set(demand.queued.get(tenant, ())) == {job for job, v in mine.items() if v.queued}
        assert set(demand.jobs_of(tenant)) == set(mine)
        wanted = [v.urgency for v in mine.values() if v.urgency is not None]
        assert (tenant in demand.tenants_with_examples()) == any(
            v.examples or v.example_urgency is not None for v in mine.values()
        )
        first = demand.rollouts.tenants[tenant].first() if tenant in demand.rollouts.tenants else None
        assert (first is None) == (not wanted)
        if first is not None:
            assert now[first].urgency == min(wanted)


def hungry(*urgency: float) -> View:
    return View(tenant="a", active=True, urgency=urgency)


def test_a_tenant_with_nothing_under_way_is_idle_whatever_floats_add_up_to() -> None:
    demand = Demand()
    for tokens in (0.1, 0.7, 0.3):
        for job, times in (("1", 3), ("2", 1)):
            demand.update(job, View(tenant="a", active=True, waiting=times, tokens=times * tokens, kv_tokens=tokens))
    for job in ("1", "2"):
        demand.update(job, View(tenant="a", active=True))
    assert (demand.tenants(), demand.tokens["a"], demand.kv_tokens) == (set(), 0.0, 0.0)


def test_within_one_urgency_the_first_to_ask_is_served_first() -> None:
    demand = Demand()
    for job in ("x", "y"):
        demand.update(job, hungry(0, 4))
    assert demand.rollouts.next_job("a") == "x"
    demand.update("x", View(tenant="a", active=True, waiting=8, tokens=8.0, urgency=(0, 4)))
    assert demand.rollouts.next_job("a") == "y", "having been served, x stands behind"


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 2)), min_size=1, max_size=8))
def test_of_a_tenants_jobs_the_most_urgent_goes_first_and_none_waits_longer_than_four_rounds(
    urgencies: list[tuple[int, int]],
) -> None:
    demand, waited = Demand(), [0] * len(urgencies)
    for job, urgency in enumerate(urgencies):
        demand.update(str(job), hungry(*urgency))
    for turn in range(200):
        name = demand.rollouts.next_job("a")
        assert name is not None
        if turn % LONGEST_WAITING_EVERY != LONGEST_WAITING_EVERY - 1:
            assert urgencies[int(name)] == min(urgencies)
        waited = [n + 1 for n in waited]
        waited[int(name)] = 0
        # The owner looks at it again, and it wants more: it keeps its place in the line until `granted`
        demand.update(name, hungry(*urgencies[int(name)]))
        demand.rollouts.granted("a", name)
        assert max(waited) <= LONGEST_WAITING_EVERY * len(urgencies)


def test_a_job_that_wants_nothing_for_a_while_goes_to_the_end_of_the_line() -> None:
    demand = Demand()
    for job in ("x", "y"):
        demand.update(job, hungry(0, 4))
    demand.update("x", View(tenant="a", active=True))
    demand.update("x", hungry(0, 4))
    for _ in range(LONGEST_WAITING_EVERY - 1):
        demand.rollouts.granted("a", "nobody")
    assert demand.rollouts.next_job("a") == "y"
