"""The acts of chaos' hostile tenant: a sound service withstands them, and what a service must not answer is found."""

import asyncio
import contextlib
import os
import random
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from chaos.client import Client
from chaos.hostile import acts, jobs
from chaos.hostile.acts import ACTS, GRADERS, OPERATORS, Act, Foe, runs_of
from chaos.hostile.graders import GETS, TRIALS, Trial, code
from tests.support.api_server import ApiServer, method, running_api, upload

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TIMEOUT_S", "HELD_S", "SERVES_S"):
        monkeypatch.setattr(acts, name, 1.0)
    monkeypatch.setattr(acts, "BEGINS_S", 60.0)
    monkeypatch.setattr(acts, "LARGE_BYTES", 8 << 20)


@pytest.fixture
async def server(redis_url: str, tmp_path: Path) -> AsyncGenerator[ApiServer]:
    async with running_api(redis_url, tmp_path / "data") as running:
        yield running


@asynccontextmanager
async def foe_of(url: str, key: str, job: str) -> AsyncGenerator[Foe]:
    async def age(session: str) -> bool:
        return True

    foe = Foe([url], key, mine=lambda: [], others=lambda: [job], age=age, chance=random.Random(1))
    yield foe
    await foe.http.aclose()


@pytest.mark.timeout(120)
async def test_a_sound_service_gives_the_hostile_tenant_nothing(server: ApiServer) -> None:
    await server.new_tenant("hostile")
    file = await upload(server.openai)
    job = await server.openai.fine_tuning.jobs.create(model="tiny", training_file=file, extra_body={"method": method()})
    async with foe_of(server.url, server.clients[-1].api_key, job.id) as foe:
        for act in ACTS:
            await act(foe)
        assert foe.wrong == []
    assert (await server.http.get("/v1/models")).status_code == 200
    assert (await server.http.get("/v1/files")).json()["data"][0]["id"] == file
    # And all runs of the client that was killed are known
    names = {name.decode() async for name in server.bus.client.scan_iter(server.bus.cell.run("*"))}
    assert len(foe.sessions) == 1 and names and names <= set(map(server.bus.cell.run, runs_of(foe.sessions)))


@pytest.mark.parametrize(
    "act",
    [
        acts.giant_bodies, acts.deep_texts, acts.garbage_for_protobuf, acts.hostile_names, acts.foreign_ids,
        acts.flood_without_a_key, acts.flood_of_uploads, acts.large_uploads, acts.operators_views, acts.hungry_graders,
    ],
    ids=lambda act: act.__name__,
)  # fmt: skip
async def test_an_answer_that_nobody_may_get_is_found(act: Act) -> None:
    async with careless() as (url, _), foe_of(url, "key", "ftjob-1") as foe:
        await act(foe)
        assert foe.wrong


@asynccontextmanager
async def careless() -> AsyncGenerator[tuple[str, list[bytes]]]:
    """A service that says OK to everything; its URL, and the bodies that it was sent."""
    writers, bodies = list[asyncio.StreamWriter](), list[bytes]()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        head = await reader.readuntil(b"\r\n\r\n")
        lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        with contextlib.suppress(asyncio.IncompleteReadError):  # of a file that comes half
            bodies.append(await reader.readexactly(int(lengths[0].partition(b":")[2]) if lengths else 0))
        writer.write(OK)
        await writer.drain()
        writer.close()

    stub = await asyncio.start_server(answer, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{stub.sockets[0].getsockname()[1]}", bodies
    stub.close()
    for writer in writers:
        writer.transport.abort()
    await asyncio.sleep(0)  # in which their sockets are closed


async def test_the_acts_ask_for_what_there_is(server: ApiServer) -> None:
    # Given one who may see what the hostile tenant asks for
    file = await upload(server.openai)
    job = await server.openai.fine_tuning.jobs.create(model="tiny", training_file=file, extra_body={"method": method()})
    async with foe_of(server.url, server.key, job.id) as foe:
        await acts.foreign_ids(foe)
        seen = {line.split()[2] for line in foe.wrong}
        root = f"/v1/fine_tuning/jobs/{job.id}"
        assert {root, *(f"{root}/{part}" for part in ("events", "samples", "ledger", "checkpoints"))} <= seen
    async with foe_of(server.url, server.admin_key, job.id) as foe:
        await acts.operators_views(foe)
        assert {line.split()[2] for line in foe.wrong} == set(OPERATORS)


@pytest.fixture
def env_worker(redis_url: str, tmp_path: Path) -> Iterator[None]:
    settings = {"REDIS_URL": redis_url, "STORE_URL": (tmp_path / "data" / "store").as_uri()}
    variables = {f"MARLAAS_{name}": value for name, value in settings.items()}
    with subprocess.Popen([sys.executable, "-m", "env_service"], env={**os.environ, **variables}) as process:
        yield
        process.kill()


@pytest.mark.timeout(180)
@pytest.mark.usefixtures("env_worker")
async def test_a_sound_env_worker_gives_a_hungry_grader_nothing(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acts, "TIMEOUT_S", 60.0)
    async with foe_of(server.url, server.key, "") as foe:
        await acts.hungry_graders(foe)
        assert foe.wrong == [] and foe.graded == [True] * len(TRIALS) and foe.idle() == []
        # And each tried: a grader that gets nothing gives 0, and one that gets something is found
        for name in GETS:
            (trial,) = (one for one in TRIALS if one.name == name)
            answer = await server.http.post(f"{GRADERS}/run", json=trial.body, timeout=60)
            assert (answer.status_code, answer.json()["failure"]) == (200, None), answer.text
        await foe.run_grader(Trial("what it may have", code("def grade(sample, item): return 1.0")))
        assert "what it may have: 200" in foe.wrong[0]


async def test_what_the_hostile_tenant_never_got_done_is_told() -> None:
    async with foe_of("http://127.0.0.1:1", "key", "") as foe:
        assert foe.idle() == []
        await foe.run_grader(TRIALS[0])
        assert foe.idle() == ["hostile: no call of graders/run was answered"]


async def test_an_act_for_which_there_was_no_time_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = asyncio.Event()

    async def first(foe: Foe) -> None:
        stop.set()

    async def second(foe: Foe) -> None:
        raise AssertionError

    monkeypatch.setattr(jobs, "ACTS", (first, second))
    async with foe_of("http://127.0.0.1:1", "key", "") as foe:
        hostile = jobs.Hostile(Client(foe.urls, foe.key), foe)
        await hostile._act(stop)  # pyright: ignore[reportPrivateUsage]
        assert hostile.idle() == ["hostile: there was no time for second"]
        await hostile.client.close()


async def test_the_same_seed_sends_the_same_garbage() -> None:
    async with careless() as (url, bodies):
        for _ in range(2):
            async with foe_of(url, "key", "") as foe:
                await acts.garbage_for_protobuf(foe)
    half = len(bodies) // 2
    assert len(set(bodies)) > 2 and bodies[:half] == bodies[half:]
