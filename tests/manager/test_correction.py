"""A share of the rollout slots grows while it gets less of the engines' time than is due, and only while more is asked for."""

import random

import pytest

from common.sharing.correction import MAX_FACTOR, MIN_MEASURED_S, Correction
from harness.standin import FixedSlots, job_spec
from manager_service.scheduling.policies import POLICIES
from tests.support.owner_world import World


def after(*rounds: tuple[float, float], due: float = 0.25, asks: bool = True) -> Correction:
    """Rounds of seconds that jobs and others got in each."""
    found, jobs, others = Correction(), 0.0, 0.0
    found.look({}, "jobs", due, asks=False)
    for more_jobs, more_others in rounds:
        jobs, others = jobs + more_jobs, others + more_others
        found.look({"jobs": jobs, "samples": others}, "jobs", due, asks=asks)
    return found


@pytest.mark.parametrize(
    ("found", "factor"),
    [
        (after(*[(1.0, 3.0)] * 5), 1.0),  # gets its due
        (after(*[(0.0, 4.0)] * 20), MAX_FACTOR),
        (after(*[(4.0, 0.0)] * 20), 1 / MAX_FACTOR),
        (after(*[(0.0, 4.0)] * 5, asks=False), 1.0),
        (after(*[(0.0, 4.0)] * 5, due=1.0), 1.0),
        (after((0.0, MIN_MEASURED_S / 2)), 1.0),  # little is not told from chance
    ],
)
def test_a_share_is_corrected_within_bounds_while_it_asks_for_more(found: Correction, factor: float) -> None:
    assert found.factor == factor


@pytest.mark.parametrize("got", [0.15, 0.2, 0.3, 0.4])
def test_a_share_that_gets_more_or_less_comes_to_its_due(got: float) -> None:
    """The share's part of the engines grows as its factor does."""
    found, jobs, others = Correction(), 0.0, 0.0
    for _ in range(20):
        part = got * found.factor
        jobs, others = jobs + 4 * part, others + 4 * (1 - part)
        found.look({"jobs": jobs, "samples": others}, "jobs", 0.25, asks=True)
    assert got * found.factor == pytest.approx(0.25, rel=0.01)


def test_what_was_served_before_it_looked_says_nothing() -> None:
    found = Correction()
    found.look({"jobs": 1000.0, "samples": 0.0}, "jobs", 0.25, asks=True)
    assert found.factor == 1.0
    # Nor does what Redis lost
    found.look({"samples": 10.0}, "jobs", 0.25, asks=True)
    found.look({"jobs": 1.0, "samples": 13.0}, "jobs", 0.25, asks=True)
    assert found.factor == 1.0


def test_an_owners_share_of_the_slots_is_corrected_beside_samplers_alone() -> None:
    world = World(random.Random(1), POLICIES["marlaas"], cluster=FixedSlots(rollout=8, trainer=1, env=8))
    for number in range(8):
        world.add(job_spec(f"job-{number}", f"tenant-{number}", batch_size=2, group_size=3, num_steps=3))
    allocator = world.allocator
    while not allocator.demand.rollouts.tenants:
        world.turn()
    weight = float(len(allocator.demand.tenants()))
    assert allocator.share == 1.0
    allocator.hear_of_others(0.0, weight, {"jobs": 0.0, "samples": 0.0})
    assert allocator.share == 0.5
    allocator.hear_of_others(0.0, weight, {"jobs": 1.0, "samples": 3.0})
    assert allocator.share == pytest.approx(0.5 * 2**0.5)
    allocator.hear_of_others(weight, 0.0, {"jobs": 1.0, "samples": 3.0})
    assert allocator.share == 0.5
