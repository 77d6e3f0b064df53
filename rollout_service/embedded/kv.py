"""Attention on the keys and values in the pools: it writes those of new tokens, and reads earlier ones.

Axes: n rows, T positions, L positions of a pool's rows, H query heads, K key/value heads, G query heads of one key head, D head size.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rollout_service.embedded.backbone.interface import ModelShape, joined
from rollout_service.embedded.pools import Pool, rounded

MERGED_HEADS = 2
"""Up to so many key heads, a CPU is faster with `_merged_attention`, in spite of its zeros."""

ANY_DISTANCE = 1 << 40
"""A window of all positions."""
BLOCK = 128
"""Positions of one product of weights and values in deterministic mode."""
MIN_WIDTH = 16
"""Rows with fewer new tokens than this are of one kind."""


@dataclass(slots=True)
class Slice:
    """The rows of one pool inside a forward."""

    pool: Pool
    first: int  # row of the forward at which they begin
    positions: Tensor  # [n] of each row's new token
    places: Tensor  # [n] row * length + position in the pool: where the new token's keys and values go
    length: int  # L
    masks: dict[int | None, Tensor] = field(default_factory=dict[int | None, Tensor])

    def mask(self, window: int | None) -> Tensor:
        """[n, 1, 1, L] 0 on the tokens that a row's new one sees, else -inf; made once for all layers."""
        if window not in self.masks:
            like = self.pool.layers[0]
            self.masks[window] = masked(self.positions, self.length, window, like)[:, None, None]
        return self.masks[window]


def masked(positions: Tensor, length: int, window: int | None, like: Tensor) -> Tensor:
    """positions [...] -> added to the scores of `length` keys, [..., length]: 0 where a position sees one, else -inf. `window`: the
    most positions that one sees, itself included."""
    span = torch.arange(length, device=positions.device)
    unseen = span > positions.unsqueeze(-1)
    if window is not None:
        unseen |= span <= positions.unsqueeze(-1) - window
    return like.new_zeros(unseen.shape).masked_fill_(unseen, float("-inf"))


def slices(pools: Sequence[Pool], positions: Tensor, lengths: Sequence[int]) -> list[Slice]:
    """positions [B]: of each row's new token, by pool; lengths: tokens of each pool's longest row."""
    first = 0
    found: list[Slice] = []
    for pool, longest in zip(pools, lengths, strict=True):
        num = len(pool.slots)
        at = positions[first : first + num]
        places = torch.arange(num, device=at.device).mul_(pool.length).add_(at)
        found.append(Slice(pool, first, at, places, rounded(longest)))
        first += num
    return found


class DecodeAttend:
    """Attention of one new token a row on its pool's rows."""

    def __init__(self, config: ModelShape, parts: Sequence[Slice], *, exact: bool) -> None:
        """`exact`: a row's bits do not depend on how long its neighbours are; on a CPU."""
        self._parts = parts
        self._exact = exact
        self._heads = config.num_heads
        self._kv_heads = config.num_kv_heads

    def __call__(self, layer: int, qkv: Tensor, scale: float | None = None, window: int | None = None) -> Tensor:
        if len(self._parts) == 1 and len(self._parts[0].places) == len(qkv):
            return self._one(layer, self._parts[0], qkv, scale, window)
        owned = [qkv[part.first : part.first + len(part.places)] for part in self._parts]
        each = zip(self._parts, owned, strict=True)
        found = torch.cat([self._one(layer, part, own, scale, window) for part, own in each])
        return F.pad(found, (0, 0, 0, len(qkv) - len(found)))

    def _one(self, layer: int, part: Slice, qkv: Tensor, scale: float | None, window: int | None) -> Tensor:
        """qkv [n, H + 2K, D] -> [n, H * D]. The query heads of one key head stand as its rows."""
        num, k = len(qkv), self._kv_heads
        cache = part.pool.layers[layer]
        cache.view(-1, 2 * k, qkv.shape[2]).index_copy_(0, part.places, qkv[:, self._heads :])
        q = qkv[:, : self._heads].reshape(num, k, -1, qkv.shape[2])
        seen, mask = cache[:num, : part.length], part.mask(window)  # [n, L, 2K, D]
        if self._exact or (cache.device.type == "cpu" and k <= MERGED_HEADS):
            return _merged_attention(q, seen, mask, scale, block=BLOCK if self._exact else part.length)
        seen = seen.transpose(1, 2)
        out = F.scaled_dot_product_attention(q, seen[:, :k], seen[:, k:], attn_mask=mask, scale=scale)
        return out.reshape(num, -1)


