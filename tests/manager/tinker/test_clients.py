"""Clients of the Tinker protocol: their keys and sessions, whose things are whose, and requests for samples."""

import asyncio
from typing import Any, cast

import pytest

from common.cancellation import cancel_all
from common.wire.messages import BASE, Failure, TurnRequest, TurnResult, Usage, f32, i32
from manager_service.http.sampling.inference import InferenceRequest
from manager_service.http.tinker import retrieval
from manager_service.http.tinker.futures import sample_futures
from manager_service.http.tinker.futures.sample_futures import KEPT_S, RETRIEVED_S, UNASKED_S, Gone, Samples
from manager_service.http.tinker.wire import tinker_pb2
from manager_service.records.run_records import USED_S, run_of
from tests.support.api_server import ApiServer, Script, played
from tests.support.standin_runs import StandInRuns
from tests.support.tinker_client import TinkerClient, client_of, samples_of

PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [104, 105]}]}


SETTINGS = {"inference_silence_s": 0.4, "inference_timeout_s": 6.0}


# ---- keys, sessions -------------------------------------------------------------------------------------------------


async def test_only_known_keys_come_in(server: ApiServer, client: TinkerClient) -> None:
    assert (await server.http.get("/api/v1/healthz", headers={"Authorization": ""})).json() == {"status": "ok"}
    for key in ("sk-unknown", ""):
        stranger = TinkerClient(server.http, key)
        assert (await stranger.post("create_session", tags=[])).status_code == 401
    admin = TinkerClient(server.http, server.admin_key)
    assert (await admin.post("client/config")).status_code == 403
    config = (await client.post("client/config", sdk_version="0.38.0")).json()
    assert config["fwdbwd_max_chunk_bytes_count"] == 400_000 and config["use_pyqwest_transport"] is False
    assert config["create_model_via_load_weights"] is True
    assert (await client.post("client/dynamic_config")).json()["sample_cancel_enabled"] is True
    (model,) = (await client.get("get_server_capabilities")).json()["supported_models"]
    assert (model["model_name"], model["max_context_length"]) == ("tiny", 2048)
    assert (await client.post("telemetry", events=[])).json() == {"status": "accepted"}


async def test_a_session_lives_while_its_client_does(server: ApiServer, client: TinkerClient) -> None:
    made = (await client.post("create_session", tags=["a"], sdk_version="0.38.0", user_metadata={"a": "b"})).json()
    session = made["session_id"]
    assert "train_unembed" in made["info_message"]
    bus, key = server.bus, server.bus.cell.session(session)
    assert 290 <= await bus.client.ttl(key) <= 300
    await bus.client.delete(key)  # its client was silent for long
    assert (await client.post("session_heartbeat", session_id=session)).status_code == 200
    assert await bus.client.get(key) == b"default"
    assert (await client.post(f"sessions/{session}/finish", reason={"type": "success"})).status_code == 200
    assert await bus.client.get(key) is None
    assert (await client.post("session_heartbeat", session_id=session)).status_code == 410


