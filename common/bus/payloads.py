"""Payloads: the bytes of a message in an entry. Large ones go to object storage and travel as claim checks.

reads and writes: `payloads/<job>/<version>/` in object storage   waits for: the storage, without limit
"""

import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from uuid import uuid4

import msgpack

from common.cancellation import beating
from common.errors import InvalidInput, NotFound
from common.store.objects import Objects, patiently
from common.wire.codec import encode
from common.wire.messages import Message

CLAIM_CHECK_BYTES = 1 << 20
PLAIN_FIELDS = ("id", "job", "partition", "epoch", "kind")
"""Fields of a message that stand in the entry too where its payload does not."""


def fields_of(message: Message, path: str, payload: bytes) -> list[Any]:
    """Names and values, flat, as for XADD. `path`: of the payload in object storage; empty: it travels itself."""
    if not path:
        return ["payload", payload]
    plain = ["id", message.id, "job", message.job, "partition", message.partition, "epoch", message.epoch]
    return [*plain, "kind", type(message).__name__, "ref", path]


def plain_of(fields: Mapping[bytes, bytes]) -> dict[str, str]:
    """Returns what an unreadable entry says of itself, in its own fields or in its payload."""
    plain = {name.decode(errors="replace"): value.decode(errors="replace") for name, value in fields.items()}
    texts = _readable(fields.get(b"payload", b"")) | plain
    return {name: texts[name] for name in PLAIN_FIELDS if name in texts}


def _readable(payload: bytes) -> dict[str, str]:
    """The texts and numbers that a payload begins with, up to where it cannot be read any more."""
    found, reader = dict[str, str](), msgpack.Unpacker(strict_map_key=False)
    reader.feed(payload)
    with contextlib.suppress(msgpack.UnpackException, ValueError):
        for _ in range(reader.read_map_header()):
            name, value = reader.unpack(), reader.unpack()
            found |= {name: str(value)} if isinstance(name, str) and isinstance(value, str | int) else {}
    return found


class Payloads:
    """Payloads of one cell."""

    def __init__(self, objects: Objects | None) -> None:
        """Without `objects` no large message can travel."""
        self._objects = objects

    async def fields(self, message: Message, beat: Callable[[], None]) -> list[Any]:
        """See `fields_of`. Writes a large payload, and beats meanwhile; never waits for a small one."""
        payload = encode(message)
        large = len(payload) > CLAIM_CHECK_BYTES
        return fields_of(message, await beating(beat, self.write(message, payload)) if large else "", payload)

    async def write(self, message: Message, payload: bytes) -> str:
        """Returns the path. Raises InvalidInput without an object store."""
        if self._objects is None:
            raise InvalidInput(f"a message of {len(payload)} bytes needs an object store to travel")
        step = getattr(message, "adapter", None)
        version = step.version if step is not None else 0
        path = f"payloads/{message.job}/{version:08d}/{message.id.replace('/', '.')}.{uuid4().hex}"
        objects = self._objects
        await patiently(lambda: objects.write(path, payload))
        return path

    async def get(self, path: str, renew: Callable[[], Awaitable[object]]) -> bytes:
        """Renews a claim check's entry by `renew` while the storage is away. Raises NotFound."""
        objects = self._objects
        if objects is None:
            raise NotFound("the entry is a claim check, but this process has no object store")
        return await patiently(lambda: objects.get(path), meanwhile=renew)
