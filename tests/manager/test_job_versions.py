"""Versions of a job that `keep_versions` leaves out are deleted, and never one that somebody uses."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import openai
import pytest
from msgspec.structs import replace

from common.bus.bus import Bus
from common.bus.streams import partition_of
from common.store.adapters import AdapterStore
from common.store.objects import Objects
from common.wire.messages import AdapterRef, EnvSpec
from harness.standin import create_job, job_spec, state_of, until_status
from manager_service.owner.runs import runs
from manager_service.records.job_records import JobState, Training
from manager_service.records.run_records import Leaving, use
from tests.common.test_worker import until
from tests.manager.test_archive import archived
from tests.support.api_server import (
    ApiServer,
    create,
    item,
    jsonl,
    method,
    running_api,
    running_jobs,
    upload,
    write_state,
)
from tests.support.owning import System

STEPS, KEEP = 11, 4
EVENLY = {0, 4, 8, 10, 11}


@pytest.fixture
async def server(redis_url: str, tmp_path: Path) -> AsyncGenerator[ApiServer]:
    async with running_api(redis_url, tmp_path / "data") as running:
        yield running


async def stored(objects: Objects, tenant: str, job: str) -> set[int]:
    """The versions whose adapters are in the store."""
    paths = await objects.paths(f"adapters/{tenant}/{job}")
    return {int(path.split("/")[3]) for path in paths if path.endswith("adapter_model.safetensors")}


async def ended(bus: Bus, job: str, tenant: str) -> bool:
    return not await bus.client.sismember(bus.cell.active(partition_of(tenant)), job)


async def trained(server: ApiServer, **hyper: Any) -> str:
    """A job that has ended, of which somebody used version 1."""
    file = await upload(server.openai, jsonl(*(item() for _ in range(4))))
    how: Any = method(batch_size=1, group_size=2, max_steps=STEPS, **hyper)
    job = (await server.openai.fine_tuning.jobs.create(model="tiny", training_file=file, method=how)).id
    await server.bus.client.set(server.bus.cell.use(job, 1), "")
    async with running_jobs(server):
        await until_status(server.bus, job, "succeeded")
        await until(lambda: ended(server.bus, job, "default"))
    return job


async def status_of(server: ApiServer, job: str, version: int) -> int:
    return (await server.http.get(f"/v1/models/ft:tiny:default::{job}@{version}")).status_code


async def test_a_job_keeps_its_newest_two_and_some_of_the_others_evenly(server: ApiServer) -> None:
    job = await trained(server, keep_versions=KEEP)
    assert await stored(server.api.objects, "default", job) == EVENLY | {1}
    model = f"ft:tiny:default::{job}"
    for _ in ("in Redis", "in the archive"):
        listed = [one.step_number for one in (await server.openai.fine_tuning.jobs.checkpoints.list(job)).data]
        assert listed == [11, 10, 8, 4, 1], "a version that is used when its job ends stays"
        content = await server.http.get(f"/v1/fine_tuning/jobs/{job}/checkpoints/6/content")
        assert (content.status_code, content.json()["error"]["code"]) == (404, "version_deleted")
        with pytest.raises(openai.NotFoundError, match=r"version 6 is deleted: .*; the nearest is 8") as refused:
            await server.openai.chat.completions.create(
                model=f"{model}@6", messages=[{"role": "user", "content": "add 1+1"}]
            )
        assert refused.value.code == "version_deleted"
        assert [await status_of(server, job, version) for version in (0, 1, 6, 8, 12)] == [200, 200, 404, 200, 404]
        await archived(server)
    manifests = [await AdapterStore(server.api.objects).manifest(AdapterRef("default", job, v)) for v in range(12)]
    assert None not in manifests, "no version is made again"


@pytest.mark.parametrize("hyper", [{}, {"keep_versions": "all"}])
async def test_a_job_of_a_few_steps_or_that_asks_for_it_keeps_all(server: ApiServer, hyper: dict[str, Any]) -> None:
    job = await trained(server, **hyper)
    assert await stored(server.api.objects, "default", job) == set(range(STEPS + 1))
    assert await use(server.bus, AdapterRef("default", job, 5))
    shown = await server.openai.fine_tuning.jobs.retrieve(job)
    given: Any = shown.method.reinforcement.hyperparameters if shown.method and shown.method.reinforcement else None
    assert given.keep_versions == hyper.get("keep_versions", 64)


async def test_what_unfinished_jobs_copy_or_ask_stays_and_an_owner_that_dies_deletes_nothing_more(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "RETIRE_EVERY_S", 0.0)
    spec, grader = job_spec(num_steps=8, keep_versions=2), {"type": "score_model", "model": "ft:tiny:acme::job-a@3"}
    judged = replace(job_spec("judged"), env=EnvSpec("single_turn", {"grader": grader}))
    copying = replace(job_spec("copying"), source=AdapterRef("acme", "job-a", 5))
    for other in (judged, copying):
        await create_job(system.bus, other, JobState(status="paused"))
    await create_job(system.bus, spec)
    for version in (2, 5):
        await until(lambda version=version: _reached(system.bus, version))
        await system.kill_owner()
        system.start_owner()
    await until_status(system.bus, spec.id, "succeeded")
    await until(lambda: ended(system.bus, spec.id, "acme"))
    kept = {0, 3, 4, 5, 7, 8}
    assert await stored(system.objects, "acme", spec.id) == kept
    cell, client = system.bus.cell, system.bus.client
    assert {int(version) for version in await client.hkeys(cell.versions(spec.id))} == kept
    assert {int(version) for version in await client.hkeys(cell.checkpoints(spec.id))} == kept - {0}
    assert not await use(system.bus, AdapterRef("acme", spec.id, 2))


async def test_a_model_of_a_job_that_has_just_ended_is_deleted_once_its_owner_is_done(server: ApiServer) -> None:
    job, active = (await create(server.openai)).id, server.bus.cell.active(partition_of("default"))
    await write_state(server, job, status="cancelled", version=3, leaving=Leaving("f", {1: False}, []))
    await server.bus.client.sadd(active, job)
    deleting = asyncio.create_task(server.openai.models.delete(f"ft:tiny:default::{job}"))
    await asyncio.wait([deleting], timeout=0.2)
    await server.bus.client.srem(active, job)
    assert (await deleting).deleted


async def _reached(bus: Bus, version: int) -> bool:
    return (await state_of(bus, "job-a")).version >= version


async def test_a_model_is_deleted_only_when_no_trainer_is_to_delete_versions_of_it(server: ApiServer) -> None:
    """The bytes would be counted as deleted twice. A step that waits for room on a full disk keeps nobody from making some."""
    client, active = server.bus.client, server.bus.cell.active(partition_of("default"))
    ends: list[dict[str, Any]] = [
        {"leaving": Leaving("f", {1: False}, [])},
        {},
        {"training": Training("b", (), 0, (1,))},
    ]
    for refused, state in zip((True, True, False), ends, strict=True):
        job = (await create(server.openai)).id
        await write_state(server, job, status="cancelled", version=3, **state)
        await client.sadd(active, job)  # its owner has more to do
        if refused:
            with pytest.raises(openai.ConflictError, match="has just ended") as told:
                await server.openai.models.delete(f"ft:tiny:default::{job}")
            assert told.value.code == "wrong_job_state"
            await client.srem(active, job)
        assert (await server.openai.models.delete(f"ft:tiny:default::{job}")).deleted
