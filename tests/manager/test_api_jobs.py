"""Jobs through the `openai` client: everything is checked at creation; states, events and results read back."""

import asyncio
import io
import json
import time
import zipfile
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import openai
import pytest

from common.errors import InvalidInput
from common.store.adapters import PEFT_FILES
from common.wire.messages import EnvSpec, Failure
from manager_service.http.openai.adapter_content import with_base
from manager_service.http.openai.jobs.job_checks import find_start
from manager_service.http.openai.jobs.submission import JobGiven
from manager_service.records.job_records import Stop
from manager_service.records.keys import GLOBAL
from manager_service.records.sample_records import Kept, SampleRecord, Written
from manager_service.records.tenants import TenantRecord
from tests.support.api_server import (
    GRADER,
    ApiServer,
    commit_version,
    create,
    item,
    jsonl,
    keep_samples,
    method,
    running_jobs,
    spec_of,
    upload,
    write_events,
    write_state,
)

SETTINGS = {"command_wait_s": 60.0, "keep_alive_s": 0.3}


# Creation ----------------------------------------------------------------------------------------------------------


async def test_a_job_is_created_with_its_defaults_filled_in(server: ApiServer) -> None:
    job = await create(
        server.openai, suffix="mine", metadata={"team": "a"}, method=method(n_epochs="auto", batch_size=4)
    )
    assert (job.object, job.status, job.model) == ("fine_tuning.job", "validating_files", "tiny")
    assert (job.trained_tokens, job.metadata, job.fine_tuned_model) == (0, {"team": "a"}, None)
    assert 0 <= job.seed < 2**53
    due = {"max_steps": 3, "batch_size": 4, "group_size": 8, "learning_rate": 1e-3, "loss": "grpo"}
    hyper: Any = job.to_dict()["hyperparameters"]
    assert due.items() <= hyper.items()
    again = await server.openai.fine_tuning.jobs.retrieve(job.id)
    assert again.to_dict() == job.to_dict()


async def start_of_any(*bases: str) -> str:
    """The name of what a job starts from that names nothing, where these base models are served."""
    models = SimpleNamespace(models=dict.fromkeys(bases, "/models/one"))
    api: Any = SimpleNamespace(bases={name: SimpleNamespace(name=name) for name in bases}, settings=models)
    return (await find_start(api, TenantRecord(id="acme", created_at=0), JobGiven())).name


async def test_a_job_that_names_no_model_trains_tiny_or_the_only_base_model() -> None:
    assert [await start_of_any("a", "tiny"), await start_of_any("a")] == ["tiny", "a"]
    with pytest.raises(InvalidInput, match="name a base model as `model`; there are: a, b"):
        await start_of_any("a", "b")


async def test_training_ends_at_max_steps_or_epochs_whichever_is_first(server: ApiServer) -> None:
    file = await upload(server.openai)
    for given, steps in (
        ({}, 1),
        ({"batch_size": 3}, 4),
        ({"batch_size": 3, "n_epochs": 2}, 7),
        ({"batch_size": 3, "max_steps": 50}, 50),
        ({"batch_size": 3, "max_steps": 50, "n_epochs": 2}, 7),
        ({"batch_size": 3, "max_steps": 5, "n_epochs": 2}, 5),
        ({"batch_size": 3, "max_steps": "auto", "n_epochs": None}, 4),
    ):
        job = await create(server.openai, training_file=file, method=method(**given))
        assert job.to_dict()["num_steps"] == steps


def by(**reinforcement: Any) -> dict[str, Any]:
    return {"method": {"type": "reinforcement", "reinforcement": reinforcement}}


