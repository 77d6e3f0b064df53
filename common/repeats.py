"""Sends once what neighbouring entries have in common, as the turns of a group do: of each but the first only what is different.

    entry            its payload
    next entry       how many bytes of that its own begins and ends with, and what is between

The script that settles entries puts the payloads together again, so each entry is as whole as any other.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Literal

PIECE = 64
"""Bytes that are compared at once, first; then ever more."""
LEAST = 32
"""Bytes in common that are worth it."""
Piece = Callable[[bytes, int, int], bytes]
"""A part of some bytes between two places, counted from either end."""


def sent_once(entries: Sequence[list[Any]]) -> list[list[Any]]:
    """Fields of entries, as XADD takes them, in the form that the script takes in their place."""
    return [*entries[:1], *(_after(before, fields) for before, fields in pairwise(entries))]


def num_same(one: bytes, other: bytes) -> int:
    """The number of bytes with which both begin. Looks at little more than these."""
    return _num_same(one, other, _from_start, "little")


def num_same_at_end(one: bytes, other: bytes) -> int:
    """The number of bytes with which both end. Looks at little more than these."""
    return _num_same(one, other, _from_end, "big")


def _num_same(one: bytes, other: bytes, part: Piece, order: Literal["little", "big"]) -> int:
    least, same, size = min(len(one), len(other)), 0, PIECE
    while same < least and part(one, same, end := min(same + size, least)) == part(other, same, end):
        same, size = end, 2 * size
    end = min(same + size, least)
    differ = int.from_bytes(part(one, same, end), order) ^ int.from_bytes(part(other, same, end), order)
    return same + ((differ & -differ).bit_length() - 1) // 8 if differ else same


def _from_start(data: bytes, start: int, end: int) -> bytes:
    return data[start:end]


def _from_end(data: bytes, start: int, end: int) -> bytes:
    return data[len(data) - end : len(data) - start]


def _after(before: list[Any], fields: list[Any]) -> list[Any]:
    """The fields of an entry that follows on another."""
    (before_name, one, *_), (name, other, *rest) = before, fields
    if before_name != "payload" or name != "payload":
        return fields
    head = num_same(one, other)
    tail = num_same_at_end(one[head:], other[head:])
    return ["like", head, tail, other[head : len(other) - tail], *rest] if head + tail >= LEAST else fields
