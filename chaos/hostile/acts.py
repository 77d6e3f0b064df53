"""Acts of the hostile tenant beside its jobs, one after the other: floods, slow readers, strange names, graders that want more
than graders may have, large uploads, deserted runs.

An act may be refused, cut off or slowed down; none may be answered with what is another's, or with success where it makes no sense.
"""

import asyncio
import contextlib
import json
import random
import socket
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from chaos.hostile.deserter import NUM_RUNS, PASS, PROMPT
from chaos.hostile.graders import TRIALS, Trial

TIMEOUT_S = 5.0
AT_ONCE = 32
"""Requests of a flood."""
HELD_S = 3.0
"""Time for which connections are kept that do nothing."""
NUM_HALF_OPEN = 300
LARGE_BYTES = 32 << 20
"""Bytes of an upload."""
BEGINS_S, SERVES_S = 20.0, 4.0
"""Time that a deserter has to begin, and before it is killed."""
JSON = {"Content-Type": "application/json"}
HALF_OPEN = (b"", b"GET /v1/mo", b"POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Length: 10000000\r\n\r\nab")
GRADERS = "/v1/fine_tuning/alpha/graders"
OPERATORS = ("/v1/cluster/workers", "/v1/cluster/timeline", "/v1/cluster/dead", "/v1/admin/tenants", "/metrics")
ITEM = b'{"messages": [{"role": "user", "content": "add 1+2"}], "answer": "%s"}\n'
NAMES = (
    "../../../etc/passwd",
    "..%2f..%2fadmin",
    "%00",
    "a" * 5000,
    b"\x1b[2J".hex(),
    "ftjob-",
    "{tiny}:owners",
    "*",
)


@dataclass
class Foe:
    """The hostile tenant, and what it knows."""

    urls: list[str]
    key: str
    mine: Callable[[], Sequence[str]]
    """Its jobs."""
    others: Callable[[], Sequence[str]]
    """Jobs of the other tenants."""
    age: Callable[[str], Awaitable[bool]]
    """Lets five silent minutes pass for a session. False if it was silent before."""
    chance: random.Random
    wrong: list[str] = field(default_factory=list[str])
    """Answers that nobody may get."""
    sessions: list[str] = field(default_factory=list[str])
    """Sessions of its deserters."""
    aged: list[bool] = field(default_factory=list[bool])
    """Did five minutes pass for a session?"""
    graded: list[bool] = field(default_factory=list[bool])
    """Was a call of `graders/run` answered?"""
    http: httpx.AsyncClient = field(init=False)

    def __post_init__(self) -> None:
        limits = httpx.Limits(max_connections=AT_ONCE)
        self.http = httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False, limits=limits)

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}", "X-API-Key": f"tml-{self.key}"}

    @property
    def url(self) -> str:
        return self.chance.choice(self.urls)

    def idle(self) -> list[str]:
        """Lists the acts that it meant to do and never did."""
        meant = {"five minutes passed for no session": self.aged, "no call of graders/run was answered": self.graded}
        return [f"hostile: {line}" for line, done in meant.items() if done and not any(done)]

    async def send(
        self, method: str, path: str, *, headers: Mapping[str, str] | None = None, **options: Any
    ) -> httpx.Response | None:
        """None: it was cut off. `path`: below the API's root."""
        with contextlib.suppress(httpx.HTTPError, httpx.InvalidURL):
            return await self.http.request(method, self.url + path, headers=headers or self.headers, **options)
        return None

    async def flood(self, *requests: Awaitable[httpx.Response | None]) -> None:
        await asyncio.gather(*requests)

    async def must_fail(self, method: str, path: str, **options: Any) -> None:
        answer = await self.send(method, path, **options)
        if answer is not None and answer.status_code < 400:
            self.wrong.append(f"hostile {method} {path[:100]} was answered {answer.status_code}: {answer.text[:100]}")

    async def run_grader(self, trial: Trial) -> None:
        """One that waits too long is cut off."""
        body = json.dumps(trial.body).encode()
        answer = await self.send("POST", f"{GRADERS}/run", content=body, headers=self.headers | JSON)
        cut_off = answer is None or answer.status_code == 429 or answer.status_code >= 500
        self.graded.append(not cut_off)
        if answer is None or cut_off:
            return
        reward = answer.json().get("reward") if answer.status_code == 200 else None
        if not trial.is_right(answer.status_code, reward):
            self.wrong.append(f"hostile grader, {trial.name}: {answer.status_code} {answer.text[:200]}")

    @asynccontextmanager
    async def connected(self, num: int) -> AsyncGenerator[list[socket.socket]]:
        """Connections to all managers, as many as can be had. They are reset at the end."""
        with contextlib.ExitStack() as stack:
            opened: list[socket.socket] = []
            for number in range(num):
                with contextlib.suppress(OSError):
                    address = ("127.0.0.1", urlsplit(self.urls[number % len(self.urls)]).port)
                    opened.append(stack.enter_context(socket.create_connection(address, timeout=1)))
            yield opened


