"""Attention over a pack by torch's flex attention: who sees whom is a block mask, of which blocks that nobody sees cost nothing.

On CUDA it is one fused kernel. Elsewhere it is written out, with scores of all pairs and without a backward: for tests.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from trainer_service.backbone.attention import Pack, register

NAME = "marlaas_flex"
FAR = 1 << 30
"""Positions: more than a row has."""
_fused: Any = torch.compile(flex_attention, dynamic=True)
_block_mask: Any = torch.compile(create_block_mask)


def flex_packed(
    pack: Pack, query: Tensor, key: Tensor, value: Tensor, window: int | None, scaling: float | None
) -> Tensor:
    """See PackAttention."""
    attend = _fused if query.is_cuda else flex_attention
    mask = pack.once(block_mask, window)
    found: Tensor = attend(query, key, value, block_mask=mask, scale=scaling, enable_gqa=query.shape[1] > key.shape[1])
    return found.transpose(1, 2)


def block_mask(pack: Pack, window: int | None) -> BlockMask:
    """The mask of a pack's trees: a position sees its own branch and its tree's beginning, as far as the window."""
    positions_N, device, length = pack.positions_N, pack.tokens_N.device, len(pack.tokens_N)
    reach = window or FAR  # a number that does not change with the pack: the compiler knows it

    def on_device(numbers: list[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(numbers)).to(device)

    trees_N = on_device([np.full(len(tree), number) for number, tree in enumerate(pack.trees)])
    branches_N = on_device([tree.branches for tree in pack.trees])

    def seen(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        own = (branches_N[k] == branches_N[q]) | (branches_N[k] == 0)
        before = positions_N[q] - positions_N[k]
        return own & (trees_N[k] == trees_N[q]) & (before >= 0) & (before < reach)

    make = _block_mask if device.type == "cuda" else create_block_mask  # written out, all pairs exist for a moment
    return make(seen, None, None, length, length, device=device)


register(NAME, flex_packed)
