"""Connections to Redis that pack commands in C; in a Redis Cluster they find the shard of their keys.

    redis://host:port/0     rediss://…            one Redis; with TLS
    redis+cluster://user:password@host:port,host:port     rediss+cluster://…     a Redis Cluster, by some of its nodes

All keys of a client share one hash tag (a cell's, or that of records outside of cells), so they lie on one shard, and
scripts and transactions need nothing special. Whenever a connection to a cluster opens, it asks which primary has the
slot. A shard that fails over or moves shows as a lost connection.
"""

import asyncio
import socket
from collections.abc import Iterable
from typing import Any, cast
from urllib.parse import urlsplit

import hiredis
import redis.asyncio as aioredis
from redis import exceptions as redis_errors
from redis.asyncio import Connection, SSLConnection
from redis.asyncio.connection import parse_url
from redis.crc import key_slot
from redis.exceptions import AskError, MaxConnectionsError, ReadOnlyError
from redis.exceptions import ConnectionError as RedisConnectionError

CLUSTER = "+cluster"
DEFAULT_PORT = 6379
MAX_CONNECTIONS = 1000
"""Connections of one client, one a waiting call; a burst of requests exceeds the library's own limit of 100."""
WAIT_S = 4.0
"""The longest wait for a connection that another call has."""


class FastConnection(Connection):
    """Packs commands in C.

    redis-py's asyncio connections pack commands in Python, argument by argument: the largest part of a hand-over's
    cost, because a script that settles 32 entries has 600 arguments.
    """

    def pack_command(self, *args: Any) -> list[bytes]:
        """The command in Redis' protocol. Raises TypeError for an argument other than str, bytes, int or float."""
        name = args[0]
        words = name.split() if isinstance(name, str) else (name,)  # "XGROUP CREATE" is two arguments
        command: Any = (*words, *args[1:])  # hiredis' own type says that a command has one word
        return [hiredis.pack_command(command)]

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        """Leaves the wait to whoever reads the answer. The library makes a task to wait until all is written, which takes three more
        rounds of the event loop for each command; this connection has one command at a time."""
        if self.is_open and isinstance(command, list) and self._writer is not None:
            self._writer.writelines(cast("list[bytes]", command))
        else:
            await super().send_packed_command(command, check_health)

    @property
    def is_open(self) -> bool:
        """Is it connected, and has the server not closed it meanwhile?"""
        return self._reader is not None and self._writer is not None and not self._reader.at_eof()


class FastPool(aioredis.ConnectionPool):
    """Hands out connections; calls beyond their number wait for one, in order.

    redis-py's own takes a lock and keeps unread metrics at each use, and refuses calls beyond the number. A returned
    connection has no unread answer: whatever interrupts a command closes it.
    """

    def __init__(self, *, max_connections: int, wait_s: float = WAIT_S, **options: Any) -> None:
        super().__init__(max_connections=max_connections, **options)
        self._places = asyncio.Semaphore(max_connections)
        self._wait_s = wait_s

    async def get_connection(self, command_name: str | None = None, *keys: Any, **options: Any) -> Any:
        """Raises MaxConnectionsError, which is a ConnectionError, if none is free for `wait_s`."""
        await self._take_place()
        connection: Any = self.get_available_connection()
        opened = connection.is_open
        try:
            if not opened:
                await self.ensure_connection(connection)
                opened = True
        finally:
            if not opened:
                await self.release(connection)
        return connection

    async def release(self, connection: Any) -> None:
        self._in_use_connections.remove(connection)
        try:
            if connection.should_reconnect():
                await connection.disconnect()
            self._available_connections.append(connection)
        finally:
            self._places.release()

    async def _take_place(self) -> None:
        if not self._places.locked():
            await self._places.acquire()
            return
        try:
            async with asyncio.timeout(self._wait_s):
                await self._places.acquire()
        except TimeoutError as error:
            raise MaxConnectionsError(f"no connection to Redis was free for {self._wait_s:g} s") from error


