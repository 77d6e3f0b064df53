"""The `endpoint` grader: a POST to the user's own URL, which must not become a way into the operator's network. Graders' models
outside of this service are asked in the same way.

Only hosts in the operator's list are called. The name is resolved here, once, every address is checked, and the
connection goes to the checked address, so that a second answer of the name server cannot lead elsewhere. No redirects,
no proxies or credentials from the worker's environment, a limit on the answer's size, one on its time.
"""

import asyncio
import ipaddress
import json
import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import httpx

from common.graders import EndpointGrader
from env_service import work
from env_service.failures import GraderFailed

MAX_ANSWER_BYTES = 64 * 1024

_resolvers = ThreadPoolExecutor(8, "resolver")
"""Threads of their own: a name server that does not answer keeps one for half a minute, whatever the call's limit."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class Endpoints:
    """Calls endpoints. `close` when done."""

    def __init__(self, hosts: str, *, proxy: str = "") -> None:
        """`hosts`: the operator's list, comma-separated names, `*.` names, addresses and networks.

        `proxy`: where all calls go through, if the worker itself has no way out. It resolves the names, and must refuse
        the operator's own addresses.
        """
        entries = [entry.strip().lower() for entry in hosts.split(",") if entry.strip()]
        self._networks = [network for entry in entries if (network := _network(entry))]
        self._names = [entry for entry in entries if _network(entry) is None]
        self._proxied = bool(proxy)
        self._client = httpx.AsyncClient(trust_env=False, follow_redirects=False, timeout=None, proxy=proxy or None)

    async def reward(
        self, grader: EndpointGrader, item: Mapping[str, Any], sample: Mapping[str, Any], *, key: str, timeout_s: float
    ) -> Any:
        """Returns the `reward` of the answer, unchecked. `key` lets the endpoint recognise a repeat. Raises GraderFailed."""
        content = {"item": item, "sample": sample}
        return _reward(await self.post(grader.url, grader.headers, content, key=key, timeout_s=timeout_s))

    async def post(
        self, url: str, headers: Mapping[str, str], content: Mapping[str, Any], *, key: str, timeout_s: float
    ) -> bytes:
        """The body of the answer to some JSON. Raises GraderFailed."""
        sent = {"Content-Type": "application/json", "Idempotency-Key": key}
        body = json.dumps(content).encode()
        return await self._answer("POST", httpx.URL(url), {**headers, **sent}, body, timeout_s=timeout_s)

    async def get(self, url: str, *, timeout_s: float, known: bool = False) -> bytes:
        """The body of the answer. `known`: the host needs no leave. Raises GraderFailed."""
        return await self._answer("GET", httpx.URL(url), {}, None, timeout_s=timeout_s, known=known)

    async def close(self) -> None:
        await self._client.aclose()

    async def _answer(
        self,
        method: str,
        url: httpx.URL,
        headers: Mapping[str, str],
        content: bytes | None,
        *,
        timeout_s: float,
        known: bool = False,
    ) -> bytes:
        try:
            async with work.time_limit(timeout_s):
                host = await self.allowed_host(url, known=known)
                return await self._send(
                    self._client.build_request(
                        method,
                        url.copy_with(host=host),
                        content=content,
                        headers={**headers, "Host": url.netloc.decode(), "Accept-Encoding": "identity"},
                        extensions={"sni_hostname": url.host},
                    )
                )
        except TimeoutError as error:
            raise GraderFailed(f"endpoint: no answer within {timeout_s:g} seconds") from error
        except (httpx.HTTPError, OSError) as error:
            raise GraderFailed(f"endpoint: {type(error).__name__}") from error

    async def _send(self, request: httpx.Request) -> bytes:
        response = await self._client.send(request, stream=True)
        try:
            return await _body(response)
        finally:
            await response.aclose()

    async def allowed_host(self, url: httpx.URL, *, known: bool = False) -> str:
        """Returns the host to connect to: a checked address; behind a proxy, or of a host that is known, the name.

        Raises GraderFailed if the operator does not allow this host, or an address that its name leads to.
        """
        if known:
            return url.host
        host = url.host.lower().rstrip(".")
        literal = _address(host)
        if literal is None and not any(_matches(host, name) for name in self._names):
            raise GraderFailed(f"endpoint: the operator does not allow the host {host}")
        if literal is None and self._proxied:
            return url.host
        addresses = [literal] if literal else await _resolve(host, url.port or 443)
        if not addresses:
            raise GraderFailed(f"endpoint: the host {host} has no address")
        for address in addresses:
            if not self._allows(address, by_name=literal is None):
                raise GraderFailed(f"endpoint: the operator does not allow the address of {host}")
        return str(addresses[0])

    def _allows(self, address: Address, *, by_name: bool) -> bool:
        plain = getattr(address, "ipv4_mapped", None) or address
        if any(plain in network for network in self._networks if network.version == plain.version):
            return True
        return by_name and plain.is_global and not plain.is_multicast


def _matches(host: str, name: str) -> bool:
    return host.endswith(name[1:]) if name.startswith("*.") else host == name


def _network(entry: str) -> Network | None:
    try:
        return ipaddress.ip_network(entry.strip("[]"))
    except ValueError:
        return None


def _address(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


async def _resolve(host: str, port: int) -> list[Address]:
    def ask() -> list[Any]:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)

    found = await asyncio.get_running_loop().run_in_executor(_resolvers, ask)
    return [ipaddress.ip_address(entry[4][0]) for entry in found]


async def _body(response: httpx.Response) -> bytes:
    if response.status_code != 200:
        raise GraderFailed(f"endpoint: answered with status {response.status_code}")
    body = bytearray()
    async for chunk in response.aiter_raw():
        body += chunk
        if len(body) > MAX_ANSWER_BYTES:
            raise GraderFailed(f"endpoint: answered with more than {MAX_ANSWER_BYTES} bytes")
    return bytes(body)


def _reward(body: bytes) -> Any:
    try:
        answer: Any = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise GraderFailed("endpoint: the answer is not JSON") from error
    if not isinstance(answer, dict) or "reward" not in answer:
        raise GraderFailed('endpoint: the answer has no "reward"')
    return cast(dict[str, Any], answer)["reward"]
