"""Supervised jobs under the real owner, with stand-ins for the workers."""

import json
from typing import Any

import msgspec
import pytest

from common.bus.streams import Cell
from common.tasks.environments import SUPERVISED
from common.wire.messages import AdapterRef, EnvSpec, Failure, LossSpec, ScoredTrajectory, TrainStep, TrajectoryRef
from harness.standin import command, create_job, job_spec, ledger_of, state_of, until_status
from manager_service.owner.jobs.changes import Changes
from manager_service.owner.jobs.evaluation import count, loss_summary, new_tally, next_unit
from manager_service.owner.jobs.items import Items
from manager_service.owner.jobs.job import Job
from manager_service.owner.jobs.open_trajectories import TrajectoryKey
from manager_service.records.job_records import JobSpec, JobState
from manager_service.records.sample_records import LIMITS
from tests.common.test_worker import until
from tests.support.owning import System

ABOUT: dict[str, Any] = {"id": "m", "tenant": "acme", "job": "job-a", "partition": 0}


def supervised(**hyper: Any) -> JobSpec:
    """A job as the API resolves it: a group is one example."""
    loss = LossSpec(name="cross_entropy")
    spec = job_spec()
    values = {"batch_size": 4, "num_steps": 6, **hyper, "group_size": 1, "max_staleness": 1, "loss": loss}
    return msgspec.structs.replace(spec, env=EnvSpec(SUPERVISED), hyper=msgspec.structs.replace(spec.hyper, **values))


def groups_of(step: TrainStep) -> list[int]:
    return step.rows.groups.numpy().tolist()


async def test_each_step_has_the_next_examples_whatever_is_killed_paused_and_resumed(system: System) -> None:
    system.env.delay_s = 0.03
    spec = supervised()
    await create_job(system.bus, spec)
    await until(lambda: len(system.trainer.seen) >= 1)
    await system.kill_owner()
    system.start_owner()
    await until(lambda: len(system.trainer.seen) >= 3)
    await command(system.bus, spec, "pause")
    await until_status(system.bus, spec.id, "paused")
    await command(system.bus, spec, "resume")
    await until_status(system.bus, spec.id, "succeeded", seconds=60)
    steps = {step.adapter.version: groups_of(step) for step in system.trainer.seen}
    assert steps == {version: list(range(4 * version, 4 * version + 4)) for version in range(6)}
    assert {step.loss.name for step in system.trainer.seen} == {"cross_entropy"}
    assert await ledger_of(system.bus, spec.id) == {"issued": 24, "trained": 24, "in_flight": 0}
    told = [e for e in await system.events(spec.id) if e.type == "metrics"]
    assert [e.message for e in told] == [f"Step {n}/6: loss 0.0000" for n in range(1, 7)]
    assert (await state_of(system.bus, spec.id)).last_loss == 0.0


async def test_a_file_of_which_nothing_can_be_learned_fails_with_the_reason(system: System) -> None:
    system.env.reward = lambda start, sample: Failure("invalid", "the template refuses it")
    spec = supervised()
    state = await system.run_job(spec, "failed")
    assert state.error and state.error.code == "invalid" and "the template refuses it" in state.error.message


def measured(index: int, log_prob: float | None, tokens: int) -> ScoredTrajectory:
    failure = Failure("invalid", "too long") if log_prob is None else None
    ref = TrajectoryRef("eval", 7, index, 0)
    return ScoredTrajectory(
        **ABOUT, adapter=AdapterRef("acme", "job-a", 0), trajectory=ref, reward=log_prob,
        reward_parts={"tokens": float(tokens)}, stop_reason="length", failure=failure,
    )  # fmt: skip


def test_the_loss_of_an_evaluation_is_the_mean_over_all_learned_tokens() -> None:
    spec = msgspec.structs.replace(supervised(), num_eval_items=3)
    state = JobState(evals={"5": new_tally(spec)})
    tally = state.evals["5"]
    keys = [next_unit(tally, 5, spec) for _ in range(tally.units)]
    assert [str(key) for unit in keys for key in unit] == ["eval@5.0/0", "eval@5.1/0", "eval@5.2/0"]
    for message in (measured(0, -1.0, 1), measured(1, -0.2, 4), measured(2, None, 9)):
        assert not tally.done
        count(spec, state, 5, message)
    assert tally.done and tally.failed_reason == "invalid: too long"
    found = loss_summary(5, tally)
    assert found == {
        "step": 5, "version": 5, "eval_loss": pytest.approx(0.36), "eval_tokens": 5, "eval_n": 2, "eval_failed": 1,
    }  # fmt: skip


def test_the_version_of_the_smallest_loss_is_the_best() -> None:
    spec = msgspec.structs.replace(supervised(), num_eval_items=1)
    job, changes = Job(Cell("tiny"), spec, JobState(status="running", version=2), Items(), Items()), Changes()
    for version, log_prob in ((0, -3.0), (1, -0.5), (2, -0.75)):
        job.state.evals = {str(version): new_tally(spec)}
        count(spec, job.state, version, measured(0, log_prob, 2))
        job.journal.evaluated(version, job.state.evals.popitem()[1], 0.0, changes)
    state = job.state
    assert (state.best_version, state.last_eval_loss, state.last_eval) == (1, 0.75, None)
    assert changes.events[-1][1].message == "Evaluation of version 2: loss 0.7500 over 1 examples"


def test_an_evaluation_keeps_its_first_examples_which_have_no_reward() -> None:
    example, num = b'{"prompt": "min 3,1", "completion": "1"}', LIMITS.sample_items + 1
    spec = msgspec.structs.replace(supervised(), num_eval_items=num)
    state = JobState(status="running", version=2, evals={"2": new_tally(spec)})
    job, changes = Job(Cell("tiny"), spec, state, Items(), Items([example] * num)), Changes()
    for index in range(num):
        job.open.issue(TrajectoryKey(index, 0, "eval", 2), 2, 0, changes)
        message = msgspec.structs.replace(measured(index, -0.5, 4), adapter=AdapterRef("acme", "job-a", 2))
        job.on_scored("1-0", message, changes)
    job.advance(1.0, changes)
    (answers,) = changes.samples
    kept = json.loads(answers.records)
    assert (answers.kind, answers.version) == ("answers", 2)
    assert [(one["item"], one["step"], one["prompt"]) for one in kept] == [(n, 2, "min 3,1") for n in range(num - 1)]
    assert {one["reward"] for one in kept} == {None}
