"""Philox, compiled for this machine's processor: numbers of `common.rng.uniform_rows`, to the last bit, of few rows without a call of numpy
for each of its ten rounds.

Importing this compiles it; see `decode_kernel.py`.
"""

import numpy as np

from rollout_service.embedded.backbone.decode_kernel import compiled, inlined

U64 = np.uint64
M0, M1, W0, W1 = U64(0xD2511F53), U64(0xCD9E8D57), U64(0x9E3779B9), U64(0xBB67AE85)
MASK, WORD, UNUSED_BITS = U64(0xFFFFFFFF), U64(32), U64(11)
SIGNATURE = "void(u8[:,::1], u8[:,::1], u8[::1], f8[:,::1])"


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


draw = compiled(_draw, SIGNATURE)
