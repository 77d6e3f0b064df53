"""Rotary embedding of queries and keys, with their norm, compiled for this machine's processor: one pass where torch takes eight.

Importing this compiles it; see `decode_kernel.py`.
"""

import numpy as np

from rollout_service.embedded.backbone.decode_kernel import F32, compiled, inlined

SIGNATURE = "void(f4[:,:,::1], i8, f4[:,::1], f4, f4[:,::1], f4[:,::1], i8[::1])"


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

    `qkv` [N, H + 2K, D]; `weight` of the norm [num, D], or [0, D] without one; `cos` and `sin` [positions, D], the first half of the
    sines negative; `positions` [N].
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


rotate = compiled(_rotate, SIGNATURE)
