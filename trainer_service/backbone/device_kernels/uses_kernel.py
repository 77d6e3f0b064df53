"""A Triton kernel that sums the gradients of keys and values over their uses, in a fixed order.

Axes: N positions, m uses, K heads, D head size.
"""

# pyright: basic, reportIndexIssue=false

import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize_on_alignment=["cuts_ptr", "uses_ptr"])
def sum_uses_kernel(
    keys_ptr, values_ptr, of_keys_ptr, of_values_ptr, cuts_ptr, uses_ptr, width: tl.constexpr, COLS: tl.constexpr
):
    row, columns = tl.program_id(0), tl.arange(0, COLS)
    if tl.program_id(1) == 1:
        keys_ptr, of_keys_ptr = values_ptr, of_values_ptr
    total = tl.zeros((COLS,), tl.float32)
    for use in range(tl.load(cuts_ptr + row), tl.load(cuts_ptr + row + 1)):
        place = keys_ptr + tl.load(uses_ptr + use).to(tl.int64) * width + columns
        total += tl.load(place, mask=columns < width, other=0.0).to(tl.float32)
    place = of_keys_ptr + row.to(tl.int64) * width + columns
    tl.store(place, total.to(of_keys_ptr.dtype.element_ty), mask=columns < width)


def sum_uses(keys_mKD: Tensor, values_mKD: Tensor, cuts_N: Tensor, uses_m: Tensor) -> tuple[Tensor, Tensor]:
    """The sums [N, K, D] of contiguous keys and values at `uses_m[cuts_N[n] : cuts_N[n + 1]]`, added in float32. int32 [N + 1], [m]."""
    shape, width = (len(cuts_N) - 1, *keys_mKD.shape[1:]), keys_mKD[0].numel()
    of_keys, of_values = keys_mKD.new_empty(shape), values_mKD.new_empty(shape)
    args = (keys_mKD, values_mKD, of_keys, of_values, cuts_N, uses_m, width, triton.next_power_of_2(width))
    sum_uses_kernel[(shape[0], 2, 1)](*args)
    return of_keys, of_values
