"""Attention over packed trees, beside attention with a mask of who sees whom for each pair of positions of a pack.

Axes: N positions of a pack, H query heads, K key/value heads, D head size.
"""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from common.models.footprint import MASK_QUERIES
from trainer_service.backbone import attention
from trainer_service.backbone.attention import ALIGNED, Pack, packed_attention
from trainer_service.packing import Tree

H, K, D = 4, 2, 8


def tree(shared: int, *owns: int) -> Tree:
    """Rows that share so many positions, with so many of their own."""
    lengths = [shared, *owns]
    positions = [np.arange(shared), *(np.arange(shared, shared + own) for own in owns)]
    return Tree(
        group=0,
        rows=tuple(range(len(owns) or 1)),
        tokens=np.zeros(sum(lengths), np.int64),
        positions=np.concatenate(positions),
        branches=np.repeat(np.arange(len(lengths)), lengths),
        predictors=(np.zeros(0, np.int64),),
    )


PACK = (tree(5, 3, 0, 40), tree(70), tree(33, 1, 20, 17), tree(2))


def inputs(pack: Pack) -> tuple[Tensor, Tensor, Tensor]:
    made = np.random.default_rng(1)
    q, k, v = (torch.from_numpy(made.normal(size=(1, heads, len(pack.tokens_N), D))) for heads in (H, K, K))
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def written_out(trees: Sequence[Tree], window: int | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[1, N, H, D]"""
    numbers_N = np.repeat(np.arange(len(trees)), [len(each) for each in trees])
    positions_N, branches_N = (np.concatenate(each) for each in zip(*((t.positions, t.branches) for t in trees)))  # noqa: B905
    own = (branches_N[:, None] == branches_N) | (branches_N == 0)
    seen = own & (numbers_N[:, None] == numbers_N) & (positions_N <= positions_N[:, None])
    if window:
        seen &= positions_N[:, None] - positions_N < window
    k, v = (each.repeat_interleave(H // K, dim=1) for each in (k, v))
    scores = (q @ k.transpose(2, 3) * 0.3).masked_fill(torch.from_numpy(~seen), -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


@pytest.mark.parametrize("queries", [256, 8], ids=["whole", "in blocks"])
@pytest.mark.parametrize("window", [None, 1, 6, 37, 500])
def test_a_position_sees_its_row_as_far_as_the_window(
    window: int | None, queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "QUERIES", queries)
    pack = Pack.of(PACK, torch.device("cpu"))
    given = inputs(pack)

    found = packed_attention(pack, *given, window, 0.3)
    expected = written_out(PACK, window, *given)

    seed = torch.from_numpy(np.random.default_rng(2).normal(size=found.shape))
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-9)
    for one, other in zip(*(torch.autograd.grad(each, given, seed) for each in (found, expected)), strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-9)


def test_masks_grow_with_the_length_of_a_row_and_not_with_its_square() -> None:
    pack = Pack.of([tree(100, 2000, 2000), tree(3000)], torch.device("cpu"))
    packed_attention(pack, *inputs(pack), 64, None)
    packed_attention(pack, *inputs(pack), None, None)
    masks: list[Tensor] = list(pack.of_all_layers.values())
    assert len(masks) == 2 and all(mask.numel() <= MASK_QUERIES * (3000 + ALIGNED) for mask in masks)
