"""Triton kernels for the products of LoRA over segments: rows of tokens that are contiguous and have one adapter.

    lora_shrink      low = s x A', dlow = s dy B
    lora_expand_     y += low B', dx += dlow A
    lora_gradient_   dA += dlow' x, dB' += low' dy

Weights and gradients are [G, R, .]: A as it is, B transposed (a view). Kernels take bfloat16 and add in float32. What they
compute for an adapter depends on its own tokens alone, bit for bit. As operators of torch (`torch.ops.marlaas`), compiled
layers call them too; none has a gradient.

Axes: N tokens, G adapters, R rank, I and O widths of a layer, S segments, T tiles; both are [., 3] of int32: an adapter,
its first token, and the one after its last.
"""

# pyright: basic, reportIndexIssue=false

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_ROWS = 64
"""Most tokens of a tile, which a program computes."""
COLUMNS = 128
"""Of a layer's width, that a program computes at a time."""
LEAST = 16
"""The smallest side of a product on tensor cores."""


def segments_and_tiles(cuts: Sequence[int], device: torch.device, start: int = 0) -> tuple[Tensor, Tensor]:
    """Segments [G, 3] of the adapters whose tokens end at `cuts`, the first of which begin at `start`, and tiles [T, 3]."""
    bounds = list(zip(range(len(cuts)), [start, *cuts], cuts, strict=False))
    tiles = [
        (adapter, row, min(row + TILE_ROWS, stop))
        for adapter, first, stop in bounds
        for row in range(first, stop, TILE_ROWS)
    ]
    segments_S3, tiles_T3 = (torch.tensor(rows, dtype=torch.int32).view(-1, 3) for rows in (bounds, tiles))
    return segments_S3.to(device), tiles_T3.to(device)


@triton.jit
def _places(ranks, columns, width, rank: tl.constexpr, INNER: tl.constexpr):
    """Where an adapter's values lie. `INNER`: those of a column are neighbours, which loads read at once."""
    if INNER:
        return columns * rank + ranks
    return ranks * width + columns


