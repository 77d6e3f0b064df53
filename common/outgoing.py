"""Checks and calls URLs that users give, which must not become ways into the operator's network.

Only hosts in the operator's list are called. The name is resolved here, once, every address is checked, and the
connection goes to a checked address, so a second answer of the name server cannot lead elsewhere. No redirects, no
proxies or credentials from the environment, a limit on the answer's size. The caller limits the time.
"""

import asyncio
import functools
import ipaddress
import socket
import ssl
import string
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from common.errors import MarlaasError
from common.private_networks import PRIVATE
from common.suggestions import quoted

MAX_ANSWER_BYTES = 64 * 1024
MAX_URL_CHARACTERS = 2048
_NAME_CHARACTERS = frozenset(string.ascii_letters + string.digits + "-._")

_resolvers = ThreadPoolExecutor(8, "resolver")
"""Threads of their own: a silent name server keeps one for half a minute, whatever the call's limit."""

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


_PRIVATE = [ipaddress.ip_network(network) for network in PRIVATE]


class CallFailed(MarlaasError):
    """A user's URL was not called, or did not answer as it should."""


class NotAllowed(CallFailed):
    """The operator does not allow the host, or its address."""


class AllowedHosts:
    """The operator's list: comma-separated names, `*.` names, addresses and networks."""

    def __init__(self, hosts: str) -> None:
        entries = [entry.strip().lower() for entry in hosts.split(",") if entry.strip()]
        self._networks = [network for entry in entries if (network := _network(entry))]
        self._names = [entry for entry in entries if _network(entry) is None]

    def check_name(self, url: httpx.URL) -> None:
        """Raises NotAllowed if the list has neither the URL's host nor, of an address, its network."""
        host = _host(url)
        literal = _address(host)
        if literal is None and not any(_matches(host, name) for name in self._names):
            raise NotAllowed(f"the operator does not allow the host {host}")
        if literal is not None:
            self._check(literal, host, by_name=False)

    async def resolve(self, url: httpx.URL) -> str:
        """Returns an address of the URL's host, once all are checked. Raises NotAllowed, CallFailed or OSError."""
        self.check_name(url)
        host = _host(url)
        literal = _address(host)
        addresses = [literal] if literal else await _resolve(host, url.port or 443)
        if not addresses:
            raise CallFailed(f"the host {host} has no address")
        for address in addresses:
            self._check(address, host, by_name=literal is None)
        return str(addresses[0])

    def _check(self, address: IpAddress, host: str, *, by_name: bool) -> None:
        plain = getattr(address, "ipv4_mapped", None) or address
        listed = any(plain in network for network in self._networks if network.version == plain.version)
        private = any(plain in network for network in _PRIVATE if network.version == plain.version)
        if not listed and not (by_name and plain.is_global and not private):
            raise NotAllowed(f"the operator does not allow the address of {host}")


@functools.cache
def _trusted() -> ssl.SSLContext:
    """The certificates by which servers are known, shared: they take longer to read than a call."""
    return httpx.create_ssl_context(trust_env=False)


class Caller:
    """Calls URLs of allowed hosts. `close` when done."""

    def __init__(self, hosts: str, *, proxy: str = "") -> None:
        """`proxy`: for all calls. It resolves names, and must refuse the operator's own addresses."""
        self.hosts = AllowedHosts(hosts)
        self._proxy = httpx.Proxy(proxy) if proxy else None

    @functools.cached_property
    def _client(self) -> httpx.AsyncClient:
        """Made by the first call: most processes never make one."""
        options: dict[str, Any] = {"trust_env": False, "follow_redirects": False, "timeout": None}
        return httpx.AsyncClient(verify=_trusted(), proxy=self._proxy, **options)

    async def post(self, url: str, headers: Mapping[str, str], content: bytes) -> tuple[int, bytes]:
        """The answer's status to some JSON, and its body if that says success. Raises CallFailed."""
        return await self._call("POST", httpx.URL(url), {**headers, "Content-Type": "application/json"}, content)

    async def get(self, url: str, *, known: bool = False) -> tuple[int, bytes]:
        """Gets like `post`. `known`: the host needs no leave."""
        return await self._call("GET", httpx.URL(url), {}, None, known=known)

    async def host_to_call(self, url: httpx.URL, *, known: bool = False) -> str:
        """A checked address; behind a proxy, or of a host that is known, the name. Raises CallFailed."""
        if known:
            return url.host
        if self._proxy and _address(_host(url)) is None:
            self.hosts.check_name(url)
            return url.host
        try:
            return await self.hosts.resolve(url)
        except OSError as error:
            raise CallFailed(type(error).__name__) from error

    async def close(self) -> None:
        if "_client" in self.__dict__:
            await self._client.aclose()

    async def _call(
        self, method: str, url: httpx.URL, headers: Mapping[str, str], content: bytes | None, *, known: bool = False
    ) -> tuple[int, bytes]:
        request = self._client.build_request(
            method,
            url.copy_with(host=await self.host_to_call(url, known=known)),
            content=content,
            headers={**headers, "Host": url.netloc.decode(), "Accept-Encoding": "identity"},
            extensions={"sni_hostname": url.host},
        )
        try:
            response = await self._client.send(request, stream=True)
            try:
                return response.status_code, await _body(response) if response.is_success else b""
            finally:
                await response.aclose()
        except (httpx.HTTPError, OSError) as error:
            raise CallFailed(type(error).__name__) from error


def _host(url: httpx.URL) -> str:
    return url.host.lower().rstrip(".")


def _matches(host: str, name: str) -> bool:
    return host.endswith(name[1:]) if name.startswith("*.") else host == name


def _network(entry: str) -> Network | None:
    try:
        return ipaddress.ip_network(entry.strip("[]"))
    except ValueError:
        return None


def _address(host: str) -> IpAddress | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


async def _resolve(host: str, port: int) -> list[IpAddress]:
    def ask() -> list[Any]:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)

    found = await asyncio.get_running_loop().run_in_executor(_resolvers, ask)
    return [ipaddress.ip_address(entry[4][0]) for entry in found]


async def _body(response: httpx.Response) -> bytes:
    body = bytearray()
    async for chunk in response.aiter_raw():
        body += chunk
        if len(body) > MAX_ANSWER_BYTES:
            raise CallFailed(f"answered with more than {MAX_ANSWER_BYTES} bytes")
    return bytes(body)


def check_url(text: str) -> None:
    """Raises ValueError, with the reason, unless it is an http:// or https:// URL of a callable host."""
    if len(text) > MAX_URL_CHARACTERS:
        raise ValueError(f"has {len(text)} characters; a URL has at most {MAX_URL_CHARACTERS}")
    try:
        url = httpx.URL(text)
        host = url.host.encode("idna").decode()
    except (httpx.InvalidURL, UnicodeError) as error:
        raise ValueError(f"is not a URL: {error}") from error
    if url.scheme not in ("http", "https") or not host:
        raise ValueError("must be an http:// or https:// URL")
    if url.userinfo:
        raise ValueError("must not carry a user name or password")
    if url.port is not None and not 0 < url.port < 2**16:
        raise ValueError(f"the port {url.port} is not between 1 and 65535")
    if not _is_name(host) and not _is_address(host):
        raise ValueError(f"the host {quoted(host)} is neither a name nor an address")


def check_base(text: str) -> None:
    """Raises ValueError for a URL after which no path can be written."""
    if set("?#") & set(text):
        raise ValueError("must have neither a query nor a fragment: paths are added to it")


def _is_name(host: str) -> bool:
    return len(host) <= 253 and _NAME_CHARACTERS.issuperset(host)


def _is_address(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return "%" not in host