HOSTILE: list[tuple[str, dict[str, Any]]] = [
    ("create_session", {"tags": "x"}),
    ("create_model", {"session_id": "ses-x", "model_seq_id": 0, "base_model": "tiny"}),
    ("create_model", {"session_id": "*", "model_seq_id": 0, "base_model": "tiny"}),
    ("get_info", {"model_id": "run-0123456789abcdef-0"}),
    ("get_info", {"model_id": 7}),
    ("retrieve_future", {"request_id": "run-0123456789abcdef-0:1"}),
    ("retrieve_future", {"request_id": "smp-0-0"}),
    ("retrieve_future", {"request_id": "x" * 10_000}),
    ("load_weights", {"path": "tinker://x/y/z", "session_id": "ses-0123456789abcdef", "model_seq_id": 0}),
    ("load_weights", {"path": "/etc/passwd", "session_id": "ses-0123456789abcdef", "model_seq_id": 0}),
    ("create_sampling_session", {"session_id": "ses-0123456789abcdef", "sampling_session_seq_id": -1}),
    ("asample", {"prompt": {"chunks": []}, "sampling_params": {}, "base_model": "tiny"}),
    ("asample", {"prompt": {"chunks": [{"tokens": [99999]}]}, "sampling_params": {}, "base_model": "tiny"}),
    ("asample", {"prompt": {"chunks": [{"tokens": [1] * 5000}]}, "sampling_params": {}, "base_model": "tiny"}),
    ("asample", {"prompt": PROMPT, "sampling_params": {}}),
    ("asample", {"prompt": PROMPT, "sampling_params": {}, "base_model": "a" * 1000 + "/tiny"}),
    ("retrieve_future", {"request_id": "smp-*-tiny-0"}),
    ("retrieve_future", {"request_id": "smp-0123456789abcdef-tiny-0"}),
    ("asample", {"prompt": PROMPT, "sampling_params": {}, "sampling_session_id": "*"}),
    ("create_session", {"user_metadata": {"a": "b" * 100_000}}),
]


@pytest.mark.parametrize(("name", "body"), HOSTILE)
async def test_what_makes_no_sense_is_refused(client: TinkerClient, name: str, body: dict[str, Any]) -> None:
    answer = await client.post(name, **body)
    assert answer.status_code in (400, 404, 410), answer.text
    assert answer.json()["error"]["message"]


async def test_a_body_that_is_no_json_is_refused(server: ApiServer, client: TinkerClient) -> None:
    headers = {"X-API-Key": f"tml-{client.key}"}
    for name in ("create_session", "create_model", "retrieve_future", "asample", "optim_step"):
        for body in (b"", b"{", b"[" * 20_000, b"\xff", b'"' + b"a" * 40_000 + b'"'):
            answer = await server.http.post(f"/api/v1/{name}", content=body, headers=headers)
            assert answer.status_code == 400, (name, body[:10])


# ---- samples --------------------------------------------------------------------------------------------------------


SAMPLE: dict[str, Any] = {"prompt": PROMPT, "sampling_params": {"max_tokens": 8, "seed": 3}, "base_model": "tiny"}


async def asample(client: TinkerClient, **more: Any) -> dict[str, Any]:
    answer = await client.post("asample", **SAMPLE | more)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_samples_come_as_protobuf_and_are_charged(server: ApiServer, client: TinkerClient) -> None:
    asked = await asample(client, num_samples=3)
    future, ids = asked["request_id"], asked["sample_sequence_ids"]
    assert ids == [f"{future}/{i}@0" for i in range(3)]
    async with played(Script(server.bus, text="ok", stop_reason="length", inbox=server.bus.cell.rollout)):
        found = await client.retrieve(future)
    sequences = tinker_pb2.SampleResponse.FromString(found.content).sequences
    assert [(one.stop_reason, one.tokens) for one in sequences] == [
        (tinker_pb2.STOP_REASON_LENGTH, i32([*b"ok"]).data)
    ] * 3
    assert samples_of(await client.retrieve(future)) == [[*b"ok"]] * 3
    total = (await server.http.get("/v1/usage")).json()["total"]
    assert (total["prompt_tokens"], total["sampled_tokens"]) == (6, 6)


async def test_the_same_request_for_samples_is_made_once(server: ApiServer, client: TinkerClient) -> None:
    session = await client.session()
    sampler = await client.sampler(session)
    of: dict[str, Any] = {"base_model": None, "sampling_session_id": sampler}
    first, again = await asample(client, **of, seq_id=0), await asample(client, **of, seq_id=0)
    assert first == again != await asample(client, **of, seq_id=1)


