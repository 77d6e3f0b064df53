"""A hostile tenant's requests are refused or wait their turn, and meanwhile others are answered."""

import asyncio
import contextlib
import errno
import gc
import json
import os
import select
import signal
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import httpx
import openai
import pytest
import pytest_asyncio
from fastapi.routing import APIRoute
from starlette.datastructures import UploadFile
from structlog.testing import capture_logs

from common.cancellation import cancel_all
from common.wire.messages import GradeRequest, GradeResult
from harness.redis_server import RedisServer
from manager_service.http import body_limit, connections, context
from manager_service.http.app import ROUTERS
from manager_service.http.reading.bodies import JsonRoute
from manager_service.http.sampling import completion_requests
from manager_service.http.sampling.inference import MAX_GRADES
from manager_service.http.schemas import Page, SampleObject
from manager_service.records.keys import JSON
from tests.common.test_worker import until
from tests.support.api_server import (
    GRADER,
    ApiServer,
    Script,
    create,
    item,
    jsonl,
    large_samples,
    played,
    played_grader,
    running_api,
    upload,
)

T = TypeVar("T")

LONGEST_STOP_S = 0.25
"""A part of this process's CPU time, which other processes do not lengthen. The measured stops are 5 to 60 ms."""


@pytest.fixture
async def server(redis_url: str, tmp_path: Path) -> AsyncGenerator[ApiServer]:
    async with running_api(
        redis_url, tmp_path / "data", inference_timeout_s=60.0, max_file_bytes=MAX_FILE_BYTES
    ) as running:
        gc.freeze()  # as the manager's `main` does
        yield running


