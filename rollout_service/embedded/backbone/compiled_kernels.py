"""Kernels compiled for this machine's processor by numba: on a CPU, torch's products of so few rows are mostly calls.

    attend   attention of few new tokens a row
    rotate   rotary embedding of queries and keys, with their norm: one pass where torch takes eight
    draw     numbers of `common.rng.uniform_rows` (Philox), to the last bit: no call of numpy for each of its ten rounds

Importing this compiles them: seconds, or milliseconds if numba has the code in its cache. A row's result depends on that row
only, and a NaN stays in its row.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np

F32, I32 = np.float32, np.int32
LOG2_E = F32(1.4426950408889634)
LEAST = F32(-126)
"""The least power of two that is a normal number: smaller weights count as this."""
C1, C2, C3, C4, C5, C6 = (
    F32(c) for c in (0.693147180559, 0.240226506959, 0.055504108664, 0.009618129107, 0.001333355814, 0.000154035303)
)
"""2^y for |y| <= 1/2 as a polynomial: the series of exp(y ln 2), good to float32's last digit."""
FAST = {"reassoc", "contract", "arcp", "nsz"}
"""Sums in any order. Numbers that are none, or infinite, count as such."""

OPTIONS: dict[str, Any] = {"nogil": True, "fastmath": FAST, "error_model": "numpy"}
F = TypeVar("F", bound=Callable[..., Any])
inlined: Callable[[F], F] = numba.njit(**OPTIONS)  # pyright: ignore
ATTEND = "void(f4[:,:,::1], f4[:,:,:,::1], i8[:,::1], f4[:,:,::1], f4, i8)"
ROTATE = "void(f4[:,:,::1], i8, f4[:,::1], f4, f4[:,::1], f4[:,::1], i8[::1])"
DRAW = "void(u8[:,::1], u8[:,::1], u8[::1], f8[:,::1])"

U64 = np.uint64
M0, M1, W0, W1 = U64(0xD2511F53), U64(0xCD9E8D57), U64(0x9E3779B9), U64(0xBB67AE85)
MASK, WORD, UNUSED_BITS = U64(0xFFFFFFFF), U64(32), U64(11)
"""Philox' multipliers and Weyl constants, and how it cuts words."""


@inlined  # pyright: ignore[reportUntypedFunctionDecorator]
def _score(query, seen, k, scale, weights):  # pyright: ignore
    """Writes the scores of a query [D] with key head k of `seen` [positions, 2K, D]. Returns their maximum."""
    largest = F32(-np.inf)
    for at in range(seen.shape[0]):
        score = F32(0)
        for d in range(query.shape[0]):
            score += query[d] * seen[at, k, d]
        score *= scale
        weights[at] = score
        if score > largest:
            largest = score
    return largest


@inlined  # pyright: ignore[reportUntypedFunctionDecorator]
def _weigh(weights, num, largest, powers, powers_as_bits):  # pyright: ignore
    """Makes weights of scores: exp(score - largest), as 2^(whole + rest). Returns their sum."""
    for at in range(num):
        power = (weights[at] - largest) * LOG2_E
        if power < LEAST:
            power = LEAST
        whole = I32(power - F32(0.5))
        rest = power - F32(whole)
        powers_as_bits[at] = (whole + I32(127)) << I32(23)
        weights[at] = F32(1) + rest * (C1 + rest * (C2 + rest * (C3 + rest * (C4 + rest * (C5 + rest * C6)))))
    total = F32(0)
    for at in range(num):
        weights[at] *= powers[at]
        total += weights[at]
    return total


@inlined  # pyright: ignore[reportUntypedFunctionDecorator]
def _mix(weights, share, seen, v, found):  # pyright: ignore
    """Writes the sum of value head v of `seen`, by weight."""
    for d in range(found.shape[0]):
        found[d] = F32(0)
    for at in range(seen.shape[0]):
        weight = weights[at] * share
        for d in range(found.shape[0]):
            found[d] += weight * seen[at, v, d]


