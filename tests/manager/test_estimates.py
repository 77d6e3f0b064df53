"""Estimates of a job's needs, and of a running one's end, through the real HTTP API."""

from typing import Any

import msgspec
import openai
import pytest

from common.settings import TINY
from common.text.tokens import ChatTokenizer
from harness.standin import job_spec
from manager_service.http.openai.jobs.estimates import num_evaluated, seconds_for
from manager_service.owner.jobs.changes import Changes
from manager_service.owner.jobs.items import Items
from manager_service.owner.jobs.job import Job
from manager_service.records.job_records import JobState, ScoreProgress, steps_left
from tests.manager.test_api_cluster import report
from tests.manager.test_job import CELL
from tests.support.api_server import ApiServer, create, item, jsonl, method, upload, write_state

PROMPT = len(ChatTokenizer.load(TINY).render(item()["messages"]))


async def estimate(server: ApiServer, file: str | None = None, **hyper: Any) -> dict[str, Any]:
    body = {"model": "tiny", "training_file": file or await upload(server.openai), "method": method(**hyper)}
    answer = await server.http.post("/v1/fine_tuning/jobs/estimate", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_job_is_reckoned_by_its_files_and_creates_nothing(server: ApiServer) -> None:
    found = await estimate(server, max_steps=5, batch_size=2, group_size=4, max_tokens=10, max_tokens_total=1000)
    num, whole = 5 * 2 * 4, PROMPT + 10
    assert (found["num_steps"], found["num_trajectories"], found["num_evaluated"]) == (5, num, 0)
    assert (found["sampled_tokens"], found["trained_tokens"]) == (num * 10, num * whole)
    assert found["tokens"] == found["max_tokens"] == 2 * num * whole
    assert found["steps_within_limit"] == 1000 // (2 * 8 * whole)
    assert (found["seconds"], found["num_like"]) == (None, 0), "nothing has been seen yet"
    assert [job async for job in server.openai.fine_tuning.jobs.list()] == []
    # And what would be refused is
    body = {"model": "tiny", "training_file": "file-x", "method": method()}
    answer = await server.http.post("/v1/fine_tuning/jobs/estimate", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "training_file"


async def test_answers_are_expected_as_long_as_those_of_ones_own_jobs(server: ApiServer) -> None:
    file = await upload(server.openai)
    hyper = {"max_steps": 5, "batch_size": 2, "group_size": 4, "max_tokens": 10}
    made = await create(server.openai, training_file=file, method=method(**hyper))
    await write_state(server, made.id, status="succeeded", version=5, trained_tokens=40 * (PROMPT + 3))
    for asked in (file, await upload(server.openai)):
        found = await estimate(server, asked, **hyper)
        assert (found["num_like"], found["sampled_tokens"]) == (1, 40 * 3)
        assert found["tokens"] == 80 * (PROMPT + 3) < found["max_tokens"] == 80 * (PROMPT + 10)
    other = await server.new_tenant("acme")
    with pytest.raises(openai.BadRequestError):
        await other.post("/fine_tuning/jobs/estimate", body={"model": "tiny", "training_file": file}, cast_to=object)


async def test_a_supervised_job_samples_nothing(server: ApiServer) -> None:
    row = {"messages": [*item()["messages"], {"role": "assistant", "content": "3"}]}
    file = await upload(server.openai, jsonl(*[row] * 10))
    how = {"type": "supervised", "supervised": {"hyperparameters": {"batch_size": 5, "n_epochs": 2}}}
    body = {"model": "tiny", "training_file": file, "validation_file": file, "method": how}
    found = (await server.http.post("/v1/fine_tuning/jobs/estimate", json=body)).json()
    assert (found["num_steps"], found["num_trajectories"], found["num_evaluated"]) == (4, 20, 20)
    assert found["sampled_tokens"] == 0 and found["tokens"] == found["trained_tokens"] * 2 == found["max_tokens"]


def test_seconds_follow_from_what_the_workers_did_so_far() -> None:
    fast = report("r1", "rollout", counters={"sampled_tokens": 1000.0, "busy_s": 10.0})
    slow = report("r2", "rollout", counters={"sampled_tokens": 500.0, "busy_s": 10.0})
    fresh = report("r3", "rollout", counters={"sampled_tokens": 5.0, "busy_s": 0.01})
    trainer = report("t", "trainer", counters={"trained_tokens": 2000.0, "busy_s": 5.0})
    assert seconds_for(300, 800, [fast, slow, fresh, trainer]) == 2 + 2
    assert seconds_for(0, 800, [trainer]) == 2, "a supervised job needs no rollouts"
    assert seconds_for(300, 800, [fast]) is None is seconds_for(300, 800, [fresh, trainer])


def test_every_evaluation_is_counted_once() -> None:
    assert num_evaluated(job_spec(num_steps=6, eval_interval=2)) == 0
    for interval, num in ((0, 2), (2, 4), (4, 3), (7, 2)):
        spec = msgspec.structs.replace(job_spec(num_steps=6, eval_interval=interval), num_eval_items=5)
        assert num_evaluated(spec) == num * 5 * 2


def test_the_steps_that_are_left_end_with_the_tokens() -> None:
    state = JobState(status="running", version=4, progress=ScoreProgress(tokens=400, step_tokens=100, eval_tokens=50))
    assert steps_left(job_spec(num_steps=20), state) == 16
    assert steps_left(job_spec(num_steps=20, max_tokens_total=1050), state) == 6
    assert steps_left(job_spec(num_steps=20, max_tokens_total=440), state) == 0


def test_a_pause_makes_no_step_longer() -> None:
    job, changes = Job(CELL, job_spec(num_steps=9), JobState(status="running", version=2), Items(), Items()), Changes()
    job.journal.start_clock(100.0)
    job.pause(105.0, changes)
    job.resume(1000.0, changes)
    assert job.state.stepped_at == 1000.0