class FastClient(aioredis.Redis):
    """Sends a command and reads its answer, once: the caller retries. Leaves XREADGROUP's answer in Redis' form, stream ->
    entries with flat fields: redis-py's conversion costs more than all else."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.set_response_callback("XREADGROUP", _as_given)

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        connection: Any = await self.connection_pool.get_connection()
        try:
            await connection.send_command(*args)
            return await self.parse_response(connection, args[0], **options)
        finally:
            await self.connection_pool.release(connection)


def _as_given(response: Any, **_: Any) -> Any:
    return response


class SecureConnection(SSLConnection, FastConnection):
    """The same with TLS."""


class Shard:
    """The shard of a Redis Cluster that has a key, whichever node is its primary just now."""

    def __init__(self, nodes: list[tuple[str, int]], key: str, options: dict[str, Any]) -> None:
        """`options`: for a connection to any node, such as credentials and TLS."""
        self._seeds = nodes
        self._nodes = nodes
        self._slot = key_slot(key.encode())
        self._options = options

    async def primary(self) -> tuple[str, int]:
        """Host and port. Raises ConnectionError if no known node answers, or if nobody has the slot."""
        for host, port in dict.fromkeys([*self._nodes, *self._seeds]):
            try:
                rows = await self._ask(host, port)
            except (RedisConnectionError, TimeoutError, OSError):
                continue
            # a row: first and last slot, the primary, replicas; a node that does not know its host leaves it empty
            nodes = [(_text(node[0]) or host, int(node[1])) for row in rows for node in row[2:]]
            self._nodes = nodes or self._nodes
            for first, last, node, *_ in rows:
                if first <= self._slot <= last:
                    return _text(node[0]) or host, int(node[1])
        raise RedisConnectionError("no node of the Redis Cluster answers, or none has the slot")

    async def _ask(self, host: str, port: int) -> list[Any]:
        options: dict[str, Any] = {**self._options, "host": host, "port": port, "socket_connect_timeout": 5}
        secure = options.pop("connection_class", Connection) is SSLConnection
        connection = SecureConnection(**options) if secure else FastConnection(**options)
        try:
            await connection.connect()
            await connection.send_command("CLUSTER SLOTS")
            rows: Any = await connection.read_response()
            return rows
        finally:
            await connection.disconnect()


class ShardConnection(FastConnection):
    """Connects to the node that is the primary of the shard's slot at that moment."""

    def __init__(self, *, shard: Shard, **options: Any) -> None:
        super().__init__(**options)
        self._shard = shard

    async def _connect(self) -> None:
        self.host, self.port = await self._shard.primary()
        await super()._connect()

    async def read_response(self, *args: Any, **options: Any) -> Any:
        """Raises ConnectionError when this node does not have the slot any more."""
        try:
            return await super().read_response(*args, **options)
        except (AskError, ReadOnlyError) as error:
            await self.disconnect()
            raise RedisConnectionError(f"the shard has moved: {error}") from error


class SecureShardConnection(ShardConnection, SecureConnection):
    """The same with TLS."""


def make_client(redis_url: str, key: str, **options: Any) -> "aioredis.Redis":
    """A client for the keys that share this key's hash tag, in bytes. Raises ValueError for a wrong URL."""
    scheme, _, rest = redis_url.partition("://")
    secure = scheme.startswith("rediss")
    if not scheme.endswith(CLUSTER):
        kind = SecureConnection if secure else FastConnection
        address: dict[str, Any] = {**parse_url(redis_url)}
    else:
        kind = SecureShardConnection if secure else ShardConnection
        nodes, first = _nodes(rest)
        address = {**parse_url(f"{scheme.removesuffix(CLUSTER)}://{first}")}
        address["shard"] = Shard(nodes, key, dict(address))
    # without `driver_info` each connection sends the library's version in two commands, the largest part of its cost
    plain = {"connection_class": kind, "decode_responses": False, "protocol": 3, "driver_info": None}
    chosen: dict[str, Any] = {"max_connections": MAX_CONNECTIONS, **address, **options, **plain}
    return FastClient.from_pool(FastPool(**chosen))


def own_address(redis_url: str) -> str:
    """The address of this machine on the way to Redis, at which others of the cell reach it. Raises OSError."""
    ((host, port), *_), _ = _nodes(redis_url.partition("://")[2])
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # a datagram socket's sends nothing
        return probe.getsockname()[0]


def _nodes(rest: str) -> tuple[list[tuple[str, int]], str]:
    """`user:password@a:1,b:2?x=y` -> [("a", 1), ("b", 2)] and the rest with only the first node."""
    parts = urlsplit(f"//{rest}")
    user, at, hosts = parts.netloc.rpartition("@")
    urls = [urlsplit(f"//{host}") for host in hosts.split(",")]
    nodes = [(host.hostname or "localhost", host.port or DEFAULT_PORT) for host in urls]
    query = f"?{parts.query}" if parts.query else ""
    return nodes, f"{user}{at}{hosts.split(',')[0]}{query}"


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value or "")


_LATER = ("OOM", "LOADING", "NOSCRIPT", "BUSY", "READONLY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "MISCONF")
_FULL = ("OOM", "MISCONF")
_LATER_CLASSES = (
    redis_errors.OutOfMemoryError,
    redis_errors.BusyLoadingError,
    redis_errors.NoScriptError,
    redis_errors.ReadOnlyError,
    redis_errors.MasterDownError,
    redis_errors.ClusterDownError,
    redis_errors.TryAgainError,
)


def passes(error: redis_errors.RedisError) -> bool:
    """True for an error that passes. redis-py makes classes of some codes; a script's error quotes the code."""
    if not isinstance(error, redis_errors.ResponseError) or isinstance(error, _LATER_CLASSES):
        return True
    return _says(error, _LATER)


def is_full(error: redis_errors.RedisError) -> bool:
    """True for the error of a Redis that has no memory left, or no room on its disk."""
    if isinstance(error, redis_errors.OutOfMemoryError):
        return True
    return _says(error, _FULL)


def _says(error: redis_errors.RedisError, codes: Iterable[str]) -> bool:
    """Is it about one of these codes?"""
    text = str(error)
    return any(text.startswith(f"{code} ") or f" -{code} " in text for code in codes)