REINFORCEMENT = "method.reinforcement"
HYPER = f"{REINFORCEMENT}.hyperparameters"
CALCULATOR = {"environment": {"name": "calculator"}}
BOTH_RATES = {"learning_rate": 1e-4, "learning_rate_multiplier": 2}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"model": "tinny"}, "model", "unknown base model 'tinny'; did you mean 'tiny'?"),
    ({"model": "ft:tiny:default::ftjob-1"}, "model", "there is no model 'ft:tiny:default::ftjob-1'"),
    ({"training_file": "file-none"}, "training_file", "there is no file 'file-none'"),
    ({"validation_file": "file-none"}, "validation_file", "there is no file"),
    ({"training_file": None}, "training_file", "needs a training_file"),
    ({"seed": -1}, "seed", "greater than or equal to 0"),
    ({"seed": 2**53}, "seed", "less than"),
    ({"suffix": "a:b"}, "suffix", "letters, digits"),
    ({"hyperparameters": {"n_epochs": 1}}, "hyperparameters", "in method.reinforcement.hyperparameters where there is"),
    ({"metadata": {"k" * 65: "v"}}, "metadata", "at most 64 characters"),
    ({"extra_body": {"sed": 1}}, "sed", "unknown parameter 'sed'; did you mean 'seed'?"),
    (by(gradr={}), f"{REINFORCEMENT}.gradr", "did you mean 'grader'?"),
    ({"method": {"type": "dpo"}}, "method.type", "'dpo' is not offered"),
    ({"method": {"type": "supervised"}}, "training_file", "line 1: a supervised job learns answers"),
    ({"method": {"type": "supervised", "reinforcement": {}}}, "method", "only `supervised` goes with"),
    ({"method": method(loss="cross_entropy")}, f"{HYPER}.loss", "'grpo'"),
    ({"method": {"type": "reinforcment"}}, "method.type", "did you mean 'reinforcement'?"),
    ({"method": {"type": "reinforcement"}}, "method.reinforcement", "is missing"),
    (by(), f"{REINFORCEMENT}.grader", "one of them"),
    ({"method": method(batch_sise=1)}, f"{HYPER}.batch_sise", "did you mean 'batch_size'?"),
    ({"method": method(batch_size=0)}, f"{HYPER}.batch_size", "greater than or equal to 1, not 0"),
    ({"method": method(batch_size="8")}, f"{HYPER}.batch_size", "valid integer, not '8'"),
    ({"method": method(group_size=1)}, f"{HYPER}.group_size", "greater than or equal to 2"),
    ({"method": method(temperature=0)}, f"{HYPER}.temperature", "greater than or equal to 0.01"),
    ({"method": method(loss="grpoo")}, f"{HYPER}.loss", "'grpo'"),
    (by(grader=GRADER, hyperparameters=BOTH_RATES), f"{HYPER}.learning_rate_multiplier", "not both"),
    ({"method": method(compute_multiplier=2)}, f"{HYPER}.compute_multiplier", "only 1 is possible"),
    ({"method": method(reasoning_effort="high")}, f"{HYPER}.reasoning_effort", 'only "default"'),
    ({"method": method(lora_targets=["q_prj"])}, f"{HYPER}.lora_targets", "it has q_proj, k_proj"),
    ({"method": method(lora_targets=["lm_head"])}, f"{HYPER}.lora_targets", "not the name of a linear layer"),
    ({"method": method(priority=1.5)}, f"{HYPER}.priority", "valid integer, not 1.5"),
    ({"method": method(priority=101)}, f"{HYPER}.priority", "less than or equal to 100, not 101"),
    ({"method": method(deadline=0)}, f"{HYPER}.deadline", "greater than 0, not 0"),
    ({"method": method(dead_line=60)}, f"{HYPER}.dead_line", "did you mean 'deadline'?"),
    ({"method": method(max_tokens=2048)}, f"{HYPER}.max_tokens", "leaves no room for a prompt"),
    ({"method": method(max_context=2049)}, f"{HYPER}.max_context", "above 2048, the context of 'tiny'"),
    ({"method": method(max_context=64)}, f"{HYPER}.max_tokens", "the job's max_context is 64 tokens"),
    (by(grader={"type": "string_chek"}), f"{REINFORCEMENT}.grader.type", "did you mean 'string_check'?"),
    (by(grader=GRADER | {"reference": "{{item.anser}}"}), "training_file", "did you mean 'answer'?"),
    (by(grader={"type": "score_model"}), f"{REINFORCEMENT}.grader.model", "is missing"),
    (by(environment={"name": "calculater"}), "environment.name", "did you mean 'calculator'?"),
    (
        by(environment={"name": "calculator", "args": {"skil": "calc"}}),
        f"{REINFORCEMENT}.environment.args.skil",
        "did you mean 'skill'?",
    ),
    (by(environment={"name": "calculator"}, grader=GRADER), f"{REINFORCEMENT}.grader", "one of them"),
    (by(environment={"name": "calculator", "arg": {}}), f"{REINFORCEMENT}.environment.arg", "unknown parameter"),
]


