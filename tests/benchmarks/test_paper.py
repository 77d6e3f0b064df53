"""The benchmark of the paper's figures: its sums and its workloads."""

import asyncio

import pytest

from benchmarks._lengths import answer_tokens
from benchmarks.paper import agentic
from benchmarks.paper.measure import Seen
from benchmarks.paper.results import Engine, JobFigures, Measured, measured, rollout_engine, training_engine
from benchmarks.paper.workloads import WORKLOADS
from common.messages import TrajectoryRef
from env_service.environment import Turn


def job(start_s: float, step_s: float, *, tokens: int = 100) -> JobFigures:
    """Two steps, submitted at 0, at work from `start_s` on."""
    versions = [start_s + 0.1 + step_s * version for version in range(3)]
    times = {"submitted_s": 0.0, "first_s": start_s, "token_s": start_s}
    return JobFigures(**times, versions_s=versions, tokens=tokens, written=tokens // 2)


def run_of(jobs: list[JobFigures]) -> Measured:
    return measured(
        jobs,
        Engine(2.0, 1.0, 0.5),
        Engine(1.0, 0.9, 0.0),
        sampled_tokens=sum(each.written for each in jobs) + 7,
        policy="marlaas",
        workload="single",
        cpu_s={"redis": 0.5, "manager": 0.5, "rollout-0": 2.2, "trainer-0": 1.3},
    )


def test_figures_follow_from_the_jobs_times() -> None:
    run = run_of([job(0.5, 1.0), job(1.0, 2.0, tokens=300)])
    assert run.makespan_s == pytest.approx(5.1) and run.steps == 2 and run.n == 2
    assert run.tpts_s.mean == pytest.approx(1.5) and run.ttfs_s.p95 == pytest.approx(1.0)
    assert run.tokens_per_s == pytest.approx(400 / 5.1) and run.wasted_tokens == 7
    assert run.control_s == pytest.approx(4.5 - 3.0) and run.useful == pytest.approx(1.9 / (2 * 5.1))
    assert run.bottleneck_useful == pytest.approx(1.0 / (5.1 - 0.5)), "what waited for a core was not its own idleness"
    assert run.slowdowns(run_of([job(0.5, 0.5)])) == pytest.approx([2.6 / 1.6, 5.1 / 1.6])


def test_padding_and_tokens_that_are_never_trained_are_not_useful() -> None:
    growth = {
        "sampled_tokens": 80, "decode_rows": 100, "decode_s": 1.0,
        "prefill_tokens": 10, "prefill_positions": 20, "prefill_s": 0.5,
    }  # fmt: skip
    assert rollout_engine(growth, written=40, core_wait_s=0.0) == Engine(1.5, 0.5 * (0.8 + 0.25), 0.0)
    growth = {"trained_tokens": 200, "forward_tokens": 100, "padding_tokens": 10, "compute_s": 2.0}
    assert training_engine(growth, trained=100, core_wait_s=0.1).useful_s == pytest.approx(0.9)


def test_others_used_what_the_machine_was_busy_with_and_its_processes_were_not() -> None:
    before, after = (
        Seen(at_s=at, machine_s=machine, counters={}, cpu_s={"redis": own, "manager": own}, core_wait_s={})
        for at, machine, own in ((5.0, 100.0, 1.0), (15.0, 120.0, 3.5))
    )
    assert before.others(after) == pytest.approx((20.0 - 5.0) / 10.0)


def test_answers_and_tool_calls_are_functions_of_seed_group_and_sample() -> None:
    first, again = ([answer_tokens(TrajectoryRef("train", 1, g, 0)) for g in range(100)] for _ in range(2))
    assert first == again and 8 < sorted(first)[50] < 32
    assert {agentic.num_calls(7, sample) for sample in range(64)} == {2, 3, 4}
    assert WORKLOADS["tail"].hyper["max_tokens"] >= max(first)


def test_a_trajectory_calls_its_tool_as_often_as_the_law_says(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = agentic.Agentic()
    item = environment.make_item(3, held_out=False)
    state, _ = environment.reset(item, 5)

    async def play(sample: int) -> int:
        for number in range(9):
            turn = Turn(item=item, text=item["answer"], index=number, key=f"ftjob-1/2/{sample}/{number}/0")
            if (step := await environment.step(state, turn)).done:
                assert step.reward == 1.0
                return number
        raise AssertionError("it never ended")

    monkeypatch.setattr(agentic, "LATENCY_S", 0.0)
    assert [asyncio.run(play(s)) for s in range(6)] == [agentic.num_calls(5, s) for s in range(6)]
