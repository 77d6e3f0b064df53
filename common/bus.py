"""The bus: Redis Streams with consumer groups, and the one script that publishes results and acknowledges their cause.

Guarantees:
- Work may be done twice, its result is published once: one script appends the outputs, acknowledges the input and
  deletes it, and does nothing if the input is not pending any more. Retrying that script after a lost reply is harmless.
- An entry is deleted with its acknowledgement, so a stream's length is its open work.
- Connection losses, a loading Redis, full memory, a lost script cache and an object storage that is away are retried
  with backoff until they pass; callers see no error, only time.

Entries carry plain fields (id, job, partition, epoch, kind) beside `payload`, the msgpack of the message. A payload
above `CLAIM_CHECK_BYTES` goes to object storage and travels as `ref`.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast
from uuid import uuid4

import msgspec
import redis.asyncio as aioredis
import structlog
from redis import exceptions as redis_errors

from common.errors import InvalidInput, NotFound
from common.messages import AnyMessage, Message, decode, encode
from common.objects import Objects, patiently
from common.redis_connection import make_client
from common.streams import Cell

CLAIM_CHECK_BYTES = 1 << 20
MAX_BACKOFF_S = 2.0

T = TypeVar("T")
Out = tuple[str, Message]  # stream key, message
log = structlog.get_logger()

# KEYS: none named (all keys share the cell's hash tag, KEYS[1] routes). ARGV: number of inputs, then for each input:
# stream, group, entry, number of outputs, then for each output: stream, "1" if it must exist, number of fields, fields.
SETTLE = """
local at = 1
local function take() at = at + 1; return ARGV[at - 1] end
local settled = {}
for n = 1, tonumber(take()) do
  local stream, group, entry, outputs = take(), take(), take(), tonumber(take())
  local open = #redis.call('XPENDING', stream, group, entry, entry, 1) == 1
  for _ = 1, outputs do
    local key, must_exist, fields = take(), take() == '1', tonumber(take())
    if open and must_exist then
      redis.call('XADD', key, 'NOMKSTREAM', '*', unpack(ARGV, at, at + fields - 1))
    elseif open then
      redis.call('XADD', key, '*', unpack(ARGV, at, at + fields - 1))
    end
    at = at + fields
  end
  if open then
    redis.call('XACK', stream, group, entry)
    redis.call('XDEL', stream, entry)
  end
  settled[n] = open and 1 or 0
end
return settled
"""

# KEYS: streams. ARGV: group, consumer, how many entries together. What each stream gave, earlier streams first.
READ_IN_ORDER = """
local left, found = tonumber(ARGV[3]), {}
for i, stream in ipairs(KEYS) do
  if left > 0 then
    local read = redis.call('XREADGROUP', 'GROUP', ARGV[1], ARGV[2], 'COUNT', left, 'STREAMS', stream, '>')
    if read then
      found[#found + 1] = read[1]
      left = left - #read[1][2]
    end
  end
end
return found
"""

# KEYS[1] stream. ARGV: group, consumer, entries. Resets the idle time of those that the consumer still owns.
RENEW = """
local renewed = 0
for i = 3, #ARGV do
  local row = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[i], ARGV[i], 1)[1]
  if row and row[2] == ARGV[2] then
    redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[i], 'JUSTID')
    renewed = renewed + 1
  end
