"""Sends once what neighbouring entries have in common, as the turns of a group do: of each but the first only what is different.

    entry            its payload
    next entry       how many bytes of that its own begins and ends with, and what is between

The script that settles entries puts the payloads together again, so each entry is as whole as any other.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

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
    while same < least:
        end = min(same + size, least)
        mine, yours = one[same:end], other[same:end]
        if mine != yours:
            return same + _num_same(mine, yours, "little")
        same, size = end, 2 * size
    return same


def num_same_at_end(one: bytes, other: bytes) -> int:
    """The number of bytes with which both end. Looks at little more than these."""
    num_one, num_other, same, size = len(one), len(other), 0, PIECE
    least = min(num_one, num_other)
    while same < least:
        end = min(same + size, least)
        mine, yours = one[num_one - end : num_one - same], other[num_other - end : num_other - same]
        if mine != yours:
            return same + _num_same(mine, yours, "big")
        same, size = end, 2 * size
    return same


def _num_same(one: bytes, other: bytes, order: Literal["little", "big"]) -> int:
    """The same of two pieces that differ, as long as each other. `order`: "little" from their beginning, "big" from their end."""
    differ = int.from_bytes(one, order) ^ int.from_bytes(other, order)
    return ((differ & -differ).bit_length() - 1) // 8


def _after(before: list[Any], fields: list[Any]) -> list[Any]:
    """The fields of an entry that follows on another."""
    (before_name, one, *_), (name, other, *rest) = before, fields
    if before_name != "payload" or name != "payload":
        return fields
    head = num_same(one, other)
    tail = num_same_at_end(one[head:], other[head:])
    return ["like", head, tail, other[head : len(other) - tail], *rest] if head + tail >= LEAST else fields
