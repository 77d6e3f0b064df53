"""Clients that read their answers slowly or never: what they hold is bounded, and others are answered meanwhile."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Generator
from contextvars import ContextVar
from functools import partial
from typing import IO

import pytest

from common.store.adapters import PEFT_FILES
from common.wire.messages import AdapterRef
from manager_service.http import connections, open_requests
from manager_service.http.openai.adapter_content import files_of
from manager_service.http.openai.files import downloads
from manager_service.owner.jobs.journal import MAX_TEXT
from manager_service.records.sample_records import LIMITS
from manager_service.records.tenants import TenantRecord
from tests.manager.tinker.test_checkpoints import external
from tests.support.api_server import ApiServer, commit_version, create, large_samples
from tests.support.run_world import owned_runs
from tests.support.tinker_client import client_of

LARGE = 8 << 20
"""Bytes; more than a kernel keeps for a client that does not read."""


SETTINGS = {"max_open_requests": 4}


opened: ContextVar[contextlib.ExitStack] = ContextVar("opened")


@pytest.fixture(autouse=True)
def closing(server: ApiServer) -> Generator[None]:
    with contextlib.ExitStack() as stack:
        opened.set(stack)
        yield


class Reader:
    """A client that reads when it is told to. It is closed at the test's end."""

    def __init__(self, server: ApiServer, url: str, key: str) -> None:
        self._head = f"GET {url} HTTP/1.1\r\nHost: x\r\n" + (f"Authorization: Bearer {key}\r\n" if key else "") + "\r\n"
        self._address = ("127.0.0.1", server.api.settings.port)
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.close = self._socket.close
        opened.get().callback(self.close)

    async def ask(self) -> "Reader":
        self._socket.connect(self._address)
        self._socket.setblocking(False)
        await asyncio.get_running_loop().sock_sendall(self._socket, self._head.encode())
        return self

    async def read(self, num_bytes: int = 1 << 20) -> bytes:
        """Raises ConnectionResetError."""
        async with asyncio.timeout(60):
            return await asyncio.get_running_loop().sock_recv(self._socket, num_bytes)

    async def read_all(self) -> bytes:
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        read = b""
        with contextlib.suppress(ConnectionResetError):
            while more := await self.read():
                read += more
        return read


