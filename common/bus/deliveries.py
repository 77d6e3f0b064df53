"""Entries of streams as workers hold them, what settles them, and dead letters."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from common.bus.streams import NUM_PARTITIONS
from common.wire.codec import AnyMessage, encode
from common.wire.history import History
from common.wire.messages import DeadLetter, Message

Out = tuple[str, Message]  # stream key, message

MAX_PAYLOAD = 64 << 10
"""Bytes of the original that a dead letter keeps."""
MAX_REASON = 4096


@dataclass(frozen=True, slots=True)
class Undecodable:
    """The content of an entry that is no message of ours."""

    reason: str
    payload: bytes
    plain: Mapping[str, str]
    """Fields that say whose it is: id, job, partition, epoch, kind; none of a foreign entry."""


@dataclass(frozen=True, slots=True)
class Unfetched(Undecodable):
    """The content of an entry whose payload is in object storage, for those who do not wait for it."""

    fetch: Callable[[], Awaitable["Delivery"]]


async def fetched(delivery: "Delivery") -> "Delivery":
    """The delivery with its payload, however long object storage is away."""
    return await delivery.message.fetch() if isinstance(delivery.message, Unfetched) else delivery


class Delivery(msgspec.Struct, frozen=True):
    """One entry, held by this consumer until it is settled."""

    stream: str
    group: str
    entry: str
    message: AnyMessage | Undecodable
    deliveries: int = 1
    progress: bytes = b""
    """Progress on the entry that an earlier worker kept."""
    history: History | None = None
    """The history on which the entry builds; None: it stands for itself."""
    is_inline: bool = True
    """Its payload stands in the entry, and not in object storage."""

    @property
    def place(self) -> tuple[str, str]:
        """Its stream and entry: entries of two streams that were written in the same millisecond have the same id."""
        return self.stream, self.entry

    @property
    def is_whole(self) -> bool:
        """Does the entry, with its history, say all that the message does?"""
        return self.is_inline and not self.progress


@dataclass(frozen=True, slots=True)
class Idle:
    """A pending entry that nobody renewed."""

    entry: str
    deliveries: int  # up to now
    advanced: bool = False
    """The worker that had it last kept progress on it."""


@dataclass(frozen=True, slots=True)
class Progress:
    """New progress on an entry. Redis holds one string: a head, which is replaced, and a body, which grows."""

    head: bytes
    start: int  # of the tail, in the string
    tail: bytes


NO_PROGRESS = Progress(b"", 0, b"")


@dataclass(frozen=True, slots=True)
class Settlement:
    """A delivery with the messages that it led to, which settle it."""

    delivery: Delivery
    outputs: Sequence[Out] | None = ()
    """None: the entry once more, as it is, for another worker."""
    fields: Sequence[list[Any]] | None = None
    """The outputs as the script that settles takes them, once `Bus.written` made that of them."""
    refers_to: History | None = None
    """The history that the output builds on. Its last item is the input's payload."""


def dead_letter(delivery: Delivery, reason: str) -> DeadLetter:
    """Makes the letter that keeps the original and the reason; of an unreadable entry, what can be read."""
    message = delivery.message
    if isinstance(message, Undecodable):
        plain = message.plain
        about: dict[str, Any] = {
            "tenant": "",
            "job": plain.get("job", ""),
            "partition": _number(plain.get("partition", "")),
        }
        identity, payload = plain.get("id", delivery.entry), message.payload
    else:
        about, identity, payload = message.about(), message.id, encode(message)
    return DeadLetter(
        id=identity,
        **about,
        stream=delivery.stream,
        entry=delivery.entry,
        reason=reason[:MAX_REASON],
        deliveries=delivery.deliveries,
        payload=payload[:MAX_PAYLOAD],
    )


def _number(text: str) -> int:
    return int(text) % NUM_PARTITIONS if text.isdecimal() else 0
