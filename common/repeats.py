"""Sends once what several entries have in common, as the first turns of a group do: of each but the first only what is different.

    entry            its payload
    next entry       how many bytes of that its own begins and ends with, and what is between

The script that settles an entry puts the payloads together again, so each entry is as whole as any other.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

LEAST = 64
"""Bytes in common that are worth it."""


def sent_once(entries: Sequence[list[Any]]) -> list[list[Any]]:
    """Fields of entries, as XADD takes them, in the form that the script takes in their place."""
    return [*entries[:1], *(_after(before, fields) for before, fields in pairwise(entries))]


def num_same(one: bytes, other: bytes) -> int:
    """The number of bytes with which both begin."""
    least = min(len(one), len(other))
    differ = int.from_bytes(one[:least], "little") ^ int.from_bytes(other[:least], "little")
    return ((differ & -differ).bit_length() - 1) // 8 if differ else least


def num_same_at_end(one: bytes, other: bytes) -> int:
    """The number of bytes with which both end."""
    differ = int.from_bytes(one, "big") ^ int.from_bytes(other, "big")
    same = ((differ & -differ).bit_length() - 1) // 8 if differ else len(one)
    return min(same, len(one), len(other))


def _after(before: list[Any], fields: list[Any]) -> list[Any]:
    """The fields of an entry that follows on another."""
    if before[0] != "payload" or fields[0] != "payload" or len(fields) != 2:
        return fields
    one, other = before[1], fields[1]
    head = num_same(one, other)
    tail = num_same_at_end(one[head:], other[head:])
    return ["like", head, tail, other[head : len(other) - tail]] if head + tail >= LEAST else fields
