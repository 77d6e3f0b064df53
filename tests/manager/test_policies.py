"""The scheduling policies, with many jobs whose work comes back in any order."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from harness.standin import FixedSlots, job_spec
from manager_service.http.openai.jobs.hyperparameters import as_given, parse_hyperparameters, resolve
from manager_service.scheduling.policies import MAX_ETA, capacity, parse_policy
from manager_service.settings import ManagerSettings
from tests.support.owner_world import World

SEEDS = st.integers(0, 10**9)


def world(seed: int, policy: str, *, num_jobs: int = 4, rollout: int = 8, **hyper: object) -> World:
    found = World(random.Random(seed), parse_policy(policy), cluster=FixedSlots(rollout=rollout, trainer=1, env=8))
    spec = {"batch_size": 2, "group_size": 3, "num_steps": 3, **hyper}
    for number in range(num_jobs):
        found.add(job_spec(f"job-{number}", f"tenant-{number % 3}", created_at=1 + number, **spec))
    return found


# ---- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "marlas", "bounded:", "bounded:0", f"bounded:{MAX_ETA + 1}", "naive:2", "Naive"])
def test_a_wrong_name_is_refused_with_what_there_is(text: str) -> None:
    with pytest.raises(ValueError, match=r"bounded:"):
        parse_policy(text)


def test_the_setting_is_checked_when_the_manager_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARLAAS_POLICY", "bounded:3")
    assert ManagerSettings().scheduling.eta == 3
    monkeypatch.setenv("MARLAAS_POLICY", "fifo")
    with pytest.raises(ValidationError, match="sequential, synchronous, naive, marlaas, bounded"):
        ManagerSettings()


def test_staleness_is_the_jobs_own_but_where_a_policy_fixes_or_lends_it() -> None:
    wanted = {"sequential": (0, 0), "synchronous": (0, 0), "naive": (0, 0), "marlaas": (0, 2), "bounded:3": (3, 2)}
    for name, (unasked, asked) in wanted.items():
        policy = parse_policy(name)
        assert (policy.max_staleness(None), policy.max_staleness(2)) == (unasked, asked), name


def test_a_job_shows_the_staleness_that_its_policy_gave_it() -> None:
    given = parse_hyperparameters({"max_steps": 2})
    hyper = resolve(given, num_items=8, base_learning_rate=1e-3, policy=parse_policy("bounded:3"))
    assert hyper.max_staleness == as_given(hyper, given)["max_staleness"] == 3


# ---- every policy ---------------------------------------------------------------------------------------------------


@settings(max_examples=8, deadline=None)
@given(SEEDS, st.sampled_from(["sequential", "synchronous", "naive", "marlaas", "bounded:2"]))
def test_every_job_ends_and_is_issued_no_more_than_it_trains(seed: int, policy: str) -> None:
    found = world(seed, policy)
    found.run()
    assert found.issued == {f"job-{number}": 6 for number in range(4)}
    assert sorted(found.trained) == sorted(f"job-{number}" for number in range(4) for _ in range(3))


# ---- one policy each ------------------------------------------------------------------------------------------------


@settings(max_examples=5, deadline=None)
@given(SEEDS)
def test_sequential_runs_one_job_after_another_oldest_first(seed: int) -> None:
    found = world(seed, "sequential")
    while found.jobs:
        found.turn()
        running = [job for job in found.jobs.values() if job.state.status == "running"]
        assert len(running) <= 1
        assert not any(job.num_waiting and job.state.training for job in running), "rollout, then training"
    assert found.started == [f"job-{number}" for number in range(4)]


@settings(max_examples=5, deadline=None)
@given(SEEDS)
def test_synchronous_never_samples_while_a_batch_is_trained_or_waits_behind_the_barrier(seed: int) -> None:
    found = world(seed, "synchronous")
    while found.jobs:
        found.turn()
        assert not (found.training and found.open_work), "sampling and training at once"
        versions = [job.state.version for job in found.jobs.values()]
        assert not versions or max(versions) - min(versions) <= 1, "a job ran ahead of the barrier"


@settings(max_examples=5, deadline=None)
@given(SEEDS)
def test_naive_never_has_more_trajectories_open_than_slots(seed: int) -> None:
    found = world(seed, "naive")
    most = 0
    while found.jobs:
        found.turn()
        most = max(most, found.open_work)
    # A group is issued whole, so the last one may exceed the slots by all but one of its trajectories
    assert most <= 8 + 2


@settings(max_examples=5, deadline=None)
@given(SEEDS)
def test_marlaas_refills_slots_while_tools_run_within_what_workers_can_hold(seed: int) -> None:
    found = world(seed, "marlaas", num_jobs=8)
    most, begun = 0, False
    while found.jobs:
        found.turn()
        # First groups may exceed it, until they have ended
        begun |= all(found.issued[name] for name in found.jobs) and found.open_work <= 12 + 8 + 2
        most = max(most, found.open_work) if begun else 0
        wanted = any(job.wants_group() for job in found.jobs.values())
        assert not wanted or found.open_work >= 12 + min(8, found.allocator.in_env), "room was left unused"
    assert 12 < most <= 12 + 8 + 2


@settings(max_examples=8, deadline=None)
@given(SEEDS, st.integers(0, 3))
def test_bounded_keeps_within_eta_batches_of_what_is_trained(seed: int, eta: int) -> None:
    found = world(seed, f"bounded:{eta}" if eta else "marlaas", num_jobs=3, rollout=64, num_steps=6, max_staleness=eta)
    while found.jobs:
        found.turn()
        for job in found.jobs.values():
            assert found.issued[job.id] <= (max(0, job.state.version) + eta + 1) * 2


# ---- the rules ------------------------------------------------------------------------------------------------------


@given(st.integers(0, 64), st.integers(1, 64), st.integers(0, 1000), st.integers(0, 5000), st.integers(0, 5000))
def test_capacity_is_areals_and_survives_a_restart_without_a_burst(
    eta: int, batch_size: int, version: int, complete: int, running: int
) -> None:
    accepted = version * batch_size + complete
    areal = (eta + version + 1) * batch_size - (accepted + running)
    found = capacity(eta=eta, batch_size=batch_size, num_untrained=complete + running)
    assert found == max(0, areal)
    # A restart forgets no group that is open: what may be issued then brings the total to the same bound, not beyond
    assert complete + running + found <= max((eta + 1) * batch_size, complete + running)