async def test_what_is_wrong_is_named_before_anything_is_queued(server: ApiServer) -> None:
    file = await upload(server.openai)
    for changes, param, complaint in REFUSED:
        with pytest.raises(openai.BadRequestError) as refused:
            await create(server.openai, **{"training_file": file, **changes})
        assert refused.value.param == param, refused.value.message
        assert complaint in refused.value.message
    assert await server.api.redis.exists(server.bus.cell.jobs_all) == 0


async def test_prompts_that_do_not_fit_are_counted_and_named(server: ApiServer) -> None:
    file = await upload(server.openai, jsonl(item(), item("x" * 2040), item("x" * 2100), item()))
    for name in ("training_file", "validation_file"):
        complaint = r"2 of the prompts .* \(lines 2, 3; the longest has 2103 tokens\)"
        with pytest.raises(openai.BadRequestError, match=complaint) as refused:
            await create(server.openai, **{name: file})
        assert refused.value.param == name


async def test_a_job_s_prompts_leave_room_in_its_own_context(server: ApiServer) -> None:
    file = await upload(server.openai, jsonl(item("x" * 200), item()))
    complaint = "1 of the prompts .* 136 tokens, which is max_context of 200 less"
    with pytest.raises(openai.BadRequestError, match=complaint):
        await create(server.openai, training_file=file, method=method(max_context=200))
    made = await create(server.openai, training_file=file, method=method(max_context=300))
    assert (await spec_of(server, made.id)).hyper.max_context == 300


@pytest.mark.parametrize(
    ("how", "hyper", "most"),
    [
        ({"grader": GRADER}, {"max_tokens": 30}, 30),  # its environment asks once
        ({"environment": {"name": "calculator"}}, {"max_tokens": 30, "max_turns": 4}, 120),
        ({"environment": {"name": "calculator"}}, {"max_tokens": 60, "max_turns": 60}, 2048),
        ({"environment": {"name": "calculator"}}, {"max_tokens": 30, "max_context": 100}, 100),
    ],
)
async def test_dr_grpo_divides_by_the_most_that_a_trajectory_can_write(
    server: ApiServer, how: dict[str, Any], hyper: dict[str, int], most: int
) -> None:
    file = await upload(server.openai)
    given = {"type": "reinforcement", "reinforcement": {**how, "hyperparameters": {"loss": "dr_grpo", **hyper}}}
    made = await create(server.openai, training_file=file, method=given)
    assert (await spec_of(server, made.id)).hyper.loss.max_tokens == most


async def test_prompts_are_measured_at_upload_else_at_creation(server: ApiServer) -> None:
    file = await upload(server.openai, jsonl(item("x" * 2040), item()))
    key = f"{GLOBAL}file:{file}"
    record = json.loads(await server.api.redis.get(key))
    assert record["longest"] == {"tiny": 2043}
    for longest in (record["longest"], {}):  # {}: its base was added later
        await server.api.redis.set(key, json.dumps(record | {"longest": longest}))
        with pytest.raises(openai.BadRequestError, match="1 of the prompts"):
            await create(server.openai, training_file=file)
        assert await create(server.openai, training_file=file, method=method(max_tokens=4))


async def test_an_environment_that_makes_its_items_needs_no_file(server: ApiServer) -> None:
    job = await create(server.openai, training_file=None, **by(**CALCULATOR, hyperparameters={"max_steps": 4}))
    assert (job.training_file, job.to_dict()["num_steps"]) == (None, 4)
    assert (await spec_of(server, job.id)).env == EnvSpec("calculator")
    with pytest.raises(openai.BadRequestError, match="max_steps says when training ends"):
        await create(server.openai, training_file=None, **by(**CALCULATOR))


# Idempotency and quotas ----------------------------------------------------------------------------------------------


