"""Finds of all payloads at once what each has in common with the one before, as `sent_once` finds it of one after the other."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from common.repeats import LEAST

Alike = tuple[int, int]
"""Numbers of bytes with which a payload begins, and ends, like the one before it; those at its end are none of those at its beginning."""


def fields_after(payload: bytes, alike: Alike) -> list[Any]:
    """The fields of an entry that follows on another, as the script that settles takes them."""
    head, tail = alike
    if head + tail < LEAST:
        return ["payload", payload]
    return ["like", head, tail, payload[head : len(payload) - tail]]


def alike(payloads: Sequence[bytes]) -> list[Alike]:
    """Compares each payload but the first with the one before."""
    lengths = np.fromiter(map(len, payloads), np.int64, len(payloads))
    width = int(lengths.max()) + 1
    from_left, from_right = (
        _bytes(payloads, width),
        _bytes([payload.rjust(width, b"\0") for payload in payloads], width),
    )
    least = np.minimum(lengths[1:], lengths[:-1])
    heads = np.minimum(_first_difference(from_left), least)
    tails = np.minimum(_first_difference(from_right[:, ::-1]), least - heads)
    return list(zip(heads.tolist(), tails.tolist(), strict=True))


def _bytes(payloads: Sequence[bytes], width: int) -> np.ndarray:
    """u1 [payloads, width], zeros behind each payload."""
    return np.array(payloads, f"S{width}").view(np.uint8).reshape(len(payloads), width)


def _first_difference(rows: np.ndarray) -> np.ndarray:
    """The first column in which each row but the first differs from the one before; the last if they are equal."""
    differs = rows[1:] != rows[:-1]
    differs[:, -1] = True
    return differs.argmax(1)