def _merged_attention(q: Tensor, seen: Tensor, mask: Tensor, scale: float | None, block: int) -> Tensor:
    """q [n, K, G, D], seen [n, L, 2K, D], mask [n, 1, 1, L] -> [n, K * G * D]; values are summed `block` positions at a time.

    On a CPU small heads cost their calls. So all heads of a row share one product: a query stands in the columns of its own
    key head, with zeros elsewhere.
    """
    num, k, group, size = q.shape
    spread = q.new_zeros(num, k, group, k, size)
    torch.diagonal(spread, dim1=1, dim2=3).copy_(q.permute(0, 2, 3, 1))
    spread = spread.view(num, k * group, k * size)
    keys, values = seen.view(num, -1, 2, k * size).unbind(2)
    scores = torch.baddbmm(mask.squeeze(1), spread, keys.transpose(1, 2), alpha=scale or size**-0.5)
    out = _summed(torch.softmax(scores, dim=-1), values, block).view(num, k, group, k, size)
    return torch.diagonal(out, dim1=1, dim2=3).permute(0, 3, 1, 2).reshape(num, -1)


def _summed(weights: Tensor, values: Tensor, block: int) -> Tensor:
    """weights [n, Q, L], values [n, L, S] -> their product [n, Q, S].

    A product over more positions is summed in another order, even if the weights beyond are zero: the length of a row's
    neighbours would show in its bits. Summed in blocks it does not: a block of zeros adds nothing.
    """
    out = torch.bmm(weights[:, :, :block], values[:, :block])
    for first in range(block, values.shape[1], block):
        out = out.baddbmm_(weights[:, :, first : first + block], values[:, first : first + block])
    return out


class PrefillAttend:
    """Causal attention of whole sequences of one padded length; writes keys and values into rows of pools."""

    def __init__(self, config: ModelShape, rows: Sequence[tuple[Pool, int]], nums: Sequence[int], width: int) -> None:
        """`rows`: the pool and its row of each sequence; `nums`: its tokens, of `width` positions."""
        self._num = len(rows)
        self._heads = config.num_heads
        self._kv_heads = config.num_kv_heads
        self._parts = _written(rows, nums, width)

    def __call__(self, layer: int, qkv: Tensor, scale: float | None = None, window: int | None = None) -> Tensor:
        for pool, positions, places in self._parts:
            cache = pool.layers[layer]
            cache.view(-1, *cache.shape[2:]).index_copy_(0, places, qkv[:, self._heads :].index_select(0, positions))
        rows = qkv.view(self._num, -1, *qkv.shape[1:])  # [n, T, H + 2K, D]
        q, k, v = rows.transpose(1, 2).split([self._heads, self._kv_heads, self._kv_heads], dim=1)
        if window is not None and window < q.shape[2]:
            out = _windowed(q, k, v, scale, window)
        else:
            grouped = self._heads != self._kv_heads
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
        return out.transpose(1, 2).reshape(len(qkv), -1)


def _windowed(q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int) -> Tensor:
    """Causal attention of q [n, H, T, D] on at most `window` of k and v [n, K, T, D]: -> [n, H, T, D].

    It takes `window` positions at a time, which see twice as many, so that memory is linear in T.
    """
    num, heads, length, size = q.shape
    group = heads // k.shape[1]
    at, found = torch.arange(length, device=q.device), list[Tensor]()
    for start in range(0, length, window):
        first, own = max(0, start - window + 1), slice(start, start + window)
        seen = slice(first, own.stop)
        mask = masked(at[own] - first, k[:, :, seen].shape[2], window, k).repeat(group, 1)
        queries = q[:, :, own].reshape(num, k.shape[1], -1, size)  # of one key head: its rows
        out = F.scaled_dot_product_attention(queries, k[:, :, seen], v[:, :, seen], attn_mask=mask, scale=scale)
        found.append(out.reshape(num, heads, -1, size))  # CUDA's kernels may lay heads out last
    return torch.cat(found, dim=2)


