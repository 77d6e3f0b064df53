"""Attention over packed sequences, for transformers' modules: plain SDPA, a row at a time, on every device.

    pack  | tree 1: beginning, branch, branch | tree 2 | tree 3: beginning, ...        no padding, [N] positions

A position sees what precedes it in its own branch and in its tree's beginning; in a layer with a sliding window, at most
`window` - 1 of them. So the queries of a branch, or of a block of a row, are the last of the keys that they may see, and
the lower right corner of one mask serves them all:

    keys of the row     0 1 2 3 4 5 6
    last three queries  x x x x x . .
                        x x x x x x .
                        x x x x x x x

Axes: N positions of a pack, T of a sequence, n queries and m keys of a row, H query heads, K key/value heads, D head size.
"""

import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from base_model.modules import passed_on
from common.models.footprint import MASK_QUERIES
from trainer_service.packing import Tree

T = TypeVar("T")
NAME = "marlaas_packed"
"""The name by which transformers knows this attention."""
ALIGNED = 16
"""CUDA's kernels want rows of masks to begin at multiples of so many numbers, or they copy masks."""
QUERIES = MASK_QUERIES - ALIGNED
"""Queries of a block."""


Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q [1, H, n, D], k and v [1, K, m, D] of one row -> [1, H, n, D]; the queries are the row's last."""


@dataclass(frozen=True, slots=True)
class PackSpan:
    """One sequence's place in a pack."""

    length: int
    beginning: int  # positions that its rows share; all of them, if it is one row
    branches: tuple[slice, ...]  # own positions of the rows that have some, counted from its start

    @classmethod
    def of(cls, tree: Tree) -> "PackSpan":
        ends = np.cumsum(np.bincount(tree.branches)).tolist()
        branches = [slice(start, stop) for start, stop in itertools.pairwise(ends) if stop > start]
        return cls(len(tree), ends[0], tuple(branches))


@dataclass(frozen=True, slots=True)
class AttentionRuns:
    """A pack as runs of queries, each with a run of keys, of which the last query sees all, and each earlier one a key less.

    a tree:          beginning | branch 1 | branch 2
    runs of queries  beginning | branch 1 | branch 2
    runs of keys     beginning | beginning, branch 1 | beginning, branch 2
    """

    keys_m: Tensor  # int32, each key's place in the pack
    query_cuts: Tensor  # int32 [runs + 1], where runs begin, and the last one ends
    key_cuts: Tensor
    uses_m: Tensor  # int32, places of keys in the runs: those of a position side by side
    use_cuts: Tensor  # int32 [N + 1], where each position's begin
    most: Tensor  # on the host: most queries of a run, most keys, and whether keys are others than their own positions

    @classmethod
    def of(cls, spans: Sequence[PackSpan], device: torch.device) -> "AttentionRuns":
        keys: list[np.ndarray] = []
        queries: list[int] = []
        start = 0
        for span in spans:
            own = np.arange(start, start + span.length)
            first = own[: span.beginning]
            keys += [first, *(np.concatenate([first, own[branch]]) for branch in span.branches)]
            queries += [span.beginning, *(branch.stop - branch.start for branch in span.branches)]
            start += span.length
        counts = [*map(len, keys)]
        keys_m = np.concatenate(keys)
        cuts = [np.cumsum([0, *each]) for each in (queries, counts, np.bincount(keys_m, minlength=start))]
        made = [keys_m, *cuts[:2], keys_m.argsort(kind="stable"), cuts[2]]
        on_device = torch.from_numpy(np.concatenate(made).astype(np.int32)).to(device)
        places, query_cuts, key_cuts, uses, use_cuts = on_device.split([*map(len, made)])
        most = torch.tensor([max(queries), max(counts), counts != queries])
        return cls(places, query_cuts, key_cuts, uses, use_cuts, most)


@dataclass(frozen=True, slots=True)
class Pack:
    """Sequences end to end, on the device."""

    tokens_N: Tensor
    positions_N: Tensor
    predictors_M: Tensor  # index in the pack
    spans: Sequence[PackSpan]
    runs: AttentionRuns
    longest: int  # positions of a row
    of_all_layers: dict[tuple[Any, ...], Any] = field(default_factory=dict[tuple[Any, ...], Any])
    """Things that attention has made for all layers."""
    windows: set[int | None] = field(default_factory=set[int | None])
    """Windows that layers have asked for."""

    @classmethod
    def of(cls, trees: Sequence[Tree], device: torch.device) -> "Pack":
        starts = np.cumsum([0, *map(len, trees)])

        def on_device(arrays: Sequence[np.ndarray]) -> Tensor:
            return torch.from_numpy(np.concatenate(arrays)).to(device)

        positions = [tree.positions for tree in trees]
        spans = [PackSpan.of(tree) for tree in trees]
        predictors = [row_M + start for tree, start in zip(trees, starts, strict=False) for row_M in tree.predictors]
        return cls(
            on_device([tree.tokens for tree in trees]),
            on_device(positions),
            on_device(predictors),
            spans,
            AttentionRuns.of(spans, device),
            1 + int(max(map(np.max, positions))),
        )

    def once(self, make: Callable[..., T], *about: Hashable) -> T:
        """Calls `make(pack, *about)` when it is first asked for; all layers share what comes of it."""
        key = (make, *about)
        if key not in self.of_all_layers:
            self.of_all_layers[key] = make(self, *about)
        return self.of_all_layers[key]


