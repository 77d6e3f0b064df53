"""Finished jobs' records move from Redis to object storage, and the API answers as before."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from common.bus.streams import partition_of
from common.errors import StoreUnavailable
from common.store.objects import Objects
from harness.standin import until_status
from manager_service.owner.archiver import Archiver
from manager_service.records.archive import ROWS_A_PART, Archive, Archived, in_parts
from manager_service.records.job_records import MOVING, JobState
from manager_service.records.keys import JSON
from manager_service.records.sample_records import CheckpointRecord, EventRecord
from tests.support.api_server import ApiServer, item, jsonl, method, running_api, running_jobs, upload


@pytest.fixture
async def server(redis_url: str, tmp_path: Path) -> AsyncGenerator[ApiServer]:
    async with running_api(redis_url, tmp_path / "data", keep_alive_s=0.3) as running:
        yield running


async def finished_jobs(server: ApiServer, count: int, **settings: Any) -> list[str]:
    """Ids of jobs that have succeeded, the oldest first."""
    file = await upload(server.openai, jsonl(*(item() for _ in range(4))))
    hyper = method(batch_size=2, group_size=2, max_steps=2)
    jobs: list[str] = []
    async with running_jobs(server, **settings):
        for number in range(count):
            body: dict[str, Any] = {"suffix": f"n.{number}", "metadata": {"odd": str(number % 2)}, "method": hyper}
            made = await server.openai.fine_tuning.jobs.create(model="tiny", training_file=file, **body)
            jobs.append(made.id)
        for job in jobs:
            await until_status(server.bus, job, "succeeded")
    return jobs


async def archived(server: ApiServer) -> None:
    """Lets an owner archive all that has finished."""
    async with running_jobs(server, archive_after_s=0.0), asyncio.timeout(120):
        while await server.bus.client.zcard(server.bus.cell.jobs_all):
            await asyncio.sleep(0.05)


async def answers(server: ApiServer, jobs: list[str]) -> dict[str, Any]:
    """The API's answers about the jobs, by every route and through every page."""
    urls = ["/v1/models", "/v1/fine_tuning/jobs", "/v1/fine_tuning/jobs?metadata[odd]=1&limit=1"]
    urls += [f"/v1/fine_tuning/jobs?limit=2&after={job}" for job in jobs]
    for job in jobs:
        urls += [
            f"/v1/fine_tuning/jobs/{job}{part}"
            for part in ("", "/ledger", "/usage", "/samples", "/checkpoints", "/metrics")
        ]
        urls += [f"/v1/fine_tuning/jobs/{job}/events?limit=100", f"/v1/fine_tuning/jobs/{job}/events?limit=2&after=3"]
        urls += [f"/v1/fine_tuning/jobs/{job}/events?stream=true", f"/v1/fine_tuning/jobs/{job}/samples?version=1"]
        urls += [f"/v1/fine_tuning/jobs/{job}/checkpoints?limit=1&after=ftckpt-{job}@2"]
    said = {url: await server.http.get(url) for url in urls}
    assert {url: answer.status_code for url, answer in said.items()} == dict.fromkeys(urls, 200)
    return {url: answer.text for url, answer in said.items()}


async def test_an_archived_job_is_answered_for_as_before(server: ApiServer) -> None:
    jobs = await finished_jobs(server, 3)
    before = await answers(server, jobs)
    total = (await server.http.get("/v1/usage")).json()["total"]
    await archived(server)
    assert await answers(server, jobs) == before
    report = (await server.http.get("/v1/usage")).json()
    assert report["total"] == pytest.approx(total)
    assert [row["job"] for row in report["data"]] == ["archived"]
    metrics = (await server.http.get("/metrics", headers=server.as_admin())).text
    assert 'marlaas_jobs{base_model="tiny",status="finished"} 3.0' in metrics


async def test_nothing_of_an_archived_job_is_left_in_redis(server: ApiServer) -> None:
    jobs = await finished_jobs(server, 2)
    await archived(server)
    keys = [key async for key in server.bus.client.scan_iter()]
    assert [key for key in keys if any(job.encode() in key for job in jobs)] == []
    usage = await server.bus.client.hkeys(server.bus.cell.usage("default"))
    assert [field for field in usage if any(job in str(field) for job in jobs)] == []


async def test_new_jobs_and_archived_ones_are_one_list(server: ApiServer) -> None:
    old = await finished_jobs(server, 2)
    await archived(server)
    new = await finished_jobs(server, 2)
    listed = [job.id async for job in server.openai.fine_tuning.jobs.list(limit=2)]
    assert listed == [*reversed(new), *reversed(old)]
    models = [model.id.rpartition(":")[2] async for model in server.openai.models.list()]
    assert models == [*listed, "tiny"]


async def test_another_tenant_sees_nothing_of_an_archived_job(server: ApiServer) -> None:
    (job,) = await finished_jobs(server, 1)
    await archived(server)
    other = await server.new_tenant("rival")
    with pytest.raises(openai.NotFoundError):
        await other.fine_tuning.jobs.retrieve(job)
    assert [one.id async for one in other.fine_tuning.jobs.list()] == []


