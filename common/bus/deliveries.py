"""Entries of streams as workers hold them, and what settles them."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from common.wire.codec import AnyMessage
from common.wire.history import History
from common.wire.messages import Message

Out = tuple[str, Message]  # stream key, message


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
    """New progress on an entry. In Redis it is one string: a head, which is replaced, and a body, which grows."""

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
