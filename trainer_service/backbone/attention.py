"""Attention over packed sequences, for transformers' modules: plain SDPA, a sequence at a time, on every device.

    pack  | tree 1: beginning, branch, branch | tree 2 | tree 3: beginning, ...        no padding, [N] positions

A position sees what stands before it in its own branch and in its tree's beginning; in a layer with a sliding window only those
at most `window` - 1 positions of its row before it.

Axes: N positions of a pack, T of a sequence, H query heads, K key/value heads, D head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from common.errors import InvalidInput
from trainer_service.packing import Tree

NAME = "marlaas_packed"
"""The name under which transformers knows this attention."""
NOT_COMPUTED = ("softcap", "s_aux", "position_bias")
"""Additions of other families' attention to scores."""


@dataclass(frozen=True, slots=True)
class PackSpan:
    """One sequence's place in a pack."""

    start: int
    stop: int
    longest: int  # positions of its longest row
    branches_T: Tensor | None  # None: it is one row
    positions_T: Tensor

    def mask(self, window: int | None) -> Tensor | None:
        """The positions that each position sees, [T, T]; None: plainly causal."""
        narrow = window is not None and window < self.longest
        if self.branches_T is None and not narrow:
            return None
        positions_T = self.positions_T
        seen_TT = torch.ones(len(positions_T), len(positions_T), dtype=torch.bool, device=positions_T.device).tril()
        if self.branches_T is not None:
            seen_TT &= (self.branches_T == self.branches_T[:, None]) | (self.branches_T == 0)
        if window is not None:
            seen_TT &= positions_T[:, None] - window < positions_T
        return seen_TT


Masks = dict[tuple[int, int | None], Tensor | None]
"""Masks by span and window."""


@dataclass(frozen=True, slots=True)
class Pack:
    """Sequences end to end, on the device."""

    tokens_N: Tensor
    positions_N: Tensor
    predictors_M: Tensor  # index in the pack
    spans: Sequence[PackSpan]
    masks: Masks = field(default_factory=Masks)
    """Made once, for all layers."""

    @classmethod
    def of(cls, trees: Sequence[Tree], device: torch.device) -> "Pack":
        starts = np.cumsum([0, *map(len, trees)])

        def on_device(arrays: Sequence[np.ndarray]) -> Tensor:
            return torch.from_numpy(np.concatenate(arrays)).to(device)

        positions_N = on_device([tree.positions for tree in trees])
        branches_N = on_device([tree.branches for tree in trees])
        spans = [
            PackSpan(
                start,
                start + len(tree),
                int(tree.positions.max()) + 1,
                branches_N[start : start + len(tree)] if tree.branched else None,
                positions_N[start : start + len(tree)],
            )
            for tree, start in zip(trees, starts.tolist(), strict=False)
        ]
        predictors = [row_M + start for tree, start in zip(trees, starts, strict=False) for row_M in tree.predictors]
        return cls(on_device([tree.tokens for tree in trees]), positions_N, on_device(predictors), spans)

    def mask(self, number: int, window: int | None) -> Tensor | None:
        if (number, window) not in self.masks:
            self.masks[number, window] = self.spans[number].mask(window)
        return self.masks[number, window]


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: Pack,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """query [1, H, N, D], key and value [1, K, N, D] -> [1, N, H, D]. `packed` comes with the call of the model.

    Raises InvalidInput for an attention that adds to its scores.
    """
    if odd := [name for name in NOT_COMPUTED if others.get(name) is not None]:
        raise InvalidInput(f"the transformers backbone does not compute attention with {', '.join(odd)}")
    found: list[Tensor] = []
    for number, span in enumerate(packed.spans):
        q, k, v = (each[:, :, span.start : span.stop] for each in (query, key, value))
        found.append(_attended(q, k, v, packed.mask(number, sliding_window), scaling))
    return torch.cat(found, dim=2).transpose(1, 2), None


def _attended(q: Tensor, k: Tensor, v: Tensor, mask_TT: Tensor | None, scaling: float | None) -> Tensor:
    """[1, H, T, D]"""
    grouped = q.shape[1] > k.shape[1]
    if grouped and mask_TT is not None and q.is_cuda:  # its kernels with masks want a key for each query head
        k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], dim=1) for each in (k, v))
        grouped = False
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask_TT, is_causal=mask_TT is None, scale=scaling, enable_gqa=grouped
    )


AttentionInterface.register(NAME, packed_attention)  # pyright: ignore