async def test_the_same_idempotency_key_gives_the_same_job_even_in_a_race(server: ApiServer) -> None:
    body: dict[str, Any] = {"model": "tiny", "training_file": await upload(server.openai), "method": method()}
    headers = {b"Idempotency-Key": "once \u00fc".encode()}

    async def post() -> Any:
        return await server.http.post("/v1/fine_tuning/jobs", json=body, headers=headers)

    answers = await asyncio.gather(*(post() for _ in range(6)))
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert await server.api.redis.zcard(server.bus.cell.jobs_all) == 1
    with pytest.raises(openai.ConflictError, match="needs this file"):
        await server.openai.files.delete(body["training_file"])
    await write_state(server, answers[0].json()["id"], status="succeeded")
    await server.openai.files.delete(body["training_file"])
    assert (await post()).json()["id"] == answers[0].json()["id"]
    other = await server.http.post("/v1/fine_tuning/jobs", json=body | {"seed": 1}, headers=headers)
    assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_key_reused")


async def test_a_used_up_quota_refuses_new_jobs_and_chat(server: ApiServer) -> None:
    client = await server.new_tenant("acme", max_tokens_per_day=0)
    with pytest.raises(openai.RateLimitError, match="quota of 0 tokens a day is used up"):
        await create(client)
    with pytest.raises(openai.RateLimitError, match="quota"):
        await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}])


# Lists and states ----------------------------------------------------------------------------------------------------


async def test_jobs_are_listed_newest_first_paged_and_filtered(server: ApiServer) -> None:
    file = await upload(server.openai)
    jobs = [(await create(server.openai, training_file=file, metadata={"n": str(i % 2)})).id for i in range(5)]
    assert [job.id async for job in server.openai.fine_tuning.jobs.list(limit=2)] == jobs[::-1]
    page = await server.openai.fine_tuning.jobs.list(limit=2, after=jobs[4])
    assert ([job.id for job in page.data], page.has_more) == ([jobs[3], jobs[2]], True)
    odd = await server.openai.fine_tuning.jobs.list(metadata={"n": "1"})
    assert [job.id for job in odd.data] == [jobs[3], jobs[1]]


async def test_another_tenant_neither_sees_nor_disturbs_a_job(server: ApiServer) -> None:
    job = (await create(server.openai)).id
    other = (await server.new_tenant("acme")).fine_tuning.jobs
    for call in (other.retrieve, other.cancel, other.pause, other.resume, other.list_events, other.checkpoints.list):
        with pytest.raises(openai.NotFoundError):
            await call(job)
    assert [found async for found in other.list()] == []


async def test_commands_in_the_wrong_state_say_what_is_possible(server: ApiServer) -> None:
    job = (await create(server.openai)).id
    complaint = "the job is validating_files: resume is possible while it is paused"
    with pytest.raises(openai.ConflictError, match=complaint):
        await server.openai.fine_tuning.jobs.resume(job)
    await write_state(server, job, status="succeeded", version=3)
    for call in (server.openai.fine_tuning.jobs.cancel, server.openai.fine_tuning.jobs.pause):
        with pytest.raises(openai.ConflictError, match=r"the job has ended \(succeeded\): there is nothing to"):
            await call(job)


async def test_with_the_real_owner_a_job_is_paused_resumed_cancelled_and_another_succeeds(server: ApiServer) -> None:
    jobs = server.openai.fine_tuning.jobs
    async with running_jobs(server) as env:
        env.delay_s = 0.02
        job = (await create(server.openai, method=method(max_steps=10_000, batch_size=2, group_size=2))).id
        assert (await jobs.pause(job)).to_dict()["status"] == "paused"
        assert (await jobs.resume(job)).status in ("queued", "running")
        assert (await jobs.cancel(job)).status == "cancelled"
        done = await create(server.openai, method=method(max_steps=2, batch_size=2, group_size=2))
        streamed = [event async for event in server_sent(server, done.id)]
        assert streamed[-1]["message"]
        done = await jobs.retrieve(done.id)
        assert (done.status, done.fine_tuned_model) == ("succeeded", f"ft:tiny:default::{done.id}")
        assert [c.step_number async for c in jobs.checkpoints.list(done.id)] == [2, 1]
        for one in (job, done.id):
            counts = (await server.http.get(f"/v1/fine_tuning/jobs/{one}/ledger")).json()
            names = ("trained", "filtered", "stale", "failed", "cancelled", "in_flight")
            assert counts["issued"] == sum(counts[name] for name in names)


