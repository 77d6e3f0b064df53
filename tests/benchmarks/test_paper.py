"""The benchmark of the paper's figures: its laws, sums, marks and pictures; and one run as small as can be."""

import asyncio
import math
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest

from benchmarks import _lengths as lengths
from benchmarks._report import empty
from benchmarks.paper import agentic, table
from benchmarks.paper.__main__ import FULL, plan
from benchmarks.paper.measure import Seen, measure
from benchmarks.paper.results import (
    Engine,
    JobFigures,
    Measured,
    Stretch,
    measured,
    read,
    rollout_engine,
    summed,
    training_engine,
    with_sums,
)
from benchmarks.paper.workloads import WORKLOADS
from common.messages import TrajectoryRef
from common.text.tokens import ChatTokenizer
from env_service.environment import Turn
from manager_service.local.supervisor import LocalCluster
from simulator.calibration import write
from tests.support import forked


def job(start_s: float, step_s: float, *, steps: int = 2, tokens: int = 100) -> JobFigures:
    """Submitted at 0, at work from `start_s` on."""
    versions = [start_s + 0.1 + step_s * version for version in range(steps + 1)]
    return JobFigures(
        submitted_s=0.0, first_s=start_s, versions_s=versions, rewards=[0.5] * steps, tokens=tokens, written=tokens // 2
    )


def run_of(
    jobs: list[JobFigures], policy: str = "marlaas", workload: str = "single", *, stretches: list[Stretch] | None = None
) -> Measured:
    return measured(
        policy=policy,
        workload=workload,
        jobs=jobs,
        rollout=Engine(2.0, 1.0, 0.5),
        trainer=Engine(1.0, 0.9, 0.0),
        cpu_s={"redis": 0.5, "manager": 0.5, "rollout-0": 2.2, "trainer-0": 1.3},
        sampled_tokens=sum(each.written for each in jobs) + 7,
        stretches=stretches or [],
    )


def test_figures_follow_from_the_jobs_times() -> None:
    run = run_of([job(0.5, 1.0), job(1.0, 2.0, tokens=300)])
    assert run.makespan_s == pytest.approx(5.1) and run.steps == 2 and run.n == 2
    assert run.tpts_s.mean == pytest.approx(1.5) and run.ttfs_s.p95 == pytest.approx(1.0)
    assert run.tokens_per_s == pytest.approx(400 / 5.1) and run.steps_per_s == pytest.approx(4 / 5.1)
    assert run.wasted_tokens == 7
    assert run.control_s == pytest.approx(4.5 - 3.0)
    assert run.idle == pytest.approx(1 - 3.0 / (2 * 5.1)) and run.useful == pytest.approx(1.9 / (2 * 5.1))
    assert run.bottleneck_useful == pytest.approx(1.0 / (5.1 - 0.5)), "what waited for a core was not its own idleness"
    alone = run_of([job(0.5, 0.5)])
    assert run.slowdowns(alone) == pytest.approx([2.6 / 1.6, 5.1 / 1.6])


def test_the_goals_of_single_have_the_median_and_the_longest_time_to_a_first_token() -> None:
    jobs = [msgspec.structs.replace(job(0.1, 1.0), token_s=at, answer_s=at + 1) for at in (0.9, 0.2, 0.3)]
    assert run_of(jobs).until_tokens_s == [0.2, 0.3, 0.9]
    found = table.Found([run_of(10 * jobs + jobs[:2])])
    goals = {goal.what.partition("job's ")[2]: goal.measured for goal in table.goals(found, {})}
    assert (goals["first token, median"], goals["first token, longest"]) == (0.3, 0.9)
    assert table.notes(found, {})[-1] == "single marlaas 32: first answers after 1.3 s (median), 1.9 s (longest)"
    assert run_of([job(0.1, 1.0)]).until_tokens_s == [], "not measured"


def test_padding_and_tokens_that_are_never_trained_are_not_useful() -> None:
    growth = {
        "sampled_tokens": 80, "decode_rows": 100, "decode_s": 1.0,
        "prefill_tokens": 10, "prefill_positions": 20, "prefill_s": 0.5,
    }  # fmt: skip
    assert rollout_engine(growth, written=40, core_wait_s=0.0) == Engine(1.5, 0.5 * (0.8 + 0.25), 0.0)
    growth = {"trained_tokens": 200, "forward_tokens": 100, "padding_tokens": 10, "compute_s": 2.0}
    engine = training_engine(growth, trained=100, core_wait_s=0.1)
    assert (engine.busy_s, engine.core_wait_s) == (2.0, 0.1) and engine.useful_s == pytest.approx(0.9)


