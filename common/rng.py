"""Counter-based random numbers: each is a pure function of (seed, purpose, coordinates).

A generator's state would make a row's tokens depend on what other rows or jobs drew before it, and on the worker. Without
one a repeat after a death gives the same bits, and checkpoints hold no random state.

Philox 4x32 with 10 rounds (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), vectorised in numpy.
"""

import hashlib
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

FEISTEL_ROUNDS = 6
_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def philox(key: tuple[Any, Any], counter: list[np.ndarray]) -> list[np.ndarray]:
    """Ten rounds. `key`: two 32-bit words, ints or uint64 arrays that broadcast against the counter.

    `counter`: four uint64 arrays of 32-bit words; returns four such arrays.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (
            (p1 >> _SHIFT) ^ c1 ^ np.uint64(k0),
            p1 & _MASK,
            (p0 >> _SHIFT) ^ c3 ^ np.uint64(k1),
            p0 & _MASK,
        )
        k0, k1 = (k0 + _W0) & 0xFFFFFFFF, (k1 + _W1) & 0xFFFFFFFF
    return [c0, c1, c2, c3]


def bits(seed: int, purpose: str, *coordinates: Any) -> np.ndarray:
    """64 random bits for each point. At most four integer coordinates below 2**32, which broadcast."""
    return _bits(key_of(seed, purpose), coordinates)


def uniform(seed: int, purpose: str, *coordinates: Any) -> np.ndarray:
    """Float64 in [0, 1), one for each point, of the broadcast shape of the coordinates."""
    return _unit(bits(seed, purpose, *coordinates))


def permutation(seed: int, epoch: int, n: int) -> np.ndarray:
    """The order of a training file's n items in one epoch: int64 [n]."""
    return np.argsort(bits(seed, "data_order", epoch, np.arange(n)), kind="stable")


def permuted(seed: int, epoch: int, n: int, place: int) -> int:
    """One place of such an order, for files too large to draw it whole. Not the order of `permutation`.

    A Feistel network permutes all numbers below a power of 4, and repeats on results of n or more (cycle walking: Black
    and Rogaway 2002, "Ciphers with arbitrary finite domains").
    """
    half_bits = ((n - 1).bit_length() + 1) // 2
    mask = (1 << half_bits) - 1
    while True:
        left, right = place >> half_bits, place & mask
        for turn in range(FEISTEL_ROUNDS):
            digest = hashlib.blake2b(b"%d %d %d %d" % (seed, epoch, turn, right), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest) & mask)
        place = left << half_bits | right
        if place < n:
            return place


def key_of(seed: int, purpose: str) -> tuple[int, int]:
    """The two 32-bit key words under which `bits` and `uniform` draw for this seed and purpose."""
    tag = zlib.crc32(purpose.encode())
    return (seed ^ tag) & 0xFFFFFFFF, ((seed >> 32) ^ (tag * 0x85EBCA6B)) & 0xFFFFFFFF


def uniform_rows(keys: np.ndarray, *coordinates: Any) -> np.ndarray:
    """Draws as `uniform` does, for many seeds and purposes at once.

    `keys` uint64 [n, 2] are rows of `key_of`; the coordinates broadcast to [n, m]; returns float64 [n, m].
    """
    return _unit(_bits((keys[:, :1], keys[:, 1:]), coordinates))


def _bits(key: tuple[Any, Any], coordinates: Sequence[Any]) -> np.ndarray:
    if len(coordinates) > 4:
        raise ValueError("at most four coordinates")
    words = [np.asarray(c, np.uint64) & _MASK for c in coordinates] + [np.zeros((), np.uint64)] * (4 - len(coordinates))
    high, low, _, _ = philox(key, [np.array(w) for w in np.broadcast_arrays(*words)])
    return (high << _SHIFT) | low


def _unit(drawn: np.ndarray) -> np.ndarray:
    return (drawn >> np.uint64(11)).astype(np.float64) * 2.0**-53
