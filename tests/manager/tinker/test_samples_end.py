"""Requests for samples end if they cannot be served, or if nobody wants them any more."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from common.cancellation import cancel_all
from common.wire.messages import BASE, Cancel, Failure
from manager_service.http.errors import ApiError
from manager_service.http.sampling.choices import InferenceRequest
from manager_service.http.tinker import retrieval
from manager_service.http.tinker.futures import sample_futures as samples_module
from manager_service.http.tinker.futures.sample_futures import Gone
from manager_service.records.run_records import SESSION_ALIVE_S
from tests.support.api_server import ApiServer, Script, method, played, running_api, upload, write_state
from tests.support.tinker_client import TinkerClient, client_of, samples_of

PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [104, 105]}]}
SAMPLE: dict[str, Any] = {"prompt": PROMPT, "sampling_params": {"max_tokens": 8}}


async def test_a_sampler_of_a_jobs_version_that_was_deleted_says_so(server: ApiServer, client: TinkerClient) -> None:
    given: Any = method()
    job = (
        await server.openai.fine_tuning.jobs.create(
            model="tiny", training_file=await upload(server.openai), extra_body={"method": given}
        )
    ).id
    await write_state(server, job, status="succeeded", version=3)
    sampler = await client.sampler(await client.session(), model_path=f"tinker://{job}/sampler_weights/2")
    async with played(Script(server.bus, inbox=server.bus.cell.rollout)):
        asked = await client.post("asample", **SAMPLE, sampling_session_id=sampler, seq_id=0)
        assert (await client.retrieve(asked.json()["request_id"])).status_code == 200
    await server.openai.models.delete(f"ft:tiny:default::{job}")
    refused = await client.post("asample", **SAMPLE, sampling_session_id=sampler, seq_id=1)
    assert refused.status_code == 404, refused.text
    assert "there is no checkpoint" in refused.json()["error"]["message"]


async def test_a_damaged_version_is_an_error_and_not_a_request_to_ask_again(
    server: ApiServer, client: TinkerClient
) -> None:
    sampler = await client.sampler(await client.session())
    damaged = Failure("corrupt_adapter", "adapter_model.safetensors does not match its manifest")
    async with played(Script(server.bus, failure=damaged, inbox=server.bus.cell.rollout)):
        asked = await client.post("asample", **SAMPLE, sampling_session_id=sampler, seq_id=0)
        found = await client.retrieve(asked.json()["request_id"])
    assert found.status_code == 200 and "the version is damaged" in found.json()["error"]


async def test_a_request_is_retrieved_and_given_up_at_whichever_manager(
    server: ApiServer, client: TinkerClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_api(server.api.settings.redis_url, tmp_path / "data") as second:
        there, stranger = TinkerClient(second.http, client.key), await client_of(server, "stranger")
        request = (await client.post("asample", **SAMPLE, base_model="tiny")).json()["request_id"]
        waiting = asyncio.create_task(there.retrieve(request))
        for http in (server.http, second.http):
            other = TinkerClient(http, stranger.key)
            assert (await other.post("cancel_future", request_id=request)).status_code == 200
            assert (await other.retrieve(request)).status_code == 410
        async with played(Script(server.bus, text="ok", inbox=server.bus.cell.rollout)):
            assert samples_of(await waiting) == [[*b"ok", 256]]
        monkeypatch.setattr(retrieval, "WAIT_S", 0.2)
        request = (await client.post("asample", **SAMPLE, base_model="tiny")).json()["request_id"]
        assert (await client.retrieve(request)).status_code == 408
        for _ in range(2):  # what is over is passed over
            assert (await there.post("cancel_future", request_id=request)).status_code == 200
            while (found := await client.retrieve(request)).status_code == 408:
                pass
            assert found.status_code == 410
        theirs = (await there.post("asample", **SAMPLE, base_model="tiny")).json()["request_id"]
    await server.bus.client.delete(server.bus.cell.peers(theirs.split("-")[1]))  # as it expires
    assert (await client.retrieve(theirs)).status_code == 410, "the replica that had it is not there"


async def asked_of(client: TinkerClient, sampler: str, num: int) -> list[str]:
    return [
        (await client.post("asample", **SAMPLE, sampling_session_id=sampler, seq_id=seq)).json()["request_id"]
        for seq in range(num)
    ]


async def test_what_a_client_has_under_way_ends_with_its_session(
    server: ApiServer, client: TinkerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retrieval, "WAIT_S", 0.2)
    mine, others = await client.sampler(await client.session()), await client.sampler(await client.session())
    requests, kept = await asked_of(client, mine, 2), await asked_of(client, others, 1)
    waiting = asyncio.create_task(server.tinker.futures["tiny"].samples.outcome("default", requests[0], 60))
    assert (await client.retrieve(requests[1])).status_code == 408
    session = mine.partition(":")[0]
    assert (await client.post(f"sessions/{session}/finish", reason={"type": "success"})).status_code == 200
    assert (await waiting).gone, "whoever waits hears of it"
    assert [(await client.retrieve(request)).status_code for request in requests] == [410, 410]
    assert (await client.retrieve(kept[0])).status_code == 408
    cancelled: set[str] = set()
    while len(cancelled) < 2:  # its turns end at the workers
        told = await server.bus.follow(server.bus.cell.control, "0", block_ms=None)
        cancelled = {message.job for _, message in told if isinstance(message, Cancel)}


async def test_a_session_that_is_over_ends_its_samples_at_every_manager(
    server: ApiServer, client: TinkerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = server.tinker.futures["tiny"].samples
    mine, others = await client.sampler(await client.session()), await client.sampler(await client.session())
    (request,), (kept,) = await asked_of(client, mine, 1), await asked_of(client, others, 1)
    await samples.end_silent()
    samples.find("default", request)
    monkeypatch.setattr(samples, "end_session", str)  # another manager was told
    await client.post(f"sessions/{mine.partition(':')[0]}/finish", reason={"type": "success"})
    monkeypatch.undo()
    await samples.end_silent()
    samples.find("default", request)  # it may be silent, and back in time
    monkeypatch.setattr(samples_module, "GRACE_S", 0.0)
    await samples.end_silent()
    with pytest.raises(Gone):
        samples.find("default", request)
    samples.find("default", kept)


async def test_samples_end_forty_seconds_after_the_last_heartbeat(
    server: ApiServer, client: TinkerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples, now = server.tinker.futures["tiny"].samples, [0.0]
    monkeypatch.setattr(samples, "_clock", lambda: now[0])
    sampler = await client.sampler(await client.session())
    session = sampler.partition(":")[0]
    (request,) = await asked_of(client, sampler, 1)

    async def look(silent_s: int) -> None:
        """Looks as long after the last heartbeat, 10 s after the last look."""
        now[0] += 10
        await server.bus.client.expire(server.bus.cell.session(session), SESSION_ALIVE_S - silent_s)
        await samples.end_silent()

    for silent_s in (10, 19, 29, 39):
        await look(silent_s)
    assert (await client.post("session_heartbeat", session_id=session)).status_code == 200
    for silent_s in (9, 21, 31):
        await look(silent_s)
    samples.find("default", request)
    await look(41)
    with pytest.raises(Gone):
        samples.find("default", request)


async def test_a_request_that_is_given_up_before_it_begins_leaves_its_room(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples_module, "MAX_OPEN", 1)
    samples, tenant = server.tinker.futures["tiny"].samples, await server.api.tenants.get("default")
    ask = InferenceRequest(
        tenant=tenant, adapter=BASE, prompts=[[1]], num_choices=1, sampling=[], seed=0, stream=False, bulk=True
    )
    for _ in range(3):
        request = samples.find("default", samples.start(ask))
        with pytest.raises(ApiError, match="under way"):
            samples.start(ask)
        samples.cancel(request)
        await cancel_all([request.task])
