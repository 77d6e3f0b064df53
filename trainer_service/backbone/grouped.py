"""Linear layers with the adapters of packed tokens; only the adapters train.

One adapter's tokens are contiguous: each adapter has its own product, or `lora_kernels` compute those of all at once.
Forward y = x W' + (x A') (s B)'. Backward, with g = dy (s B): dx = dy W + g A, dA = g' x, d(s B') = (x A')' dy.

    stacks ─ gather, pad, cast: once a pass ─► A, s B' of all layers ─► each layer's product
           ◄──────── add: once a pass ───────── their gradients     ◄─ its backward

A layer's product is an operator of torch, which the compiler of whole layers calls without looking into it.

Axes: N tokens of a pack, G adapters of a pack, L layers, I and O widths of a layer, R padded rank.
"""

import itertools
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from trainer_service.backbone.interface import AdapterPlace
from trainer_service.lora import AdapterStack

ALIGNED_RANK = 8
"""Ranks are padded to a multiple of it, so that rows begin at multiples of 16 bytes, and none is of one value."""


@dataclass(frozen=True, slots=True)
class Lane:
    """Adapters of one stack, side by side in a pass."""

    stack: AdapterStack
    own: slice  # of G
    places_G: Tensor
    scales_G11: Tensor

    def of(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Its part of A [L, G, R, I] and B' [L, G, R, O] of a pass."""
        rank = self.stack.layout.rank
        return a[:, self.own, :rank], b[:, self.own, :rank]


@dataclass(frozen=True, slots=True)
class Groups:
    """The adapters of a pass."""

    lanes: Sequence[Lane]
    layers: Sequence[str]
    factors: Mapping[str, tuple[Tensor, Tensor]]
    """A [G, R, I] and s B' [G, R, O] of each layer, 0 where an adapter has none."""
    cuts_G: Tensor  # on the host: where each one's tokens end
    segments_G3: Tensor  # see `lora_kernels`; empty: they do not compute
    tiles_T3: Tensor

    @property
    def marks(self) -> tuple[Tensor, ...]:
        return self.cuts_G, self.segments_G3, self.tiles_T3

    def add_gradients(self) -> None:
        """Adds the gradients of all layers' factors to the adapters' in their stacks."""
        for path in {path: None for lane in self.lanes for path in lane.stack.paths}:
            pairs = [self.factors[f"layers.{layer}.{path}"] for layer in self.layers]
            if any(factor.grad is None for pair in pairs for factor in pair):
                return  # memory ran out in a layer: `Shortage` knows, and the pass counts nowhere
            a, b = (torch.stack([factor.grad for factor in factors]) for factors in zip(*pairs, strict=True))  # pyright: ignore
            for lane in self.lanes:
                if path in lane.stack.paths:
                    of_a, of_b = lane.of(a, b)
                    of_b = of_b.transpose(2, 3).to(lane.scales_G11.dtype) * lane.scales_G11
                    lane.stack.add_gradients(path, lane.places_G, of_a, of_b)


def groups_of(
    adapters: Sequence[AdapterPlace],
    lengths: Sequence[int],
    shapes: Mapping[str, tuple[int, int]],
    dtype: torch.dtype,
    *,
    one_graph: bool = False,
    fused: bool = False,
) -> Groups:
    """`adapters`, `lengths`: of each sequence; neighbours of one adapter are one group. `shapes`: (out, in) of all linear layers.
    `one_graph`: all layers have factors, and there are two groups at least, so that a graph fits every pass."""
    lanes: list[Lane] = []
    counts: list[int] = []
    for stack, own in itertools.groupby(zip(adapters, lengths, strict=True), key=lambda sequence: sequence[0][0]):
        start, places = len(counts), list[int]()
        for place, group in itertools.groupby(own, key=lambda sequence: sequence[0][1]):
            places.append(place)
            counts.append(sum(length for _, length in group))
        scales = torch.tensor([stack.scales[place] for place in places], device=stack.device)
        places_G = torch.tensor(places, device=stack.device)
        lanes.append(Lane(stack, slice(start, len(counts)), places_G, scales[:, None, None]))
    counts += [0] * (one_graph and len(counts) == 1)
    names = shapes if one_graph else [name for lane in lanes for name in lane.stack.layout.names]
    factors = _gathered(lanes, {name.split(".", 2)[2]: shapes[name] for name in names}, len(counts), dtype)
    cuts_G, device = torch.from_numpy(np.cumsum(counts).astype(np.int32)), lanes[0].stack.device
    spans = torch.empty(2, 0, 3, dtype=torch.int32, device=device).unbind()
    if fused:
        from trainer_service.backbone.device_kernels.lora_kernels import segments_and_tiles  # here: it imports Triton

        spans = segments_and_tiles(cuts_G.tolist(), device)
    return Groups(lanes, lanes[0].stack.layers, factors, cuts_G, *spans)


@torch.no_grad()
def _gathered(
    lanes: Sequence[Lane], widths: Mapping[str, tuple[int, int]], num_groups: int, dtype: torch.dtype
) -> dict[str, tuple[Tensor, Tensor]]:
    """See `Groups.factors`. `widths`: (out, in) of each of a layer's modules."""
    stack, most = lanes[0].stack, max(lane.stack.layout.rank for lane in lanes)
    rank = -(-most // ALIGNED_RANK) * ALIGNED_RANK
    empty = torch.empty(0, dtype=dtype, device=stack.device)
    size = len(stack.layers), num_groups, rank
    made = {path: [empty.new_zeros(*size, width) for width in reversed(pair)] for path, pair in widths.items()}
    for lane in lanes:
        for path, (a, b) in zip(lane.stack.paths, lane.stack.gathered(lane.places_G), strict=True):
            of_a, of_b = lane.of(*made[path])
            of_a.copy_(a)
            torch.mul(b.transpose(2, 3), lane.scales_G11, out=of_b)
    return {
        f"layers.{layer}.{path}": pair
        for path, (a, b) in made.items()
        for layer, pair in zip(stack.layers, zip(a.unbind(), b.unbind(), strict=True), strict=True)
    }


@dataclass(slots=True)
class CurrentGroups:
    """The groups of the pass under way, which transformers' modules cannot take as an argument."""

    layers: dict[str, "LoraLinear"] = field(default_factory=dict[str, "LoraLinear"])
    groups: Groups | None = None
    one_graph: bool = False
    fused: bool = False
    """For both see `groups_of`."""

    @contextmanager
    def using(self, groups: Groups | None) -> Generator[None]:
        before = self.groups
        self._set(groups)
        try:
            yield
        finally:
            self._set(before)

    def _set(self, groups: Groups | None) -> None:
        self.groups = groups
        for name, layer in self.layers.items():
            vars(layer)["factors"] = groups.factors.get(name) if groups else None  # a module's own way is slow

    def follow(self, embedding: torch.nn.Module) -> None:
        """Has each pass's backward end, where it comes to what the embedding gave the first layer, by adding gradients."""

        def learning(_: Any, __: Any, hidden: Tensor) -> Tensor:
            if self.groups is None or not torch.is_grad_enabled():
                return hidden
            for factor in itertools.chain(*self.groups.factors.values()):
                factor.requires_grad_()
            return _FirstInput.apply(hidden, torch.zeros((), requires_grad=True), self.groups)  # pyright: ignore

        embedding.register_forward_hook(learning)


class _FirstInput(torch.autograd.Function):
    """Stands before the first layer: all layers have had their backward when it comes to its own."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, anchor: Tensor, groups: Groups) -> Tensor:
        ctx.groups = groups
        return hidden.clone()  # a view would make the first layer another kind

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[None, None, None]:
        ctx.groups.add_gradients()
        return None, None, None


class LoraLinear(torch.nn.Module):
    """A frozen linear layer of the base, through which each token goes with its own adapter."""

    factors: tuple[Tensor, Tensor] | None = None

    def __init__(self, base: torch.nn.Linear, name: str, current: CurrentGroups) -> None:
        super().__init__()
        self.base, self._current = base, current
        current.layers[name] = self

    def forward(self, x: Tensor) -> Tensor:
        """x [1, N, I] -> [1, N, O]"""
        groups = self._current.groups
        if groups is None or self.factors is None:
            return self.base(x)
        given = x.flatten(0, -2), self.base.weight, self.base.bias, *self.factors, *groups.marks
        return _GroupedLoraLinear.apply(*given).unflatten(0, x.shape[:-1])  # pyright: ignore


class _GroupedLoraLinear(torch.autograd.Function):
    """x [N, I] -> [N, O]"""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, *marks: Tensor
    ) -> Tensor:
        y, low = torch.ops.marlaas.lora_linear(x, weight, bias, a, b, *marks)
        ctx.save_for_backward(x, weight, a, b, low, *marks)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dx, of_a, of_b = torch.ops.marlaas.lora_linear_backward(grads[0].contiguous(), *ctx.saved_tensors)
        return dx, None, None, of_a, of_b, None, None, None


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, *marks: Tensor
) -> tuple[Tensor, Tensor]:
    """x [N, I] -> [N, O], and x A' [N, R], which the backward needs."""
    y = F.linear(x, weight, bias)
    cuts_G, _, tiles_T3 = marks
    if len(tiles_T3):
        from trainer_service.backbone.device_kernels.lora_kernels import lora_expand_, lora_shrink

        low = lora_shrink(x, a, tiles_T3)
        lora_expand_(y, low, b, tiles_T3)
        return y, low
    low = _by_group(x, a.transpose(1, 2), cuts_G)
    y += _by_group(low, b, cuts_G)
    return y, low


def _backward(
    dy: Tensor, x: Tensor, weight: Tensor, a: Tensor, b: Tensor, low: Tensor, *marks: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, A and s B'."""
    dx = dy @ weight
    cuts_G, segments_G3, tiles_T3 = marks
    if len(tiles_T3):
        from trainer_service.backbone.device_kernels.lora_kernels import lora_expand_, lora_gradients, lora_shrink

        dlow = lora_shrink(dy, b, tiles_T3)
        lora_expand_(dx, dlow, a, tiles_T3)
        of_a, of_b = lora_gradients(x, dlow, dy, low, segments_G3)
        return dx, of_a, of_b
    dlow = _by_group(dy, b.transpose(1, 2), cuts_G)
    dx += _by_group(dlow, a, cuts_G)
    return dx, _over_tokens(dlow, x, cuts_G), _over_tokens(low, dy, cuts_G)


def _forward_shapes(x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0], weight.shape[0]), x.new_empty(x.shape[0], a.shape[1])


def _backward_shapes(
    _: Tensor, x: Tensor, __: Tensor, a: Tensor, b: Tensor, *___: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), a.new_empty(a.shape), b.new_empty(b.shape)


# `torch.library.custom_op` would cost the host seven times as much a call
_LIBRARY = torch.library.Library("marlaas", "FRAGMENT")
_MARKS = "Tensor cuts, Tensor segments, Tensor tiles"
_LIBRARY.define(f"lora_linear(Tensor x, Tensor weight, Tensor? bias, Tensor a, Tensor b, {_MARKS}) -> (Tensor, Tensor)")
_LIBRARY.define(
    f"lora_linear_backward(Tensor dy, Tensor x, Tensor weight, Tensor a, Tensor b, Tensor low, {_MARKS}) "
    "-> (Tensor, Tensor, Tensor)"
)
_LIBRARY.impl("lora_linear", _forward, "CompositeExplicitAutograd")
_LIBRARY.impl("lora_linear_backward", _backward, "CompositeExplicitAutograd")


torch.library.register_fake("marlaas::lora_linear", _forward_shapes, lib=_LIBRARY)
torch.library.register_fake("marlaas::lora_linear_backward", _backward_shapes, lib=_LIBRARY)


def _by_group(x_NI: Tensor, weights_GIO: Tensor, cuts_G: Tensor) -> Tensor:
    """Each adapter's tokens times its own matrix, [N, O]."""
    return torch.cat([x @ w for x, w in zip(_cut(x_NI, cuts_G), weights_GIO, strict=True)])


def _over_tokens(left_NO: Tensor, right_NI: Tensor, cuts_G: Tensor) -> Tensor:
    """left' right of each adapter's own tokens, [G, O, I]."""
    pairs = zip(_cut(left_NO, cuts_G), _cut(right_NI, cuts_G), strict=True)
    return torch.stack([left.t() @ right for left, right in pairs])


def _cut(x: Tensor, cuts_G: Tensor) -> tuple[Tensor, ...]:
    return x.tensor_split(cuts_G[:-1].tolist())
