"""The evidence that sharing is harmless, as far as it needs no cluster: statistics, findings, figures, report."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.isolation import findings, measure, runs, statistics
from benchmarks.isolation.__main__ import write_report
from benchmarks.isolation.findings import MARGIN, REWARD, Pair
from benchmarks.isolation.jobs import BROKEN, WATCHED, background
from benchmarks.isolation.report import Evidence, goals, table
from benchmarks.isolation.runs import JobRun, Mode, Neighbour, Run, Sample, Settings, Sharing
from common.errors import InvalidInput
from common.graders import validate_grader
from common.skills import SKILLS
from manager_service.api.hyperparameters import parse_hyperparameters, resolve
from manager_service.kept import LIMITS
from simulator.calibration import jain
from tests.support import forked

SETTINGS = Settings(num_watched=2, num_jobs=8, deterministic_steps=3, default_steps=3, num_seeds=4)


# ---- statistics against known values --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("probability", "dof", "t"),
    [(0.975, 1, 12.7062), (0.975, 4, 2.77645), (0.95, 39, 1.68488), (0.5, 7, 0.0), (0.01, 10, -2.76377)],
)
def test_students_t_is_that_of_the_tables(probability: float, dof: int, t: float) -> None:
    assert statistics.t_quantile(probability, dof) == pytest.approx(t, abs=1e-4)
    assert statistics.t_cdf(t, dof) == pytest.approx(probability, abs=1e-6)


def test_a_mean_has_the_interval_of_the_t_distribution() -> None:
    mean = statistics.mean_of([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (mean.value, mean.half) == (3.0, pytest.approx(2.77645 * math.sqrt(2.5 / 5), abs=1e-4))
    assert math.isnan(statistics.mean_of([1.0]).half)


def test_sign_flips_of_few_pairs_are_all_tried() -> None:
    assert statistics.sign_flip_p(np.array([[1.0], [2.0], [3.0]])) == 2 / 8
    assert statistics.sign_flip_p(np.array([[1.0], [-1.0]])) == 1.0
    assert statistics.sign_flip_p(np.zeros((5, 1))) == 1.0


def test_sign_flips_of_many_pairs_find_what_is_there_and_nothing_else() -> None:
    noise = np.random.default_rng(1).normal(0, 1, (40, 1))
    assert statistics.sign_flip_p(noise + 1) < 0.001
    assert statistics.sign_flip_p(noise - noise.mean() + 0.1) > 0.2


def test_the_sign_flip_test_keeps_its_level() -> None:
    """Lets no more than a twentieth of many experiments without a difference give p ≤ 0.05, but for chance."""
    random = np.random.default_rng(2)
    found = [statistics.sign_flip_p(random.normal(0, 1, (8, 1))) for _ in range(400)]
    assert 0.02 <= np.mean(np.array(found) <= 0.05) <= 0.08


def test_a_histograms_bins_are_flipped_together() -> None:
    moved = np.tile([0.5, -0.5], (6, 1))  # every seed moves half of the mass
    assert statistics.sign_flip_p(moved) == 2 / 2**6


def test_holm_multiplies_by_the_tests_that_are_left() -> None:
    assert statistics.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])


def test_tost_needs_a_small_mean_and_a_small_spread() -> None:
    # the mean 0.01 is 0.04 / 0.005 = 8 standard errors below the margin: P(T_3 ≤ -8) = 0.00204
    differences = [0.0, 0.01, 0.02, 0.01]
    error = statistics.standard_error(differences)
    expected = 1 - statistics.t_cdf((0.05 - 0.01) / error, 3)
    assert statistics.tost_p(differences, 0.05) == pytest.approx(expected) and expected < 0.01
    assert statistics.tost_p([0.05, 0.06, 0.04], 0.05) == pytest.approx(0.5)
    assert statistics.tost_p([0.3, -0.3, 0.2, -0.2], 0.05) > 0.3
    assert (statistics.tost_p([0.0, 0.0], 0.05), statistics.tost_p([0.05, 0.05], 0.05)) == (0.0, 1.0)
    assert math.isnan(statistics.tost_p([0.0], 0.05))


def test_the_detectable_difference_is_found_in_four_cases_of_five() -> None:
    random = np.random.default_rng(3)
    noise = random.normal(0, 1, 12)
    effect = statistics.detectable(noise / noise.std(ddof=1))
    limit = statistics.t_quantile(0.975, 11)
    samples = random.normal(effect, 1, (4000, 12))
    ts = samples.mean(1) / (samples.std(1, ddof=1) / math.sqrt(12))
    assert np.mean(np.abs(ts) > limit) == pytest.approx(0.8, abs=0.03)


def test_jains_index() -> None:
    assert jain([2.0, 2.0, 2.0]) == 1.0
    assert jain([1.0, 0.0, 0.0, 0.0]) == 0.25


# ---- the jobs -------------------------------------------------------------------------------------------------------


def test_every_job_is_one_that_the_service_takes() -> None:
    for job in (*WATCHED, *background(24), *BROKEN):
        hyper = parse_hyperparameters(job.hyper)
        resolve(hyper, num_items=256, base_learning_rate=1e-3)
        how = job.method(max_steps=2)["reinforcement"]
        assert how["hyperparameters"] == {**job.hyper, "max_steps": 2} and job.skill in SKILLS
        assert ("environment" in how) == SKILLS[job.skill].needs_calculator
        if "grader" in how:
            validate_grader(how["grader"])


def test_the_jobs_differ_in_what_a_job_may_choose() -> None:
    assert len({job.tenant for job in WATCHED}) == len(WATCHED) == 8
    assert len({job.hyper.get("loss", "grpo") for job in WATCHED}) == 7
    assert len({job.hyper.get("lora_rank", 8) for job in WATCHED}) >= 4
    assert any(job.reward == "calculator" for job in WATCHED[:2]), "the short run has a job of several turns"
    beside = background(24)
    assert len({job.name for job in beside}) == 24 and not {j.tenant for j in beside} & {j.tenant for j in WATCHED}


def test_a_job_has_the_same_seed_alone_and_among_others() -> None:
    seeds = [measure.job_seed(run, place) for run in range(1, 6) for place in range(124)]
    assert len(set(seeds)) == len(seeds)


def test_only_deterministic_runs_among_others_are_disturbed_by_kills() -> None:
    for mode in ("default", "bfloat16"):
        assert measure.scene(mode, alone=True) == measure.scene(mode, alone=False)
    alone, among = (measure.scene("deterministic", alone=flag) for flag in (True, False))
    assert alone.environment == among.environment == {"MARLAAS_DETERMINISTIC": "1", "MARLAAS_LEASE_S": "2"}
    assert not alone.kills and {name.split("-")[0] for name in among.kills} == {"rollout", "env", "trainer"}
    assert all(among.workers[service] > alone.workers[service] for service in alone.workers)


def test_company_is_counted_where_a_worker_has_work_of_both() -> None:
    def span(worker: str, tenant: str, start: float, end: float, service: str = "trainer") -> dict[str, Any]:
        return {"worker": worker, "service": service, "tenant": tenant, "start": start, "end": end}

    spans = [
        *(span("t1", "a", 0, 4), span("t1", "x", 3, 9), span("t1", "y", 3.5, 4)),  # 1 of 4 seconds
        *(span("t2", "x", 0, 9), span("t2", "a", 5, 6), span("r1", "x", 0, 9, "rollout")),  # 1 of 1
    ]
    assert measure.together(spans, "trainer", ["a"]) == pytest.approx(2 / 5)
    assert measure.together(spans, "rollout", ["a"]) == 0.0


# ---- findings -------------------------------------------------------------------------------------------------------


def job_run(name: str, rewards: list[float], *, digest: str = "a", text: str = "x", **changes: Any) -> JobRun:
    """Three steps whose figures follow the rewards."""
    steps = [
        {
            **{"step": i, "sampled_versions": [i - 1], "reward_mean": reward, "reward_std": 0.1, "loss": 0.0},
            **{
                "sampling_gap": 1e-6,
                "sampling_kl": 1e-9,
                "ess_share": 1 - 1e-9,
                "clip_fraction": 0.0,
                "staleness": 0.0,
            },
            **{"grad_norm": 0.5, "entropy": 1.0, "num_rows": 64.0, "num_signal_rows": 32.0},
        }
        for i, reward in enumerate(rewards, 1)
    ]
    samples = [Sample(i, 0, sample, float(sample % 2), text) for i in range(1, len(rewards) + 1) for sample in range(4)]
    values: dict[str, Any] = {
        **{"name": name, "status": "succeeded", "seconds": 10.0, "steps": steps, "samples": samples},
        "evals": {
            "0": {"version": 0, "eval_reward_mean": 0.2},
            "3": {"version": 3, "eval_reward_mean": rewards[-1]},
        },
        "sha256": [{"adapter_model.safetensors": f"{digest}{i}"} for i in range(len(rewards) + 1)],
    }
    return JobRun(**{**values, **changes})


def run(mode: Mode, sharing: Sharing, seed: int, *jobs: JobRun, **changes: Any) -> Run:
    values: dict[str, Any] = {"workers": {"rollout": 1, "env": 1, "trainer": 1}, "jobs": list(jobs), **changes}
    return Run(mode=mode, sharing=sharing, seed=seed, **values)


def recorded(*, drift: float = 0.0, digest: str = "a") -> list[Run]:
    """Two jobs in two modes; `drift`: what sharing adds to the rewards; `digest`: of the adapters among others."""
    others = [Neighbour(name="grader raises", tenant="broken", status="failed", error="a|b", steps=0)]
    found: list[Run] = []
    for mode in ("deterministic", "default"):
        for seed in SETTINGS.seeds(mode):
            noise = np.random.default_rng(seed).normal(0, 0.01, 6)
            alone = [job_run(name, [0.3, 0.4, 0.5 + noise[i]]) for i, name in enumerate(("sort", "tools"))]
            among = [
                job_run(name, [0.3, 0.4, 0.5 + drift + noise[2 + i]], digest=digest, seconds=40.0)
                for i, name in enumerate(("sort", "tools"))
            ]
            found += [run(mode, "alone", seed, job) for job in alone]
            kills = ["rollout-0"] if mode == "deterministic" else []
            company = {"rollout": 0.9, "trainer": 0.75}
            found.append(run(mode, "among", seed, *among, others=others, kills=kills, accompanied=company))
    return found


def test_runs_are_paired_by_job_and_seed() -> None:
    found = findings.pairs([*recorded(), run("default", "among", 9, job_run("sort", [0.1]))], "default")
    assert [(pair.job, pair.seed) for pair in found] == [
        (job, seed) for job in ("sort", "tools") for seed in (1, 2, 3, 4)
    ]
    assert all(pair.alone.seconds == 10 and pair.among.seconds == 40 for pair in found)
    assert findings.slowdowns(found) == {"sort": 4.0, "tools": 4.0}


def test_bytes_are_compared_version_by_version() -> None:
    alone = job_run("sort", [0.1, 0.2, 0.3])
    changed = job_run("sort", [0.1, 0.2, 0.3], sha256=[*alone.sha256[:3], {"adapter_model.safetensors": "other"}])
    shorter = job_run("sort", [0.1, 0.2, 0.3], sha256=alone.sha256[:2])
    assert [
        (found.num_versions, found.same)
        for found in (findings.same_bytes(Pair("sort", 1, alone, other)) for other in (alone, changed, shorter))
    ] == [(4, 4), (4, 3), (4, 2)]


def test_an_effect_of_sharing_is_found_and_no_effect_is_shown_to_be_none() -> None:
    same, changed = (findings.pairs(recorded(drift=drift), "default") for drift in (0.0, 0.6))
    none, effect = findings.compare("", same, REWARD), findings.compare("", changed, REWARD)
    assert none is not None and none.p > 0.05 and none.equal_p < 0.05 and none.detectable < MARGIN
    assert effect is not None and effect.p < 0.05 and effect.equal_p > 0.5
    assert effect.difference.value == pytest.approx(0.2, abs=0.01)  # of three steps, the last differs


def test_another_seeds_run_has_the_same_mean_and_the_seeds_spread() -> None:
    found = findings.pairs(recorded(), "default")
    turned = findings.uncoupled(found)
    assert [(pair.job, pair.seed) for pair in turned] == [(pair.job, pair.seed) for pair in found]
    assert [pair.among for pair in turned[:4]] == [found[i].among for i in (1, 2, 3, 0)]
    assert findings.uncoupled(found[:1]) == []


def test_figures_that_no_step_has_are_left_out() -> None:
    quiet = job_run("sort", [0.1, 0.1], evals={}, steps=[{"step": 1, "sampled_versions": [0], "reward_mean": 0.1}])
    labels = [row.label for row in findings.compared_pooled([Pair("sort", 1, quiet, quiet)])]
    assert REWARD.label in labels and "gradient norm" not in labels


def test_histograms_count_every_kept_reward_once() -> None:
    job = job_run("sort", [0.5])
    shares = findings.histogram(job)
    assert (shares[0], shares[-1], shares.sum()) == (0.5, 0.5, 1.0)  # rewards 0, 1, 0, 1
    other = job_run("sort", [0.5], samples=[Sample(1, 0, 0, 1.0, "x"), Sample(1, 0, 1, None, "failed")])
    distance, p = findings.histogram_distance([Pair("sort", seed, job, other) for seed in range(5)])
    assert (distance, p) == (0.5, 2 / 2**5)


def test_a_pair_parts_where_its_rewards_differ() -> None:
    alone, among = job_run("sort", [0.1, 0.2, 0.3]), job_run("sort", [0.1, 0.25, 0.3], text="y")
    found = findings.parting(Pair("sort", 1, alone, among))
    assert (found.first_gradient, found.first_step, found.same_samples) == (0.0, 2, 0.0)
    assert findings.parting(Pair("sort", 1, alone, alone)).first_step is None


def test_a_step_on_another_versions_trajectories_is_stale() -> None:
    steps = [{"step": 3, "sampled_versions": [2]}, {"step": 4, "sampled_versions": [2, 3]}]
    assert findings.stale_steps([job_run("sort", [0.1], steps=steps)]) == 1


@pytest.mark.exact
@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_job_alone_and_among_others_on_a_real_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """One cluster for both: each worker would test itself."""
    monkeypatch.setattr(measure, "running", forked.running)  # which starts processes sooner
    monkeypatch.setattr(measure, "SEVERAL", measure.ONE_EACH)
    monkeypatch.setattr(measure, "KILLS", ("env-0",))
    monkeypatch.setattr(measure, "KILL_EVERY_S", 0.5)
    settings = Settings(num_watched=1, num_jobs=3, deterministic_steps=2, num_items=32, num_held_out=4, eval_samples=1)
    job, beside = replace(WATCHED[0], hyper={**WATCHED[0].hyper, "batch_size": 4}), background(2)
    async with measure.tenants(measure.scene("deterministic", alone=False)) as theirs:
        alone = await measure.alone(theirs, "deterministic", 1, 0, job, settings)
        among = await measure.among(theirs, "deterministic", 1, [job], beside, settings)

    (pair,) = findings.pairs([alone, among], "deterministic")
    assert pair.alone.status == pair.among.status == "succeeded"
    assert findings.same_bytes(pair).same == findings.same_bytes(pair).num_versions == 3
    assert [step["step"] for step in pair.among.steps] == [1, 2] and set(pair.among.evals) == {"0", "2"}
    kept = (
        LIMITS.sample_groups * 8 + 2 * LIMITS.other_samples
    )  # of a step: whole groups, the best and the worst of the others
    assert len(pair.among.samples) == 2 * kept and findings.stale_steps([pair.alone, pair.among]) == 0
    assert pair.alone.samples == pair.among.samples
    assert [other.name for other in among.others] == [each.name for each in (*beside, *BROKEN)]
    assert all(other.status == "running" and not other.error for other in among.others[:2])
    assert among.kills == ["env-0"]


# ---- files and the report -------------------------------------------------------------------------------------------


def folder_of(folder: Path, found: list[Run]) -> Path:
    runs.open_folder(folder, SETTINGS)
    for each in found:
        runs.write(folder, each)
    return folder


def test_runs_survive_their_files(tmp_path: Path) -> None:
    found = recorded()
    folder_of(tmp_path, found)
    assert sorted(runs.read(tmp_path), key=lambda r: r.file) == sorted(found, key=lambda r: r.file)


def test_a_folder_refuses_runs_of_other_settings(tmp_path: Path) -> None:
    runs.open_folder(tmp_path, SETTINGS)
    runs.open_folder(tmp_path, SETTINGS)
    with pytest.raises(InvalidInput, match="other settings"):
        runs.open_folder(tmp_path, Settings())


def test_goals_are_reached_where_sharing_changes_nothing() -> None:
    reached = [goal.reached for goal in goals(Evidence.of(SETTINGS, recorded()))]
    assert reached == [True] * 5


def test_goals_are_missed_where_sharing_changes_bytes_and_rewards() -> None:
    missed = {goal.what for goal in goals(Evidence.of(SETTINGS, recorded(drift=0.6, digest="b"))) if not goal.reached}
    assert missed >= {
        "deterministic: versions whose bytes differ",
        "default: p of a difference in final reward, all pairs",
        f"default: p of TOST, margin ± {MARGIN:g}, all pairs",
    }


def test_the_report_answers_each_question(tmp_path: Path) -> None:
    found = recorded()
    in_bfloat16 = [replace(each, mode="bfloat16") for each in found if each.mode == "default"]
    write_report(folder_of(tmp_path, [*found, *in_bfloat16]), "make bench-isolation")
    text = (tmp_path / "report.md").read_text()
    assert "No: all 8 versions of 2 jobs are the same bytes." in text
    assert "shows no significant difference" in text and "equal within the margin (TOST p" in text.replace("\n", " ")
    assert "against its run among others with another seed" in text
    assert "0 of 48 steps used a trajectory of another version" in text
    assert "| grader raises | 9× failed | a\\|b |" in text
    assert "rollout-0 1×" in text and "for 75 % of what they spent in trainers" in text
    assert not re.search(r"\bnan\b", text)
    for name in ("reward_curves", "final_reward", "divergence", "reward_histograms"):
        for mode in ("default", "bfloat16"):
            assert f"({mode}_{name}.png)" in text and (tmp_path / f"{mode}_{name}.png").stat().st_size > 5000
    for title in ("float32", "bfloat16"):
        assert f"## Does sharing change how a job learns? (default mode, {title})" in text
    assert "4 seeds (default) and 4 seeds (bfloat16)" in text


def test_a_report_of_one_mode_speaks_of_that_mode_alone(tmp_path: Path) -> None:
    write_report(folder_of(tmp_path, [r for r in recorded(digest="b") if r.mode == "deterministic"]), "make")
    text = (tmp_path / "report.md").read_text()
    assert "**Yes, of sort, tools.** This breaks invariant I8." in text and "TOST" not in text
    assert "default_" not in text and "bfloat16_" not in text, "they were not measured"


def test_a_folder_without_pairs_gives_no_report(tmp_path: Path) -> None:
    folder_of(tmp_path, [r for r in recorded() if r.sharing == "alone"])
    with pytest.raises(InvalidInput, match="alone and among"):
        write_report(tmp_path, "make")


def test_a_cell_of_a_table_may_hold_a_bar() -> None:
    assert table(("a", "b"), [("|x|", "")]).splitlines()[-1] == "| \\|x\\| |  |"