def corner_mask(pack: Pack, window: int | None, dtype: torch.dtype) -> Tensor:
    """The numbers added to scores, [MASK_QUERIES, the pack's longest row or a few more]: see the top."""
    size, device = _aligned(pack.longest), pack.tokens_N.device
    queries = torch.arange(MASK_QUERIES, 0, -1, device=device)[:, None]
    ahead = torch.arange(size, 0, -1, device=device) - queries  # positions from a key to the query
    seen = (ahead >= 0) & (ahead < (window or size))
    return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, -math.inf)


def packed_attention(
    pack: Pack, query: Tensor, key: Tensor, value: Tensor, window: int | None, scaling: float | None
) -> Tensor:
    """See PackAttention."""
    attend = partial(_attended, pack=pack, window=window, scaling=scaling)
    lengths = [span.length for span in pack.spans]
    queries, keys, values = (each.split(lengths, dim=2) for each in (query, key, value))
    found: list[Tensor] = []
    for span, q, k, v in zip(pack.spans, queries, keys, values, strict=True):
        first = slice(span.beginning)
        found.append(attend(q[:, :, first], k[:, :, first], v[:, :, first]))
        if span.branches:
            found.append(_Branches.apply(q, k, v, span, attend))  # pyright: ignore
    return torch.cat(found, dim=2).transpose(1, 2)


class _Branches(torch.autograd.Function):
    """A tree's branches, each over the tree's beginning and itself: queries [1, H, T, D] -> [1, H, T - beginning, D]. The
    backward computes them again: kept, the beginning's keys and values would be stored once for each.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, span: PackSpan, attend: Attention) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.span, ctx.attend = span, attend
        return torch.cat([attend(*_row(q, k, v, span, own)) for own in span.branches], dim=2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        span: PackSpan = ctx.span
        q, k, v = ctx.saved_tensors
        of_q, *of_keys = (torch.zeros_like(each) for each in (q, k, v))
        parts = grads[0].split([own.stop - own.start for own in span.branches], dim=2)
        for own, grad in zip(span.branches, parts, strict=True):
            row = [each.detach().requires_grad_() for each in _row(q, k, v, span, own)]
            with torch.enable_grad():
                found = ctx.attend(*row)
            of_q[:, :, own], *of_row = torch.autograd.grad(found, row, grad)
            for total, one in zip(of_keys, of_row, strict=True):
                total[:, :, : span.beginning] += one[:, :, : span.beginning]
                total[:, :, own] = one[:, :, span.beginning :]
        return of_q, *of_keys, None, None


def _row(q: Tensor, k: Tensor, v: Tensor, span: PackSpan, own: slice) -> tuple[Tensor, Tensor, Tensor]:
    """The queries of a branch, and all keys and values of its row."""
    k, v = (torch.cat([each[:, :, : span.beginning], each[:, :, own]], dim=2) for each in (k, v))
    return q[:, :, own], k, v


def _attended(q: Tensor, k: Tensor, v: Tensor, *, pack: Pack, window: int | None, scaling: float | None) -> Tensor:
    """See Attention. Goes by blocks of queries, which share one mask; plainly causal rows need none."""
    before = k.shape[2] - q.shape[2]
    if not before and (window is None or window >= k.shape[2]):
        return _sdpa(q, k, v, None, scaling)
    mask = pack.once(corner_mask, window, q.dtype)
    found: list[Tensor] = []
    for start in range(0, q.shape[2], QUERIES):
        block = q[:, :, start : start + QUERIES]
        stop = before + start + block.shape[2]
        first = max(0, stop - _aligned(window - 1 + block.shape[2])) if window else 0
        found.append(_masked(block, k[:, :, first:stop], v[:, :, first:stop], mask, scaling))
    return torch.cat(found, dim=2) if len(found) > 1 else found[0]


def _masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float | None) -> Tensor:
    """Attends with the mask's lower right corner. Keys are padded at the end to a multiple of ALIGNED; no query sees those."""
    num_queries, missing = q.shape[2], -k.shape[2] % ALIGNED
    if missing:
        q, k, v = (F.pad(each, (0, 0, 0, missing)) for each in (q, k, v))
    mask_nm = mask[len(mask) - q.shape[2] :, mask.shape[1] - k.shape[2] :]
    return _sdpa(q, k, v, mask_nm, scaling)[:, :, :num_queries]


def _aligned(number: int) -> int:
    return -(-number // ALIGNED) * ALIGNED


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask_nm: Tensor | None, scaling: float | None) -> Tensor:
    """[1, H, n, D]"""
    grouped = q.shape[1] > k.shape[1]
    if grouped and mask_nm is not None and q.is_cuda:  # its kernels with masks want a key for each query head
        k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], dim=1) for each in (k, v))
        grouped = False
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask_nm, is_causal=mask_nm is None, scale=scaling, enable_gqa=grouped
    )


PackAttention = Callable[[Pack, Tensor, Tensor, Tensor, int | None, float | None], Tensor]
"""Attends over a pack: query [1, H, N, D], key and value [1, K, N, D], window or None, scale of scores -> [1, N, H, D]."""


def register(name: str, attend: PackAttention) -> None:
    """Registers this attention with transformers by its name. A call raises InvalidInput for one that a pack has not."""

    def attention(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed: Pack | None = None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        pack = passed_on(packed, others)
        if not torch.compiler.is_compiling():
            pack.windows.add(sliding_window)
        return attend(pack, query, key, value, sliding_window, scaling), None

    AttentionInterface.register(name, attention)


register(NAME, packed_attention)