async def test_a_running_job_says_when_it_will_end(server: ApiServer) -> None:
    job, now = (await create(server.openai, method=method(max_steps=10))).id, int(time.time())
    for state, after_s in (
        ({"version": 0, "stepped_at": now}, None),
        ({"version": 4, "stepped_at": now - 5, "step_s": 25}, 145),
        ({"version": 4, "stepped_at": now - 300, "step_s": 25}, 125),  # the step under way is late
        ({"version": 4, "stepped_at": now, "step_s": 25, "stop": Stop(5, "plateau")}, 25),
        ({"version": 10, "stepped_at": now, "step_s": 25}, 0),
    ):
        await write_state(server, job, status="running", **state)
        estimate = (await server.openai.fine_tuning.jobs.retrieve(job)).estimated_finish
        assert estimate == (None if after_s is None else pytest.approx(now + after_s, abs=5))
    await write_state(server, job, status="succeeded", version=10, stepped_at=now, step_s=1)
    assert (await server.openai.fine_tuning.jobs.retrieve(job)).estimated_finish is None


# Events --------------------------------------------------------------------------------------------------------------


STEPS = [{"step": number} for number in range(1, 6)]


async def server_sent(server: ApiServer, job: str, last: str = "") -> AsyncGenerator[dict[str, Any]]:
    headers = {"Last-Event-ID": last} if last else {}
    url = f"/v1/fine_tuning/jobs/{job}/events"
    async with server.http.stream("GET", url, params={"stream": "true"}, headers=headers) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                yield json.loads(line[6:])


async def test_events_are_listed_newest_first_and_paged(server: ApiServer) -> None:
    job = (await create(server.openai)).id
    await write_events(server, job, STEPS)
    events = [event async for event in server.openai.fine_tuning.jobs.list_events(job, limit=2)]
    assert [event.id for event in events] == ["5", "4", "3", "2", "1"]
    assert (events[0].object, events[0].type, events[0].data) == ("fine_tuning.job.event", "metrics", {"step": 5})
    with pytest.raises(openai.BadRequestError, match="not the id of an event"):
        await server.openai.fine_tuning.jobs.list_events(job, after="-1")


async def test_a_stream_tells_events_in_order_as_they_come_is_kept_alive_and_ends_with_the_job(
    server: ApiServer,
) -> None:
    job = (await create(server.openai)).id
    await write_events(server, job, STEPS[:2])
    following = server_sent(server, job)
    async with asyncio.timeout(60):
        assert [(await anext(following))["id"] for _ in range(2)] == ["1", "2"]
        await write_events(server, job, STEPS[2:4], first=3)
        await write_state(server, job, status="succeeded")
        assert [event["id"] async for event in following] == ["3", "4"]
    assert [event["id"] async for event in server_sent(server, job, last="3")] == ["4"]
    assert [event["id"] async for event in server_sent(server, job, last="4")] == []
    # And a silent one is kept alive
    job = (await create(server.openai)).id
    url = f"/v1/fine_tuning/jobs/{job}/events?stream=true"
    async with asyncio.timeout(60), server.http.stream("GET", url) as answer:
        async for line in answer.aiter_lines():
            assert line == ": keep-alive"
            break


async def test_a_stream_of_events_ends_with_the_key_that_opened_it(server: ApiServer) -> None:
    job, keys = (await create(server.openai)).id, "/v1/admin/tenants/default/keys"
    made = (await server.http.post(keys, headers=server.as_admin())).json()
    own = {"Authorization": f"Bearer {made['key']}"}
    await write_events(server, job, STEPS[:1])
    url = f"/v1/fine_tuning/jobs/{job}/events?stream=true"
    async with asyncio.timeout(60), server.http.stream("GET", url, headers=own) as answer:
        lines = answer.aiter_lines()
        assert await anext(lines) == "id: 1"
        assert (await server.http.delete(f"{keys}/{made['id']}", headers=server.as_admin())).status_code == 200
        await write_events(server, job, STEPS[1:2], first=2)
        told = [line async for line in lines]
    assert "invalid_api_key" in told[-2] and not any(line == "id: 2" for line in told)


# Results -------------------------------------------------------------------------------------------------------------


