"""Jobs that go on from a tuned model."""

from typing import Any

import openai
import pytest

from common.wire.messages import AdapterRef, LoraSpec
from manager_service.records.keys import JSON
from manager_service.records.run_records import Checkpoint, RunSpec, RunState
from tests.support.api_server import ApiServer, create, method, spec_of, write_state


async def start(client: openai.AsyncOpenAI, model: str, **hyper: Any) -> str:
    return (await create(client, model=model, method=method(**hyper))).id


async def tuned(server: ApiServer, version: int, **hyper: Any) -> str:
    """The name of a model that has come to a version."""
    job = await start(server.openai, "tiny", **hyper)
    await write_state(server, job, status="running", version=version)
    return f"ft:tiny:default::{job}"


async def test_a_job_goes_on_from_the_newest_or_a_pinned_version_in_its_shape_alone(server: ApiServer) -> None:
    model = await tuned(server, 3, lora_rank=4, lora_alpha=32.0, lora_targets=["q_proj"])
    for asked, version in ((model, 3), (f"{model}@1", 1)):
        job = await start(server.openai, asked)
        spec = await spec_of(server, job)
        assert spec.source == AdapterRef("default", model.rpartition(":")[2], version)
        assert spec.hyper.lora == LoraSpec(4, 32.0, ("q_proj",)), "the adapter keeps its shape"
        shown: Any = (await server.openai.fine_tuning.jobs.retrieve(job)).to_dict()
        assert (shown["model"], shown["hyperparameters"]["lora_rank"]) == (f"{model}@{version}", 4)
    with pytest.raises(openai.BadRequestError, match="lora_rank: the model that the job starts from has 4"):
        await start(server.openai, model, lora_rank=8)


async def test_only_ones_own_models_that_have_a_version_are_starts(server: ApiServer) -> None:
    model = await tuned(server, 3)
    fresh = f"ft:tiny:default::{await start(server.openai, 'tiny')}"
    for wrong in (f"{model}@4", f"{model}x", fresh):
        with pytest.raises(openai.BadRequestError, match="model"):
            await start(server.openai, wrong)
    with pytest.raises(openai.BadRequestError, match="there is no model"):
        await start(await server.new_tenant("acme"), model)


async def test_a_runs_versions_are_models_like_a_jobs(server: ApiServer) -> None:
    """They can be started from, asked for by their names, and are nobody else's."""
    session, run = "ses-0123456789abcdef", "run-0123456789abcdef-0"
    spec = RunSpec(run, "default", session, "tiny", "tiny", LoraSpec(32, 32.0, ("q_proj",)), seed=1, created_at=1)
    state = RunState(status="ready", version=2, checkpoints=[Checkpoint("weights", "mine", 1, 1)])
    record = {"spec": JSON.encode(spec), **state.fields()}
    await server.api.redis.hset(server.bus.cell.run(run), mapping=record)
    await server.api.redis.hset(server.bus.cell.versions(run), mapping={"0": "0", "1": "1", "2": "1"})
    path, name = f"tinker://{session}:train:0/weights/mine", f"ft:tiny:default::{run}"
    for model, version in ((path, 1), (name, 2), (f"{name}@0", 0)):
        assert (await server.openai.models.retrieve(model)).to_dict()["version"] == version
        started = await spec_of(server, await start(server.openai, model))
        assert (started.source, started.hyper.lora) == (AdapterRef("default", run, version), spec.lora)
    other = await server.new_tenant("acme")
    for model in (path, name, f"{name}@3", f"ft:tiny:default:x:{run}", "tinker://x", f"{path}x"):
        with pytest.raises(openai.NotFoundError):
            await (other if model in (path, name) else server.openai).models.retrieve(model)
    with pytest.raises(openai.BadRequestError, match="checkpoints"):
        await server.openai.models.delete(name)
