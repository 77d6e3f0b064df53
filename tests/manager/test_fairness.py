"""Fair sharing and batch assembly, as the pure functions that they are."""

from hypothesis import given
from hypothesis import strategies as st

from common.sharing.fairness import Fairness
from common.wire.messages import AdapterRef, ScoredTrajectory, TrajectoryRef
from common.wire.transcript import shown, wrote
from manager_service.owner.jobs.groups import Group, Scored, next_batch
from manager_service.scheduling.fairness import room, serve
from tests.common.test_messages import PLAIN


def served(weights: dict[str, float], rounds: int, tokens: dict[str, int]) -> dict[str, float]:
    """Tokens that each tenant got when all of them always want more."""
    fairness, got = Fairness(), dict.fromkeys(weights, 0.0)

    def grant(tenant: str) -> tuple[float, int]:
        got[tenant] += tokens[tenant]
        fairness.charge(tenant, tokens[tenant], weights[tenant])
        return tokens[tenant] / weights[tenant], 1

    for _ in range(rounds // 10):
        fairness.busy(weights)
        serve({t: fairness.virtual_time(t) for t in weights}, grant, room=10)
    return got


@given(st.dictionaries(st.sampled_from("abcdef"), st.tuples(st.floats(0.5, 4), st.integers(1, 50)), min_size=2))
def test_tokens_are_shared_by_weight_whatever_a_request_costs(tenants: dict[str, tuple[float, int]]) -> None:
    weights = {t: w for t, (w, _) in tenants.items()}
    costs = {t: c for t, (_, c) in tenants.items()}
    got = served(weights, 4000, costs)
    shares = [got[t] / weights[t] for t in weights]
    allowance = 2 * max(c / weights[t] for t, c in costs.items())
    assert max(shares) - min(shares) <= allowance


def test_a_tenant_that_was_idle_neither_hoards_nor_starves() -> None:
    fairness = Fairness()
    fairness.busy({"a"})
    fairness.charge("a", 1000, 1)
    fairness.busy({"a", "b"})
    assert fairness.virtual_time("b") == fairness.virtual_time("a")


def test_nothing_is_issued_beyond_the_slots_or_into_a_full_redis() -> None:
    assert room(slots=64, open_work=0, share=1.0, memory_used=0.1) == 96
    assert room(slots=64, open_work=96, share=1.0, memory_used=0.1) == 0
    assert room(slots=64, open_work=0, share=0.5, memory_used=0.1) == 48
    assert room(slots=64, open_work=0, share=1.0, memory_used=0.7) == 0
    assert room(slots=0, open_work=0, share=1.0, memory_used=0.0) == 0


def test_a_share_below_one_trajectory_starts_nevertheless() -> None:
    assert room(slots=8, open_work=0, share=0.01, memory_used=0.0) == 1
    assert room(slots=8, open_work=1, share=0.01, memory_used=0.0) == 0


def scored(group: int, sample: int, reward: float = 1.0, version: int = 0) -> Scored:
    message = ScoredTrajectory(
        **PLAIN,
        adapter=AdapterRef("t", "j", version),
        trajectory=TrajectoryRef("train", 1, group, sample),
        transcript=shown([1]) + wrote([group, sample], [-1, -1]),
        reward=reward,
        stop_reason="stop",
    )
    return Scored(f"{group}-{sample}", message)


def decided(number: int, size: int = 2) -> Group:
    return Group(0, {}, {s: scored(number, s) for s in range(size)})


def test_a_batch_is_the_first_usable_groups_in_order_not_in_order_of_arrival() -> None:
    groups = {0: decided(0), 1: Group(0, {0: 0}), 2: decided(2), 3: decided(3)}
    # While group 1 is open there is no batch, though three others are there
    assert next_batch(groups, window=0, end=4, batch_size=2) is None
    groups[1] = decided(1)
    assert next_batch(groups, window=0, end=4, batch_size=2) == [0, 1]
    # A dropped group is passed over
    del groups[1]
    assert next_batch(groups, window=0, end=4, batch_size=2) == [0, 2]
