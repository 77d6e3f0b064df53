"""A Triton kernel that sums the gradients of gathered keys and values by the position that they were gathered from.

Adds in float32, a position's in the order of the runs: no atomics, the same bits each time. Axes: N positions of a pack,
m gathered keys, K key/value heads, D head size.
"""

# pyright: basic, reportIndexIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _sums(of_k_ptr, of_v_ptr, k_ptr, v_ptr, cuts_ptr, uses_ptr, width, COLS: tl.constexpr):
    row, columns = tl.program_id(0), tl.arange(0, COLS)
    is_column = columns < width
    k, v = tl.zeros((COLS,), tl.float32), tl.zeros((COLS,), tl.float32)
    for use in range(tl.load(cuts_ptr + row), tl.load(cuts_ptr + row + 1)):
        place = tl.load(uses_ptr + use).to(tl.int64) * width + columns
        k += tl.load(of_k_ptr + place, mask=is_column, other=0.0).to(tl.float32)
        v += tl.load(of_v_ptr + place, mask=is_column, other=0.0).to(tl.float32)
    place = row.to(tl.int64) * width + columns
    tl.store(k_ptr + place, k.to(k_ptr.dtype.element_ty), mask=is_column)
    tl.store(v_ptr + place, v.to(v_ptr.dtype.element_ty), mask=is_column)


def sum_uses(of_k: Tensor, of_v: Tensor, use_cuts: Tensor, uses_m: Tensor) -> tuple[Tensor, Tensor]:
    """[m, K, D] each -> [N, K, D]; see `AttentionRuns`."""
    of_k, of_v, num = of_k.contiguous(), of_v.contiguous(), len(use_cuts) - 1
    k, v = (torch.empty(num, *each.shape[1:], dtype=each.dtype, device=each.device) for each in (of_k, of_v))
    width = of_k.shape[1] * of_k.shape[2]
    _sums[(num,)](of_k, of_v, k, v, use_cuts, uses_m, width, triton.next_power_of_2(width))
    return k, v
