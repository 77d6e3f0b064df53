"""The sums over all jobs equal what a fresh look at each would give."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from manager_service.scheduling.demand import Demand, View
from manager_service.scheduling.fairness import LONGEST_WAITING_EVERY

SUMS = ("open_work", "num_training", "handed", "num_running", "kv_tokens", "ready", "behind", "active", "open_examples")
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
    demand, fresh, now = Demand(), Demand(), dict[str, View]()
    for job, view in updates:
        now.pop(job, None)
        if view is not None:
            now[job] = view = replace(view, tenant="abc"[int(job) % 3])
        demand.update(job, view)
    for job, view in now.items():
        fresh.update(job, view)
    assert summed(demand) == summed(fresh)
    assert demand.open_work == sum(view.waiting for view in now.values())
    assert demand.ready == {job: view.tenant for job, view in now.items() if view.ready}


def summed(demand: Demand) -> dict[str, Any]:
    found = {name: getattr(demand, name) for name in SUMS}
    found["queued"] = {tenant: set(jobs) for tenant, jobs in demand.queued.items()}
    found["tenants"] = demand.tenants(), demand.tenants_with_examples()
    found["jobs"] = [demand.jobs_of(tenant) for tenant in "abc"]
    found["urgencies"] = {tenant: set(wishes.by_urgency) for tenant, wishes in demand.rollouts.tenants.items()}
    return found


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