def test_others_used_what_the_machine_was_busy_with_and_its_processes_were_not() -> None:
    before, after = (
        Seen(at_s=at, machine_s=machine, counters={}, cpu_s={"redis": own, "manager": own}, core_wait_s={})
        for at, machine, own in ((5.0, 100.0, 1.0), (15.0, 120.0, 3.5))
    )
    assert before.others(after) == pytest.approx((20.0 - 5.0) / 10.0)


def test_a_sum_puts_measured_jobs_one_after_another_and_says_so() -> None:
    run = run_of([job(0.0, 1.0), job(2.1, 2.0)], policy="sequential")  # they end at 2.1 and 6.2
    total = summed(run, 5)
    assert total.kind == "summed" and total.n == 5
    assert total.makespan_s == pytest.approx(2 * 6.2 + 2.1)
    assert [each.first_s for each in total.jobs] == pytest.approx([0.0, 2.1, 6.2, 8.3, 12.4])
    assert total.tpts_s.mean == pytest.approx((3 * 1.0 + 2 * 2.0) / 5), "steps take as long as they did"
    assert total.rollout.busy_s == pytest.approx(2.5 * run.rollout.busy_s)
    assert table.named(total) == "single sequential 5 (sum)"


def test_only_what_was_not_measured_is_summed_and_from_the_largest_run_below() -> None:
    runs = [run_of([job(0.0, 1.0)], "sequential"), run_of([job(0.0, 1.0), job(2.1, 1.0)], "sequential")]
    found = with_sums([*runs, run_of([job(0.0, 1.0)] * 4)], [1, 2, 4])
    assert [(run.policy, run.n, run.kind) for run in found[3:]] == [("sequential", 4, "summed")]
    assert found[3].makespan_s == pytest.approx(2 * 4.2)


def test_sequential_is_measured_where_the_plan_says() -> None:
    planned = [(workload.name, n) for workload, _, n in plan(FULL, ["sequential"], list(WORKLOADS))]
    assert planned == [("single", 1), ("single", 4), ("single", 32), ("agentic", 1), ("agentic", 4), ("tail", 1),
                       ("tail", 4), ("tail", 32)]  # fmt: skip


def test_runs_are_read_as_they_were_written(tmp_path: Path) -> None:
    run = run_of([job(0.0, 1.0)], stretches=[Stretch(0, "rollout", 0.0, 1.0)])
    write(run, tmp_path / "run-single-marlaas-1.json")
    assert read(tmp_path) == [run]


def under_three_policies(n: int) -> table.Found:
    """One job and `n` jobs, all alike."""
    policies = ("sequential", "synchronous", "marlaas")
    return table.Found(run_of([job(0.2, 1.0)] * num, policy, "agentic") for policy in policies for num in (1, n))


def test_goals_name_what_is_missed() -> None:
    found = {goal.what: goal for goal in table.goals(under_three_policies(32), {})}
    assert found["agentic, N = 32: Jain's index"].reached
    assert not found["agentic, N = 32, against sequential: makespan lower by"].reached
    assert found["agentic, N = 32, against synchronous: mean TPTS"].measured == pytest.approx(1)


def test_only_32_jobs_are_judged() -> None:
    few, many = under_three_policies(4), under_three_policies(32)
    assert table.goals(few, few.runs) == []
    assert table.notes(few, few.runs)[-2].startswith("simulator: 6 of 6 makespans within 15 %")
    assert "the goals are for N = 32" in table.notes(few, few.runs)[-1]
    assert table.goals(many, many.runs)[-1].measured == 100
    assert table.notes(many, many.runs)[-1].startswith("simulator: 6 of 6")


def test_a_busy_machine_is_named_with_its_worst_run() -> None:
    found = under_three_policies(4)
    assert not any("warning" in note for note in table.notes(found, {}))
    noisy = [msgspec.structs.replace(run, others=0.3 * run.n) for run in found.runs.values() if run.policy == "marlaas"]
    (warning,) = (note for note in table.notes(table.Found([*found.runs.values(), *noisy]), {}) if "warning" in note)
    assert "1.2 cores (agentic marlaas 4)" in warning


def test_every_word_of_the_legend_heads_a_column_or_marks_a_run() -> None:
    heads = " ".join((*table.TIME_COLUMNS, *table.ENGINE_COLUMNS, "(sum)"))
    assert all(word in heads for word in table.LEGEND)


