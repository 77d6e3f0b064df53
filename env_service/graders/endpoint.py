"""The `endpoint` grader: a POST to the user's own URL. Graders' models elsewhere are asked the same way."""

import json
from collections.abc import Awaitable, Mapping
from typing import Any, cast

import httpx
import msgspec

from common.outgoing import Caller, CallFailed
from common.tasks.graders import EndpointGrader
from env_service import work
from env_service.failures import GraderFailed
from env_service.graders.attempt import Attempt


class Endpoints:
    """Calls endpoints. `close` when done."""

    def __init__(self, hosts: str, *, proxy: str = "") -> None:
        """`hosts`, `proxy`: see `common.outgoing`."""
        self._caller = Caller(hosts, proxy=proxy)
        self.close = self._caller.close

    async def reward(self, grader: EndpointGrader, attempt: Attempt, *, key: str, timeout_s: float) -> Any:
        """Returns the answer's `reward`, unchecked. `key`: the same for a repeat. Raises GraderFailed."""
        content = msgspec.json.encode({"item": attempt.item, "sample": attempt.written})
        return _reward(await self.post(grader.url, grader.headers, content, key=key, timeout_s=timeout_s))

    async def post(self, url: str, headers: Mapping[str, str], content: bytes, *, key: str, timeout_s: float) -> bytes:
        """The body of the answer to some JSON. Raises GraderFailed."""
        call = self._caller.post(url, {**headers, "Idempotency-Key": key}, content)
        return await _body(call, timeout_s)

    async def get(self, url: str, *, timeout_s: float, known: bool = False) -> bytes:
        """The body of the answer. `known`: the host needs no leave. Raises GraderFailed."""
        return await _body(self._caller.get(url, known=known), timeout_s)

    async def allowed_host(self, url: httpx.URL, *, known: bool = False) -> str:
        """The host to connect to, as `Caller.host_to_call` says it. Raises GraderFailed."""
        try:
            return await self._caller.host_to_call(url, known=known)
        except CallFailed as error:
            raise GraderFailed(f"endpoint: {error}") from error


async def _body(call: Awaitable[tuple[int, bytes]], timeout_s: float) -> bytes:
    try:
        async with work.time_limit(timeout_s):
            status, body = await call
    except TimeoutError as error:
        raise GraderFailed(f"endpoint: no answer within {timeout_s:g} seconds") from error
    except CallFailed as error:
        raise GraderFailed(f"endpoint: {error}") from error
    if status != 200:
        raise GraderFailed(f"endpoint: answered with status {status}")
    return body


def _reward(body: bytes) -> Any:
    try:
        answer: Any = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise GraderFailed("endpoint: the answer is not JSON") from error
    if not isinstance(answer, dict) or "reward" not in answer:
        raise GraderFailed('endpoint: the answer has no "reward"')
    return cast(dict[str, Any], answer)["reward"]