end
return renewed
"""


@dataclass(frozen=True, slots=True)
class Undecodable:
    """The content of an entry that is no message of ours."""

    reason: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class Delivery:
    """One entry, held by this consumer until it is settled."""

    stream: str
    group: str
    entry: str
    message: AnyMessage | Undecodable
    deliveries: int = 1


@dataclass(frozen=True, slots=True)
class Settlement:
    """A delivery with the messages that it led to, which settle it."""

    delivery: Delivery
    outputs: Sequence[Out] = ()


class Bus:
    """One cell's streams. Safe for concurrent use within one event loop."""

    def __init__(self, client: "aioredis.Redis", cell: Cell, objects: Objects | None = None) -> None:
        self.client = client
        self.cell = cell
        self._objects = objects
        self._settle = client.register_script(SETTLE)
        self._renew = client.register_script(RENEW)
        self._read_in_order = client.register_script(READ_IN_ORDER)

    @classmethod
    def connect(cls, redis_url: str, cell: Cell, objects: Objects | None = None) -> "Bus":
        """Connects lazily; every call waits for Redis to be there."""
        return cls(connect(redis_url, cell), cell, objects)

    async def close(self) -> None:
        await self.client.aclose()

    # ---- work streams -----------------------------------------------------------------------------------------------

    async def ensure_group(self, stream: str, group: str) -> None:
        """Creates the consumer group, from the stream's beginning, unless it is there."""
        await self._unless("BUSYGROUP", lambda: self.client.xgroup_create(stream, group, id="0", mkstream=True))

    async def read(
        self, streams: Sequence[str], group: str, consumer: str, *, count: int, block_ms: int | None = None
    ) -> list[Delivery]:
        """New entries, at most `count` a stream, in stream order. `block_ms` None: return at once."""
        wanted: dict[Any, Any] = dict.fromkeys(streams, ">")
        return await self._read_group(wanted, group, consumer, count, block_ms)

    async def read_in_order(self, streams: Sequence[str], group: str, consumer: str, *, count: int) -> list[Delivery]:
        """New entries, at most `count` together; entries of a later stream only once the earlier ones have no more. Does not wait."""

        async def call() -> Any:
            rows = await self._read_in_order(keys=list(streams), args=[group, consumer, count])
            return [(stream, [(entry, _mapping(fields)) for entry, fields in entries]) for stream, entries in rows]

        return await self._delivered(call, streams, group, consumer)

    async def read_pending(
        self, stream: str, group: str, consumer: str, *, after: str = "0", count: int = 256
    ) -> list[Delivery]:
        """Entries that this consumer was given before and has not settled, after an entry id."""
        return await self._read_group({stream: after}, group, consumer, count, None)

    async def _read_group(
        self, wanted: dict[Any, Any], group: str, consumer: str, count: int, block_ms: int | None
    ) -> list[Delivery]:
        async def call() -> Any:
            return await self.client.xreadgroup(group, consumer, wanted, count=count, block=block_ms) or ()

        return await self._delivered(call, wanted, group, consumer)

    async def _delivered(
        self, call: Callable[[], Awaitable[Any]], streams: Iterable[str], group: str, consumer: str
    ) -> list[Delivery]:
        found = await self._unless("NOGROUP", call)
        if found is None:
            for stream in streams:
                await self.ensure_group(stream, group)
            return []
        return [
            await self._delivery(_text(stream), group, entry, fields, consumer=consumer)
            for stream, entries in _pairs(found)
            for entry, fields in entries
            if fields  # a pending entry that was deleted has none
        ]

    async def claim(
        self, stream: str, group: str, consumer: str, *, min_idle_ms: int, count: int = 1
    ) -> list[Delivery]:
        """Takes over entries that nobody renewed for `min_idle_ms`, oldest first. Counts as a delivery of each."""
        idle = await self.idle(stream, group, min_idle_ms=min_idle_ms, count=count)
        if not idle:
            return []
        found = await self.retrying(lambda: self.client.xclaim(stream, group, consumer, min_idle_ms, cast(Any, idle)))
        taken: list[Delivery] = []
        for entry, fields in found:
            if entry is None or not fields:
                continue
            row = await self.retrying(lambda e=entry: self.client.xpending_range(stream, group, e, e, 1))
            deliveries = int(row[0]["times_delivered"]) if row else 1
            taken.append(await self._delivery(stream, group, entry, fields, consumer=consumer, deliveries=deliveries))
        return taken

    async def idle(self, stream: str, group: str, *, min_idle_ms: int, count: int = 256) -> list[str]:
        """Ids of pending entries that nobody renewed for `min_idle_ms`."""

        call = partial(self.client.xpending_range, stream, group, "-", "+", count, idle=min_idle_ms)
        return [_text(row["message_id"]) for row in await self._unless("NOGROUP", call) or ()]

    async def pending(self, stream: str, group: str, *, after: str, count: int = 1000) -> list[str]:
        """Ids of pending entries after an entry's id, oldest first."""
        call = partial(self.client.xpending_range, stream, group, f"({after}", "+", count)
        return [_text(row["message_id"]) for row in await self.retrying(call)]

    async def reread(self, stream: str, group: str, consumer: str, entries: Sequence[str]) -> list[Delivery]:
        """Reads pending entries again, whoever has them, and makes them this consumer's. Leaves out those that are gone."""
        if not entries:
            return []
        found = await self.retrying(lambda: self.client.xclaim(stream, group, consumer, 0, cast(Any, entries)))
        return [
            await self._delivery(stream, group, entry, fields, consumer=consumer) for entry, fields in found if fields
        ]

    async def renew(self, stream: str, group: str, consumer: str, entries: Sequence[str]) -> int:
        """Resets the idle time of these entries. Returns the number that this consumer still owns."""
        if not entries:
            return 0
        call = partial(self._renew, keys=[stream], args=[group, consumer, *entries])
        return await self._unless("NOGROUP", call) or 0

    async def settle(self, settlements: Sequence[Settlement]) -> list[bool]:
        """Publishes and acknowledges, one script for all. False: somebody else settled it before, so nothing was published."""
        if not settlements:
            return []
        arguments: list[Any] = [len(settlements)]
        for settlement in settlements:
            delivery = settlement.delivery
            arguments += [delivery.stream, delivery.group, delivery.entry, len(settlement.outputs)]
            for stream, message in settlement.outputs:
                fields = await self.fields(message)
                arguments += [stream, "1" if self.is_reply(stream) else "0", len(fields), *fields]
        keys = [settlements[0].delivery.stream]
        done = await self._unless("NOGROUP", lambda: self._settle(keys=keys, args=arguments))
        if done is None:
            for stream, group in {(s.delivery.stream, s.delivery.group) for s in settlements}:
                await self.ensure_group(stream, group)
            return await self.settle(settlements)
        return [bool(n) for n in done]

    async def publish(self, outs: Iterable[Out]) -> None:
        """Appends messages that answer no delivery. After a lost reply an entry may stand twice; ids make that harmless."""
        encoded = [(stream, await self.fields(message)) for stream, message in outs]

        async def call() -> Any:
            pipe = self.client.pipeline(transaction=False)
            for stream, fields in encoded:
                pipe.xadd(stream, _mapping(fields), nomkstream=self.is_reply(stream))
            return await pipe.execute()

        await self.retrying(call)

    # ---- broadcasts and reply streams -------------------------------------------------------------------------------

    async def broadcast(self, stream: str, message: Message, *, keep_s: float) -> None:
        """Appends, and trims what is older than `keep_s` by Redis' own clock."""
        fields = await self.fields(message)

        async def call() -> Any:
            seconds, _ = await self.client.time()
            oldest = int((seconds - keep_s) * 1000)
            return await self.client.xadd(stream, _mapping(fields), minid=oldest, approximate=True)

        await self.retrying(call)

    async def follow(
        self, stream: str, after: str, *, block_ms: int | None, count: int = 1000
    ) -> list[tuple[str, AnyMessage]]:
        """Entries after a cursor ("0": from the oldest), without a group. Undecodable ones are left out and logged."""
        found = await self.retrying(lambda: self.client.xread({stream: after}, count=count, block=block_ms))
        messages: list[tuple[str, AnyMessage]] = []
        for key, entries in _pairs(found):
            for entry, fields in entries:
                delivery = await self._delivery(_text(key), "", entry, fields)
                if isinstance(delivery.message, Undecodable):
                    log.warning("undecodable_broadcast", stream=stream, entry=delivery.entry)
                else:
                    messages.append((delivery.entry, delivery.message))
        return messages

    def is_reply(self, stream: str) -> bool:
        """Reply streams belong to an API replica; nobody else may bring one into being."""
        return stream.startswith(self.cell.reply(""))

    # ---- records ----------------------------------------------------------------------------------------------------

    async def read_hashes(self, keys: Sequence[str]) -> list[dict[bytes, bytes]]:
        """All fields of each hash; none of one that does not exist. One round trip."""

        async def call() -> Any:
            pipe = self.client.pipeline(transaction=False)
            for key in keys:
                pipe.hgetall(key)
            return await pipe.execute()

        return await self.retrying(call)

    async def read_set(self, key: str) -> set[bytes]:
        """All members of a set; none if it does not exist."""
        found: Any = await self.retrying(lambda: self.client.smembers(key))
        return found

    # ---- encoding ---------------------------------------------------------------------------------------------------

    async def fields(self, message: Message) -> list[Any]:
        """Names and values, flat, as XADD takes them."""
        body = await self._body(message)
        kind = type(message).__name__
        plain = ["id", message.id, "job", message.job, "partition", message.partition, "epoch", message.epoch]
        return [*plain, "kind", kind, *body]

    async def _body(self, message: Message) -> list[Any]:
        payload = encode(message)
        if len(payload) <= CLAIM_CHECK_BYTES:
            return ["payload", payload]
        if self._objects is None:
            raise InvalidInput(f"a message of {len(payload)} bytes needs an object store to travel")
        step = getattr(message, "adapter", None)
        version = step.version if step is not None else 0
        path = f"payloads/{message.job}/{version:08d}/{message.id.replace('/', '.')}.{uuid4().hex}"
        objects = self._objects
        await patiently(lambda: objects.write(path, payload))
        return ["ref", path]

    async def _delivery(
        self, stream: str, group: str, entry: Any, fields: Any, *, consumer: str = "", deliveries: int = 1
    ) -> Delivery:
        payload = fields.get(b"payload")
        try:
            if payload is None:
                payload = await self._claimed(fields, lambda: self.renew(stream, group, consumer, [_text(entry)]))
            message = decode(payload)
        except (msgspec.MsgspecError, NotFound, KeyError, ValueError) as error:
            message = Undecodable(f"{type(error).__name__}: {error}", payload or b"")
        return Delivery(stream, group, _text(entry), message, deliveries)

    async def _claimed(self, fields: Any, renew: Callable[[], Awaitable[object]]) -> bytes:
        """Reads the payload from object storage, waits while that is away, and keeps the entry ours meanwhile."""
        objects, path = self._objects, _text(fields[b"ref"])
        if objects is None:
            raise NotFound("the entry is a claim check, but this process has no object store")
        return await patiently(lambda: objects.get(path), meanwhile=renew)

    async def _unless(self, code: str, call: Callable[[], Awaitable[T]]) -> T | None:
        """Like `retrying`; None if Redis answers with an error of this code."""
        try:
            return await self.retrying(call)
        except redis_errors.ResponseError as error:
            if code not in str(error):
                raise
            return None

    async def retrying(self, call: Callable[[], Awaitable[T]]) -> T:
        """Awaits `call()` until Redis answers. Raises only the errors that the caller made."""
        delay = 0.02
        while True:
            try:
                return await call()
            except redis_errors.ResponseError as error:
                if not passes(error):
                    raise
                reason = str(error)
            except (redis_errors.ConnectionError, redis_errors.TimeoutError, OSError) as error:
                reason = str(error)
            log.debug("redis_away", reason=reason)
            await asyncio.sleep(delay * random.uniform(0.5, 1.0))
            delay = min(delay * 2, MAX_BACKOFF_S)


def connect(redis_url: str, cell: Cell) -> "aioredis.Redis":
    """A client for a cell's keys that leaves retries to us and answers in bytes.

    No socket timeout: with one, redis-py sends through asyncio.wait_for, which on Python 3.11 swallows cancellation.
    """
    return make_client(redis_url, cell.key(""), socket_connect_timeout=5, socket_timeout=None)


_LATER = ("OOM", "LOADING", "NOSCRIPT", "BUSY", "READONLY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "MISCONF")
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
    """True for an error that says `later`, not `never`. redis-py makes classes of some codes; a script's error quotes the code."""
    if not isinstance(error, redis_errors.ResponseError) or isinstance(error, _LATER_CLASSES):
        return True
    text = str(error)
    return any(text.startswith(f"{code} ") or f" -{code} " in text for code in _LATER)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _pairs(found: Any) -> Iterable[tuple[Any, Any]]:
    """XREAD's answer as (stream, entries): a list of pairs in RESP2, a dict in RESP3."""
    if isinstance(found, dict):
        return [(stream, [row for page in pages for row in page]) for stream, pages in found.items()]
    return found or []


def _mapping(fields: Sequence[Any]) -> dict[Any, Any]:
    return dict(zip(fields[::2], fields[1::2], strict=True))