@pytest.mark.parametrize(
    ("max_tokens", "state", "reason"),
    [(None, "paused_capacity", "no rollout worker is there"), (0, "paused_rate_limit", "it goes on at midnight UTC")],
)
async def test_samples_say_what_they_wait_for(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch, max_tokens: int | None, state: str, reason: str
) -> None:
    monkeypatch.setattr(retrieval, "WAIT_S", 0.2)
    tenant = await server.new_tenant("poor", max_tokens_per_day=max_tokens)
    waits = await (client := TinkerClient(server.http, tenant.api_key)).retrieve((await asample(client))["request_id"])
    assert (waits.status_code, waits.json()["queue_state"]) == (408, state)
    assert reason in waits.json()["queue_state_reason"]


class Refusing(Script):
    """A worker that refuses what it is asked."""

    def result(self, request: TurnRequest, tokens: Any = None) -> tuple[str, Any]:
        names = ("id", "tenant", "job", "partition", "epoch", "adapter")
        about = {name: getattr(request, name) for name in names}
        failure = Failure("invalid", "the prompt is not liked")
        result = TurnResult(
            **about,
            request=request,
            tokens=i32([]),
            logprobs=f32([]),
            stop_reason="failed",
            usage=Usage(),
            failure=failure,
        )
        return request.reply_to, result


async def test_what_a_worker_refuses_is_told(server: ApiServer, client: TinkerClient) -> None:
    async with played(Refusing(server.bus, inbox=server.bus.cell.rollout)):
        told = (await client.retrieve((await asample(client))["request_id"])).json()
    assert told == {"error": "the prompt is not liked", "category": "user"}


async def test_results_that_nobody_wants_are_dropped(server: ApiServer) -> None:
    now = [1000.0]
    base = server.api.bases["tiny"]
    samples = Samples(server.bus, base.inference, "other", clock=lambda: now[0])
    tenant = await server.api.tenants.get("default")
    ask = InferenceRequest(
        tenant=tenant, adapter=BASE, prompts=[[1]], num_choices=1, sampling=[], seed=0, stream=False, bulk=True
    )
    name = samples.start(ask)
    request = samples.find("default", name)
    served, over = request.task, asyncio.get_running_loop().create_future()
    over.set_result(None)
    for task, retrieved, patience_s in ((served, False, UNASKED_S), (over, True, RETRIEVED_S), (over, False, KEPT_S)):
        request.task, request.retrieved = cast(Any, task), retrieved
        now[0] = request.asked_s + patience_s - 1
        samples.look()
        assert samples.find("default", name) is request
    request.task, request.session = served, "ses-0123456789abcdef"  # whose heartbeats count
    now[0] += KEPT_S + 1
    samples.look()
    assert request.id in samples._requests  # pyright: ignore[reportPrivateUsage]
    request.task = cast(Any, over)
    samples.look()
    with pytest.raises(Gone):
        samples.find("default", name)
    await cancel_all([served])


async def test_a_tenants_open_samples_are_bounded_however_few_its_requests(
    server: ApiServer, client: TinkerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_futures, "MAX_SAMPLES", 8)
    asked = await asample(client, num_samples=7)
    refused = await client.post("asample", **SAMPLE | {"num_samples": 2})
    assert (
        refused.status_code == 429
        and refused.headers["retry-after"]
        and "8 samples" in refused.json()["error"]["message"]
    )
    await asample(await client_of(server, "stranger"), num_samples=2)
    async with played(Script(server.bus, text="ok", stop_reason="length", inbox=server.bus.cell.rollout)):
        # What is done takes room until it is retrieved, and a prompt does as samples do
        samples, name = server.tinker.futures["tiny"].samples, asked["request_id"]
        await samples.find("default", name).task
        assert (await client.post("asample", **SAMPLE | {"num_samples": 2})).status_code == 429
        assert (await client.retrieve(name)).status_code == 200
        monkeypatch.setattr(sample_futures, "TOKENS", 1)
        assert (await client.post("asample", **SAMPLE | {"num_samples": 8})).status_code == 429
        monkeypatch.setattr(sample_futures, "TOKENS", 512)
        await asample(client, num_samples=8)