@pytest.fixture
async def executing(redis_url: str, tmp_path: Path) -> AsyncGenerator[ApiServer]:
    """A server whose helpers are its children."""
    async with running_api(redis_url, tmp_path / "data", forks=False) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def refusing(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[ApiServer]:
    """A server for requests of which nothing is left, with a Redis that no other test empties."""
    redis = RedisServer.start(tmp_path_factory.mktemp("redis"), durable=False)
    async with running_api(redis.url, tmp_path_factory.mktemp("data"), inference_timeout_s=60.0) as running:
        gc.freeze()
        yield running
    redis.stop()


async def longest_stop(work: Awaitable[T]) -> tuple[T, float]:
    """The result of some work, and the most CPU time that went by while the event loop answered nobody else."""
    longest_s, task = 0.0, asyncio.ensure_future(work)
    while not task.done():
        before = time.process_time()
        await asyncio.sleep(0.005)
        longest_s = max(longest_s, time.process_time() - before)
    return task.result(), longest_s


def chat(content: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": content}]}


def graded(**fields: Any) -> dict[str, Any]:
    return {"grader": GRADER | fields, "model_sample": "x", "item": {"answer": "x"}}


CHAT, COMPLETIONS, RUN = "/v1/chat/completions", "/v1/completions", "/v1/fine_tuning/alpha/graders/run"
JOBS = "/v1/fine_tuning/jobs"
FOUR_MB = 4_000_000
MAX_FILE_BYTES = 64 << 20


def multi(**fields: Any) -> dict[str, Any]:
    """A grader of 20 graders."""
    return {"type": "multi", "graders": {f"g{i}": GRADER | fields for i in range(20)}, "calculate_output": "g0"}


def submitted(**reinforcement: Any) -> bytes:
    return json.dumps({"model": "tiny", "method": {"type": "reinforcement", "reinforcement": reinforcement}}).encode()


def tried(grader: dict[str, Any], item: dict[str, Any]) -> bytes:
    return json.dumps({"grader": grader, "model_sample": "x", "item": item}).encode()


def doubling(depth: int) -> str:
    """Source of which each line of `finally` doubles the compiled code."""
    return "".join(f"{' ' * i}try: p\n{' ' * i}finally:\n" for i in range(depth)) + " " * depth + "p\n"


LIKELY = "ab" * 100
MANY_VARIABLES = "{{item.a}}" * 6500
HOSTILE: dict[str, tuple[str, Callable[[], bytes]]] = {
    "a long prompt": (COMPLETIONS, lambda: json.dumps({"model": "tiny", "prompt": "x" * FOUR_MB}).encode()),
    "a long message": (CHAT, lambda: json.dumps(chat("<|end|>" * (FOUR_MB // 7))).encode()),
    "a long message of quotes": (CHAT, lambda: json.dumps(chat('"' * (FOUR_MB // 2))).encode()),
    "many parts": (CHAT, lambda: json.dumps(chat([{"type": "text", "text": "x"}] * 100_000)).encode()),
    "many lists": (COMPLETIONS, lambda: b'{"model": "tiny", "prompt": [' + b",".join([b"[]"] * 1_300_000) + b"]}"),
    "many ids": (COMPLETIONS, lambda: b'{"model": "tiny", "prompt": [' + b",".join([b"1"] * 1_900_000) + b"]}"),
    "nearly too many ids": (COMPLETIONS, lambda: b'{"model": "tiny", "prompt": [' + b",".join([b"1"] * 99_000) + b"]}"),
    "nearly too many lists": (
        COMPLETIONS,
        lambda: b'{"model": "tiny", "prompt": [' + b",".join([b"[]"] * 99_000) + b"]}",
    ),
    "many objects": (CHAT, lambda: b'{"model": "tiny", "messages": [' + b",".join([b"{}"] * 1_300_000) + b"]}"),
    "braces": (RUN, lambda: json.dumps(graded(input="{{" * 100_000)).encode()),
    "braces at the limit": (RUN, lambda: json.dumps(graded(input="{{" * 32_000 + "{{item.answers}}")).encode()),
    "a path of many steps": (RUN, lambda: json.dumps(graded(input="{{item" + ".a" * 30_000 + "}}")).encode()),
    "a multi of many variables": (RUN, lambda: tried(multi(input=MANY_VARIABLES, reference=MANY_VARIABLES), {"b": 1})),
    "a field that an item lacks": (RUN, lambda: tried(multi(input="{{item.a}}" * 1800), {"b": 1})),
    "a job of many variables": (JOBS, lambda: submitted(grader=multi(input="{{item.a}}" * 1800))),
    "a method that is too large": (
        JOBS,
        lambda: submitted(grader=multi(input=MANY_VARIABLES, reference=MANY_VARIABLES)),
    ),
    "bad documents": (JOBS, lambda: submitted(environment={"name": "search", "args": {"documents": [1] * 90_000}})),
    "unknown fields": (CHAT, lambda: json.dumps(chat("x") | {f"k{i}": 1 for i in range(90_000)}).encode()),
    "unknown fields of a method": (JOBS, lambda: submitted(**{f"k{i}": 1 for i in range(90_000)})),
    "unknown fields of a grader": (JOBS, lambda: submitted(grader=GRADER | {f"k{i}": 1 for i in range(20_000)})),
    "a long model": (JOBS, lambda: submitted(grader=GRADER).replace(b"tiny", b"t" * FOUR_MB)),
    "a long field": (JOBS, lambda: submitted(grader=GRADER, **{"k" * FOUR_MB: 1})),
    "a long field of a grader": (JOBS, lambda: submitted(grader=GRADER | {"k" * 300_000: 1})),
    "a long key twice": (JOBS, lambda: b'{"%b": 1, "%b": 1}' % (b"k" * 1_000_000, b"k" * 1_000_000)),
    "a source that doubles": (RUN, lambda: tried({"type": "python", "source": doubling(17)}, {})),
    "a job's source that doubles": (JOBS, lambda: submitted(grader={"type": "python", "source": doubling(17)})),
    "likely names": (
        RUN,
        lambda: tried(GRADER | {"input": f"{{{{item.{LIKELY}}}}}"}, {f"{LIKELY}{i}": 1 for i in range(9000)}),
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.asyncio(loop_scope="module")
async def test_the_api_answers_others_while_it_refuses(refusing: ApiServer, name: str) -> None:
    path, body = HOSTILE[name]
    sending = refusing.http.post(path, content=body(), headers={"content-type": "application/json"}, timeout=60)
    answer, stop_s = await longest_stop(sending)
    assert answer.status_code == 400, answer.text[:300]
    assert len(answer.text) < 600
    assert stop_s < LONGEST_STOP_S


async def test_the_api_answers_others_while_it_checks_a_large_grader_and_a_large_file(server: ApiServer) -> None:
    grader = multi(input="{{item.a}}" * 1800)
    checking = server.http.post("/v1/fine_tuning/alpha/graders/validate", json={"grader": grader})
    answer, stop_s = await longest_stop(checking)
    assert answer.json() == {"grader": grader} and stop_s < LONGEST_STOP_S
    content = jsonl(*(item("x" * 200, "y" * 20_000) for _ in range(1500)))
    answer, stop_s = await longest_stop(send_file(server, content))
    assert (answer.status_code, answer.json()["num_items"]) == (200, 1500)
    assert stop_s < LONGEST_STOP_S


async def send_file(server: ApiServer, content: bytes) -> httpx.Response:
    files = {"file": ("f.jsonl", content)}
    return await server.http.post("/v1/files", files=files, data={"purpose": "fine-tune"})


async def test_a_line_is_found_by_its_number_in_any_slice(server: ApiServer) -> None:
    rows = [item("x" * 100, "y" * 20_000) for _ in range(200)]
    content = jsonl(*rows[:170]) + b"\r\n\r\n{\r\n" + jsonl(*rows[170:])
    with pytest.raises(openai.BadRequestError, match="line 173: not JSON"):
        await server.openai.files.create(file=("f.jsonl", content), purpose="fine-tune")
    file = await server.openai.files.create(file=("f.jsonl", jsonl(*rows)), purpose="fine-tune")
    wanted = {"grader": GRADER | {"reference": "{{item.missing}}"}}
    with pytest.raises(openai.BadRequestError, match="training_file, line 1: the grader needs"):
        method = {"type": "reinforcement", "reinforcement": wanted}
        await create(server.openai, training_file=file.id, method=method)


async def test_a_body_whose_reader_is_killed_is_no_fault_of_its_sender(executing: ApiServer) -> None:
    path, body = HOSTILE["nearly too many ids"]
    others = helper_processes()
    asking = asyncio.create_task(
        executing.http.post(path, content=body(), headers={"Content-Type": "application/json"})
    )
    while not (helpers := helper_processes() - others):
        await asyncio.sleep(0.01)
    for helper in helpers:
        os.kill(int(helper.parent.name), signal.SIGKILL)
    answer = await asking
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")


async def test_a_large_body_that_is_good_is_answered(server: ApiServer) -> None:
    async with played(Script(server.bus, text="95")) as script:
        told = {"model": "tiny", "prompt": "add 37+58", "user": "x" * 100_000}
        answer = await server.http.post(COMPLETIONS, json=told)
        assert answer.json()["choices"][0]["text"] == "95"
        assert bytes(script.seen[0].tokens.numpy().astype("uint8")) == b"add 37+58"


async def test_a_method_that_every_message_would_carry_is_bounded(server: ApiServer) -> None:
    grader = {"type": "python", "source": "def grade(sample, item): return 1\n" + "#" * 200_000}
    both = {"type": "multi", "graders": {"a": grader, "b": grader}, "calculate_output": "a + b"}
    with pytest.raises(openai.BadRequestError, match=r"method has 40\d{4} bytes; at most 393216"):
        await create(server.openai, method={"type": "reinforcement", "reinforcement": {"grader": both}})


def test_every_route_reads_its_json_strictly() -> None:
    routes = [route for noun in ROUTERS for route in noun.router.routes if isinstance(route, APIRoute)]
    loose = [r.path for r in routes if r.body_field and not isinstance(r, JsonRoute) and r.path != "/v1/files"]
    assert loose == []


async def test_log_probs_beyond_all_measure_are_refused(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion_requests, "MAX_LOGPROBS", 1000)
    body = chat("x") | {"logprobs": True, "top_logprobs": 9, "n": 2, "max_tokens": 51}
    answer = await server.http.post(CHAT, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens")
    assert "could give 1020 log-probs: at most 1000" in answer.json()["error"]["message"]
    async with played(Script(server.bus)):
        assert (await server.http.post(CHAT, json=body | {"max_tokens": 50})).status_code == 200


# Shares --------------------------------------------------------------------------------------------------------------


def reward(request: GradeRequest) -> GradeResult:
    return GradeResult(**request.about(), id=request.id, reward=1.0, seconds=2.5)


async def test_grader_runs_are_charged(server: ApiServer) -> None:
    async with played_grader(server.bus, reward):
        for _ in range(2):
            assert (await server.http.post(RUN, json=graded())).status_code == 200
    report = (await server.http.get("/v1/usage")).json()
    assert (report["data"][0]["job"], report["data"][0]["env_s"]) == ("inference", 5.0)


async def env_s(server: ApiServer) -> float:
    """Seconds that the tenant has used of env workers."""
    return sum(row["env_s"] for row in (await server.http.get("/v1/usage")).json()["data"])


async def test_a_grader_run_whose_client_leaves_is_charged_and_frees_its_place(server: ApiServer) -> None:
    running = asyncio.create_task(server.http.post(RUN, json=graded()))
    await until(lambda: server.api.redis.xlen(server.bus.cell.env))
    await cancel_all([running])
    async with asyncio.timeout(30):  # half of what a run may take
        while not await env_s(server) or num_asking(server) != [0, 0]:
            await asyncio.sleep(0.02)


async def test_a_grader_run_that_takes_too_long_is_charged_and_frees_its_place(redis_url: str, tmp_path: Path) -> None:
    async with running_api(redis_url, tmp_path / "data", grader_run_timeout_s=1.0) as server:
        answer = await server.http.post(RUN, json=graded())
        assert answer.status_code == 503 and "no environment worker answered" in answer.text
        assert await env_s(server) > 0.5 and num_asking(server) == [0, 0]


async def test_few_grader_runs_of_a_tenant_wait_for_a_place(server: ApiServer) -> None:
    await server.new_tenant("victim")
    waiting = [asyncio.create_task(server.http.post(RUN, json=graded(), timeout=60)) for _ in range(MAX_GRADES + 1)]
    await until(lambda: num_asking(server)[1] == len(waiting))
    answer = await server.http.post(RUN, json=graded())
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "too_many")
    assert "64 of your requests wait for slots for graders already" in answer.json()["error"]["message"]
    headers = {"Authorization": f"Bearer {server.clients[-1].api_key}"}
    waiting.append(asyncio.create_task(server.http.post(RUN, json=graded(), timeout=60, headers=headers)))
    await until(lambda: num_asking(server)[1] == len(waiting))
    await cancel_all(waiting)


async def test_a_victims_chat_and_grader_go_before_the_queue_of_another_tenant(server: ApiServer) -> None:
    # Given one slot of each kind, and a tenant with a long queue for both
    victim, finished = await server.new_tenant("victim"), list[str]()

    async def ask(who: str, client: openai.AsyncOpenAI) -> None:
        await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}])
        finished.append(f"{who} chat")

    async def grade(who: str, client: openai.AsyncOpenAI) -> None:
        await client.post("/fine_tuning/alpha/graders/run", body=graded(), cast_to=object)
        finished.append(f"{who} grade")

    hog = [asyncio.create_task(call("hog", server.openai)) for call in (ask, grade) for _ in range(30)]
    await until(lambda: num_asking(server) == [30, 30])
    own = [asyncio.create_task(call("victim", victim)) for call in (ask, grade)]
    await until(lambda: num_asking(server) == [31, 31])
    # When workers come
    async with played(Script(server.bus)), played_grader(server.bus, reward):
        await asyncio.gather(*hog, *own)
    # Then the victim is not the last
    assert finished.index("victim chat") < 10 and finished.index("victim grade") < 10, finished


def num_asking(server: ApiServer) -> list[int]:
    """Requests that hold a place or wait for one: for a chat, and for a grader."""
    places = server.api.bases["tiny"].inference._places  # pyright: ignore[reportPrivateUsage]
    return [sum(asked.num for asked in places[kind].asking().values()) for kind in ("rollout", "env")]


async def test_a_client_that_leaves_while_its_body_is_read_is_no_error_of_ours(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def reading(*_: object, **__: object) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    monkeypatch.setattr(server.api.helpers, "do", reading)
    with capture_logs() as logs:
        client = asyncio.create_task(server.http.post(CHAT, json=chat("x" * 10_000)))
        await begun.wait()
        await cancel_all([client])
        await ended.wait()
        assert (await server.http.get("/v1/models")).status_code == 200
    assert "internal_error" not in [log["event"] for log in logs]


@pytest.mark.parametrize("large", [{"model_sample": "é" * 300_000}, {"item": {"answer": "x", "note": "x" * 600_000}}])
async def test_a_grader_run_travels_in_one_message_and_leaves_nothing_in_the_store(
    server: ApiServer, large: dict[str, Any]
) -> None:
    refused = await server.http.post(RUN, json=graded() | large)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "too_large")


async def test_many_choices_of_one_request_leave_room_for_others(server: ApiServer) -> None:
    victim = await server.new_tenant("victim")
    messages: Any = [{"role": "user", "content": "x"}]
    large = [
        asyncio.create_task(server.openai.completions.create(model="tiny", prompt=["x"] * 4, n=16)) for _ in range(2)
    ]
    await asyncio.sleep(0.3)
    small = asyncio.create_task(victim.chat.completions.create(model="tiny", messages=messages))
    await asyncio.sleep(0.3)
    async with played(Script(server.bus, text="5")) as script:
        await small
        assert sum(not task.done() for task in large) == 2
        assert [len((await task).choices) for task in large] == [64, 64]
        assert len(script.seen) == 129


async def test_the_api_answers_others_while_it_sends_the_samples_of_large_groups(server: ApiServer) -> None:
    url, samples = await large_samples(server)
    answer, stop_s = await longest_stop(_read(server, url))
    assert JSON.encode(samples) in answer, "it goes out as it is stored"
    assert stop_s < LONGEST_STOP_S
    found = Page[SampleObject].model_validate_json(answer)
    assert [(s.group, s.sample, s.text, s.prompt) for s in found.data] == [
        (s.group, s.sample, s.text, s.prompt) for s in samples
    ]


async def _read(server: ApiServer, url: str) -> bytes:
    """The body of an answer, put together once."""
    async with server.http.stream("GET", url, timeout=60) as answer:
        return b"".join([part async for part in answer.aiter_raw()])


# Connections ---------------------------------------------------------------------------------------------------------


async def half_open(server: ApiServer, head: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.api.settings.port))
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_sendall(connection, head)
    return connection


async def is_closed(connection: socket.socket) -> bool:
    """True once the server has closed it; whatever it says before that is read."""
    while await received(connection):
        pass
    return True


HALF_OPEN = (
    b"",
    b"GET /v1/mo",
    b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-A: ",
    b"POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Length: 10000000\r\n\r\nab",
    b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\nGET /v1/mo",
)


async def test_a_connection_without_a_key_does_not_stay_half_open(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.3)
    for head in HALF_OPEN:
        with await half_open(server, head) as connection:
            assert await is_closed(connection), head


async def test_the_oldest_of_too_many_silent_connections_is_closed(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_KEYLESS", 20)
    for limit in ("HEAD_S", "KEYLESS_S"):
        monkeypatch.setattr(connections, limit, 600)  # none is closed for its silence
    opened = [await half_open(server, b"") for _ in range(30)]
    try:
        assert all([await is_closed(connection) for connection in opened[:10]])
        assert (await server.http.get("/v1/models")).status_code == 200
    finally:
        for connection in opened:
            connection.close()


async def test_what_stands_behind_a_request_without_a_key_is_not_worked_on(server: ApiServer) -> None:
    for path in ("/docs", "/v1/models"):
        with await half_open(server, f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode() * 40) as connection:
            answers = b""
            while more := await received(connection):
                answers += more
        assert answers.count(b"HTTP/1.1 ") == 1 and b"connection: close" in answers


async def test_what_is_slow_to_read_is_refused(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_HEAD_BYTES", 2000)
    chunked = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.key}\r\nTransfer-Encoding: chunked"
    for sent, told in (
        (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a:\r\n" * 200, b"at most 128 lines"),
        (b"GET /?" + b"a&" * 1000 + b" HTTP/1.1\r\nHost: x\r\n", b"and 2000 bytes before the body"),
        (chunked.encode() + b"\r\n\r\n" + b"1\r\n \r\n" * 2000, b"larger chunks"),
    ):
        with await half_open(server, sent + b"\r\n") as connection:
            answers = b""
            while more := await received(connection):
                answers += more
        assert answers.startswith(b"HTTP/1.1 400") and told in answers


async def received(connection: socket.socket) -> bytes:
    """More of what the server sends; nothing once it has closed the connection."""
    try:
        return await asyncio.wait_for(asyncio.get_running_loop().sock_recv(connection, 65536), 60)
    except ConnectionResetError:
        return b""


async def test_a_connection_lives_on_only_with_a_key(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "KEYLESS_S", 2.0)
    with_key = f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.key}\r\n\r\n".encode()
    with await half_open(server, with_key) as known, await half_open(server, b"GET / HTTP/1.1\r\nX: ") as unknown:
        assert await is_closed(unknown)
        assert b"200 OK" in await received(known)
        await asyncio.get_running_loop().sock_sendall(known, with_key)
        assert b"200 OK" in await received(known)


async def test_a_client_that_does_not_read_is_closed(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "UNREAD_S", 0.3)
    # Given answers beyond what the kernel holds
    url, _ = await large_samples(server)
    head = f"GET {url} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.key}\r\n\r\n"
    with await half_open(server, head.encode() * 40) as connection:
        # When nobody reads them
        ended = select.poll()
        ended.register(connection, 0)
        # Then the connection is reset
        assert await asyncio.to_thread(ended.poll, 10_000) == [(connection.fileno(), select.POLLERR | select.POLLHUP)]


async def test_a_body_without_a_key_is_refused_unread(server: ApiServer) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 999\r\n\r\n"
    with await half_open(server, head) as connection:
        answer = await received(connection)
    assert b"401 " in answer and b"no API key" in answer


async def half_sent(server: ApiServer) -> socket.socket:
    """A request whose body does not come."""
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.key}\r\n"
    return await half_open(server, f"{head}Content-Type: application/json\r\nContent-Length: 999\r\n\r\n{{".encode())


async def test_more_requests_at_once_than_connections_to_redis_fail_nobody(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "MAX_CONNECTIONS", 2)
    async with running_api(redis_url, tmp_path / "data") as server:
        other = await server.new_tenant("bluebird")
        asked = [server.http.get("/v1/files", headers={"Authorization": f"Bearer sk-{i}"}) for i in range(30)]
        asked += [server.http.get("/v1/files") for _ in range(30)]
        answers = asyncio.gather(*asked)
        assert not (await other.files.list()).data
        assert [answer.status_code for answer in await answers] == [401] * 30 + [200] * 30


async def test_a_tenants_open_requests_are_bounded(redis_url: str, tmp_path: Path) -> None:
    async with running_api(redis_url, tmp_path / "data", max_open_requests=8) as server:
        other = await server.new_tenant("bluebird")
        # Given more requests of a tenant than it may have open
        connections = [await half_sent(server) for _ in range(12)]
        answers = [asyncio.create_task(received(one)) for one in connections]
        await until(lambda: sum(answer.done() for answer in answers) == 4)
        # Then those above are refused, as is one more, whatever it asks, and others' are answered
        assert all(b"429 " in answer.result() for answer in answers if answer.done())
        refused = await server.http.get("/v1/models")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_open")
        assert refused.headers["retry-after"] and "8 of your requests are open" in refused.json()["error"]["message"]
        assert (await other.models.list()).data
        # And there is room again when some were closed
        await cancel_all(answers)
        for connection in connections:
            connection.close()
        while (await server.http.get("/v1/models")).status_code == 429:
            await asyncio.sleep(0.01)


async def test_a_tenants_event_streams_are_bounded_and_leave_room_for_other_requests(
    redis_url: str, tmp_path: Path
) -> None:
    async with (
        running_api(redis_url, tmp_path / "data", max_event_streams=2) as server,
        contextlib.AsyncExitStack() as open_,
    ):
        job = await create(server.openai)
        url, streams = f"{JOBS}/{job.id}/events", list[httpx.Response]()
        for _ in range(2):
            streams += [await open_.enter_async_context(server.http.stream("GET", url, params={"stream": "true"}))]
        assert [stream.status_code for stream in streams] == [200, 200]
        refused = await server.http.get(url, params={"stream": "true"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_open")
        assert (await server.http.get(f"{JOBS}/{job.id}")).status_code == 200
        await streams[0].aclose()
        while (await server.http.get(url)).status_code == 429:
            await asyncio.sleep(0.01)


# Uploads that take long ----------------------------------------------------------------------------------------------

FORM = b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'


async def uploading(server: ApiServer, content: bytes, length: int = 60_000_000) -> socket.socket:
    """An upload that has sent its first bytes and sends no more by itself."""
    head = f"POST /v1/files HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.key}\r\nContent-Length: {length}\r\n"
    form = "Content-Type: multipart/form-data; boundary=b\r\n\r\n"
    return await half_open(server, f"{head}{form}".encode() + FORM + content)


FILE_LIMIT = MAX_FILE_BYTES + (64 << 10)


async def test_the_bodies_that_a_tenant_has_under_way_are_bounded_together(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_limit, "MAX_PASSING_BYTES", 150_000)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.key}\r\nContent-Length: 200000\r\n\r\n"
    with await half_open(server, head.encode() + b" " * 100_000):
        while (refused := await server.http.post(CHAT, content=b" " * 70_000)).status_code == 400:
            await asyncio.sleep(0.01)
        assert refused.status_code == 429 and "under way" in refused.json()["error"]["message"]
        assert (await server.http.post(CHAT, content=b" " * 1000)).status_code == 400


@pytest.mark.parametrize(
    ("path", "limit", "announced"),
    [(CHAT, 4 << 20, True), (CHAT, 4 << 20, False), ("/v1/files", FILE_LIMIT, True)],
    ids=["announced", "in chunks", "a file"],
)
async def test_a_client_that_sends_all_before_it_reads_hears_that_its_body_is_too_large(
    path: str, limit: int, server: ApiServer, *, announced: bool
) -> None:
    kind = "multipart/form-data; boundary=b" if path == "/v1/files" else "application/json"
    length, chunk = limit + (32 << 20), b"x" * (1 << 20)
    size = f"Content-Length: {length}" if announced else "Transfer-Encoding: chunked"
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.key}\r\n{size}\r\nContent-Type: {kind}\r\n\r\n"
    loop = asyncio.get_running_loop()
    with await half_open(server, head.encode()) as connection:
        for sent in range(0, length, len(chunk)):
            part = chunk[: length - sent]
            await loop.sock_sendall(connection, part if announced else b"%x\r\n%s\r\n" % (len(part), part))
        if not announced:
            await loop.sock_sendall(connection, b"0\r\n\r\n")
        answer = await received(connection)
    assert b" 413 " in answer and f"at most {limit} bytes".encode() in answer


async def test_a_body_that_is_too_large_is_read_no_longer_than_it_comes(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for more, pause_s in (("", 0.1), ("Expect: 100-continue\r\n", 3600.0)):
        monkeypatch.setattr(body_limit, "DRAIN_PAUSE_S", pause_s)
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.key}\r\n{more}Content-Length: 9000000\r\n\r\n"
        with await half_open(server, head.encode()) as connection:
            assert b" 413 " in await received(connection)


async def test_a_body_that_drips_is_refused(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_limit, "PAUSE_S", 0.5)
    with await uploading(server, b"x") as connection:
        answered = asyncio.create_task(received(connection))
        while not answered.done():
            await asyncio.get_running_loop().sock_sendall(connection, b"x")
            await asyncio.sleep(0.1)
    assert b"408 " in answered.result() and b"too slowly" in answered.result()


async def test_a_file_is_read_no_further_when_its_client_has_left(executing: ApiServer) -> None:
    # Given a file that takes minutes to read
    content = jsonl(item("a")) * 200_000
    rest = b'\r\n--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nfine-tune\r\n--b--\r\n'
    before, others = spooled_files(), helper_processes()
    with await uploading(executing, content, length=len(FORM + content + rest)) as connection:
        await asyncio.get_running_loop().sock_sendall(connection, rest)
        await until(lambda: helper_processes() - others)
    # When its client leaves, the helper that reads it ends, and the file goes
    await until(lambda: not helper_processes() - others and spooled_files() <= before)
    assert not (await executing.openai.files.list()).data


def helper_processes() -> set[Path]:
    """The children of this process that read texts."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    programs = [Path(f"/proc/{child}/cmdline") for child in children]
    return {one for one in programs if one.exists() and b"reading.process" in one.read_bytes()}


def spooled_files() -> int:
    """Files of this process that have no name any more."""
    return sum(os.readlink(link).endswith("(deleted)") for link in Path("/proc/self/fd").iterdir() if link.is_symlink())


async def test_a_tenants_uploads_under_way_are_bounded_and_leave_nothing_behind(redis_url: str, tmp_path: Path) -> None:
    async with running_api(redis_url, tmp_path / "data", max_uploads_bytes=3_000_000) as server:
        other, before = await server.new_tenant("bluebird"), spooled_files()
        # Given an upload of two megabytes that goes on
        with await uploading(server, b"x" * 2_000_000):
            await until(lambda: spooled_files() > before)
            # Then another of the same tenant is refused, and one of another tenant is not
            with await uploading(server, b"x" * 2_000_000) as second:
                answer = await received(second)
            assert b"507 " in answer and b"uploads under way have more than 3000000 bytes" in answer
            await upload(other, jsonl(*(item("x" * 10_000) for _ in range(200))))
        # And when the client goes away, its file goes too, and the tenant may upload again
        await until(lambda: spooled_files() <= before)
        await upload(server.openai, jsonl(*(item("x" * 10_000) for _ in range(200))))


async def test_an_upload_for_which_the_disk_has_no_room_says_so(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(self: UploadFile, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(UploadFile, "write", full)
    answer = await send_file(server, jsonl(item()))
    assert (answer.status_code, answer.json()["error"]["code"]) == (507, "disk_full")


VALIDATE = "/v1/fine_tuning/alpha/graders/validate"
MIDDLE = {
    CHAT: {"model": "tiny", "messages": [{"role": "user", "content": "a"}] * 700},
    VALIDATE: {"grader": GRADER | {"input": "{{item.a}}" * 2800}},
}


@pytest.mark.parametrize(("path", "body"), MIDDLE.items(), ids=["messages", "template"])
async def test_many_requests_of_middle_size_do_not_come_before_another_tenants(
    server: ApiServer, path: str, body: dict[str, Any]
) -> None:
    headers = {"Authorization": f"Bearer {(await server.new_tenant('acme')).api_key}"}
    many = [asyncio.create_task(server.http.post(path, json=body, timeout=60)) for _ in range(12)]
    await asyncio.wait(many, return_when=asyncio.FIRST_COMPLETED)
    answer = await server.http.post(VALIDATE, json={"grader": GRADER}, headers=headers)
    waiting = sum(not task.done() for task in many)
    await asyncio.gather(*many)
    assert answer.status_code == 200
    assert waiting > 3
