"""The benchmark of the paper's figures: its sums and its workloads."""

import asyncio

import pytest

from benchmarks._lengths import answer_tokens
from benchmarks.paper import agentic
from benchmarks.paper.results import JobFigures, Measured, measured
from benchmarks.paper.workloads import WORKLOADS
from common.wire.messages import TrajectoryRef
from env_service.environment import Turn


def job(start_s: float, step_s: float, tokens: int = 100) -> JobFigures:
    """Two steps, submitted at 0, at work from `start_s` on."""
    versions = [start_s + step_s * version for version in range(3)]
    return JobFigures(submitted_s=0.0, versions_s=versions, tokens=tokens, written=tokens // 2)


def run_of(*jobs: JobFigures) -> Measured:
    rollout = {"decode_s": 1.5, "prefill_s": 0.5, "sampled_tokens": sum(each.written for each in jobs) + 7.0}
    cpu_s = {"redis": 0.5, "manager": 0.5, "rollout-0": 2.2, "trainer-0": 1.3}
    return measured("marlaas", "single", jobs, {"rollout": rollout, "trainer": {"compute_s": 1.0}}, cpu_s)


def test_figures_follow_from_the_jobs_times() -> None:
    run = run_of(job(0.5, 1.0), job(1.0, 2.0, tokens=300))
    assert run.makespan_s == pytest.approx(5.0) and (run.steps, run.n, run.wasted_tokens) == (2, 2, 7)
    assert run.tpts_s.mean == pytest.approx(1.5) and run.ttfs_s.p95 == pytest.approx(1.0)
    assert run.tokens_per_s == pytest.approx(400 / 5.0) and run.busy == pytest.approx(3.0 / (2 * 5.0))
    assert run.control_s == pytest.approx(4.5 - 3.0)
    assert run.slowdowns(run_of(job(0.5, 0.5))) == pytest.approx([2.5 / 1.5, 5.0 / 1.5])


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