async def samples_of(server: ApiServer) -> str:
    """The path of a job's samples, LARGE bytes."""
    url, _ = await large_samples(server, LARGE // (6 * 2 * MAX_TEXT * LIMITS.sample_groups))
    return url


async def test_a_request_is_open_until_its_answer_is_read(server: ApiServer) -> None:
    other = await server.new_tenant("bluebird")
    url = await samples_of(server)
    # Given as many answers that nobody reads as a tenant may have requests open
    readers = [await Reader(server, url, server.key).ask() for _ in range(4)]
    heads = [await reader.read(1024) for reader in readers]
    assert all(b"200 OK" in head for head in heads)
    # Then there is no place for another, but others are answered
    refused = await server.http.get("/v1/models")
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_open")
    assert (await other.models.list()).data
    # And there is once one was read
    await readers[0].read_all()
    assert (await server.http.get("/v1/models")).status_code == 200


async def test_answers_that_a_tenant_does_not_read_have_so_many_bytes(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_requests, "MAX_UNREAD_BYTES", LARGE * 3 // 2)
    url = await samples_of(server)
    reader = await Reader(server, url, server.key).ask()
    assert b"200 OK" in await reader.read(1024)
    refused = await server.http.get(url)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_open")
    assert (await server.http.get("/v1/models")).status_code == 200
    await reader.read_all()
    assert (await server.http.get(url)).status_code == 200


async def test_a_client_that_reads_too_slowly_is_closed(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "UNREAD_S", 0.5)
    reader = await Reader(server, await samples_of(server), server.key).ask()
    with pytest.raises(ConnectionResetError):
        while await reader.read(64):
            await asyncio.sleep(0.01)


async def test_the_longest_waiting_of_a_tenants_too_many_connections_is_closed(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_IDLE", 3)
    await server.new_tenant("bluebird")
    other = await Reader(server, "/v1/models", server.clients[-1].api_key).ask()
    assert b"200 OK" in await other.read()
    # When a tenant keeps five connections after their answers
    readers = [Reader(server, "/v1/models", server.key) for _ in range(5)]
    for reader in readers:
        await reader.ask()
        assert b"200 OK" in await reader.read()
    # Then the first two are closed, and of the others none, nor another tenant's
    assert [await reader.read() for reader in readers[:2]] == [b"", b""]
    for reader in (*readers[2:], other):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await reader.read()


@pytest.fixture
async def file_url(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of a file of LARGE bytes; who knows it needs no key."""
    client = await client_of(server, "acme")
    async with owned_runs(server):
        _, urls = await external(client, await client.run(await client.session()))
    weights = PEFT_FILES[0]

    async def read(*_: object) -> dict[str, bytes]:
        return {weights: bytes(LARGE)}

    monkeypatch.setattr(server.api.adapters, "read", read)
    return urls[weights].removeprefix(server.url)


async def test_a_file_is_read_to_its_end_by_a_url_however_long_that_takes(
    server: ApiServer, file_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "KEYLESS_S", 0.3)
    reader = await Reader(server, file_url, "").ask()
    head = await reader.read(1024)
    await asyncio.sleep(1)  # longer than a connection without a key lives
    assert len((head + await reader.read_all()).partition(b"\r\n\r\n")[2]) == LARGE


async def test_a_tenants_downloads_are_bounded(
    server: ApiServer, file_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downloads, "MAX_OPEN", 2)
    readers = [await Reader(server, file_url, "").ask() for _ in range(2)]
    assert all([b"200 OK" in await reader.read(1024) for reader in readers])
    refused = await server.http.get(file_url)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_open")
    # When one leaves, another is let in
    readers[0].close()
    while (answer := await server.http.get(file_url)).status_code == 429:
        await asyncio.sleep(0.01)
    assert answer.status_code == 200 and len(answer.content) == LARGE


async def test_a_download_that_nobody_sends_leaves_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "MAX_OPEN", 1)
    made, files = downloads.Downloads(), list[IO[bytes]]()

    async def read() -> dict[str, bytes]:
        return {}

    for _ in range(2):  # the first one's request was cancelled before its answer was begun
        await made.answer(
            TenantRecord(id="acme", created_at=0), read, lambda _, file: files.append(file), "text/plain", {}
        )
    assert [file.closed for file in files] == [True, True]


def nothing(_: object, file: IO[bytes]) -> None:
    pass


async def test_downloads_of_a_tenant_compute_in_one_thread_and_keep_no_other_tenant_waiting(server: ApiServer) -> None:
    job = (await create(server.openai)).id
    await commit_version(server, job, 1)
    adapter, api, may_go = AdapterRef("default", job, 1), server.api, threading.Event()
    mine, other = (TenantRecord(id=name, created_at=0) for name in ("default", "other"))
    # When a tenant's thread computes
    computing = asyncio.create_task(api.downloads.beside(mine, may_go.wait))
    reading = asyncio.create_task(files_of(api, api.bases["tiny"], mine, adapter))
    # Then another tenant's files are hashed and packed meanwhile, and this one's afterwards
    read = partial(files_of, api, api.bases["tiny"], other, adapter)
    await api.downloads.answer(other, read, nothing, "text/plain", {})
    assert not reading.done()
    may_go.set()
    assert await computing and set(await reading) == set(PEFT_FILES)


async def test_downloads_are_made_by_the_weights_of_their_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "MAX_MADE", 1)
    made, begun = downloads.Downloads(), list[str]()

    async def download(tenant: str, weight: float, seconds: float) -> None:
        async def read() -> dict[str, bytes]:
            begun.append(tenant)
            await asyncio.sleep(seconds)
            return {}

        await made.answer(TenantRecord(id=tenant, created_at=0, weight=weight), read, nothing, "text/plain", {})

    # One place is held all the time, and two tenants share the other
    asked = [("long", 1.0, 1.0), *[("light", 1.0, 0.1)] * 2, *[("heavy", 1000.0, 0.1)] * 3]
    await asyncio.gather(*(download(*one) for one in asked))
    assert begun == ["long", "light", "heavy", "heavy", "heavy", "light"]
