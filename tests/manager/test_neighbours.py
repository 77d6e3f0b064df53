"""Large lists, bodies and downloads of one tenant cost the others little of Redis' memory and of the manager's processor."""

import asyncio
import base64
import hashlib
import os
import resource
import signal
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from common.bus.bus import Bus
from common.bus.fullness import memory_used
from common.bus.streams import Cell
from common.cancellation import running
from common.children.helpers import Helper
from common.store.objects import Objects
from common.wire.messages import LoraSpec
from harness.redis_server import RedisServer, find_valkey
from manager_service.http import open_requests
from manager_service.http.connections import Connection
from manager_service.http.open_requests import OpenRequests
from manager_service.http.openai.jobs import jobs as job_routes
from manager_service.http.server import ACCEPTED_AT_ONCE
from manager_service.http.stores import job_store
from manager_service.http.stores.job_store import JobStore, ListedJob
from manager_service.launcher.embedded_redis import find_server
from manager_service.records.keys import JSON
from manager_service.records.run_records import Checkpoint, RunSpec, RunState
from manager_service.records.tenants import Tenants
from tests.common.test_worker import until
from tests.support.api_server import ApiServer, create, running_api, upload, write_state

SOURCE = "def grade(sample, item):\n    return 1.0\n#" + "x" * 200_000
GRADER = {"type": "python", "name": "long", "source": SOURCE}
METHOD = {"type": "reinforcement", "reinforcement": {"grader": GRADER, "hyperparameters": {"max_steps": 1}}}
NUM = 12


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[ApiServer]:
    """The API over a Redis of its own, whose figures nobody else changes."""
    redis = RedisServer.start(tmp_path, durable=False)
    async with running_api(redis.url, tmp_path / "data") as api:
        yield api
    redis.stop()


async def large_jobs(server: ApiServer) -> list[str]:
    """NUM jobs of a large grader that have each a version, newest first."""
    file = await upload(server.openai)
    made = [(await create(server.openai, training_file=file, suffix=str(n), method=METHOD)).id for n in range(NUM)]
    for job in made:
        await write_state(server, job, status="succeeded", version=1)
    return made[::-1]


async def helper_of(server: ApiServer) -> Helper:
    """The helper that reads large bodies, once it has read one."""
    body = {"model": "tiny", "training_file": "x" * 8192}
    assert (await server.http.post("/v1/fine_tuning/jobs", json=body)).status_code == 400
    (helper,) = idle(server)
    return helper


def idle(server: ApiServer) -> list[Helper]:
    return server.api.helpers._pool._idle  # pyright: ignore[reportPrivateUsage]


async def figure(server: ApiServer, section: str, name: str) -> int:
    return int((await server.bus.client.info(section))[name])


async def test_all_models_are_listed_and_of_their_jobs_only_small_records_are_read(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_store, "MODELS_AT_ONCE", 5)
    jobs = await large_jobs(server)
    names = [f"ft:tiny:default:{NUM - 1 - at}:{job}" for at, job in enumerate(jobs)]
    before = await figure(server, "stats", "total_net_output_bytes")
    assert [model.id async for model in server.openai.models.list()] == [*names, "tiny"]
    assert await figure(server, "stats", "total_net_output_bytes") - before < len(SOURCE)


async def test_a_page_of_jobs_is_bounded_in_bytes_and_openai_reads_on(server: ApiServer) -> None:
    jobs = await large_jobs(server)
    page = await server.openai.fine_tuning.jobs.list(limit=100)
    assert 1 < len(page.data) < NUM and page.has_more
    read = [job async for job in server.openai.fine_tuning.jobs.list(limit=100)]
    assert [job.id for job in read] == jobs
    methods: list[Any] = [job.to_dict()["method"] for job in read]
    assert [method["reinforcement"]["grader"]["source"] for method in methods] == [SOURCE] * NUM
    assert len((await server.http.get("/v1/fine_tuning/jobs?limit=100")).content) < job_routes.PAGE_BYTES + len(SOURCE)