Act = Callable[[Foe], Awaitable[None]]


# ---- bodies and names -----------------------------------------------------------------------------------------------


async def giant_bodies(foe: Foe) -> None:
    body = json.dumps({"model": "tiny", "prompt": "x" * 5_000_000}).encode()
    await foe.must_fail("POST", "/v1/completions", content=body, headers=foe.headers | JSON)


async def deep_texts(foe: Foe) -> None:
    lists, objects = "[" * 100_000, '{"a":' * 100_000
    for text in (lists, objects, lists + "]" * 100_000, f'{{"model": "tiny", "messages": {lists}'):
        for path in ("/v1/fine_tuning/jobs", "/v1/chat/completions", "/api/v1/create_model", "/api/v1/asample"):
            await foe.must_fail("POST", path, content=text.encode(), headers=foe.headers | JSON)


async def garbage_for_protobuf(foe: Foe) -> None:
    for content in (b"\xff" * 4, foe.chance.randbytes(4000), b"(\xb5/\xfd" + foe.chance.randbytes(2000)):
        for more in ({}, {"Content-Encoding": "zstd"}):
            headers = foe.headers | {"Content-Type": "application/x-protobuf"} | more
            await foe.must_fail("POST", "/api/v1/forward_backward", content=content, headers=headers)


async def hostile_names(foe: Foe) -> None:
    for name in NAMES:
        for path in ("/v1/files/{}", "/v1/files/{}/content", "/v1/fine_tuning/jobs/{}", "/v1/models/ft:tiny:{}::x"):
            await foe.must_fail("GET", path.format(name))
        await foe.must_fail("GET", f"/v1/adapters/content?model=tinker://{name}/weights/{name}")
        await foe.must_fail("POST", "/api/v1/get_info", json={"model_id": name})
        await foe.must_fail("POST", "/api/v1/retrieve_future", json={"request_id": f"{name}:1"})


async def foreign_ids(foe: Foe) -> None:
    """Asks for ids of the jobs of others, and of a run that is nobody's."""
    for job in foe.others()[-3:]:
        for part in ("", "/events", "/samples", "/ledger", "/checkpoints"):
            await foe.must_fail("GET", f"/v1/fine_tuning/jobs/{job}{part}")
        await foe.must_fail("POST", f"/v1/fine_tuning/jobs/{job}/cancel")
        for path in (f"tinker://{job}/sampler_weights/1", f"ft:tiny:single::{job}", f"ft:tiny:hostile::{job}"):
            await foe.must_fail("GET", "/v1/adapters/content", params={"model": path})
            await foe.must_fail("POST", "/v1/completions", json={"model": path, "prompt": "1"})
    run = {"model_id": "ses-0123456789abcdef:train:0", "seq_id": 1}
    await foe.must_fail("POST", "/api/v1/forward_backward", json=run | {"forward_backward_input": PASS})
    await foe.must_fail("POST", "/api/v1/unload_model", json=run)


async def operators_views(foe: Foe) -> None:
    """Asks for hosts, processes and other tenants: refused."""
    for path in OPERATORS:
        await foe.must_fail("GET", path)


# ---- graders --------------------------------------------------------------------------------------------------------


async def hungry_graders(foe: Foe) -> None:
    await foe.flood(*(foe.run_grader(trial) for trial in TRIALS))


# ---- connections ----------------------------------------------------------------------------------------------------


async def half_open(foe: Foe) -> None:
    async with foe.connected(NUM_HALF_OPEN) as connections:
        for number, connection in enumerate(connections):
            with contextlib.suppress(OSError):
                connection.send(HALF_OPEN[number % len(HALF_OPEN)])
        await asyncio.sleep(HELD_S)