async def test_checkpoints_are_listed_come_as_a_zip_and_are_deleted_unless_in_use(server: ApiServer) -> None:
    job = (await create(server.openai)).id
    for version in (1, 2):
        await commit_version(server, job, version)
    await write_state(server, job, status="succeeded", version=2)
    listed = [checkpoint async for checkpoint in server.openai.fine_tuning.jobs.checkpoints.list(job, limit=1)]
    assert [checkpoint.step_number for checkpoint in listed] == [2, 1]
    assert listed[0].fine_tuned_model_checkpoint == f"ft:tiny:default::{job}@2"
    url = f"/v1/fine_tuning/jobs/{job}/checkpoints"
    content = (await server.http.get(f"{url}/1/content")).content
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        assert {name: archive.read(name) for name in archive.namelist()} == {n: n.encode() for n in PEFT_FILES}
    for version in ("3", "99999999"):
        assert (await server.http.get(f"{url}/{version}/content")).status_code == 404
    for version in ("-1", "x", "9" * 30):
        assert (await server.http.get(f"{url}/{version}/content")).status_code == 400
    model = f"ft:tiny:default::{job}"
    assert [m.id async for m in server.openai.models.list()] == [model, "tiny"]
    assert (await server.openai.models.retrieve(f"{model}@1")).id == f"{model}@1"
    with pytest.raises(openai.NotFoundError, match="the newest version is 2"):
        await server.openai.models.retrieve(f"{model}@3")
    await write_state(server, job, status="running", version=2)
    with pytest.raises(openai.ConflictError, match="cancel it first"):
        await server.openai.models.delete(model)
    with pytest.raises(openai.BadRequestError, match="base model"):
        await server.openai.models.delete("tiny")
    await write_state(server, job, status="succeeded", version=2)
    assert (await server.openai.models.delete(model)).deleted
    with pytest.raises(openai.NotFoundError):
        await server.openai.models.retrieve(model)
    assert (await server.http.get(f"{url}/1/content")).status_code == 404
    assert await server.api.objects.paths("adapters") == []


async def test_samples_are_those_of_a_version_or_of_the_newest(server: ApiServer) -> None:
    job = (await create(server.openai)).id
    for version in (1, 2):
        samples = [SampleRecord(version, version, 0, "95", 1.0, "stop", "add 37+58")]
        await keep_samples(server, job, version, samples)
    url = f"/v1/fine_tuning/jobs/{job}/samples"
    assert [s["version"] for s in (await server.http.get(url)).json()["data"]] == [2]
    (sample,) = (await server.http.get(url, params={"version": 1})).json()["data"]
    assert (sample["text"], sample["reward"], sample["stop_reason"], sample["version"]) == ("95", 1.0, "stop", 1)
    assert (await server.http.get(url, params={"version": 7})).json()["data"] == []
    # Of a step whose samples are not written yet, or were lost with their owner, nothing is shown
    await write_state(server, job, status="running", version=4, kept={"samples": Kept([(1, 1)], newest=4)})
    assert [s["version"] for s in (await server.http.get(url)).json()["data"]] == [2]
    newest = await server.http.get(url, params={"format": "jsonl", "newest": 1})
    assert json.loads(newest.content)["step"] == 2


VERDICTS = [{"grader": "tone", "prompt": "user: is 95 right?", "reply": "fair"}]


