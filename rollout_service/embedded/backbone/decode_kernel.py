"""Attention of one new token a row on keys and values at any address, as a Triton kernel: a row reads its own tokens, wherever its
pool lies. Online softmax after FlashAttention (Dao et al. 2022, arXiv 2205.14135).

Axes: N rows of a forward, H query heads, K key/value heads, D head size.
"""

# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUntypedFunctionDecorator=false

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

BLOCK = tl.constexpr(64)
"""Positions that a program reads at a time."""
LEAST_DOT = 16
"""The smallest side of a product on tensor cores."""


@triton.jit
def _add_block(query, keys, values, is_seen, scale, largest, total, mixed):
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
    scores = tl.where(is_seen[None, :], scores, float("-inf"))
    largest_now = tl.maximum(largest, tl.max(scores, 1))
    shrunk, weights = tl.exp(largest - largest_now), tl.exp(scores - largest_now[:, None])
    mixed = mixed * shrunk[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    return largest_now, total * shrunk + tl.sum(weights, 1), mixed


@triton.jit
def _attend(
    qkv, starts, positions, out, K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, GW: tl.constexpr, DW: tl.constexpr
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position, start = tl.load(positions + row).to(tl.int32), tl.load(starts + row)
    d, g = tl.arange(0, DW), tl.arange(0, GW)
    is_dim, is_query = d < D, (g < G)[:, None] & (d < D)[None, :]
    own, of_query = qkv + row * (G * K + 2 * K) * D, (head * G + g)[:, None] * D + d[None, :]
    query = tl.load(own + of_query, mask=is_query, other=0.0)
    key = tl.load(own + (G * K + head) * D + d, mask=is_dim, other=0.0)
    value = tl.load(own + (G * K + K + head) * D + d, mask=is_dim, other=0.0)

    # Pools are aligned to at least 16 bytes; said here, the loads below take 16 bytes at once.
    cache = tl.multiple_of(start.to(tl.pointer_type(qkv.dtype.element_ty)), 16) + head * D
    new, is_stored = cache + position.to(tl.int64) * (2 * K * D) + d, d < tl.where(start == 0, 0, D)
    tl.store(new, key, mask=is_stored)
    tl.store(new + K * D, value, mask=is_stored)

    # The new token comes from registers: what this program has just stored, its own threads may not see yet.
    largest = tl.sum(query.to(tl.float32) * key.to(tl.float32)[None, :], 1) * D**-0.5
    total = tl.full([GW], 1.0, tl.float32)
    mixed = tl.zeros([GW, DW], tl.float32) + value.to(tl.float32)[None, :]
    for first in range(0, position, BLOCK):
        at = first + tl.arange(0, BLOCK)
        seen, is_read = cache + at.to(tl.int64)[:, None] * (2 * K * D) + d[None, :], (at < position)[:, None] & is_dim
        keys, values = tl.load(seen, mask=is_read, other=0.0), tl.load(seen + K * D, mask=is_read, other=0.0)
        largest, total, mixed = _add_block(query, keys, values, at < position, D**-0.5, largest, total, mixed)
    tl.store(out + row * (G * K * D) + of_query, (mixed / total[:, None]).to(qkv.dtype.element_ty), mask=is_query)


def attend(qkv: Tensor, starts: Tensor, positions: Tensor, num_heads: int) -> Tensor:
    """qkv [N, H + 2K, D], contiguous -> [N, H * D]. `starts` int64 [N]: addresses at which a layer's keys and values [positions, 2K, D]
    of each row begin, multiples of 16; 0 for a row that only fills up the forward. `positions` [N]: of the new tokens, whose keys
    and values are written there. A wrong address is not noticed.
    """
    num, heads, size = qkv.shape
    kv_heads = (heads - num_heads) // 2
    group, out = num_heads // kv_heads, qkv.new_empty(num, num_heads * size)
    widths = (max(LEAST_DOT, triton.next_power_of_2(each)) for each in (group, size))
    kernel: Any = _attend
    kernel[(num, kv_heads)](qkv, starts, positions, out, kv_heads, group, size, *widths)
    return out
