"""Training that ends early: at a target, on a plateau, or where the tokens of a job are used up."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.tasks.environments import SUPERVISED
from common.wire.messages import EnvSpec, Start, TrainStep, Usage
from harness.standin import StandInEnv, job_spec, until_status
from manager_service.owner.jobs.changes import Changes
from manager_service.owner.jobs.items import Items
from manager_service.owner.jobs.job import Job
from manager_service.owner.jobs.stopping import COMPARED_STEPS, end_of, note_evaluation, note_step
from manager_service.records.job_records import JobSpec, JobState
from tests.manager.test_job import CELL, World
from tests.support.api_server import item, jsonl, method, running_api, running_jobs, upload
from tests.support.owning import System


def reason_after(spec: JobSpec, rewards: Sequence[float | None]) -> tuple[str, int] | None:
    """The reason why training ends, and the step after which, if steps have these rewards."""
    state = JobState(status="running")
    for step, reward in enumerate(rewards, 1):
        state.version, state.last_reward, state.last_loss = step, reward, reward
        note_step(spec, state)
        if found := end_of(spec, state, steps_sent=step):
            assert found[0].version == step
            return found[0].reason, step
    return None


def test_the_mean_of_the_last_steps_is_compared_with_the_target() -> None:
    spec = job_spec(num_steps=100, target_reward=0.75)
    assert reason_after(spec, [0.5, 1.0] * 20) == ("target_reward", 6)
    assert reason_after(spec, [1.0] * (COMPARED_STEPS - 1)) is None, "too few steps to say"
    assert reason_after(spec, [0.5, None, 0.5, 1.0, None, 1.0, 1.0]) == ("target_reward", 7), "no signal is no reward"
    assert reason_after(job_spec(num_steps=COMPARED_STEPS, target_reward=0.75), [1.0] * COMPARED_STEPS) is None, (
        "it ends anyway"
    )


def test_a_plateau_is_so_many_steps_without_a_better_mean() -> None:
    rising = [n / 100 for n in range(20)]
    assert reason_after(job_spec(num_steps=100, plateau_steps=4), [*rising, *[0.1] * 30]) == ("plateau", 24)
    slow = job_spec(num_steps=100, plateau_steps=4, plateau_delta=0.1)
    assert reason_after(slow, rising) == ("plateau", COMPARED_STEPS + 4), "it rises by 0.01 a step"
    assert reason_after(job_spec(num_steps=100, plateau_steps=50), [0.1] * 40) is None


def test_a_loss_is_better_when_it_is_smaller() -> None:
    spec = msgspec.structs.replace(job_spec(num_steps=100, plateau_steps=4), env=EnvSpec(SUPERVISED))
    falling = [5 - n / 10 for n in range(40)]
    assert reason_after(spec, falling) is None
    assert reason_after(spec, falling[::-1]) == ("plateau", COMPARED_STEPS + 4)


def test_evaluations_are_compared_where_there_are_some_between_steps() -> None:
    spec = msgspec.structs.replace(
        job_spec(num_steps=100, target_reward=0.75, plateau_steps=4, eval_interval=2), num_eval_items=1
    )
    state = JobState(status="running", version=2, last_reward=1.0)
    for _ in range(COMPARED_STEPS):
        note_step(spec, state)
    note_evaluation(spec, state, 0, 0.9)
    assert end_of(spec, state, 3) is None, "neither steps nor the base model's evaluation count"
    note_evaluation(spec, state, 2, 0.74)
    note_evaluation(spec, state, 4, None)
    assert end_of(spec, state, 3) is None
    note_evaluation(spec, state, 4, 0.75)
    found = end_of(spec, state, steps_sent=6)
    assert found and found[0].version == 6, "a step under way is finished"
    assert found[1] == "the evaluation's mean reward is 0.75, and target_reward 0.75"


LIMITED: list[dict[str, Any]] = [
    {"max_tokens_total": 300},
    {"plateau_steps": 2},
    {"max_tokens_total": 600, "max_staleness": 2},
]


@settings(max_examples=12)
@given(st.integers(0, 10**9), st.sampled_from(LIMITED))
def test_a_job_that_stops_settles_every_trajectory(seed: int, limits: dict[str, Any]) -> None:
    spec = job_spec(num_steps=50, batch_size=3, group_size=4, **limits)
    world = World(random.Random(seed), Job(CELL, spec, JobState(), Items(), Items()), metrics={"reward_mean": 0.5})
    state = world.started().ended().job.state
    assert state.status == "succeeded" and state.stop and world.open == set()
    assert state.version == state.stop.version == len({step.adapter for step in world.steps}) < 50


class Orderly(World):
    """Everything comes back at once and in order. A trajectory has 3 tokens, or `eval_tokens` if it measures a later version than the
    first; of a step 10 are trained."""

    eval_tokens = 3
    told: list[dict[str, Any]]

    def work(self, message: Any) -> list[Any]:
        if not isinstance(message, Start):
            return [
                msgspec.structs.replace(
                    self.made(message), usage=Usage(trained_tokens=10 * isinstance(message, TrainStep))
                )
            ]
        found = [StandInEnv(CELL).scored(message, sample) for sample in message.samples]
        if message.purpose == "train" or message.adapter.version == 0:
            return found
        return [msgspec.structs.replace(one, usage=Usage(sampled_tokens=self.eval_tokens)) for one in found]

    def turn(self) -> None:
        job, changes = self.job, Changes()
        if self.on_its_way:
            self.deliver(self.on_its_way.pop(0), changes)
        elif job.wants_eval():
            job.issue_eval(changes)
        elif job.wants_group():
            job.issue_group(changes)
        job.advance(self.now, changes)
        if not self.on_its_way and not job.wants_group() and (numbers := job.next_batch()) is not None:
            job.publish_step(numbers, changes)
        self.told += [event.data for _, event in changes.events if event.data.get("code")]
        self.apply(changes)


def played(limit: int, *, num_steps: int, held_out: int = 0, eval_tokens: int = 3, staleness: int = 0) -> Orderly:
    """Steps have 22 tokens, and an evaluation 6 for each of the items that are held out."""
    spec = job_spec(num_steps=num_steps, batch_size=2, group_size=2, max_tokens_total=limit, max_staleness=staleness)
    spec = msgspec.structs.replace(spec, num_eval_items=held_out)
    items = Items([b'{"messages": []}'] * held_out)
    world = Orderly(random.Random(0), Job(CELL, spec, JobState(), Items(), items))
    world.eval_tokens, world.told = eval_tokens, list[dict[str, Any]]()
    world.started()
    for _ in range(1000):
        world.turn()
    assert world.job.settled and world.job.state.status == "succeeded" and not world.job.num_waiting
    return world


@pytest.mark.parametrize("trained", [1, 3, 4])
def test_evaluations_and_what_is_sampled_ahead_make_no_step_dearer(trained: int) -> None:
    assert played(24 + trained * 22, num_steps=30, held_out=4).job.state.version == trained
    ahead = 2 * 12
    assert played(ahead + trained * 22, num_steps=30, staleness=2).job.state.version == trained


def test_the_tokens_that_a_job_may_use_bound_its_last_evaluation() -> None:
    whole = played(114, num_steps=3, held_out=4)
    assert (whole.job.state.evaluated, whole.job.state.tokens, whole.told) == (3, 114, [])
    short = played(113, num_steps=3, held_out=4)
    assert (short.job.state.evaluated, short.job.state.tokens, short.job.state.stop) == (0, 90, None)
    assert short.told == [{"code": "max_tokens_total", "version": 3}]
    dear = played(114, num_steps=3, held_out=4, eval_tokens=10)
    assert (dear.job.state.evaluated, dear.job.state.tokens) == (0, 120), "nothing is issued once they are used"


async def test_a_job_ends_before_it_uses_more_tokens_than_it_may(system: System) -> None:
    spec = job_spec(num_steps=30, max_tokens_total=150)  # a step has 16 trajectories of 3 tokens, and 10 are trained
    state = await system.run_job(spec)
    assert (state.version, state.tokens) == (2, 116)
    tight = job_spec("job-b", num_steps=30, max_tokens_total=20)
    failed = await system.run_job(tight, "failed", "succeeded")
    assert failed.error and failed.error.code == "max_tokens_total"
    assert "before the first step was trained: it has used" in failed.error.message


async def test_evaluations_end_a_job_and_the_last_version_is_evaluated(redis_url: str, tmp_path: Path) -> None:
    def reward(start: Start, sample: int) -> float:
        return min(start.adapter.version, 3) / 4

    async with running_api(redis_url, tmp_path / "data") as server, running_jobs(server) as env:
        env.reward = reward
        held_out = await upload(server.openai, jsonl(*(item(f"add {n}+1") for n in range(8))))
        given = method(max_steps=50, batch_size=2, group_size=2, eval_interval=1, target_reward=0.7)
        job = await server.openai.fine_tuning.jobs.create(
            model="tiny",
            training_file=await upload(server.openai),
            validation_file=held_out,
            extra_body={"method": given},
        )
        state = await until_status(server.bus, job.id, "succeeded", "failed")
        assert state.status == "succeeded" and 3 <= state.version < 50 and state.evaluated == state.version
        assert state.best_version == 3, "the first of the best"
        shown = (await server.openai.fine_tuning.jobs.retrieve(job.id)).to_dict()
        assert shown["stopped_early"] == "target_reward" and shown["num_steps"] == 50
        assert shown["hyperparameters"]["target_reward"] == 0.7  # type: ignore[index]
        counts = (await server.http.get(f"/v1/fine_tuning/jobs/{job.id}/ledger")).json()
        assert counts["issued"] == counts["trained"] + counts["cancelled"] and counts["in_flight"] == 0