async def test_samples_are_found_by_reward_and_by_failure_and_exported_step_by_step_as_jsonl(server: ApiServer) -> None:
    job = (await create(server.openai)).id
    url = f"/v1/fine_tuning/jobs/{job}/samples"
    # Given two steps, of each a kept sample of each reward, and one that failed
    written = Written([1, 2, 3, 4], [2, 2], [-0.5, -0.1])
    failure = Failure("grader", "it raised")
    for version in (1, 2):
        about: Any = {"written": written, "verdicts": VERDICTS}
        rows = [SampleRecord(version, 0, n, "95", n / 4, "stop", "add 37+58", **about) for n in range(4)]
        rows.append(SampleRecord(version, 0, 4, "", None, "failed", "add 37+58", failure=failure, kept="failed"))
        await keep_samples(server, job, version, rows)

    async def found(**params: Any) -> list[int]:
        return [one["sample"] for one in (await server.http.get(url, params=params)).json()["data"]]

    assert await found() == [0, 1, 2, 3, 4]
    assert await found(min_reward=0.25, max_reward=0.5) == [1, 2]
    assert await found(failed=True) == [4] and await found(failed=False) == [0, 1, 2, 3]
    assert await found(failed=True, min_reward=0) == []
    for refused in ({"min_reward": "nan"}, {"failed": "perhaps"}, {"format": "csv"}, {"newest": 0}):
        assert (await server.http.get(url, params=refused)).status_code == 400

    async def exported(**params: Any) -> list[tuple[int, int]]:
        answer = await server.http.get(url, params={"format": "jsonl", **params})
        assert answer.headers["content-type"].startswith("application/jsonl")
        rows = [json.loads(line) for line in answer.content.splitlines()]
        assert all([turn["by"] for turn in row["turns"]] == ["prompt", "model"] for row in rows if row["written"])
        assert all(row["verdicts"] == (VERDICTS if row["written"] else []) for row in rows)
        return [(row["step"], row["sample"]) for row in rows]

    assert await exported() == [(step, n) for step in (1, 2) for n in range(5)]
    assert await exported(version=1, max_reward=0.25) == [(1, 0), (1, 1)]
    assert await exported(newest=1, failed=True) == [(2, 4)]
    assert await exported(from_step=2) == [(2, n) for n in range(5)] and await exported(to_step=0) == []


async def test_answers_of_evaluations_are_read_by_version_and_by_item(server: ApiServer) -> None:
    rows = jsonl(*(item() for _ in range(3)))
    job = (await create(server.openai, validation_file=await upload(server.openai, rows))).id
    written = Written([1, 2, 3, 4], [2, 2], [-0.5, -0.1])

    def answer(version: int, at: int) -> SampleRecord:
        said = f"version {version}"
        kept = SampleRecord(version, at, 0, said, 0.5, "stop", "add 1+2", written=written, kept="evaluation")
        return msgspec.structs.replace(kept, step=version, item=at)

    await write_state(server, job, status="running", version=10)
    for version in (0, 2, 10):
        await keep_samples(server, job, version, [answer(version, at) for at in range(2)], "answers")
    learned = [SampleRecord(1, 0, 0, "95", 1.0, "stop", "add 37+58", step=2)]
    await keep_samples(server, job, 2, learned)
    url = f"/v1/fine_tuning/jobs/{job}/samples"

    async def found(**params: Any) -> list[tuple[int, int | None]]:
        answer = await server.http.get(url, params=params)
        lines = answer.content.splitlines() if "format" in params else map(json.dumps, answer.json()["data"])
        return [(row["step"], row["item"]) for row in map(json.loads, lines)]

    assert await found(version=2) == [(2, None)], "what a step was trained on, as ever"
    assert await found(version=0, evaluation=True) == [(0, 0), (0, 1)]
    assert await found(evaluation=True) == [(10, 0), (10, 1)]
    assert await found(version=2, evaluation=True, item=1) == [(2, 1)]
    assert await found(version=1, evaluation=True) == []
    assert await found(format="jsonl") == [(2, None)], "nobody trains on held-out items who did not ask for them"
    assert await found(format="jsonl", evaluation=True, item=1) == [(0, 1), (2, 1), (10, 1)]
    assert await found(format="jsonl", evaluation=True, newest=2) == [(2, 0), (2, 1), (10, 0), (10, 1)]
    whole = (await server.http.get(f"{url}/10/1/0?evaluation=true")).json()
    assert (whole["sample"]["text"], [turn["by"] for turn in whole["turns"]]) == ("version 10", ["prompt", "model"])
    missing = await server.http.get(f"{url}/10/2/0?evaluation=true")
    assert (missing.status_code, "version 10 kept no answer" in missing.text) == (404, True)


def test_an_adapter_of_a_hubs_model_names_it(tmp_path: Path) -> None:
    config = b'{"r": 8, "base_model_name_or_path": "qwen"}'
    assert json.loads(with_base(config, "Qwen/Qwen3-0.6B")) == {"r": 8, "base_model_name_or_path": "Qwen/Qwen3-0.6B"}
    of_commit = json.loads(with_base(config, "Qwen/Qwen3-0.6B@abc"))
    assert (of_commit["base_model_name_or_path"], of_commit["revision"]) == ("Qwen/Qwen3-0.6B", "abc")
    assert with_base(config, str(tmp_path)) == config, "a folder of the service is no business of its users"
