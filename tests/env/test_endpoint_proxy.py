"""`endpoint` graders of a worker that has no way out but a proxy."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from common.tasks.graders import EndpointGrader
from env_service.failures import GraderFailed
from env_service.graders.attempt import Attempt
from env_service.graders.endpoint import Endpoints

ANSWER = b'HTTP/1.1 200 OK\r\nContent-Length: 15\r\nConnection: close\r\n\r\n{"reward": 0.5}'


@dataclass
class Proxy:
    """Answers every request itself, and keeps its first line."""

    url: str = ""
    asked: list[str] = field(default_factory=list)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.asked.append((await reader.readline()).decode().strip())
        writer.write(ANSWER)
        await writer.drain()
        writer.close()


@pytest.fixture
async def proxy() -> AsyncIterator[Proxy]:
    proxy = Proxy()
    server = await asyncio.start_server(proxy.handle, "127.0.0.1", 0)
    proxy.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    yield proxy
    server.close()


async def reward(proxy: Proxy, url: str) -> float:
    endpoints = Endpoints("api.example.org", proxy=proxy.url)
    try:
        grader = EndpointGrader.model_validate({"type": "endpoint", "url": url})
        return await endpoints.reward(grader, Attempt({}, ""), key="k", timeout_s=30)
    finally:
        await endpoints.close()


async def test_a_call_goes_to_the_proxy_with_the_name_that_it_alone_resolves(proxy: Proxy) -> None:
    assert await reward(proxy, "http://api.example.org/grade") == 0.5
    assert proxy.asked == ["POST http://api.example.org/grade HTTP/1.1"]


@pytest.mark.parametrize("url", ["http://other.example.org/", "http://10.0.0.1/", "http://127.0.0.1/"])
async def test_what_the_operator_does_not_allow_never_reaches_the_proxy(proxy: Proxy, url: str) -> None:
    with pytest.raises(GraderFailed, match="does not allow"):
        await reward(proxy, url)
    assert proxy.asked == []
