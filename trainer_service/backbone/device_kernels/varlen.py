"""Attention over a pack by one call of flash attention, over runs of queries and of keys. CUDA and bfloat16 only.

    a tree:          beginning | branch 1 | branch 2
    runs of queries  beginning | branch 1 | branch 2
    runs of keys     beginning | beginning, branch 1 | beginning, branch 2

The last query of a run sees all its keys, each earlier one a key less. Rows that share nothing are runs of themselves.

Axes: N positions of a pack, m keys of all runs, S runs.
"""

from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint

from trainer_service.backbone.attention import Pack, register

NAME = "marlaas_varlen"
GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
"""Fewer heads of keys than of queries are taken unasked before torch 2.13."""


@dataclass(frozen=True, slots=True)
class AttentionRuns:
    """The runs of a pack; see the top."""

    keys_m: Tensor | None  # each key's place in the pack; None: a run's keys are its own positions
    query_cuts: Tensor  # int32 [S + 1], where runs begin, and the last one ends
    key_cuts: Tensor
    most_queries: int  # of a run
    most_keys: int

    @classmethod
    def of(cls, pack: Pack) -> "AttentionRuns":
        keys: list[np.ndarray] = []
        queries: list[int] = []
        start = 0
        for span in pack.spans:
            own = np.arange(start, start + span.length)
            first = own[: span.beginning]
            keys += [first, *(np.concatenate([first, own[branch]]) for branch in span.branches)]
            queries += [span.beginning, *(branch.stop - branch.start for branch in span.branches)]
            start += span.length
        counts = [*map(len, keys)]
        device = pack.tokens_N.device
        places = torch.from_numpy(np.concatenate(keys)).to(device) if counts != queries else None
        return cls(places, _cuts(queries, device), _cuts(counts, device), max(queries), max(counts))


def _cuts(lengths: list[int], device: torch.device) -> Tensor:
    return torch.from_numpy(np.cumsum([0, *lengths]).astype(np.int32)).to(device)


def varlen_packed(
    pack: Pack, query: Tensor, key: Tensor, value: Tensor, window: int | None, scaling: float | None
) -> Tensor:
    """See PackAttention."""
    runs = pack.once(AttentionRuns.of)
    attend = partial(_attended, runs=runs, window=window, scaling=scaling)
    rows = [each[0].transpose(0, 1) for each in (query, key, value)]
    if runs.keys_m is not None:  # gathered again, or each branch would keep the beginning's keys
        attend = partial(checkpoint, attend, use_reentrant=False, preserve_rng_state=False)
    return attend(*rows)[None]


def _attended(
    q: Tensor, k: Tensor, v: Tensor, *, runs: AttentionRuns, window: int | None, scaling: float | None
) -> Tensor:
    """q [N, H, D], k and v [N, K, D] -> [N, H, D]"""
    if runs.keys_m is not None:
        k, v = k.index_select(0, runs.keys_m), v.index_select(0, runs.keys_m)
    found = varlen_attn(
        q,
        k,
        v,
        runs.query_cuts,
        runs.key_cuts,
        runs.most_queries,
        runs.most_keys,
        scale=scaling,
        window_size=(window - 1 if window else -1, 0),
        **GROUPED,
    )
    assert isinstance(found, Tensor)
    return found


register(NAME, varlen_packed)