async def test_a_sampler_follows_the_saves_of_its_run_or_not(
    server: ApiServer, client: TinkerClient, owner: StandInRuns
) -> None:
    run = await client.run(session := await client.session())
    script = Script(server.bus, inbox=server.bus.cell.rollout)
    for seq, (name, body) in enumerate(
        (
            ("save_weights_for_sampler", {"sampling_session_seq_id": 1}),
            ("optim_step", {"adam_params": {}}),
            ("save_weights_for_sampler", {"sampling_session_seq_id": 2, "kind": "inflight"}),
            ("optim_step", {"adam_params": {}}),
            ("save_weights_for_sampler", {"sampling_session_seq_id": 3, "kind": "inflight"}),
            ("optim_step", {"adam_params": {}}),
        ),
        start=1,
    ):
        await client.done(name, model_id=run, seq_id=seq, **body)
    async with played(script):
        for number, version in ((1, 0), (2, 2)):
            of: dict[str, Any] = {"base_model": None, "sampling_session_id": f"{session}:sample:{number}"}
            asked = await asample(client, **of, seq_id=0)
            assert asked["sample_sequence_ids"] == [f"{asked['request_id']}/0@{version}"]
            assert (await client.retrieve(asked["request_id"])).status_code == 200
    assert [request.adapter.version for request in script.seen] == [0, 2]


async def test_a_sampler_that_is_saved_again_under_another_number_is_the_first_one(
    client: TinkerClient, owner: StandInRuns
) -> None:
    """The client does as the SDK does when it got no answer: it counts its samplers once more."""
    run = await client.run(session := await client.session())
    sent = [
        await client.post("save_weights_for_sampler", model_id=run, seq_id=1, sampling_session_seq_id=number)
        for number in (9, 10)
    ]
    first, again = (answer.json()["request_id"] for answer in sent)
    assert first == again
    assert (await client.retrieve(again)).json()["sampling_session_id"] == f"{session}:sample:9"
    other = await client.post(
        "save_weights_for_sampler", model_id=run, seq_id=1, sampling_session_seq_id=9, kind="inflight"
    )
    assert other.status_code == 400 and "the seq_id 1 is taken" in other.json()["error"]["message"]


async def test_a_version_that_is_sampled_is_noted_as_used_and_one_that_is_gone_says_save_again(
    server: ApiServer, client: TinkerClient, owner: StandInRuns
) -> None:
    run = await client.run(session := await client.session())
    name, cell, redis = run_of(run) or "", server.bus.cell, server.api.redis
    for seq, body in ((1, {"sampling_session_seq_id": 1}), (2, {"path": "kept"})):
        await client.done("save_weights_for_sampler", model_id=run, seq_id=seq, **body)
    path = f"tinker://{run}/sampler_weights/kept"
    session_body: dict[str, Any] = {"session_id": session, "sampling_session_seq_id": 2, "model_path": path}
    assert (await client.post("create_sampling_session", **session_body)).status_code == 200
    samplers: list[dict[str, Any]] = [
        *({"base_model": None, "sampling_session_id": f"{session}:sample:{number}"} for number in (1, 2)),
        {"base_model": None, "model_path": path},
    ]
    use, samples = cell.use(name, 0), server.tinker.futures["tiny"].samples
    for seq, of in enumerate(samplers):
        await redis.delete(use)
        await asample(client, **of, seq_id=seq)
        assert 0 < await redis.ttl(use) <= USED_S
    await redis.delete(use)
    await samples.use_versions()
    assert await redis.exists(use), "requests that wait keep their version"
    assert not await redis.exists(cell.use(name, 0, with_optimizer=True))
    await redis.hdel(cell.versions(name), "0")
    for seq, of in enumerate(samplers):
        refused = await client.post("asample", **SAMPLE | of | {"seq_id": 10 + seq})
        assert refused.status_code == 404 and ("save again" in refused.text or "any more" in refused.text)
    assert (await client.post("create_sampling_session", **session_body)).status_code == 404