async def test_others_have_the_event_loop_between_the_jobs_of_a_list(server: ApiServer) -> None:
    jobs, looks = await large_jobs(server), 0

    async def look() -> None:
        nonlocal looks
        while True:
            looks += 1
            await asyncio.sleep(0)

    entries = [ListedJob(0, job, server.api.bases["tiny"]) for job in jobs]

    async def read() -> list[tuple[str, int]]:
        return [(row.spec.id, looks) async for row in JobStore(server.api).rows("default", entries)]

    async with running(look()):
        lists = await asyncio.gather(read(), read())
    assert [[job for job, _ in seen] for seen in lists] == [jobs, jobs]
    assert len({at for seen in lists for _, at in seen}) == 2 * NUM  # one part of a tenant's work in a round


async def test_reads_of_one_tenant_take_turns_and_another_s_are_answered_beside_them(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_requests, "TURN_S", 600.0)
    at_work, most, slow = Counter[str](), Counter[str](), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        tenant = scope["key"].tenant
        at_work[tenant] += 1
        most[tenant] = max(most[tenant], at_work[tenant])
        await (slow.wait() if scope["path"] == "/v1/slow" else asyncio.sleep(0.001))
        at_work[tenant] -= 1
        await JSONResponse([])(scope, receive, send)

    other = (await server.new_tenant("neighbour")).api_key
    transport = httpx.ASGITransport(OpenRequests(app, server.api))
    async with httpx.AsyncClient(transport=transport, base_url="http://manager") as client:

        def ask(key: str, path: str = "/v1/models") -> Awaitable[httpx.Response]:
            return client.get(path, headers={"Authorization": f"Bearer {key}"})

        async def slow_and_another() -> list[asyncio.Future[httpx.Response]]:
            first = asyncio.ensure_future(ask(server.openai.api_key, "/v1/slow"))
            await until(lambda: at_work["default"])
            return [first, asyncio.ensure_future(ask(server.openai.api_key))]

        await asyncio.gather(*(ask(server.openai.api_key) for _ in range(10)))
        assert most["default"] == 1
        waiting = await slow_and_another()
        await ask(other)
        assert not any(each.done() for each in waiting)
        slow.set()
        await asyncio.gather(*waiting)
        slow.clear()
        monkeypatch.setattr(open_requests, "TURN_S", 0.001)
        waiting = await slow_and_another()
        await waiting[1]  # once the slow one is known to wait for something else
        slow.set()
        assert (await waiting[0]).status_code == 200


async def test_a_read_whose_client_left_before_its_turn_is_not_computed(server: ApiServer) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("nobody reads this")

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None: ...

    key = b"Bearer " + server.openai.api_key.encode()
    scope = {"type": "http", "method": "GET", "path": "/v1/models", "headers": [(b"authorization", key)]}
    await OpenRequests(app, server.api)(scope, receive, send)


