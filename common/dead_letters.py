"""What becomes of an entry that cannot be worked on."""

from typing import Any

from common.bus import Delivery, Undecodable
from common.messages import DeadLetter, encode

MAX_PAYLOAD = 64 << 10
"""Bytes of the original that a dead letter keeps."""


def dead_letter(delivery: Delivery, reason: str) -> DeadLetter:
    """The letter that keeps the original and tells why. What cannot be read belongs to no job: its id is its entry's."""
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