def _attend(qkv, cache, places, out, scale, window):  # pyright: ignore
    """Writes each new token's keys and values into its row's cache, and its attention into `out`.

    `qkv` [N, H + 2K, D]; `cache` [rows, L, 2K, D]; `places` [n, 3]: each new token's row of `qkv` and `out`, row of the cache, and
    position, a row's in order; `out` [N, H, D]. `scale`: of scores; `window`: positions that a position sees, itself included.
    """
    num_heads, kv_heads = out.shape[1], cache.shape[2] // 2
    group = num_heads // kv_heads
    weights, powers_as_bits = np.empty(cache.shape[1], F32), np.empty(cache.shape[1], I32)
    powers = powers_as_bits.view(F32)
    for n in range(places.shape[0]):
        r, row, end = places[n, 0], places[n, 1], places[n, 2] + 1
        seen, new = cache[row, max(0, end - window) : end], cache[row, end - 1]
        for j in range(2 * kv_heads):
            for d in range(new.shape[1]):
                new[j, d] = qkv[r, num_heads + j, d]
        for h in range(num_heads):
            largest = _score(qkv[r, h], seen, h // group, scale, weights)
            total = _weigh(weights, seen.shape[0], largest, powers, powers_as_bits)
            _mix(weights, F32(1) / total, seen, kv_heads + h // group, out[r, h])


@inlined  # pyright: ignore[reportUntypedFunctionDecorator]
def _normalise(head, weight, eps):  # pyright: ignore
    """RMSNorm of a head [D], in place."""
    total = F32(0)
    for d in range(head.shape[0]):
        total += head[d] * head[d]
    factor = F32(1) / np.sqrt(total / F32(head.shape[0]) + eps)
    for d in range(head.shape[0]):
        head[d] *= factor * weight[d]


def _rotate(qkv, num, weight, eps, cos, sin, positions):  # pyright: ignore
    """Normalises and rotates the first `num` heads of each row, in place.

    `qkv` [N, H + 2K, D]; `weight` of the norm [num, D], or [0, D] without one; `cos` and `sin` [positions, D], the sines' first
    half negative; `positions` [N].
    """
    half = qkv.shape[2] // 2
    for n in range(qkv.shape[0]):
        c, s = cos[positions[n]], sin[positions[n]]
        for h in range(num):
            head = qkv[n, h]
            if weight.shape[0]:
                _normalise(head, weight[h], eps)
            for d in range(half):
                first, second = head[d], head[d + half]
                head[d] = first * c[d] + second * s[d]
                head[d + half] = second * c[d + half] + first * s[d + half]


@inlined  # pyright: ignore[reportUntypedFunctionDecorator]
def _bits(k0, k1, c0, c1, c2, c3):  # pyright: ignore
    """See `common.rng.philox`: the first two words of its ten rounds, as one."""
    for _ in range(10):
        p0, p1 = c0 * M0, c2 * M1
        c0, c1, c2, c3 = (p1 >> WORD) ^ c1 ^ k0, p1 & MASK, (p0 >> WORD) ^ c3 ^ k1, p0 & MASK
        k0, k1 = (k0 + W0) & MASK, (k1 + W1) & MASK
    return (c0 << WORD) | c1


def _draw(keys, coordinates, first, out):  # pyright: ignore
    """Writes the numbers of each row from a last coordinate on.

    `keys` [n, 2]: rows of `common.rng.key_of`; `coordinates` [n, 3]; `first` [n]; `out` [n, m].
    """
    for n in range(out.shape[0]):
        for m in range(out.shape[1]):
            at = first[n] + U64(m)
            drawn = _bits(keys[n, 0], keys[n, 1], coordinates[n, 0], coordinates[n, 1], coordinates[n, 2], at)
            out[n, m] = np.float64(drawn >> UNUSED_BITS) * 2.0**-53


def compiled(function: Callable[..., None], signature: str) -> Callable[..., None]:
    """Compiles for a signature; caches the code where a folder for it can be written."""
    try:
        return numba.njit(signature, cache=True, **OPTIONS)(function)
    except RuntimeError as error:
        if "cannot cache" not in str(error):
            raise
        return numba.njit(signature, **OPTIONS)(function)


attend = compiled(_attend, ATTEND)
rotate = compiled(_rotate, ROTATE)
draw = compiled(_draw, DRAW)
