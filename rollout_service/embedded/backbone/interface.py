"""The seam between the engine's rows and the base model under them.

Axes: N rows of a forward (one a position), E hidden, H query heads, K key/value heads, D head size, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from base_model.decoder import DecoderConfig
from base_model.stacked import FusedAdapter, Product


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a base model that its rows need to know."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    context: int  # tokens of a sequence at most

    @classmethod
    def of(cls, config: DecoderConfig) -> "ModelShape":
        c = config
        return cls(c.num_layers, c.num_heads, c.num_kv_heads, c.head_dim, c.vocab, c.context)


class QkvAttend(Protocol):
    """Attention of one layer: q and k and v [N, H + 2K, D], q and k rotated -> [N, H * D]. It may keep keys and values."""

    def __call__(self, layer: int, qkv: Tensor, scale: float | None = None, window: int | None = None) -> Tensor:
        """`scale`: of scores; None: 1 / sqrt(D). `window`: positions seen, itself included; None: all before."""
        ...


class ForwardTurn(NamedTuple):
    """New tokens of a turn in a forward."""

    slots: Sequence[tuple[int, int]]  # of all turns that share them, and how long their rows of keys and values are
    num: int
    adapter: FusedAdapter | None


@dataclass(frozen=True, slots=True)
class ForwardPart:
    """Neighbouring rows of a forward, with attention and adapters of their own."""

    num: int
    attend: QkvAttend
    products: Sequence[Product]
    turns: Sequence[ForwardTurn] = ()  # of these rows, for who computes layers elsewhere; none of later turns
    width: int = 1  # rows of each of `turns`


class EngineBackbone(Protocol):
    """The frozen base model, with an adapter for each row. Without state of rows; for one thread at a time."""

    @property
    def config(self) -> ModelShape: ...

    @property
    def embedding(self) -> Tensor:
        """Has the device and the dtype of all that is computed."""
        ...

    def linear_shapes(self) -> Mapping[str, tuple[int, int]]:
        """Module name -> (out, in), for every layer that an adapter may target."""
        ...

    def forward(self, tokens: Tensor, positions: Tensor, parts: Sequence[ForwardPart]) -> Tensor:
        """tokens, positions [N] -> hidden states [N, E] after the last norm. A part may see what earlier ones write."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, E] -> float32 [N, V]"""
        ...


def adapt(y: Tensor, x: Tensor, number: int, parts: Sequence[ForwardPart]) -> None:
    """Adds each row's adapter of x [N, in] to y [N, out], by the fused product of that number."""
    for part, own_y, own_x in zip(parts, cut(y, parts), cut(x, parts), strict=True):
        for product in part.products:
            product.add_to(own_y, own_x, number)


def cut(x: Tensor, parts: Sequence[ForwardPart]) -> Sequence[Tensor]:
    """Each part's rows."""
    return (x,) if len(parts) == 1 else x.split_with_sizes([part.num for part in parts])


def joined(parts: Sequence[Tensor]) -> Tensor:
    """The rows of all parts."""
    return parts[0] if len(parts) == 1 else torch.cat([*parts])


def joined_bias(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor | None:
    """Joins the biases of layers with these weights [out, in]: zeros where only others have one."""
    if all(bias is None for bias in biases):
        return None
    each = zip(weights, biases, strict=True)
    return joined([weight.new_zeros(len(weight)) if bias is None else bias for weight, bias in each])
