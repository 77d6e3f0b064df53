"""The bus: Redis Streams with consumer groups, and the one script that publishes results and acknowledges their cause.

Guarantees:
- Work may be done twice, its result is published once: one script appends the outputs, acknowledges the input and
  deletes it, and does nothing if the input is not pending. Retrying it after a lost reply is harmless.
- An entry is deleted with its acknowledgement, so a stream's length is its open work.
- Lost connections, missing answers, a loading or full Redis, a lost script cache and an unavailable object storage are
  retried with backoff until they pass; callers see no error, only time.
- A full Redis drains: what settles, renews, takes over and reports begins with a command that needs no memory, and
  Redis then refuses none of the script's. What `publish` appends waits.

An entry is one field, `payload`: the msgpack of the message. Above `CLAIM_CHECK_BYTES` it goes to object storage and
travels as `ref`, with plain fields (id, job, partition, epoch, kind) next to it (`payloads.py`).
"""

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar, cast

import msgspec
import redis.asyncio as aioredis
import structlog
from msgspec.structs import replace
from redis import exceptions as redis_errors

from common.bus.deliveries import (
    NO_PROGRESS,
    Delivery,
    Idle,
    Out,
    Progress,
    Settlement,
    Undecodable,
    Unfetched,
    fetched,
)
from common.bus.histories import Histories, HistoryItems
from common.bus.payloads import Payloads, fields_of, plain_of
from common.bus.redis_connection import make_client, passes
from common.bus.scripts import BROADCAST, CREATE_GROUP, FIND_IDLE, READ_IN_ORDER, RENEW, SETTLE
from common.bus.streams import Cell
from common.errors import InvalidInput, NotFound
from common.store.objects import Objects
from common.wire.codec import AnyMessage, decode, encode
from common.wire.history import shortened
from common.wire.messages import Message

MAX_BACKOFF_S = 2.0
RETRIED_ERRORS = (redis_errors.ConnectionError, redis_errors.TimeoutError, redis_errors.ResponseError, OSError)
DEADLINE_S = 10.0
"""Seconds in which Redis must answer a call that does not wait for anything."""
NO_GROUP_S = 0.05
"""Pause before a stream without a group is read again."""

T = TypeVar("T")
log = structlog.get_logger()


