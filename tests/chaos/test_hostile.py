"""The acts of chaos' hostile tenant: a sound service withstands them, and what a service must not answer is found."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from chaos.hostile import acts
from chaos.hostile.acts import ACTS, Act, Foe, runs_of
from tests.support.api_server import ApiServer, method, running_api, upload

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TIMEOUT_S", "HELD_S", "SERVES_S"):
        monkeypatch.setattr(acts, name, 1.0)
    monkeypatch.setattr(acts, "BEGINS_S", 60.0)


@pytest.fixture
async def server(redis_url: str, tmp_path: Path) -> AsyncGenerator[ApiServer]:
    async with running_api(redis_url, tmp_path / "data") as running:
        yield running


@asynccontextmanager
async def foe_of(url: str, key: str, job: str) -> AsyncGenerator[Foe]:
    async def age(session: str) -> None:
        pass

    foe = Foe([url], key, mine=lambda: [], others=lambda: [job], age=age)
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
        acts.flood_without_a_key, acts.flood_of_uploads,
    ],
    ids=lambda act: act.__name__,
)  # fmt: skip
async def test_an_answer_that_nobody_may_get_is_found(act: Act) -> None:
    writers: list[asyncio.StreamWriter] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        head = await reader.readuntil(b"\r\n\r\n")
        lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        with contextlib.suppress(asyncio.IncompleteReadError):  # of a file that comes half
            await reader.readexactly(int(lengths[0].partition(b":")[2]) if lengths else 0)
        writer.write(OK)
        await writer.drain()
        writer.close()

    stub = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with foe_of(f"http://127.0.0.1:{stub.sockets[0].getsockname()[1]}", "key", "ftjob-1") as foe:
        await act(foe)
        assert foe.wrong
    stub.close()
    for writer in writers:
        writer.transport.abort()
    await asyncio.sleep(0)  # in which their sockets are closed
