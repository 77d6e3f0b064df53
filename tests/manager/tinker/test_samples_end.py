"""How requests for samples end that cannot be served, or that nobody wants any more."""

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from common.messages import Failure
from manager_service.records import JSON, JobState
from tests.support.api_server import ApiServer, Script, method, played, running_api, upload
from tests.support.tinker_client import TinkerClient, client_of

pytestmark = pytest.mark.timeout(120)
PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [104, 105]}]}
SAMPLE: dict[str, Any] = {"prompt": PROMPT, "sampling_params": {"max_tokens": 8}}


@pytest.fixture
async def server(redis_url: str, tmp_path: Path) -> AsyncGenerator[ApiServer]:
    async with running_api(redis_url, tmp_path / "data") as running:
        yield running


@pytest.fixture
async def client(server: ApiServer) -> TinkerClient:
    return await client_of(server)


async def sampler_of(client: TinkerClient, **of: Any) -> str:
    body = {"session_id": await client.session(), "sampling_session_seq_id": 0} | of
    made = await client.post("create_sampling_session", **body)
    assert made.status_code == 200, made.text
    return made.json()["sampling_session_id"]


async def test_a_sampler_of_a_jobs_version_that_was_deleted_says_so(server: ApiServer, client: TinkerClient) -> None:
    given: Any = method()
    job = (
        await server.openai.fine_tuning.jobs.create(
            model="tiny", training_file=await upload(server.openai), extra_body={"method": given}
        )
    ).id
    state = JSON.encode(JobState(status="succeeded", version=3))
    await server.api.redis.hset(server.bus.cell.job(job), "state", state)
    sampler = await sampler_of(client, model_path=f"tinker://{job}/sampler_weights/2")
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
    sampler = await sampler_of(client, base_model="tiny")
    damaged = Failure("corrupt_adapter", "adapter_model.safetensors does not match its manifest")
    async with played(Script(server.bus, failure=damaged, inbox=server.bus.cell.rollout)):
        asked = await client.post("asample", **SAMPLE, sampling_session_id=sampler, seq_id=0)
        found = await client.retrieve(asked.json()["request_id"])
    assert found.status_code == 200 and "the version is damaged" in found.json()["error"]
