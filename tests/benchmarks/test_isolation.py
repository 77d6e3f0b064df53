"""The evidence that sharing is harmless, as far as it needs no cluster: statistics, pairs, goals."""

import math
from typing import Any

import pytest

from benchmarks.isolation import statistics
from benchmarks.isolation.jobs import BROKEN, WATCHED, background
from benchmarks.isolation.report import Evidence, goals, report
from benchmarks.isolation.runs import JobRun, Run, Settings
from common.tasks.graders import validate_grader
from manager_service.http.openai.jobs.hyperparameters import parse_hyperparameters, resolve


@pytest.mark.parametrize(
    ("probability", "dof", "t"),
    [(0.975, 1, 12.7062), (0.975, 4, 2.77645), (0.95, 39, 1.68488), (0.5, 7, 0.0), (0.01, 10, -2.76377)],
)
def test_students_t_is_that_of_the_tables(probability: float, dof: int, t: float) -> None:
    assert statistics.t_cdf(t, dof) == pytest.approx(probability, abs=1e-6)


def test_sign_flips_of_few_pairs_are_all_tried() -> None:
    assert statistics.sign_flip_p([1.0, 2.0, 3.0]) == 2 / 8
    assert statistics.sign_flip_p([1.0, -1.0]) == 1.0
    assert statistics.sign_flip_p([0.0] * 5) == 1.0


def test_holm_multiplies_by_the_tests_that_are_left() -> None:
    assert statistics.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])


def test_tost_needs_a_small_mean_and_a_small_spread() -> None:
    differences = [0.0, 0.01, 0.02, 0.01]
    expected = 1 - statistics.t_cdf((0.05 - 0.01) / statistics.standard_error(differences), 3)
    assert statistics.tost_p(differences, 0.05) == pytest.approx(expected) and expected < 0.01
    assert statistics.tost_p([0.05, 0.06, 0.04], 0.05) == pytest.approx(0.5)
    assert statistics.tost_p([0.3, -0.3, 0.2, -0.2], 0.05) > 0.3
    assert (statistics.tost_p([0.0, 0.0], 0.05), statistics.tost_p([0.05, 0.05], 0.05)) == (0.0, 1.0)
    assert math.isnan(statistics.tost_p([0.0], 0.05))


def test_every_job_is_one_that_the_service_takes() -> None:
    for job in (*WATCHED, *background(24), *BROKEN):
        resolve(parse_hyperparameters(job.hyper), num_items=256, base_learning_rate=1e-3)
        how = job.method()["reinforcement"]
        assert ("environment" in how) == (job.skill == "calc")
        if "grader" in how:
            validate_grader(how["grader"])


def job_run(reward: float, *, digest: str = "a") -> JobRun:
    steps: list[Any] = [{"step": 1, "sampled_versions": [0], "reward_mean": reward}]
    files = [{"adapter": digest + str(version)} for version in range(2)]
    return JobRun(name="sort", status="succeeded", num_steps=1, seconds=1.0, steps=steps, sha256=files)


def recorded(*, drift: float = 0.0, digest: str = "a") -> Evidence:
    """`drift`: what sharing adds to the rewards; `digest`: of the adapters among others."""
    found: list[Run] = []
    for mode, seed in (("deterministic", 1), *(("default", seed) for seed in range(1, 7))):
        noise = 0.001 * (-1) ** seed
        about: Any = {"mode": mode, "seed": seed}
        found.append(Run(sharing="alone", jobs=[job_run(0.5)], **about))
        found.append(Run(sharing="among", jobs=[job_run(0.5 + drift + noise, digest=digest)], **about))
    return Evidence.of(Settings(), found)


def test_goals_are_reached_where_sharing_changes_nothing_and_missed_where_it_changes_bytes_and_rewards() -> None:
    assert [goal.reached for goal in goals(recorded())] == [True] * 5
    changed = recorded(drift=0.2, digest="b")
    assert [goal.reached for goal in goals(changed)] == [False, False, False, False, True]
    assert "**Yes, which breaks invariant I8**: 0 of 2 versions" in report(changed)
    assert "No: 2 of 2 versions" in report(recorded())