class Bus:
    """One cell's streams. Safe for concurrent use within one event loop."""

    def __init__(self, client: "aioredis.Redis", cell: Cell, objects: Objects | None = None) -> None:
        self.client = client
        self.cell = cell
        self.trouble: tuple[float, Exception] | None = None
        """The last error after which a call was made again, and when."""
        self._payloads = Payloads(objects)
        self._histories = Histories(self.pipelined, cell)
        self._keep_s: dict[str, int] = {}  # streams that last only as long as this process
        self.owns: set[str] = set()
        """Streams that only this process makes; elsewhere others stand in for them."""
        self._settle = client.register_script(SETTLE)
        self._renew = client.register_script(RENEW)
        self._read_in_order = client.register_script(READ_IN_ORDER)
        self._find_idle = client.register_script(FIND_IDLE)
        self._create_group = client.register_script(CREATE_GROUP)
        self._broadcast = client.register_script(BROADCAST)

    @classmethod
    def connect(cls, redis_url: str, cell: Cell, objects: Objects | None = None) -> "Bus":
        """Connects lazily; every call waits for Redis to be there."""
        return cls(connect(redis_url, cell), cell, objects)

    async def close(self) -> None:
        await self.client.aclose()

    # ---- work streams -----------------------------------------------------------------------------------------------

    async def ensure_group(self, stream: str, group: str, *, keep_s: int | None = None) -> None:
        """Creates the consumer group, from the stream's beginning, and the stream, unless only its own worker creates it.
        `keep_s`: seconds after which the stream expires, now and whenever it is created again."""
        if keep_s is not None:
            self._keep_s[stream] = keep_s
        makes = ["MKSTREAM"] if stream in self.owns or self.cell.instead_of(stream) in ("", stream) else []
        words = [group, self._keep_s.get(stream, ""), *makes]
        call = partial(self._create_group, keys=[stream], args=words)
        await self._unless(call, "BUSYGROUP", "requires the key to exist")

    async def keep_alive(self, stream: str, ttl_s: int) -> bool:
        """Extends the life of its reader's stream. False: Redis had lost it, and it is created again."""
        if await self.retrying(lambda: self.client.expire(stream, ttl_s)):
            return True
        await self.ensure_group(stream, "alive", keep_s=ttl_s)  # the one command that makes an empty stream
        return False

    async def read(
        self,
        streams: Sequence[str],
        group: str,
        consumer: str,
        *,
        count: int,
        block_ms: int | None = None,
    ) -> list[Delivery]:
        """New entries, at most `count` a stream, in stream order. `block_ms` None: return at once.

        Payloads in object storage are Unfetched, here and below, so that no other entry waits for the storage.
        """
        wanted: dict[Any, Any] = dict.fromkeys(streams, ">")
        return await self._read_group(wanted, group, consumer, count, block_ms)

    async def read_in_order(
        self, streams: Sequence[str], group: str, consumer: str, *, count: int, tells: str = ""
    ) -> list[Delivery]:
        """New entries, at most `count` together, earlier streams first. Does not wait. `tells`: key in which it says what it lacks."""
        call = partial(self._read_in_order, keys=list(streams), args=[group, consumer, count, tells])
        return await self._delivered(call, streams, group, consumer)

    async def read_pending(
        self, stream: str, group: str, consumer: str, *, after: str = "0", count: int = 256
    ) -> list[Delivery]:
        """Entries that this consumer was given before and has not settled, after an entry id."""
        return await self._read_group({stream: after}, group, consumer, count, None)

    async def _read_group(
        self, wanted: dict[Any, Any], group: str, consumer: str, count: int, block_ms: int | None
    ) -> list[Delivery]:
        waits = [] if block_ms is None else ["BLOCK", block_ms]
        words = ["GROUP", group, consumer, "COUNT", count, *waits, "STREAMS", *wanted, *wanted.values()]

        async def call() -> Any:
            return (await self.client.execute_command("XREADGROUP", *words) or {}).items()

        return await self._delivered(call, wanted, group, consumer, block_ms=block_ms)

    async def _delivered(
        self,
        call: Callable[[], Awaitable[Any]],
        streams: Iterable[str],
        group: str,
        consumer: str,
        *,
        block_ms: int | None = None,
    ) -> list[Delivery]:
        pages = await self._unless(call, "NOGROUP", block_ms=block_ms)
        if pages is None:
            for stream in streams:
                await self.ensure_group(stream, group)
            await asyncio.sleep(NO_GROUP_S)
            return []
        rows = [
            (_text(stream), entry, _mapping(fields or ())) for stream, entries in pages for entry, fields in entries
        ]
        return await self._opened(rows, group, consumer)

    async def _opened(self, rows: Iterable[tuple[str, Any, Any]], group: str, consumer: str) -> list[Delivery]:
        """Makes deliveries of (stream, entry, fields). Leaves out pending entries that were deleted, and so have no fields,
        and those that another worker settled before their history was read."""
        deliveries: list[Delivery] = []
        there = [row for row in rows if row[2]]
        items = await self._histories.read([fields for _, _, fields in there if b"history" in fields])
        for stream, entry, fields in there:
            if self._histories.is_gone(fields, items) and not await self._is_open(stream, group, entry):
                continue
            if (payload := fields.get(b"payload")) is not None:
                deliveries.append(self._delivery(stream, group, entry, fields, payload, items))
                continue
            opening = partial(self._fetched, stream, group, entry, fields, items, consumer=consumer)
            unfetched, history = Unfetched("not fetched", b"", plain_of(fields), opening), self._histories.of(fields)
            deliveries.append(Delivery(stream, group, _text(entry), unfetched, history=history, is_inline=False))
        return deliveries

    async def _is_open(self, stream: str, group: str, entry: Any) -> bool:
        """Is it pending, whoever has it?"""
        call = partial(self.client.xpending_range, stream, group, entry, entry, 1)
        return bool(await self._unless(call, "NOGROUP"))

    async def find_idle(
        self, stream: str, group: str, *, min_idle_ms: int, every_ms: int = 0, own: Sequence[str] = (), count: int = 256
    ) -> list[Idle]:
        """Pending entries besides `own` not renewed for `min_idle_ms`, oldest first; none if one looked within `every_ms`."""
        args = [group, min_idle_ms, count, self.cell.looked(stream), every_ms, self.cell.partial(stream, ""), *own]
        rows = await self._unless(lambda: self._find_idle(keys=[stream], args=args), "NOGROUP")
        return [Idle(_text(entry), int(num), advanced=int(by) == num) for entry, _, _, num, by in rows or ()]

    async def claim(
        self,
        stream: str,
        group: str,
        consumer: str,
        idle: Sequence[Idle],
        *,
        min_idle_ms: int,
    ) -> list[Delivery]:
        """Takes over what `find_idle` found, with its saved progress, unless another was first."""
        if not idle:
            return []
        by_entry: Any = {each.entry: each for each in idle}
        rows = await self.retrying(lambda: self.client.xclaim(stream, group, consumer, min_idle_ms, list(by_entry)))
        taken = [(stream, entry, fields) for entry, fields in rows if entry is not None and fields]
        keys = [self.cell.partial(stream, _text(entry)) for _, entry, _ in taken]
        saved = await self.retrying(lambda: self.client.mget(keys)) if keys else []
        progress = {_text(entry): value or b"" for (_, entry, _), value in zip(taken, saved, strict=True)}
        return [
            replace(delivery, deliveries=by_entry[delivery.entry].deliveries + 1, progress=progress[delivery.entry])
            for delivery in await self._opened(taken, group, consumer)
        ]

    async def pending(self, stream: str, group: str, *, after: str, count: int = 1000) -> list[str]:
        """Ids of pending entries after an entry's id, oldest first."""
        call = partial(self.client.xpending_range, stream, group, f"({after}", "+", count)
        return [_text(row["message_id"]) for row in await self.retrying(call)]

    async def reread(self, stream: str, group: str, consumer: str, entries: Sequence[str]) -> list[Delivery]:
        """Makes pending entries this consumer's, whoever has them, and reads those that still exist."""
        if not entries:
            return []
        rows = await self.retrying(lambda: self.client.xclaim(stream, group, consumer, 0, cast(Any, entries)))
        return await self._opened([(stream, entry, fields) for entry, fields in rows], group, consumer)

    async def renew(
        self,
        stream: str,
        group: str,
        consumer: str,
        entries: Sequence[str],
        progress: Mapping[str, Progress] = MappingProxyType({}),
    ) -> int:
        """Resets these entries' idle time, and keeps their new progress until they are settled. Returns the number that this
        consumer still owns; writes nothing of others."""
        if not entries:
            return 0
        arguments: list[Any] = [group, consumer]
        for entry in entries:
            new = progress.get(entry, NO_PROGRESS)
            arguments += [entry, self.cell.partial(stream, entry), new.head, new.start, new.tail]
        return await self._unless(lambda: self._renew(keys=[stream], args=arguments), "NOGROUP") or 0

    async def settle(self, settlements: Sequence[Settlement]) -> list[bool]:
        """Publishes and acknowledges, one script for all. False: another settled it, nothing was published. After a lost
        answer nobody knows whose call it was, so all are True."""
        if not settlements:
            return []
        finished = [each if each.fields else await self.written(each) for each in settlements]
        arguments = self.settling(finished)
        calls: list[Awaitable[Any]] = []

        def call() -> Awaitable[Any]:
            calls.append(self._settle(keys=[settlements[0].delivery.stream], args=arguments))
            return calls[-1]

        answers = await self.retrying(call)
        for each, entries in zip(finished, answers, strict=True):
            if entries:
                self._histories.published(each, entries)
        return [entries != 0 or len(calls) > 1 for entries in answers]

    def settling(self, settlements: Sequence[Settlement]) -> list[Any]:
        """Arguments of the script that settles. A stream that is the one before is not named again."""
        source, target = ("", ""), ""
        arguments: list[Any] = [self.cell.key(""), len(settlements)]
        for each in settlements:
            delivery, outputs = each.delivery, each.outputs
            of = (self.cell.name_of(delivery.stream), delivery.group)
            arguments += [""] if of == source else of
            arguments += [delivery.entry, -1 if outputs is None else len(outputs), *self._histories.fate(each)]
            source = of
            for (stream, _), fields in zip(outputs or (), each.fields or (), strict=True):
                name = self.cell.name_of(stream)
                instead = self.cell.name_of(self.cell.instead_of(stream))
                arguments += ["" if name == target else name, "=" if instead == name else instead, len(fields), *fields]
                target = name
        return arguments

    async def written(self, settlement: Settlement, beat: Callable[[], None] = lambda: None) -> Settlement:
        """Encodes the outputs, so that settling waits only for Redis. Writes large payloads, and beats meanwhile."""
        if settlement.outputs is None or settlement.fields is not None:
            return settlement
        delivery, outputs = settlement.delivery, settlement.outputs
        short = shortened(delivery.message, outputs[0][1]) if len(outputs) == 1 and delivery.is_whole else None
        if short is not None:
            history = self._histories.extended(delivery)
            fields = [*await self._payloads.fields(short, beat), *self._histories.field(history)]
            return Settlement(delivery, outputs, [fields], history)
        fields = [await self._payloads.fields(message, beat) for _, message in outputs]
        return Settlement(delivery, outputs, fields)

    async def publish(self, outs: Iterable[Out]) -> None:
        """Appends messages that answer no delivery. A lost reply may leave an entry twice; ids make that harmless."""
        encoded = [(stream, await self.fields(message)) for stream, message in outs]
        await self.pipelined(
            ("XADD", stream, "*", *fields)
            if self.cell.instead_of(stream)
            else ("XADD", stream, "NOMKSTREAM", "*", *fields)
            for stream, fields in encoded
        )

    # ---- broadcasts and reply streams -------------------------------------------------------------------------------

    async def broadcast(self, stream: str, message: Message, *, keep_s: float) -> None:
        """Appends, and trims what is older than `keep_s` by Redis' own clock."""
        words = [stream, keep_s, *await self.fields(message)]
        await self.retrying(lambda: self._broadcast(keys=[], args=words))

    async def follow(
        self, stream: str, after: str, *, block_ms: int | None, count: int = 1000
    ) -> list[tuple[str, AnyMessage]]:
        """Entries after a cursor ("0": from the oldest), without a group. Logs and omits undecodable ones."""
        call = partial(self.client.xread, {stream: after}, count=count, block=block_ms)
        streams: Any = await self.retrying(call, block_ms=block_ms)
        pages = (streams or {}).get(stream.encode(), ())
        rows = [(stream, entry, fields) for page in pages for entry, fields in page]
        messages: list[tuple[str, AnyMessage]] = []
        for opened in await self._opened(rows, "", ""):
            delivery = await fetched(opened)
            if isinstance(delivery.message, Undecodable):
                log.warning("undecodable_broadcast", stream=stream, entry=delivery.entry)
            else:
                messages.append((delivery.entry, delivery.message))
        return messages

    # ---- records ----------------------------------------------------------------------------------------------------

    async def read_hashes(self, keys: Sequence[str]) -> list[dict[bytes, bytes]]:
        """All fields of each hash; none of one that does not exist. One round trip."""
        return await self.pipelined(("HGETALL", key) for key in keys)

    # ---- encoding ---------------------------------------------------------------------------------------------------

    async def fields(self, message: Message, beat: Callable[[], None] = lambda: None) -> list[Any]:
        """Names and values, flat, as for XADD. Writes a large payload to object storage, and beats meanwhile."""
        return await self._payloads.fields(message, beat)

    def fields_at(self, message: Message, path: str) -> list[Any]:
        """Encodes as `fields`, without waiting. `path`: from `write_payload`; empty: the payload travels itself."""
        return fields_of(message, path, b"" if path else encode(message))

    async def write_payload(self, message: Message) -> str:
        """Writes a payload to object storage, however long that takes. Returns its path."""
        return await self._payloads.write(message, encode(message))

    def _delivery(
        self, stream: str, group: str, entry: Any, fields: Any, payload: bytes, items: HistoryItems
    ) -> Delivery:
        history = self._histories.of(fields)
        try:
            message = self._histories.whole(decode(payload), history, items)
        except (msgspec.MsgspecError, KeyError, ValueError) as error:
            message = Undecodable(f"{type(error).__name__}: {error}", payload, plain_of(fields))
        return Delivery(stream, group, _text(entry), message, history=history, is_inline=b"payload" in fields)

    async def _fetched(
        self, stream: str, group: str, entry: Any, fields: Any, items: HistoryItems, *, consumer: str
    ) -> Delivery:
        """Fetches a payload from object storage. Keeps the entry the consumer's meanwhile."""
        try:
            renew = partial(self.renew, stream, group, consumer, [_text(entry)])
            payload = await self._payloads.get(_text(fields[b"ref"]), renew)
        except (NotFound, KeyError) as error:
            missing = Undecodable(f"{type(error).__name__}: {error}", b"", plain_of(fields))
            return Delivery(stream, group, _text(entry), missing, history=self._histories.of(fields), is_inline=False)
        return self._delivery(stream, group, entry, fields, payload, items)

    async def _unless(self, call: Callable[[], Awaitable[T]], *codes: str, block_ms: int | None = None) -> T | None:
        """Like `retrying`; None if Redis answers with an error of one of these codes."""
        try:
            return await self.retrying(call, block_ms=block_ms)
        except redis_errors.ResponseError as error:
            if not any(code in str(error) for code in codes):
                raise
            return None

    async def pipelined(self, commands: Iterable[Sequence[Any]], *, transaction: bool = False) -> list[Any]:
        """The answers to some commands, in one round trip. Repeats them all until Redis answers."""
        sent = list(commands)

        async def call() -> list[Any]:
            pipe = self.client.pipeline(transaction=transaction)
            for words in sent:
                pipe.execute_command(*words)
            return await pipe.execute()

        return await self.retrying(call)

    async def retrying(self, call: Callable[[], Awaitable[T]], *, block_ms: int | None = None) -> T:
        """Awaits `call()` until Redis answers. Raises only the errors that the caller made.

        After DEADLINE_S without an answer, plus `block_ms` if Redis is to wait, repeats the call on a fresh connection; it may
        have been carried out, see docs/decisions/no_socket_timeout.md. Raises InvalidInput for refused credentials.
        """
        delay = 0.02
        while True:
            try:
                async with asyncio.timeout(DEADLINE_S + (block_ms or 0) / 1000):
                    return await call()
            except redis_errors.AuthenticationError as error:
                raise InvalidInput(f"Redis refuses the credentials of MARLAAS_REDIS_URL: {error}") from error
            except RETRIED_ERRORS as error:
                if isinstance(error, redis_errors.ResponseError) and not passes(error):
                    raise
                if isinstance(error, TimeoutError):
                    await self._close_idle()
                self.trouble = (time.monotonic(), error)
                log.debug("redis_away", reason=repr(error))
            await asyncio.sleep(delay * random.uniform(0.5, 1.0))
            delay = min(delay * 2, MAX_BACKOFF_S)

    async def _close_idle(self) -> None:
        """Closes the connections that nobody uses: the host to which they lead may have vanished."""
        with contextlib.suppress(redis_errors.RedisError):
            await self.client.connection_pool.disconnect(inuse_connections=False)


def connect(redis_url: str, cell: Cell) -> "aioredis.Redis":
    """A client for a cell's keys, without retries, that answers in bytes. See docs/decisions/no_socket_timeout.md."""
    return make_client(redis_url, cell.key(""), socket_connect_timeout=5, socket_timeout=None)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _mapping(fields: Sequence[Any]) -> dict[Any, Any]:
    return {fields[0]: fields[1]} if len(fields) == 2 else dict(zip(fields[::2], fields[1::2], strict=True))
