"""Webhooks: signed so that the `openai` client takes them, delivered at least once, and given up where the job's events say so."""

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import openai
import pytest

from common.cancellation import cancel_all
from common.outgoing import Caller
from harness.standin import until_status
from manager_service.export.cells import JobCell
from manager_service.export.webhooks import Webhooks
from manager_service.records.archive import Archive
from manager_service.records.job_records import MOVING
from manager_service.records.receivers import Receivers
from manager_service.records.sample_records import Limits
from tests.common.test_worker import until
from tests.support.api_server import ApiServer, method, running_api, running_jobs, upload
from tests.support.owning import is_archived


@dataclass
class Host:
    """A tenant's host: what it heard, by path, and how it answers."""

    url: str = ""
    heard: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list[tuple[str, dict[str, str], bytes]])
    statuses: dict[str, list[int]] = field(default_factory=dict[str, list[int]])  # by path; the last stays
    silent: threading.Event = field(default_factory=threading.Event)  # ends the wait of the path /hangs

    def paths(self) -> list[str]:
        return [path for path, _, _ in self.heard]


@pytest.fixture
def host() -> Iterator[Host]:
    host = Host()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            host.heard.append((self.path, {name.lower(): value for name, value in self.headers.items()}, body))
            if self.path == "/hangs":
                host.silent.wait(60)
            statuses = host.statuses.get(self.path, [200])
            self.send_response(statuses.pop(0) if len(statuses) > 1 else statuses[0])
            self.send_header("Location", "/elsewhere")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    host.url = f"http://127.0.0.1:{httpd.server_port}"
    yield host
    host.silent.set()
    httpd.shutdown()
    httpd.server_close()


@pytest.fixture
async def server(redis_url: str, tmp_path: Path) -> AsyncGenerator[ApiServer]:
    async with running_api(redis_url, tmp_path / "data", webhook_hosts="127.0.0.1") as running:
        yield running


@asynccontextmanager
async def delivering(server: ApiServer, *, hosts: str = "127.0.0.1", give_up_s: float = 3600.0) -> AsyncGenerator[None]:
    caller, cell = Caller(hosts), JobCell(server.bus, Archive(server.api.objects, "tiny"))
    webhooks = Webhooks(
        [cell],
        Receivers(server.api.redis),
        caller,
        give_up_s=give_up_s,
        limits=Limits(),
        first_wait_s=0.05,
        timeout_s=0.5,
    )
    task = asyncio.create_task(webhooks.run())
    try:
        yield
    finally:
        await cancel_all([task])
        await caller.close()


async def register(server: ApiServer, url: str, **more: Any) -> dict[str, Any]:
    made = await server.http.post("/v1/webhooks", json={"url": url, **more})
    assert made.is_success, made.text
    return made.json()


async def create(server: ApiServer, **more: Any) -> str:
    job = await server.openai.fine_tuning.jobs.create(
        model="tiny",
        training_file=await upload(server.openai),
        extra_body={"method": method(max_steps=1, batch_size=1, group_size=2), **more},
    )
    return job.id


async def finished_job(server: ApiServer, *, after: int = 0) -> str:
    """`after`: ends that wait already."""

    async def waits() -> bool:
        return await server.api.redis.zcard(server.bus.cell.ends) > after

    async with running_jobs(server):
        job = await create(server)
        await until(waits)
    return job


async def all_told(server: ApiServer) -> bool:
    return not await server.api.redis.zcard(server.bus.cell.ends)


async def warnings(server: ApiServer, job: str) -> list[str]:
    events = (await server.http.get(f"/v1/fine_tuning/jobs/{job}/events?limit=100")).json()["data"]
    return [event["message"] for event in events if event["level"] == "warn"]


async def test_the_openai_client_takes_what_is_delivered(server: ApiServer, host: Host) -> None:
    secret = (await register(server, f"{host.url}/hook"))["secret"]
    job = await finished_job(server)
    async with delivering(server):
        await until(lambda: all_told(server))
    ((path, headers, body),) = host.heard
    event = openai.OpenAI(api_key="none").webhooks.unwrap(body, headers, secret=secret)
    assert (path, event.type, event.object) == ("/hook", "fine_tuning.job.succeeded", "event")
    assert event.data.to_dict() == {"id": job}
    assert event.id == headers["webhook-id"]
    with pytest.raises(openai.InvalidWebhookSignatureError):
        openai.OpenAI(api_key="none").webhooks.unwrap(body + b" ", headers, secret=secret)


