"""The API for the web page: curves in few points, conversations token by token, an operator's view of tenants."""

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from common.wire.messages import AdapterRef, Failure, ScoredTrajectory, TrajectoryRef
from common.wire.transcript import transcript
from manager_service.http.openai.jobs.hyperparameters import Hyperparameters
from manager_service.owner.jobs.samples import MAX_TOKENS, record_of, written_of
from manager_service.records.job_records import FINAL
from manager_service.records.sample_records import SampleRecord, Written
from tests.support.api_server import ApiServer, create, keep_samples, method, running_jobs, write_events

FEW = method(batch_size=2, group_size=4, max_steps=2)


async def curves(server: ApiServer, job: str, points: int) -> dict[str, Any]:
    answer = await server.http.get(f"/v1/fine_tuning/jobs/{job}/metrics", params={"points": points})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_few_steps_are_columns_as_they_are_and_many_are_means(server: ApiServer) -> None:
    job = (await create(server.openai)).id
    empty = await curves(server, job, 10)
    assert (empty["step"], empty["metrics"], empty["evaluations"], empty["last_event"]) == ([], {}, [], None)
    evaluation = {"version": 0, "eval_reward_mean": 0.5, "eval_n": 4}
    first = {"step": 1, "reward_mean": 0.25, "kl": None}
    second = {"step": 2, "reward_mean": 0.5, "kl": 2.0, "failed_reason": "x"}
    await write_events(server, job, [{}, evaluation, first, second])
    found = await curves(server, job, 10)
    assert (found["step"], found["metrics"]) == ([1, 2], {"kl": [None, 2.0], "reward_mean": [0.25, 0.5]})
    assert (found["evaluations"], found["steps_a_point"], found["last_event"]) == ([evaluation], 1, "4")
    job = (await create(server.openai)).id
    await write_events(server, job, [{"step": n, "reward_mean": float(n)} for n in range(1, 13)])
    found = await curves(server, job, 4)
    assert (found["step"], found["metrics"]["reward_mean"]) == ([3, 6, 9, 12], [2.0, 5.0, 8.0, 11.0])
    assert found["steps_a_point"] == 3
    for points in (1, 10_001):
        refused = await server.http.get(f"/v1/fine_tuning/jobs/{job}/metrics", params={"points": points})
        assert refused.status_code == 400
    await server.api.redis.xtrim(server.bus.cell.events(job), maxlen=3, approximate=False)
    assert (await curves(server, job, 12))["step"] == [10, 11, 12], "what was dropped leaves no point"


async def test_a_conversation_is_told_turn_by_turn(server: ApiServer) -> None:
    job = (await create(server.openai)).id
    encode = server.api.bases["tiny"].tokenizer.encode
    parts = [encode("add 1+2"), encode("é3"), encode("no"), encode("4")]
    lengths = [len(part) for part in parts]
    logprobs = [-0.5] * lengths[1] + [-2.0] * lengths[3]
    written = Written([token for part in parts for token in part], lengths, logprobs, 7)
    samples = [SampleRecord(3, 9, 1, "4", 0.5, "stop", "add 1+2", {"right": 0.5}, None, written)]
    await keep_samples(server, job, 4, samples)
    url = f"/v1/fine_tuning/jobs/{job}/samples"
    found = (await server.http.get(f"{url}/4/9/1")).json()
    said = [(turn["by"], "".join(turn["tokens"]), turn["logprobs"]) for turn in found["turns"]]
    model = [logprobs[: lengths[1]], logprobs[lengths[1] :]]
    assert said == [
        ("prompt", "add 1+2", None),
        ("model", "é3", model[0]),
        ("environment", "no", None),
        ("model", "4", model[1]),
    ]
    assert [len(turn["tokens"]) for turn in found["turns"]] == lengths
    sample = found["sample"]
    assert (found["num_dropped"], sample["reward_parts"], sample["written"]) == (7, {"right": 0.5}, None)
    for missing in ("4/9/2", "5/9/1"):
        assert (await server.http.get(f"{url}/{missing}")).status_code == 404
    stranger = await server.new_tenant("bluebird")
    answer = await server.http.get(f"{url}/4/9/1", headers={"Authorization": f"Bearer {stranger.api_key}"})
    assert answer.status_code == 404