def test_pictures_are_drawn_from_recorded_runs(tmp_path: Path) -> None:
    stretches = [Stretch(0, "rollout", 0.0, 1.0), Stretch(0, "env", 1.0, 1.5), Stretch(1, "trainer", 1.5, 2.0)]
    runs = [
        run_of([job(0.2, 1.0)] * n, policy, workload, stretches=stretches)
        for workload in WORKLOADS
        for policy in ("sequential", "marlaas")
        for n in (1, 2)
    ]
    from benchmarks.paper import figures  # here: matplotlib takes a second

    paths = figures.write(runs, tmp_path)
    assert [path.name.split("-")[1] for path in paths] == ["1", "3", "4", "6", "7"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
    assert set(figures.draw(table.Found(runs[:1]))) == {"figure-6-sweep", "figure-7-latency"}, "no picture of nothing"


# ---- workloads ------------------------------------------------------------------------------------------------------


def test_lengths_follow_the_law() -> None:
    tokens = [lengths.answer_tokens(TrajectoryRef("train", 1, g, s)) for g in range(600) for s in range(8)]
    median, high = np.percentile(tokens, [50, 99])
    assert median == pytest.approx(lengths.MEDIAN, rel=0.1)
    assert high / median == pytest.approx(10, rel=0.2)
    assert max(tokens) <= lengths.LONGEST


def test_latencies_follow_the_law_and_calls_are_two_to_four() -> None:
    seconds = [agentic.latency_s(seed, sample, 0) for seed in range(300) for sample in range(8)]
    assert np.median(seconds) == pytest.approx(0.5, rel=0.05)
    assert np.std(np.log(seconds)) == pytest.approx(agentic.SPREAD, rel=0.1)
    assert {agentic.num_calls(7, sample) for sample in range(64)} == {2, 3, 4}


def test_a_trajectory_calls_its_tool_as_often_as_the_law_says(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = agentic.Agentic()
    item = environment.make_item(3, held_out=False)
    state, messages = environment.reset(item, 5)
    assert messages[0]["role"] == "user"

    async def play(sample: int) -> int:
        for number in range(9):
            turn = Turn(item=item, text=item["answer"], index=number, key=f"ftjob-1/2/{sample}/{number}/0")
            if (step := await environment.step(state, turn)).done:
                assert step.reward == 1.0
                return number
        raise AssertionError("it never ended")

    monkeypatch.setattr(agentic, "LATENCY_S", 0.0)
    assert [asyncio.run(play(s)) for s in range(6)] == [agentic.num_calls(5, s) for s in range(6)]


def test_the_endless_base_model_has_an_end_that_no_token_is(tmp_path: Path) -> None:
    WORKLOADS["tail"].prepare(tmp_path)
    tokenizer = ChatTokenizer.load(tmp_path / "endless")
    (end,) = tokenizer.end_of_turn_ids
    assert tokenizer.decode([end]) == "" and end not in tokenizer.encode("any text")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_jobs_on_real_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.paper.measure.LocalCluster", partial(LocalCluster, start=forked.start))
    run, recording = asyncio.run(measure(WORKLOADS["tail"], "marlaas", 2, 1))
    assert run.n == 2 and run.steps == 1 and run.wasted_tokens == 0
    expected = [
        sum(lengths.answer_tokens(TrajectoryRef("train", number, g, s)) for g in range(4) for s in range(8))
        for number in range(2)
    ]
    assert [each.written for each in run.jobs] == expected, "answers are as long as the law says"
    for each in run.jobs:
        token_s, answer_s = each.token_s or 0.0, (each.answer_s or 0.0) + 0.001  # told in whole milliseconds
        assert 0 < each.first_s < token_s < answer_s < each.versions_s[-1]
    assert 0 < run.rollout.useful_s <= run.rollout.busy_s < run.makespan_s
    assert 0 < run.trainer.useful_s <= run.trainer.busy_s < run.makespan_s
    assert {stretch.phase for stretch in run.stretches} == {"rollout", "env", "trainer"}
    assert recording.hyper.batch_size == 4 and math.isfinite(run.control_s)


def test_a_folder_of_results_is_emptied_of_results_alone(tmp_path: Path) -> None:
    for name in ("run-single-marlaas-1.json", "figure-6.png"):
        (tmp_path / name).touch()
    empty(tmp_path, "run-*.json", "figure-*.png")
    assert not list(tmp_path.iterdir())
    (tmp_path / "thesis.txt").touch()
    (tmp_path / "run-single-marlaas-1.json").touch()
    with pytest.raises(SystemExit, match=r"it holds 'thesis.txt'"):
        empty(tmp_path, "run-*.json")
    assert len(list(tmp_path.iterdir())) == 2
