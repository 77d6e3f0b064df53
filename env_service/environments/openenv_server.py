"""OpenEnv servers: which ones there are, and their protocol.

    GET  <url>/schema   JSON schemas of actions and observations
    WS   <url>/ws       one connection is one session of the environment: reset, step and close messages

HTTP `/reset` and `/step` make a new environment each time, so they are not used. A tenant names one of the operator's
servers, or a host that the operator allows, as for `endpoint` graders.
"""

import asyncio
import contextlib
import errno
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec
import structlog
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException

from common.errors import InvalidInput
from common.outgoing import check_base, check_url
from common.suggestions import did_you_mean, quoted
from common.tasks.environments import OpenEnvArgs
from env_service.failures import EnvironmentFailed, GraderFailed, NoRoom
from env_service.graders.endpoint import Endpoints

MAX_ANSWER_BYTES = 256 * 1024
MAX_TOLD = 300
"""Characters of a server's own words in a failure."""
CONNECT_S = 20.0
CLOSE_S = 2.0
log = structlog.get_logger()


class Observation(msgspec.Struct, frozen=True):
    observation: dict[str, Any]
    reward: bool | float | None = None
    done: bool = False


class Schemas(msgspec.Struct, frozen=True):
    action: dict[str, Any]


class _Answer(msgspec.Struct, frozen=True):
    type: str
    data: dict[str, Any] = {}


class ActionRefused(EnvironmentFailed):
    """The action does not fit the environment's schema: the model is told."""


@dataclass(frozen=True, slots=True)
class OpenEnvServer:
    url: str
    known: bool
    """The operator named it: its host needs no leave."""


class Servers:
    """The servers that jobs may use."""

    def __init__(self, endpoints: Endpoints, named: str = "", *, proxy: str = "") -> None:
        """`named`: see `read_servers`. `proxy`: as for Endpoints."""
        self._endpoints = endpoints
        self._named = read_servers(named)
        self._proxy = proxy or None
        self.close = endpoints.close

    def find(self, args: OpenEnvArgs) -> OpenEnvServer:
        """Raises InvalidInput for a name that the operator has not given to a server."""
        if args.url:
            return OpenEnvServer(args.url.rstrip("/"), known=False)
        if args.server not in self._named:
            hint = did_you_mean(args.server, self._named)
            raise InvalidInput(f"there is no OpenEnv server {quoted(args.server)} here{hint}")
        return OpenEnvServer(self._named[args.server], known=True)

    async def schemas(self, server: OpenEnvServer) -> Schemas:
        """Raises EnvironmentFailed."""
        try:
            body = await self._endpoints.get(f"{server.url}/schema", timeout_s=CONNECT_S, known=server.known)
            return msgspec.json.decode(body, type=Schemas)
        except GraderFailed as error:
            raise EnvironmentFailed(f"the OpenEnv server's schema: {error}") from error
        except msgspec.DecodeError as error:
            raise EnvironmentFailed(f"the OpenEnv server's schema is none: {error}") from error

    async def connect(self, server: OpenEnvServer) -> "OpenEnvConnection":
        """Begins a session. Raises EnvironmentFailed, and NoRoom if the server refuses connections."""
        url = httpx.URL(server.url)
        try:
            host = await self._endpoints.allowed_host(url, known=server.known)
        except GraderFailed as error:
            raise EnvironmentFailed(f"the OpenEnv server: {error}") from error
        port = url.port or {"https": 443}.get(url.scheme, 80)
        fixed: dict[str, Any] = {} if self._proxy else {"host": host, "port": port}
        address = f"ws{server.url.removeprefix('http')}/ws"
        try:
            socket = await _Connect(
                address,
                proxy=self._proxy,
                max_size=MAX_ANSWER_BYTES,
                max_queue=1,
                compression=None,
                open_timeout=CONNECT_S,
                close_timeout=CLOSE_S,
                **fixed,
            )
        except (OSError, WebSocketException) as error:
            log.info("openenv_unreachable", url=server.url, reason=f"{type(error).__name__}: {error}"[:MAX_TOLD])
            kind = NoRoom if f"[Errno {errno.ECONNREFUSED}]" in str(error) else EnvironmentFailed
            raise kind(f"the OpenEnv server cannot be reached: {_named(error)}") from error
        return OpenEnvConnection(socket)


class _Connect(connect):
    """Follows no redirects: they may lead to hosts that the operator does not allow."""

    def process_redirect(self, exc: Exception) -> Exception | str:
        return exc


class OpenEnvConnection:
    """One session at a server."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket

    async def ask(self, kind: str, data: Mapping[str, Any], *, timeout_s: float) -> Observation:
        """Raises ActionRefused, EnvironmentFailed, and NoRoom if the server has no session free."""
        try:
            async with asyncio.timeout(timeout_s):
                with contextlib.suppress(ConnectionClosed):  # a full server answers first, and leaves
                    await self._socket.send(msgspec.json.encode({"type": kind, "data": data}).decode())
                answer = msgspec.json.decode(await self._socket.recv(), type=_Answer)
            if answer.type == "observation":
                return msgspec.convert(answer.data, Observation)
        except TimeoutError as error:
            raise EnvironmentFailed(
                f"the OpenEnv server took longer than {timeout_s:g} seconds for a {kind}"
            ) from error
        except (OSError, WebSocketException) as error:
            raise EnvironmentFailed(f"the connection to the OpenEnv server broke: {_named(error)}") from error
        except msgspec.DecodeError as error:
            raise EnvironmentFailed(f"the OpenEnv server's answer is no observation: {error}"[:MAX_TOLD]) from error
        raise _error_of(answer)

    async def close(self) -> None:
        """The server ends the session when the connection ends."""
        await self._socket.close()


def read_servers(text: str) -> dict[str, str]:
    """`maze=http://host:8000,…` -> a URL by name. Raises InvalidInput."""
    servers: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, url = part.partition("=")
        try:
            check_url(url)
            check_base(url)
        except ValueError as error:
            raise InvalidInput(
                f"MARLAAS_OPENENV_SERVERS: write name=http://host:port, comma-separated: {part!r}: {error}"
            ) from error
        servers[name.strip()] = url.rstrip("/")
    return servers


def _error_of(answer: _Answer) -> Exception:
    code, message = answer.data.get("code"), str(answer.data.get("message", answer.type))[:MAX_TOLD]
    if code == "CAPACITY_REACHED":
        return NoRoom(f"the OpenEnv server has no room for a session: {message}")
    if code == "VALIDATION_ERROR":
        return ActionRefused(f"{message}: {answer.data.get('errors', '')}"[:MAX_TOLD])
    return EnvironmentFailed(f"the OpenEnv server: {message}")


def _named(error: Exception) -> str:
    """Without its text, in which addresses of the operator's network may stand."""
    status = f" {error.response.status_code}" if isinstance(error, InvalidStatus) else ""
    return f"{type(error).__name__}{status}"