@triton.jit
def shrink_kernel(
    x_ptr, w_ptr, scales_ptr, tiles_ptr, low_ptr, width, apart,
    rank: tl.constexpr, RANK: tl.constexpr, INNER: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    tile = tiles_ptr + 3 * tl.program_id(0)
    adapter, start, stop = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
    rows, ranks, columns = start + tl.arange(0, ROWS), tl.arange(0, RANK), tl.arange(0, COLS)
    is_row, is_rank = rows < stop, ranks < rank
    x = x_ptr + rows.to(tl.int64)[:, None] * width
    low = tl.zeros((ROWS, RANK), tl.float32)
    for first in range(0, width, COLS):
        own = first + columns
        x_part = tl.load(x + own[None, :], mask=is_row[:, None] & (own < width)[None, :], other=0.0)
        w = w_ptr + adapter * apart + _places(ranks[None, :], own[:, None], width, rank, INNER)
        w_part = tl.load(w, mask=(own < width)[:, None] & is_rank[None, :], other=0.0)
        low = tl.dot(x_part, w_part, low, input_precision="ieee")
    low *= tl.load(scales_ptr + adapter)
    out = low_ptr + rows[:, None] * rank + ranks[None, :]
    tl.store(out, low.to(low_ptr.dtype.element_ty), mask=is_row[:, None] & is_rank[None, :])


@triton.jit
def expand_kernel(
    y_ptr, low_ptr, w_ptr, tiles_ptr, width, apart,
    rank: tl.constexpr, RANK: tl.constexpr, INNER: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    tile = tiles_ptr + 3 * tl.program_id(0)
    adapter, start, stop = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
    rows, ranks = start + tl.arange(0, ROWS), tl.arange(0, RANK)
    columns = tl.program_id(1) * COLS + tl.arange(0, COLS)
    is_row, is_rank, is_column = rows < stop, ranks < rank, columns < width
    low = low_ptr + rows[:, None] * rank + ranks[None, :]
    low = tl.load(low, mask=is_row[:, None] & is_rank[None, :], other=0.0)
    w = w_ptr + adapter * apart + _places(ranks[:, None], columns[None, :], width, rank, INNER)
    w = tl.load(w, mask=is_rank[:, None] & is_column[None, :], other=0.0)
    y = y_ptr + rows.to(tl.int64)[:, None] * width + columns[None, :]
    is_y = is_row[:, None] & is_column[None, :]
    total = tl.dot(low, w, tl.load(y, mask=is_y, other=0.0).to(tl.float32), input_precision="ieee")
    tl.store(y, total.to(y_ptr.dtype.element_ty), mask=is_y)


@triton.jit
def gradient_kernel(
    grads_ptr, low_ptr, x_ptr, segments_ptr, width, apart,
    rank: tl.constexpr, RANK: tl.constexpr, INNER: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    segment = segments_ptr + 3 * tl.program_id(0)
    adapter, start, stop = tl.load(segment).to(tl.int64), tl.load(segment + 1), tl.load(segment + 2)
    ranks, columns = tl.arange(0, RANK), tl.program_id(1) * COLS + tl.arange(0, COLS)
    is_rank, is_column = ranks < rank, columns < width
    total = tl.zeros((RANK, COLS), tl.float32)
    for first in range(start, stop, ROWS):
        rows = first + tl.arange(0, ROWS)
        is_row = rows < stop
        low = low_ptr + rows[None, :] * rank + ranks[:, None]
        low = tl.load(low, mask=is_rank[:, None] & is_row[None, :], other=0.0)
        x = x_ptr + rows.to(tl.int64)[:, None] * width + columns[None, :]
        x = tl.load(x, mask=is_row[:, None] & is_column[None, :], other=0.0)
        total = tl.dot(low, x, total, input_precision="ieee")
    grads = grads_ptr + adapter * apart + _places(ranks[:, None], columns[None, :], width, rank, INNER)
    is_grad = is_rank[:, None] & is_column[None, :]
    tl.store(grads, tl.load(grads, mask=is_grad, other=0.0) + total, mask=is_grad)


def _sizes(weights_GRI: Tensor) -> dict[str, Any]:
    """What kernels are compiled for. Raises ValueError for weights that are neither rows of ranks nor their transpose."""
    (rank, width), (_, by_rank, by_column) = weights_GRI.shape[1:], weights_GRI.stride()
    inner = by_column != 1
    if (by_rank, by_column) != (1, rank) if inner else by_rank != width and rank > 1:
        raise ValueError(f"an adapter's matrix, or its transpose, must be contiguous: strides {weights_GRI.stride()}")
    padded = max(LEAST, triton.next_power_of_2(rank))
    return {"rank": rank, "RANK": padded, "INNER": inner, "ROWS": TILE_ROWS, "COLS": COLUMNS}


def lora_shrink(x_NI: Tensor, weights_GRI: Tensor, scales_G: Tensor, tiles_T3: Tensor) -> Tensor:
    """s x W' of each adapter's own tokens, [N, R]; rows outside of all tiles are not written. `scales_G`: float32."""
    width, x_NI, low_NR = x_NI.shape[1], x_NI.contiguous(), _low_like(x_NI, weights_GRI)
    if len(tiles_T3):
        given = (x_NI, weights_GRI, scales_G, tiles_T3, low_NR, width, weights_GRI.stride(0))
        shrink_kernel[(len(tiles_T3),)](*given, **_sizes(weights_GRI))
    return low_NR


def lora_expand_(y_NO: Tensor, low_NR: Tensor, weights_GRO: Tensor, tiles_T3: Tensor) -> None:
    """Adds low W of each adapter's own tokens to the contiguous `y_NO`."""
    width = y_NO.shape[1]
    if len(tiles_T3):
        grid = (len(tiles_T3), triton.cdiv(width, COLUMNS))
        expand_kernel[grid](y_NO, low_NR, weights_GRO, tiles_T3, width, weights_GRO.stride(0), **_sizes(weights_GRO))


def lora_gradient_(grads_GRI: Tensor, low_NR: Tensor, x_NI: Tensor, segments_S3: Tensor) -> None:
    """Adds low' x of each adapter's own tokens to its gradient in float32."""
    width = x_NI.shape[1]
    grid = (len(segments_S3), triton.cdiv(width, COLUMNS))
    given = (grads_GRI, low_NR, x_NI.contiguous(), segments_S3, width, grads_GRI.stride(0))
    gradient_kernel[grid](*given, **_sizes(grads_GRI))


def _low_like(x_NI: Tensor, weights_GRI: Tensor, *_: Tensor) -> Tensor:
    return x_NI.new_empty(len(x_NI), weights_GRI.shape[1])


def _nothing(*_: Any) -> None:
    return None


_LIBRARY = torch.library.Library("marlaas", "FRAGMENT")
_LIBRARY.define("lora_shrink(Tensor x, Tensor weights, Tensor scales, Tensor tiles) -> Tensor")
_LIBRARY.define("lora_expand_(Tensor(a!) y, Tensor low, Tensor weights, Tensor tiles) -> ()")
_LIBRARY.define("lora_gradient_(Tensor(a!) grads, Tensor low, Tensor x, Tensor segments) -> ()")
for _name, _computes, _fake in (
    ("lora_shrink", lora_shrink, _low_like),
    ("lora_expand_", lora_expand_, _nothing),
    ("lora_gradient_", lora_gradient_, _nothing),
):
    _LIBRARY.impl(_name, _computes, "CompositeExplicitAutograd")
    torch.library.register_fake(f"marlaas::{_name}", _fake, lib=_LIBRARY)