async def flood_without_a_key(foe: Foe) -> None:
    """Many requests in one piece on each connection. Only the first is worked on, and is refused."""
    async with foe.connected(40) as connections:
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.send(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: keep-alive\r\n\r\n" * 200)
        await asyncio.sleep(1)
        for connection in connections:
            connection.settimeout(0)
            with contextlib.suppress(OSError):
                if b" 200 OK" in connection.recv(1 << 16):
                    foe.wrong.append("hostile: a request without a key was answered 200")


async def slow_readers(foe: Foe) -> None:
    """Ask for what is long, and read a few bytes of it: events, samples, adapters, and chat as it is written."""
    jobs, key = foe.mine()[-4:], f"Authorization: Bearer {foe.key}\r\n"
    paths = ["/v1/models", "/v1/fine_tuning/jobs?limit=100"]
    for job in jobs:
        root = f"/v1/fine_tuning/jobs/{job}"
        paths += [f"{root}/events?stream=true", f"{root}/samples?format=jsonl"]
        paths += [f"/v1/adapters/content?model=ft:tiny:hostile::{job}"] * 3
    async with foe.connected(3 * len(paths)) as connections:
        for number, connection in enumerate(connections):
            head = f"GET {paths[number % len(paths)]} HTTP/1.1\r\nHost: x\r\n{key}\r\n"
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            with contextlib.suppress(OSError):
                connection.send(head.encode())
        for _ in range(4):
            await asyncio.sleep(HELD_S / 4)
            for connection in connections:
                connection.settimeout(0)
                with contextlib.suppress(OSError):
                    connection.recv(16)


# ---- floods of requests that have a key, on connections that are kept ------------------------------------------------


async def flood_of_chat(foe: Foe) -> None:
    body = {"model": "tiny", "max_tokens": 8, "messages": [{"role": "user", "content": "add 1+2"}]}
    await foe.flood(*(foe.send("POST", "/v1/chat/completions", json=body | {"stream": n % 2 == 0}) for n in range(64)))


async def flood_of_futures(foe: Foe) -> None:
    """Samples that nobody waits for, and results that nobody asked for."""
    asked = {"base_model": "tiny", "prompt": PROMPT, "num_samples": 2, "sampling_params": {"max_tokens": 16}}
    await foe.flood(*(foe.send("POST", "/api/v1/asample", json=asked) for _ in range(32)))
    mine = [f"{run}:3" for run in runs_of(foe.sessions[-1:])]
    futures = mine * 8 + [f"run-0123456789abcdef-{number}:1" for number in range(150)]
    await foe.flood(*(foe.send("POST", "/api/v1/retrieve_future", json={"request_id": one}) for one in futures))


async def flood_of_uploads(foe: Foe) -> None:
    """Uploads what is no file of items, and files whose sender stops half-way."""
    rows = ITEM % b"3" * 2000
    form: Any = {"files": {"file": ("../../x\x1b[2J.jsonl", rows + b"{")}, "data": {"purpose": "fine-tune"}}
    await foe.flood(*(foe.must_fail("POST", "/v1/files", **form) for _ in range(12)))
    head = (
        f"POST /v1/files HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {foe.key}\r\nContent-Length: {len(rows) * 2}\r\n"
    )
    part = '--x\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n'
    async with foe.connected(20) as connections:
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.send(
                    f"{head}Content-Type: multipart/form-data; boundary=x\r\n\r\n{part}".encode() + rows[:50_000]
                )
        await asyncio.sleep(1)


async def large_uploads(foe: Foe) -> None:
    """Uploads tens of megabytes: rows of which the last is none, and one row alone."""
    row = ITEM % (b"x" * 4000)
    for content in (row * (LARGE_BYTES // len(row)) + b"{", ITEM % (b"x" * LARGE_BYTES)):
        form: Any = {"files": {"file": ("large.jsonl", content)}, "data": {"purpose": "fine-tune"}}
        await foe.must_fail("POST", "/v1/files", **form)


# ---- the Tinker protocol --------------------------------------------------------------------------------------------


async def sessions_without_end(foe: Foe) -> None:
    await foe.flood(*(foe.send("POST", "/api/v1/create_session", json={"tags": ["x"]}) for _ in range(20)))


async def desert_runs(foe: Foe) -> None:
    """A client with runs, operations and samples under way is killed."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "chaos.hostile.deserter", stdin=pipe, stdout=pipe
    )
    try:
        assert process.stdin and process.stdout
        process.stdin.write(f"{foe.url} {foe.key}\n".encode())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BEGINS_S):
                session = (await process.stdout.readline()).decode().strip()
                foe.sessions.append(session)
                await asyncio.sleep(SERVES_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    if len(foe.sessions) % 2:
        foe.aged.append(await foe.age(foe.sessions[-1]))


ACTS: Sequence[Act] = (
    desert_runs, giant_bodies, half_open, hungry_graders, flood_without_a_key, flood_of_chat, slow_readers, flood_of_uploads,
    large_uploads, deep_texts, foreign_ids, operators_views, flood_of_futures, hostile_names, garbage_for_protobuf,
    sessions_without_end,
)  # fmt: skip


def runs_of(sessions: Sequence[str]) -> list[str]:
    """Names of the runs that deserters may have begun, as the service stores them."""
    return [f"run-{session.removeprefix('ses-')}-{number}" for session in sessions for number in range(NUM_RUNS)]
