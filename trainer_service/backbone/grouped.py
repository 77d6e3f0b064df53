"""Linear layers with the adapters of packed tokens; only the adapters train.

One adapter's tokens are contiguous, so `grouped_mm` multiplies all adapters at once. It needs rows of a multiple of ALIGNMENT
bytes (ranks are padded), and on CUDA bfloat16 with capability >= 8.0. Else each adapter has its own product.
Forward y = x W' + (x A') (s B)'. Backward, with g = dy (s B): dx = dy W + g A, dA = g' x, d(s B') = (x A')' dy.

    stacks ─ gather, pad, cast: once a pass ─► A, s B' of all layers ─► each layer's product
           ◄──────── add: once a pass ───────── their gradients     ◄─ its backward

A layer's product is an operator of torch, which the compiler of whole layers calls without looking into it.

Axes: N tokens of a pack, G adapters of a pack, L layers, I and O widths of a layer, R padded rank.
"""

import itertools
import math
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

ALIGNMENT = 16
"""Bytes."""


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

    ends_G: Tensor  # int32: where each one's tokens end
    cuts_G: Tensor  # the same, for the host
    factors: Mapping[
        str, tuple[Tensor, Tensor]
    ]  # by layer: A [G, R, I] and s B' [G, R, O], 0 where an adapter has none
    segments_G3: Tensor | None = None  # see `lora_kernels`; None: it does not compute
    tiles_T3: Tensor | None = None

    @property
    def marks(self) -> tuple[Tensor | None, ...]:
        return self.ends_G, self.cuts_G, self.segments_G3, self.tiles_T3


def groups_of(
    adapters: Sequence[AdapterPlace],
    lengths: Sequence[int],
    shapes: Mapping[str, tuple[int, int]],
    dtype: torch.dtype,
    *,
    whole: bool = False,
    fused: bool = False,
) -> Groups:
    """`adapters`, `lengths`: of each sequence; neighbours of one adapter are one group. `shapes`: (out, in) of all linear layers.
    `whole`: all layers have factors, and there are two groups at least, so that a graph fits every pass."""
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
    counts += [0] * (whole and len(counts) == 1)
    cuts_G, device = torch.from_numpy(np.cumsum(counts).astype(np.int32)), lanes[0].stack.device
    names = shapes if whole else [name for lane in lanes for name in lane.stack.layout.names]
    widths = {name.split(".", 2)[2]: shapes[name] for name in names}
    layers = lanes[0].stack.layers
    made: Any = _Gathered.apply(torch.zeros((), requires_grad=True), lanes, widths, len(counts), dtype)
    factors = {
        f"layers.{layer}.{path}": pair
        for path, a, b in zip(widths, made[::2], made[1::2], strict=True)
        for layer, pair in zip(layers, zip(a.unbind(), b.unbind(), strict=True), strict=True)
    }
    if not fused:
        return Groups(cuts_G.to(device), cuts_G, factors)
    from trainer_service.backbone.device_kernels.lora_kernels import segments_and_tiles

    about = segments_and_tiles(cuts_G.tolist(), device)
    return Groups(cuts_G.to(device), cuts_G, factors, *about)


class _Gathered(torch.autograd.Function):
    """All factors of a pass, of each of `widths` A [L, G, R, I] and s B' [L, G, R, O]. `anchor` gives them a gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        lanes: Sequence[Lane],
        widths: Mapping[str, tuple[int, int]],
        num_groups: int,
        dtype: torch.dtype,
    ) -> tuple[Tensor, ...]:
        ctx.lanes, ctx.widths = lanes, widths
        ctx.set_materialize_grads(False)
        stack, aligned = lanes[0].stack, ALIGNMENT // dtype.itemsize
        rank = -(-max(lane.stack.layout.rank for lane in lanes) // aligned) * aligned
        sizes = (len(stack.layers), num_groups)
        shapes = [(*sizes, *shape) for out, width in widths.values() for shape in ((rank, width), (rank, out))]
        flat = torch.zeros(sum(map(math.prod, shapes)), dtype=dtype, device=stack.device)
        pieces = flat.split([*map(math.prod, shapes)])
        made = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
        by_path = dict(zip(widths, zip(made[::2], made[1::2], strict=True), strict=True))
        for lane in lanes:
            for path, (a, b) in zip(lane.stack.paths, lane.stack.gathered(lane.places_G), strict=True):
                to_a, to_b = lane.of(*by_path[path])
                to_a.copy_(a)
                torch.mul(b.transpose(2, 3), lane.scales_G11, out=to_b)
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        for path, grads_a, grads_b in zip(ctx.widths, grads[::2], grads[1::2], strict=True):
            for lane in ctx.lanes if grads_a is not None and grads_b is not None else ():
                if path in lane.stack.paths:
                    of_a, of_b = lane.of(grads_a, grads_b)
                    of_b = of_b.to(lane.scales_G11.dtype) * lane.scales_G11
                    lane.stack.add_gradients(path, lane.places_G, of_a, of_b.transpose(2, 3))
        return None, None, None, None, None


@dataclass(slots=True)
class CurrentGroups:
    """The groups of the pass under way, which transformers' modules cannot take as an argument."""

    layers: dict[str, "LoraLinear"] = field(default_factory=dict[str, "LoraLinear"])
    groups: Groups | None = None
    whole: bool = False
    """See `groups_of`."""
    fused: bool = False

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
            layer.factors = groups.factors.get(name) if groups else None


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
        y, _ = lora_linear(x.flatten(0, -2), self.base.weight, self.base.bias, *self.factors, *groups.marks)
        return y.unflatten(0, x.shape[:-1])  # pyright: ignore


