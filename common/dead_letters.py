"""Dead letters: keep an entry that cannot be worked on, with the reason."""

from typing import Any

from common.bus import Delivery, Undecodable
from common.messages import DeadLetter, encode

MAX_PAYLOAD = 64 << 10
"""Bytes of the original that a dead letter keeps."""


def dead_letter(delivery: Delivery, reason: str) -> DeadLetter:
    """Makes the letter that keeps the original and the reason. One for an unreadable entry has no job; its id is the entry's."""
    message = delivery.message
    about: dict[str, Any] = {"tenant": "", "job": "", "partition": 0}
    if isinstance(message, Undecodable):
        identity, payload = delivery.entry, message.payload
    else:
        about, identity, payload = message.about(), message.id, encode(message)
    return DeadLetter(
        id=identity,
        **about,
        stream=delivery.stream,
        entry=delivery.entry,
        reason=reason,
        deliveries=delivery.deliveries,
        payload=payload[:MAX_PAYLOAD],
    )