async def test_an_archived_jobs_model_can_be_used_and_deleted(server: ApiServer) -> None:
    (job,) = await finished_jobs(server, 1)
    await archived(server)
    model = f"ft:tiny:default:n.0:{job}"
    assert (await server.openai.models.retrieve(f"{model}@1")).id == f"{model}@1"
    assert await server.api.objects.paths("adapters") != []
    assert (await server.openai.models.delete(model)).deleted
    assert await server.api.objects.paths("adapters") == []
    assert [found.id async for found in server.openai.models.list()] == ["tiny"]
    assert (await server.openai.fine_tuning.jobs.retrieve(job)).fine_tuned_model is None
    with pytest.raises(openai.NotFoundError):
        await server.openai.models.delete(model)


async def test_a_model_is_not_deleted_while_its_job_is_copied(server: ApiServer) -> None:
    (job,) = await finished_jobs(server, 1)
    await server.bus.client.hset(server.bus.cell.job(job), MOVING, "1")
    deletion = asyncio.create_task(server.http.delete(f"/v1/models/ft:tiny:default:n.0:{job}"))
    await asyncio.sleep(0.2)
    assert not deletion.done()
    await archived(server)
    assert (await deletion).status_code == 200
    assert [found.id async for found in server.openai.models.list()] == ["tiny"]


async def test_without_a_store_nothing_is_deleted_in_redis(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = await finished_jobs(server, 2)
    before = await answers(server, jobs)
    real, tried = Objects.write, asyncio.Event()

    async def fails(self: Objects, path: str, data: bytes) -> None:
        if path.startswith("records/"):
            tried.set()
            raise StoreUnavailable(path)
        await real(self, path, data)

    with monkeypatch.context() as patched:
        patched.setattr(Objects, "write", fails)
        async with running_jobs(server, archive_after_s=0.0), asyncio.timeout(120):
            await tried.wait()
    assert await answers(server, jobs) == before
    await archived(server)
    assert await answers(server, jobs) == before


async def test_a_record_that_cannot_be_read_stays_where_it_is(server: ApiServer) -> None:
    broken, whole = await finished_jobs(server, 2)
    cell, client = server.bus.cell, server.bus.client
    await client.hset(cell.job(broken), "state", b"{")
    moved = await Archiver(server.bus, server.api.objects).copy([broken, whole])
    assert [(one.job, one.tenant) for one in moved] == [(broken, ""), (whole, "default")]
    async with running_jobs(server, archive_after_s=0.0), asyncio.timeout(120):
        while await client.zcard(cell.finished(partition_of("default"))):
            await asyncio.sleep(0.05)
    assert await client.exists(cell.job(broken), cell.job(whole)) == 1


@pytest.fixture
async def many_rows(objects: Objects, server: ApiServer) -> AsyncIterator[tuple[Archive, Archived]]:
    """An archived job with more events and checkpoints than a part holds."""
    (job,) = await finished_jobs(server, 1)
    spec = msgspec.json.decode(await server.bus.client.hget(server.bus.cell.job(job), "spec") or b"")
    events = [(n, JSON.encode(EventRecord(n, n, "info", f"event {n}"))) for n in range(1, 2 * ROWS_A_PART + 2)]
    versions = [(n, JSON.encode(CheckpointRecord(n, n))) for n in range(1, ROWS_A_PART + 3)]
    record = {"spec": spec, "state": JobState(), "deleted": False, "created_ms": 5, "ledger": {}, "usage": {}}
    whole = msgspec.convert(msgspec.to_builtins(record), Archived)
    archive = Archive(objects, "tiny")
    await archive.write(whole, in_parts("events", events) | in_parts("checkpoints", versions))
    found = await archive.find("default", job)
    assert found is not None
    yield archive, found


async def test_long_lists_are_read_a_part_at_a_time(many_rows: tuple[Archive, Archived]) -> None:
    archive, job = many_rows
    last = 2 * ROWS_A_PART + 1
    assert [e.sequence for e in await archive.records(job).events(before=None, limit=3)] == [last, last - 1, last - 2]
    across = await archive.records(job).events(before=ROWS_A_PART + 3, limit=4)
    assert [e.sequence for e in across] == [ROWS_A_PART + 2, ROWS_A_PART + 1, ROWS_A_PART, ROWS_A_PART - 1]
    assert [e.sequence for e in await archive.records(job).events(before=3, limit=100)] == [2, 1]
    assert [c.version for c in await archive.records(job).checkpoints(before=4, limit=2)] == [3, 2]
    assert len(await archive.records(job).checkpoints(before=None, limit=1000)) == ROWS_A_PART + 2


@pytest.mark.parametrize("last", [-1, 0, 1, ROWS_A_PART - 1, ROWS_A_PART, ROWS_A_PART + 1, 2 * ROWS_A_PART + 1])
async def test_a_stream_of_events_resumes_anywhere(many_rows: tuple[Archive, Archived], last: int) -> None:
    archive, job = many_rows
    seen = [event.sequence async for event in archive.records(job).events_after(last)]
    assert seen == list(range(max(1, last + 1), 2 * ROWS_A_PART + 2))


async def test_a_cursor_that_is_no_job_is_refused(server: ApiServer) -> None:
    for after in ("", "..", "ftjob-0"):
        answer = await server.http.get("/v1/fine_tuning/jobs", params={"after": after})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_cursor")


@pytest.mark.parametrize("job", ["..", "../../other/tiny/ftjob-1", "jobs/20261122", "", ".", "a" * 5000])
async def test_a_strange_id_is_no_job(objects: Objects, job: str) -> None:
    assert await Archive(objects, "tiny").find("default", job) is None
