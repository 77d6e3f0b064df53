"""Triton kernels for the products of LoRA over segments: rows of tokens that are contiguous and have one adapter.

    lora_shrink      low = x A', dlow = dy B
    lora_expand_     y += low B', dx += dlow A
    lora_gradients   dA = dlow' x, dB' = low' dy

All tensors are contiguous, B as B' [G, R, O]. Sums are float32. What an adapter gets depends on its own tokens alone.

Axes: N tokens, G adapters, R rank, I and O widths of a layer, T tiles. Segments [G, 3] and tiles [T, 3] are int32: an adapter,
its first token, and the one after its last.
"""

# pyright: basic, reportIndexIssue=false

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_ROWS = 64  # most tokens of a tile, which one program computes
COLUMNS = 128  # of a layer's width, that a program computes at a time
LEAST = 16  # the smallest side of a product on tensor cores
WARPS = 8
_COMPILED: dict[tuple[Any, ...], Any] = {}  # by kernel, dtype, device, sizes, and how addresses are aligned


def segments_and_tiles(cuts: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """`cuts`: where each adapter's tokens end."""
    segments = [*zip(range(len(cuts)), [0, *cuts[:-1]], cuts, strict=True)]
    tiles = [
        (i, row, min(row + TILE_ROWS, stop)) for i, first, stop in segments for row in range(first, stop, TILE_ROWS)
    ]
    segments_G3, tiles_T3 = torch.tensor(segments + tiles, dtype=torch.int32).to(device).split([len(cuts), len(tiles)])
    return segments_G3, tiles_T3


@triton.jit
def _span(spans_ptr):
    span = spans_ptr + 3 * tl.program_id(0)
    return tl.load(span).to(tl.int64), tl.load(span + 1), tl.load(span + 2)


@triton.jit
def _read(matrix, rows, stop, columns, width):
    place = matrix + rows.to(tl.int64)[:, None] * width + columns[None, :]
    return tl.load(place, mask=(rows < stop)[:, None] & (columns < width)[None, :], other=0.0)


@triton.jit
def _write(matrix, rows, stop, columns, width, values):
    place = matrix + rows.to(tl.int64)[:, None] * width + columns[None, :]
    tl.store(place, values.to(matrix.dtype.element_ty), mask=(rows < stop)[:, None] & (columns < width)[None, :])


@triton.jit
def shrink_kernel(
    x_ptr, w_ptr, spans_ptr, low_ptr, width,
    rank: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    adapter, start, stop = _span(spans_ptr)
    rows, ranks, low = start + tl.arange(0, ROWS), tl.arange(0, RANK), tl.zeros((ROWS, RANK), tl.float32)
    for first in range(0, width, COLS):
        columns = first + tl.arange(0, COLS)
        w = _read(w_ptr + adapter * rank * width, ranks, rank, columns, width)
        low = tl.dot(_read(x_ptr, rows, stop, columns, width), tl.trans(w), low)
    _write(low_ptr, rows, stop, ranks, rank, low)


@triton.jit
def expand_kernel(
    y_ptr, w_ptr, spans_ptr, low_ptr, width,
    rank: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    adapter, start, stop = _span(spans_ptr)
    rows, ranks = start + tl.arange(0, ROWS), tl.arange(0, RANK)
    columns = tl.program_id(1) * COLS + tl.arange(0, COLS)
    low, y = _read(low_ptr, rows, stop, ranks, rank), _read(y_ptr, rows, stop, columns, width)
    w = _read(w_ptr + adapter * rank * width, ranks, rank, columns, width)
    _write(y_ptr, rows, stop, columns, width, tl.dot(low, w, y.to(tl.float32)))


@triton.jit
def gradients_kernel(
    x_ptr, of_a_ptr, dlow_ptr, inputs, dy_ptr, of_b_ptr, low_ptr, outputs, spans_ptr,
    rank: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    adapter, start, stop = _span(spans_ptr)
    ranks, grads, block = tl.arange(0, RANK), tl.zeros((RANK, COLS), tl.float32), tl.program_id(1)
    if block >= tl.cdiv(inputs, COLS):
        block -= tl.cdiv(inputs, COLS)
        x_ptr, of_a_ptr, dlow_ptr, inputs = dy_ptr, of_b_ptr, low_ptr, outputs
    columns = block * COLS + tl.arange(0, COLS)
    for first in range(start, stop, ROWS):
        rows = first + tl.arange(0, ROWS)
        low = _read(dlow_ptr, rows, stop, ranks, rank)
        grads = tl.dot(tl.trans(low), _read(x_ptr, rows, stop, columns, inputs), grads)
    _write(of_a_ptr + adapter * rank * inputs, ranks, rank, columns, inputs, grads)


def lora_shrink(x_NI: Tensor, weights_GRI: Tensor, tiles_T3: Tensor) -> Tensor:
    """Each token times its adapter's W', [N, R]."""
    low_NR = x_NI.new_empty(len(x_NI), weights_GRI.shape[1])
    _launch(shrink_kernel, (len(tiles_T3), 1, 1), low_NR, x_NI, weights_GRI, tiles_T3, low_NR, x_NI.shape[1])
    return low_NR


def lora_expand_(y_NO: Tensor, low_NR: Tensor, weights_GRO: Tensor, tiles_T3: Tensor) -> None:
    """Adds each token's low times its adapter's W."""
    grid = (len(tiles_T3), -(-y_NO.shape[1] // COLUMNS), 1)
    _launch(expand_kernel, grid, low_NR, y_NO, weights_GRO, tiles_T3, low_NR, y_NO.shape[1])


def lora_gradients(x_NI: Tensor, dlow_NR: Tensor, dy_NO: Tensor, low_NR: Tensor, segments_G3: Tensor) -> list[Tensor]:
    """dlow' x and low' dy over each adapter's tokens, [G, R, I] and [G, R, O]."""
    widths = x_NI.shape[1], dy_NO.shape[1]
    of_a, of_b = made = [x_NI.new_empty(len(segments_G3), low_NR.shape[1], width) for width in widths]
    grid = (len(segments_G3), sum(-(-width // COLUMNS) for width in widths), 1)
    args = (x_NI, of_a, dlow_NR, widths[0], dy_NO, of_b, low_NR, widths[1], segments_G3)
    _launch(gradients_kernel, grid, low_NR, *args)
    return made


def _launch(kernel: Any, grid: tuple[int, int, int], low_NR: Tensor, *args: Tensor | int) -> None:
    """Launches what Triton compiled for the like of these. To look it up by itself takes Triton ten times as long."""
    rank = low_NR.shape[1]
    sizes = (rank, max(LEAST, 1 << (rank - 1).bit_length()), TILE_ROWS, COLUMNS)
    about = (arg if isinstance(arg, int) else arg.data_ptr() % 16 for arg in args)
    key = (kernel.__name__, low_NR.dtype, low_NR.device, rank, *about)
    if (compiled := _COMPILED.get(key)) is not None:
        compiled[grid](*args, *sizes)
    else:
        _COMPILED[key] = kernel[grid](*args, *sizes, num_warps=WARPS)