async def test_connections_are_accepted_few_at_a_time_and_the_others_wait(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn, made, num = 0, Counter[int](), 100

    async def count_turns() -> None:
        nonlocal turn
        while made.total() < num:
            turn += 1
            await asyncio.sleep(0)

    def counted(connection: Connection, transport: asyncio.Transport, begin: Any = Connection.connection_made) -> None:
        made[turn] += 1
        begin(connection, transport)

    monkeypatch.setattr(Connection, "connection_made", counted)
    with ExitStack() as opened:
        for _ in range(num):
            opened.enter_context(socket.create_connection(("127.0.0.1", server.api.settings.port), timeout=60))
        await count_turns()
    assert max(made.values()) <= ACCEPTED_AT_ONCE + 1  # later Pythons accept one more


async def test_a_request_whose_client_left_at_once_costs_no_look_at_its_key(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, lost = 0, asyncio.Event()

    async def looked(tenants: Tenants, key: str, look: Any = Tenants.authenticate) -> Any:
        nonlocal looks
        looks += 1
        return await look(tenants, key)

    def ended(connection: Connection, error: Exception | None, end: Any = Connection.connection_lost) -> None:
        end(connection, error)
        lost.set()

    monkeypatch.setattr(Tenants, "authenticate", looked)
    monkeypatch.setattr(Connection, "connection_lost", ended)
    with socket.create_connection(("127.0.0.1", server.api.settings.port)) as client:
        client.sendall(f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.key}\r\n\r\n".encode())
    await lost.wait()
    assert (await server.http.get("/v1/models")).status_code == 200 and looks == 1


async def test_many_lists_at_once_leave_redis_memory_flat(server: ApiServer) -> None:
    await large_jobs(server)
    state = RunState(checkpoints=[Checkpoint("weights", "x" * 100, 1, 1)] * 1000)
    for run in (f"run-0123456789abcdef-{number}" for number in range(40)):
        spec = RunSpec(run, "default", "ses-0123456789abcdef", "tiny", "tiny", LoraSpec(), 1, 1)
        await server.api.redis.hset(server.bus.cell.run(run), mapping={"spec": JSON.encode(spec), **state.fields()})
        await server.api.redis.zadd(server.bus.cell.tenant_runs("default"), {run: 1})
    before = await figure(server, "memory", "used_memory_peak")
    urls = ("/v1/fine_tuning/jobs?limit=100", "/v1/models", "/api/v1/training_runs?limit=1000", "/api/v1/checkpoints")
    pages = [server.http.get(url) for url in urls for _ in range(15)]
    assert {page.status_code for page in await asyncio.gather(*pages)} == {200}
    assert await figure(server, "memory", "used_memory_peak") - before < 16 << 20


@pytest.mark.parametrize("find", [find_server, find_valkey], ids=["6.2", "valkey"])
async def test_what_waits_for_a_client_to_read_it_is_no_memory_used(
    find: Any, tmp_path: Path, objects: Objects
) -> None:
    redis = RedisServer.start(tmp_path, program=find(), durable=False)
    bus = Bus.connect(redis.url, Cell("tiny"), objects)
    try:
        await bus.client.hset("large", "field", b"x" * (8 << 20))
        reader, writer = await asyncio.open_connection("127.0.0.1", redis.port)
        await bus.client.config_set("maxmemory", 100 << 20)
        before = await memory_used(bus)
        writer.write(b"HGET large field\r\n" * 40)
        await writer.drain()
        # Redis counts the clients' buffers once a second
        async with asyncio.timeout(60):
            while (info := await bus.client.info("memory"))["mem_clients_normal"] < 200 << 20:
                await asyncio.sleep(0.05)
        assert info["used_memory"] > info["maxmemory"]
        assert await memory_used(bus) < before + 0.1
        writer.close()
        assert reader
    finally:
        await bus.close()
        redis.stop()


async def test_a_helper_has_a_gigabyte_of_address_space_beyond_its_start(server: ApiServer) -> None:
    pid = (await helper_of(server))._process.pid  # pyright: ignore[reportPrivateUsage]
    most, _ = resource.prlimit(pid, resource.RLIMIT_AS)
    has = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
    assert 0.9 * 2**30 < most - has <= 2**30


async def test_a_helper_whose_client_leaves_is_killed(server: ApiServer) -> None:
    body, headers = b"[" + b"1," * 8192, {"Content-Type": "application/json"}
    for path in ("/v1/fine_tuning/jobs", "/api/v1/asample", "/api/v1/forward"):
        helper = await helper_of(server)
        os.kill(helper._process.pid, signal.SIGSTOP)  # pyright: ignore[reportPrivateUsage]
        asking = asyncio.create_task(server.http.post(path, content=body, headers=headers))
        async with asyncio.timeout(60):
            while idle(server):
                await asyncio.sleep(0.01)
            asking.cancel()
            while helper.alive:
                await asyncio.sleep(0.01)


async def test_the_pages_for_people_run_and_load_nothing_of_others(server: ApiServer) -> None:
    for path in ("/docs", "/openapi.json", "/"):
        answer = await server.http.get(path)
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "default-src 'none'" in answer.headers["content-security-policy"]
    style = (await server.http.get("/docs")).text.partition("<style>")[2].partition("</style>")[0]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert f"'sha256-{digest}'" in answer.headers["content-security-policy"]
