"""The sums over all jobs equal what a fresh look at each would give."""

from hypothesis import given
from hypothesis import strategies as st

from manager_service.demand import Demand, View

URGENCY = st.none() | st.tuples(st.integers(0, 1), st.integers(0, 3))
VIEWS = st.builds(
    View,
    tenant=st.sampled_from("abc"),
    queued=st.booleans(),
    active=st.booleans(),
    waiting=st.integers(0, 64),
    tokens=st.integers(0, 1000).map(float),
    training=st.booleans(),
    ready=st.booleans(),
    urgency=URGENCY,
)


@given(st.lists(st.tuples(st.sampled_from("123456"), st.none() | VIEWS), max_size=60))
def test_updates_keep_the_sums(updates: list[tuple[str, View | None]]) -> None:
    demand, now = Demand(), dict[str, View]()
    for job, view in updates:
        demand.update(job, view)
        now.pop(job, None)
        if view is not None:
            now[job] = view
    assert demand.open_work == sum(v.waiting for v in now.values())
    assert demand.num_training == sum(v.training for v in now.values())
    assert demand.ready == {job: v.tenant for job, v in now.items() if v.ready}
    for tenant in "abc":
        mine = {job: v for job, v in now.items() if v.tenant == tenant}
        assert set(demand.queued.get(tenant, ())) == {job for job, v in mine.items() if v.queued}
        assert set(demand.jobs_of(tenant)) == set(mine)
        wanted = [v.urgency for v in mine.values() if v.urgency is not None]
        first = demand.hungry[tenant].first() if tenant in demand.hungry else None
        assert (first is None) == (not wanted)
        if first is not None:
            assert now[first].urgency == min(wanted)


def test_within_one_urgency_the_first_to_ask_is_served_first() -> None:
    demand = Demand()
    for job in ("x", "y"):
        demand.update(job, View("a", False, True, 0, 0.0, False, False, (0, 4)))
    assert demand.hungry["a"].first() == "x"
    demand.update("x", View("a", False, True, 8, 8.0, False, False, (0, 4)))
    assert demand.hungry["a"].first() == "y", "having been served, x stands behind"