async def test_a_webhook_hears_of_what_it_asked_for_alone(server: ApiServer, host: Host) -> None:
    await register(server, f"{host.url}/ends", events=["fine_tuning.job.succeeded"])
    await register(server, f"{host.url}/failures", events=["fine_tuning.job.failed", "fine_tuning.job.cancelled"])
    untold = await create(server, webhooks=False)

    async with running_jobs(server):
        await until_status(server.bus, untold, "succeeded")
    assert await all_told(server)
    await finished_job(server)
    async with delivering(server):
        await until(lambda: all_told(server))
    assert host.paths() == ["/ends"]


async def test_what_was_not_taken_is_sent_again_to_that_webhook_alone_with_the_same_id(
    server: ApiServer, host: Host
) -> None:
    host.statuses["/shaky"] = [500, 302, 503, 204]
    await register(server, f"{host.url}/sound")
    await register(server, f"{host.url}/shaky")
    job = await finished_job(server)
    async with delivering(server):
        await until(lambda: all_told(server))
    assert sorted(host.paths()) == ["/shaky"] * 4 + ["/sound"]
    assert len({headers["webhook-id"] for _, headers, _ in host.heard}) == 1
    assert await warnings(server, job) == []


async def test_a_delivery_that_a_kill_ended_is_made_by_the_next_exporter(server: ApiServer, host: Host) -> None:
    await register(server, f"{host.url}/hangs")
    job = await finished_job(server)
    async with delivering(server):
        await until(lambda: host.heard)
    host.silent.set()
    async with delivering(server):
        await until(lambda: all_told(server))
    assert {json.loads(body)["data"]["id"] for _, _, body in host.heard} == {job}
    assert len(host.heard) >= 2


async def test_a_host_that_hangs_keeps_no_other_waiting_and_ends_in_the_jobs_events(
    server: ApiServer, host: Host
) -> None:
    hanging = await register(server, f"{host.url}/hangs")
    await register(server, f"{host.url}/quick")
    job = await finished_job(server)
    async with delivering(server, give_up_s=0.0):
        await until(lambda: all_told(server))
    assert sorted(host.paths()) == ["/hangs", "/quick"]
    (said,) = await warnings(server, job)
    assert hanging["id"] in said and "no answer within 0.5 s" in said
    assert hanging["secret"] not in said


async def test_a_host_that_is_not_allowed_any_more_is_not_called(server: ApiServer, host: Host) -> None:
    await register(server, f"{host.url}/hook")
    job = await finished_job(server)
    async with delivering(server, hosts="hooks.example.org"):
        await until(lambda: all_told(server))
    assert host.heard == []
    (said,) = await warnings(server, job)
    assert "the operator does not allow the address of 127.0.0.1" in said


async def test_the_events_of_an_archived_job_say_what_was_not_delivered(server: ApiServer, host: Host) -> None:
    host.statuses["/gone"] = [404]
    await register(server, f"{host.url}/gone")
    async with running_jobs(server, archive_after_s=0.0):
        job = await create(server)
        await until(lambda: is_archived(server.bus, job))
    async with delivering(server, give_up_s=0.0):
        await until(lambda: all_told(server))
    (said,) = await warnings(server, job)
    assert "answered with status 404" in said
    streamed = (await server.http.get(f"/v1/fine_tuning/jobs/{job}/events?stream=true")).text
    assert streamed.count("answered with status 404") == 1


async def test_what_cannot_be_said_while_a_job_is_being_archived_is_said_later(
    server: ApiServer, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("manager_service.export.notes.AGAIN_S", 0.01)
    host.statuses["/gone"] = [404]
    await register(server, f"{host.url}/gone")
    job = await finished_job(server)
    key, redis = server.bus.cell.job(job), server.api.redis
    await redis.hset(key, MOVING, "1")

    async with delivering(server, give_up_s=0.0):
        await until(lambda: len(host.heard) > 1)
        await redis.hdel(key, MOVING)
        await until(lambda: all_told(server))
    (said,) = await warnings(server, job)
    assert "answered with status 404" in said


async def test_of_more_ends_than_may_wait_the_oldest_are_given_up(
    server: ApiServer, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("manager_service.export.webhooks.MAX_WAITING", 1)
    await register(server, f"{host.url}/hook")
    jobs = [await finished_job(server)]
    jobs.append(await finished_job(server, after=1))
    async with delivering(server):
        await until(lambda: all_told(server))
    assert [json.loads(body)["data"]["id"] for _, _, body in host.heard] == jobs[1:]
    said = "No webhook hears of this job's end: more than 1 ends of your jobs wait for webhooks"
    assert [await warnings(server, job) for job in jobs] == [[said], []]