def _written(rows: Sequence[tuple[Pool, int]], nums: Sequence[int], width: int) -> list[tuple[Pool, Tensor, Tensor]]:
    """For each pool: which positions of the forward it holds [m], and where [m]."""
    positions: dict[Pool, list[np.ndarray]] = {}
    places: dict[Pool, list[np.ndarray]] = {}
    for index, ((pool, row), num) in enumerate(zip(rows, nums, strict=True)):
        positions.setdefault(pool, []).append(index * width + np.arange(num))
        places.setdefault(pool, []).append(row * pool.length + np.arange(num))
    device = rows[0][0].layers[0].device

    def joined(parts: list[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(device)

    return [(pool, joined(positions[pool]), joined(places[pool])) for pool in positions]


class NewTokens(NamedTuple):
    """New tokens of a row of a pool."""

    pool: Pool
    row: int
    start: int  # tokens that the row has keys and values of
    num: int  # new ones

    @property
    def kind(self) -> tuple[int, int]:
        """The pool's length, and a width that is less than twice the tokens, but at least MIN_WIDTH."""
        return self.pool.length, max(MIN_WIDTH, 1 << (self.num - 1).bit_length())


class ExtendAttend:
    """Causal attention of new tokens on rows with earlier keys and values; adds theirs. The tokens of all rows stand end to end,
    without padding; only attention pads those of one kind."""

    def __init__(self, config: ModelShape, spans: Sequence[NewTokens]) -> None:
        """`spans`: in order of kind."""
        self._parts = [_SameKind(config, [*same]) for _, same in itertools.groupby(spans, key=lambda span: span.kind)]
        self._sizes = [part.num_tokens for part in self._parts]

    def __call__(self, layer: int, qkv: Tensor, scale: float | None = None, window: int | None = None) -> Tensor:
        owned = zip(self._parts, qkv.split(self._sizes), strict=True)
        return joined([part(layer, own, scale, window) for part, own in owned])


class CompiledAttend:
    """`ExtendAttend` and, for rows with one new token, `DecodeAttend`, by a compiled function."""

    def __init__(self, config: ModelShape, kernel: Callable[..., None], rows: Sequence["NewRows"]) -> None:
        """`rows`: none twice; rows of the forward that none of them names get zeros."""
        self._heads, self._kernel = config.num_heads, kernel
        self._rows = rows

    def __call__(self, layer: int, qkv: Tensor, scale: float | None = None, window: int | None = None) -> Tensor:
        out = qkv.new_zeros(len(qkv), self._heads, qkv.shape[2])
        limits = np.float32(scale or qkv.shape[2] ** -0.5), window or ANY_DISTANCE
        for pool, places in self._rows:
            self._kernel(qkv.numpy(), pool.layers[layer].numpy(), places, out.numpy(), *limits)
        return out.flatten(1)


class NewRows(NamedTuple):
    """New tokens of rows of a pool, those of a row in order."""

    pool: Pool
    places: np.ndarray  # int64 [n, 3]: row of the forward, row of the pool, position


def new_rows(pools: Sequence[Pool], positions: np.ndarray, spans: Sequence[NewTokens] = ()) -> list[NewRows]:
    """The rows of a forward: all tokens of `spans`, then one of each row of the pools, at these positions [n]."""
    places: dict[Pool, list[np.ndarray]] = {}
    first = 0
    for span in spans:
        at = np.arange(span.num)
        places.setdefault(span.pool, []).append(_placed(first + at, span.row, span.start + at))
        first += span.num
    ends = list(itertools.accumulate(len(pool.slots) for pool in pools))
    for pool, own in zip(pools, np.split(positions, ends), strict=False):
        places.setdefault(pool, []).append(_placed(first + np.arange(len(own)), np.arange(len(own)), own))
        first += len(own)
    return [NewRows(pool, each[0] if len(each) == 1 else np.concatenate(each)) for pool, each in places.items()]


def _placed(*columns: np.ndarray | int) -> np.ndarray:
    return np.stack(np.broadcast_arrays(*columns), axis=1)


class _SameKind:
    """The rows of one pool that have new tokens, T at most."""

    def __init__(self, config: ModelShape, spans: Sequence[NewTokens]) -> None:
        self._pool = spans[0].pool
        self._heads, self._kv_heads = config.num_heads, config.num_kv_heads
        device = self._pool.layers[0].device
        self._rows_n, starts_n, nums_n = torch.tensor([span[1:] for span in spans], device=device).unbind(1)
        self.num_tokens = sum(span.num for span in spans)
        at_T = torch.arange(max(span.num for span in spans), device=device)
        position_nT = starts_n.unsqueeze(1) + at_T
        is_token_nT = at_T < nums_n.unsqueeze(1)
        self._places = (self._rows_n.unsqueeze(1) * self._pool.length + position_nT)[is_token_nT]
        self._spread = self._gathered = None  # where there is no padding
        if self.num_tokens < is_token_nT.numel():
            self._spread = (is_token_nT.flatten().cumsum(0) - 1).clamp_(min=0)
            self._gathered = is_token_nT.flatten().nonzero().squeeze(1)
        self._position_nT = position_nT
        self._length = rounded(max(span.start + span.num for span in spans))
        self._masks: dict[int | None, Tensor] = {}

    def _mask(self, window: int | None) -> Tensor:
        """Made once for all layers, [n, 1, G * T, L]."""
        if window not in self._masks:
            mask = masked(self._position_nT, self._length, window, self._pool.layers[0])
            self._masks[window] = mask.unsqueeze(1).repeat(1, 1, self._heads // self._kv_heads, 1)
        return self._masks[window]

    def __call__(self, layer: int, qkv: Tensor, scale: float | None, window: int | None) -> Tensor:
        """qkv [tokens, H + 2K, D] -> [tokens, H * D]. The G query heads of a key head are its rows."""
        num, heads, size = len(self._rows_n), self._heads, qkv.shape[2]
        cache = self._pool.layers[layer]
        cache.view(-1, *cache.shape[2:]).index_copy_(0, self._places, qkv[:, heads:])
        q = qkv[:, :heads]
        q = q if self._spread is None else q.index_select(0, self._spread)
        q = q.reshape(num, -1, self._kv_heads, heads // self._kv_heads, size).permute(0, 2, 3, 1, 4)
        seen = cache[:, : self._length].index_select(0, self._rows_n).transpose(1, 2)
        k, v = seen[:, : self._kv_heads], seen[:, self._kv_heads :]
        out = F.scaled_dot_product_attention(q.flatten(2, 3), k, v, attn_mask=self._mask(window), scale=scale)
        out = out.view(q.shape).permute(0, 3, 1, 2, 4).reshape(-1, heads * size)
        return out if self._gathered is None else out.index_select(0, self._gathered)