@torch.library.custom_op("marlaas::lora_linear", mutates_args=())
def lora_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    a: Tensor,
    b: Tensor,
    ends_G: Tensor,
    cuts_G: Tensor,
    segments_G3: Tensor | None,
    tiles_T3: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """x [N, I] -> [N, O], and x A' [N, R], which the backward needs."""
    y = F.linear(x, weight, bias)
    if tiles_T3 is not None:
        from trainer_service.backbone.device_kernels import lora_kernels

        low = lora_kernels.lora_shrink(x, a, tiles_T3)
        lora_kernels.lora_expand_(y, low, b, tiles_T3)
        return y, low
    low = _by_group(x, a.transpose(1, 2), ends_G, cuts_G)
    y += _by_group(low, b, ends_G, cuts_G)
    return y, low


@torch.library.custom_op("marlaas::lora_linear_backward", mutates_args=())
def lora_linear_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    a: Tensor,
    b: Tensor,
    low: Tensor,
    ends_G: Tensor,
    cuts_G: Tensor,
    segments_G3: Tensor | None,
    tiles_T3: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, A and s B'."""
    dx = dy @ weight
    if segments_G3 is not None and tiles_T3 is not None:
        from trainer_service.backbone.device_kernels import lora_kernels

        dlow = lora_kernels.lora_shrink(dy, b, tiles_T3)
        lora_kernels.lora_expand_(dx, dlow, a, tiles_T3)
        return dx, *(lora_kernels.lora_gradient(*pair, segments_G3) for pair in ((dlow, x), (low, dy)))
    dlow = _by_group(dy, b.transpose(1, 2), ends_G, cuts_G)
    dx += _by_group(dlow, a, ends_G, cuts_G)
    return dx, _over_tokens(dlow, x, ends_G, cuts_G), _over_tokens(low, dy, ends_G, cuts_G)


@lora_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0], weight.shape[0]), x.new_empty(x.shape[0], a.shape[1])


@lora_linear_backward.register_fake
def _(dy: Tensor, x: Tensor, weight: Tensor, a: Tensor, b: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), a.new_empty(a.shape), b.new_empty(b.shape)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, _, a, b, *about = inputs
    ctx.save_for_backward(x, weight, a, b, output[1], *about)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    dx, of_a, of_b = lora_linear_backward(grads[0].contiguous(), *ctx.saved_tensors)
    return dx, None, None, of_a, of_b, None, None, None, None


lora_linear.register_autograd(_backward, setup_context=_keep)


def _by_group(x_NI: Tensor, weights_GIO: Tensor, ends_G: Tensor, cuts_G: Tensor) -> Tensor:
    """Each adapter's tokens times its own matrix, [N, O]."""
    if _is_served(x_NI, weights_GIO.shape[2]):
        return F.grouped_mm(x_NI, weights_GIO, offs=ends_G)
    return torch.cat([x @ w for x, w in zip(_cut(x_NI, cuts_G), weights_GIO, strict=True)])


def _over_tokens(left_NO: Tensor, right_NI: Tensor, ends_G: Tensor, cuts_G: Tensor) -> Tensor:
    """left' right of each adapter's own tokens, [G, O, I]."""
    if _is_served(left_NO, right_NI.shape[1]):
        return F.grouped_mm(left_NO.t(), right_NI, offs=ends_G)
    pairs = zip(_cut(left_NO, cuts_G), _cut(right_NI, cuts_G), strict=True)
    return torch.stack([a.t() @ b for a, b in pairs])


def _is_served(x: Tensor, other: int) -> bool:
    """Says whether grouped_mm multiplies x [N, I] and matrices whose rows have `other` values."""
    if x.is_cuda and not (x.dtype == torch.bfloat16 and torch.cuda.get_device_capability(x.device) >= (8, 0)):
        return False
    return x.shape[1] * x.dtype.itemsize % ALIGNMENT == 0 and other * x.dtype.itemsize % ALIGNMENT == 0


def _cut(x: Tensor, cuts_G: Tensor) -> tuple[Tensor, ...]:
    return x.tensor_split(cuts_G[:-1].tolist())
