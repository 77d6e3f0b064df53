"""Dead letters: keep an entry that cannot be worked on, with the reason."""

from typing import Any

from common.bus.bus import Delivery, Undecodable
from common.bus.streams import NUM_PARTITIONS
from common.wire.codec import encode
from common.wire.messages import DeadLetter

MAX_PAYLOAD = 64 << 10
"""Bytes of the original that a dead letter keeps."""


MAX_REASON = 4096


def dead_letter(delivery: Delivery, reason: str) -> DeadLetter:
    """Makes the letter that keeps the original and the reason. One for an unreadable entry has what can be read of it."""
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