@pytest.mark.parametrize("length", [1, 3, MAX_TOKENS + 5])
def test_what_is_kept_of_a_trajectory_adds_up(length: int) -> None:
    wrote = [number % 5 > 1 for number in range(length)]
    message = ScoredTrajectory(
        id="x",
        tenant="acme",
        job="job-a",
        partition=0,
        adapter=AdapterRef("acme", "job-a", 0),
        trajectory=TrajectoryRef("train", 0, 0, 0, 0),
        transcript=transcript(range(length), [-float(number) for number in range(length)], wrote),
        stop_reason="stop",
    )
    kept = written_of(message)
    assert kept is not None
    assert len(kept.tokens) == sum(kept.lengths) == min(length, MAX_TOKENS)
    assert kept.num_dropped == length - len(kept.tokens)
    assert kept.logprobs == [-float(number) for number in range(len(kept.tokens)) if wrote[number]]
    assert len(kept.logprobs) == sum(kept.lengths[1::2])
    example = record_of(message, None, "first", advantage=1.0, supervised=True)
    assert (example.reward, example.advantage, example.written) == (None, None, replace(kept, logprobs=[]))


async def test_what_failed_is_kept_beside_what_was_trained_on_and_by_a_job_that_fails(server: ApiServer) -> None:
    async with running_jobs(server) as env:
        env.reward = lambda start, sample: Failure("grader", "it raised")
        failing = (await create(server.openai, method=FEW)).id
        assert await until_ended(server, failing) == "failed"
        env.reward = lambda start, sample: Failure("grader", "it raised") if sample == 3 else float(sample % 2)
        job = (await create(server.openai, method=FEW)).id
        await until_ended(server, job)
    samples = (await server.http.get(f"/v1/fine_tuning/jobs/{failing}/samples")).json()["data"]
    assert len(samples) == 4 and {one["failure"]["kind"] for one in samples} == {"grader"}
    for step in (1, 2):
        url = f"/v1/fine_tuning/jobs/{job}/samples"
        samples = (await server.http.get(url, params={"version": step})).json()["data"]
        failed = [one["failure"] for one in samples if one["reward"] is None]
        assert failed and {one["reason"] for one in failed} == {"it raised"}
        assert {one["step"] for one in samples} == {step}
        assert all(one["written"]["lengths"] == [1, 2] for one in samples)


async def until_ended(server: ApiServer, job: str) -> str:
    async with asyncio.timeout(60):
        while True:
            status = (await server.http.get(f"/v1/fine_tuning/jobs/{job}")).json()["status"]
            if status in FINAL:
                return status
            await asyncio.sleep(0.05)


async def test_an_operator_reads_as_any_tenant_and_does_nothing(server: ApiServer) -> None:
    job = (await create(server.openai)).id
    await server.new_tenant("bluebird")
    url = f"/v1/fine_tuning/jobs/{job}"

    async def status(call: str, path: str, tenant: str, headers: dict[str, str] | None = None) -> int:
        sent = {**(headers or server.as_admin()), "MARLaaS-Tenant": tenant}
        return (await server.http.request(call, path, headers=sent)).status_code

    assert await status("GET", url, "default") == 200
    assert await status("GET", url, "bluebird") == 404
    assert await status("GET", url, "nobody") == 400
    assert await status("POST", f"{url}/cancel", "default") == 403
    assert await status("DELETE", "/v1/files/file-x", "default") == 403
    assert (await server.http.get(url, headers=server.as_admin())).status_code == 403
    tenants_own = {"Authorization": f"Bearer {server.key}"}
    assert await status("GET", url, "bluebird", tenants_own) == 200, "the header is the operator's alone"


async def test_hyperparameters_are_told_with_defaults_and_limits(server: ApiServer) -> None:
    rows = (await server.http.get("/v1/fine_tuning/hyperparameters")).json()["data"]
    told = {row["id"]: row for row in rows}
    assert told["batch_size"]["default"] == 16
    assert told["batch_size"]["schema"] == {"type": "integer", "minimum": 1, "maximum": 1024}
    assert "grpo" in told["loss"]["schema"]["enum"]
    assert set(told) == set(Hyperparameters.model_fields)
    texts = {name: row["default_text"] for name, row in told.items()}
    assert (texts["batch_size"], texts["loss"], texts["target_reward"]) == ("16", "grpo", "none")
    assert "null" not in texts.values() and "[]" not in texts.values()


async def test_use_is_told_by_day(server: ApiServer) -> None:
    key = server.bus.cell.usage("default")
    await server.api.redis.hset(key, mapping={"day/20261122": 7, "day/20261103": 5, "-/prompt_tokens": 12})
    report = (await server.http.get("/v1/usage")).json()
    assert report["days"] == {"2026-11-03": 5, "2026-11-22": 7}
    assert report["total"]["prompt_tokens"] == 12
