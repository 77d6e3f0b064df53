"""Sends once what neighbouring entries have in common, as the turns of a group do: of each but the first only what is different.

    entry            its payload
    next entry       how many bytes of that its own begins and ends with, and what is between

The script that settles entries puts the payloads together again, so each entry is as whole as any other.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

PIECE = 64
"""Bytes that are compared at once, first; then ever more."""
LEAST = 32
"""Bytes in common that are worth it."""


def sent_once(entries: Sequence[list[Any]]) -> list[list[Any]]:
    """Fields of entries, as XADD takes them, in the form that the script takes in their place."""
    return [*entries[:1], *(_after(before, fields) for before, fields in pairwise(entries))]


def num_same(one: bytes, other: bytes) -> int:
    """The number of bytes with which both begin. Looks at little more than these."""
    least, same, size = min(len(one), len(other)), 0, PIECE
    while same < least and one[same : (end := min(same + size, least))] == other[same:end]:
        same, size = end, 2 * size
    one, other = one[same : min(same + size, least)], other[same : min(same + size, least)]
    return same + _zeros(int.from_bytes(one, "little") ^ int.from_bytes(other, "little"))


def num_same_at_end(one: bytes, other: bytes) -> int:
    """The number of bytes with which both end. Looks at little more than these."""
    least, same, size = min(len(one), len(other)), 0, PIECE
    while same < least and _last(one, same, end := min(same + size, least)) == _last(other, same, end):
        same, size = end, 2 * size
    one, other = (_last(each, same, min(same + size, least)) for each in (one, other))
    return same + _zeros(int.from_bytes(one, "big") ^ int.from_bytes(other, "big"))


def _last(data: bytes, start: int, end: int) -> bytes:
    """Bytes counted from the end."""
    return data[len(data) - end : len(data) - start]


def _zeros(number: int) -> int:
    """The number of zero bytes with which it ends; of 0 none."""
    return ((number & -number).bit_length() - 1) // 8 if number else 0


def _after(before: list[Any], fields: list[Any]) -> list[Any]:
    """The fields of an entry that follows on another."""
    (before_name, one, *_), (name, other, *rest) = before, fields
    if before_name != "payload" or name != "payload":
        return fields
    head = num_same(one, other)
    tail = num_same_at_end(one[head:], other[head:])
    return ["like", head, tail, other[head : len(other) - tail], *rest] if head + tail >= LEAST else fields
