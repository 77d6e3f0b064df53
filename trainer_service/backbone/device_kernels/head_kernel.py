"""A Triton kernel from logits to log-probs of targets, and to the gradient of each by its logits, in the logits' place.

Reads them twice and writes them once. The normaliser is added up as the maximum grows (Milakov and Gimelshein 2018,
arXiv 1805.02867). Axes: M targets, V vocabulary.
"""

# pyright: basic, reportIndexIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS, WARPS = 4096, 4  # logits of a target that a program holds at a time, and what computes them


@triton.jit
def logprobs_kernel(
    logits_ptr, targets_ptr, temperatures_ptr, out_ptr, vocab, SLOPES: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    row, columns = tl.program_id(0), tl.arange(0, COLS)
    logits = logits_ptr + row.to(tl.int64) * vocab
    inverse, target = 1.0 / tl.load(temperatures_ptr + row), tl.load(targets_ptr + row)
    chosen = tl.load(logits + target).to(tl.float32) * inverse
    top, total = float("-inf"), 0.0
    for first in range(0, vocab, COLS):
        score = tl.load(logits + first + columns, mask=columns < vocab - first, other=float("-inf")).to(tl.float32)
        score *= inverse
        higher = tl.maximum(top, tl.max(score, 0))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(score - higher), 0)
        top = higher
    normaliser = top + tl.log(total)
    tl.store(out_ptr + row, chosen - normaliser)
    if SLOPES:
        tl.debug_barrier()  # each thread has read the target's logit
        for first in range(0, vocab, COLS):
            place, is_column = logits + first + columns, columns < vocab - first
            score = tl.load(place, mask=is_column, other=float("-inf")).to(tl.float32) * inverse
            slope = tl.where(first + columns == target, 1.0, 0.0) - tl.exp(score - normaliser)
            tl.store(place, (slope * inverse).to(logits_ptr.dtype.element_ty), mask=is_column)


@torch.library.custom_op("marlaas::head_logprobs_", mutates_args=("logits_MV",))
def head_logprobs_(logits_MV: Tensor, targets_M: Tensor, temperatures_M: Tensor, slopes: bool) -> Tensor:
    """float32 log_softmax(logits / temperature) of each target, [M]. `slopes`: contiguous logits become its derivative by them,
    (one-hot - softmax) / temperature; else they stay."""
    logprobs_M, sizes = torch.empty_like(temperatures_M), {"SLOPES": slopes, "COLS": COLUMNS, "num_warps": WARPS}
    logprobs_kernel[(len(targets_M),)](logits_MV, targets_M, temperatures_M, logprobs_M, logits_MV.shape[1], **sizes)
    return logprobs_M


@head_logprobs_.register_fake
def _(logits_MV: Tensor, targets_M: Tensor, temperatures_M: Tensor, slopes: bool) -> Tensor:
    return torch.empty_like(temperatures_M)
