"""Trainable LoRA factors, and linear layers that train them and nothing else.

Forward y = x W' + s (x A') B'. Backward, with g = dy B s: dx = dy W + g A, dA = g' x, dB = s dy' (x A'). W is frozen, so no
gradient of it is ever made; dA and dB are added in place into the adapter's gradient.

Axes: B sequences, T positions, N = B T, P all values of an adapter.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from base_model.adapter import Adapter


@dataclass(frozen=True, slots=True)
class Factors:
    """One layer's adapter: a [rank, in], b [out, rank], float32, and where their gradients are added up."""

    a: Tensor
    b: Tensor
    grad_a: Tensor
    grad_b: Tensor
    scale: float


@dataclass(frozen=True, slots=True)
class Trainable:
    """An adapter whose values lie in one flat tensor [P], beside a gradient of the same layout."""

    values_P: Tensor
    grad_P: Tensor
    factors: Mapping[str, Factors]


@dataclass(frozen=True, slots=True)
class Piece:
    """Which adapter the sequences [start, stop) of a micro-batch go through. Pieces do not overlap."""

    start: int
    stop: int
    adapter: Trainable


def flatten(adapter: Adapter) -> Tensor:
    """All values in one new tensor [P]: by name, A before B."""
    return torch.cat([f[name].detach().reshape(-1) for name in adapter.names() for f in (adapter.a, adapter.b)])


def unflatten(values_P: Tensor, like: Adapter) -> Adapter:
    """An adapter that is a view of `values_P`."""
    a: dict[str, Tensor] = {}
    b: dict[str, Tensor] = {}
    start = 0
    for name in like.names():
        for views, shape in ((a, like.a[name].shape), (b, like.b[name].shape)):
            views[name] = values_P[start : start + shape.numel()].view(shape)
            start += shape.numel()
    return Adapter(like.spec, a, b)


def trainable(adapter: Adapter, device: torch.device) -> Trainable:
    """A copy of the adapter that can be trained, its gradient 0."""
    values_P = flatten(adapter).to(device, copy=True)
    grad_P = torch.zeros_like(values_P)
    values, grads = unflatten(values_P, adapter), unflatten(grad_P, adapter)
    factors = {
        name: Factors(values.a[name], values.b[name], grads.a[name], grads.b[name], adapter.scale)
        for name in adapter.names()
    }
    return Trainable(values_P, grad_P, factors)


class Projection:
    """The decoder's `project`: each sequence through the base layer and its own adapter."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = pieces
        self._anchor = torch.zeros((), requires_grad=True)

    def __call__(self, name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        parts = [(p.start, p.stop, p.adapter.factors[name]) for p in self._pieces if name in p.adapter.factors]
        if not parts:
            return F.linear(x, weight, bias)
        return _LoraLinear.apply(x, weight, bias, parts, self._anchor)  # pyright: ignore[reportReturnType]


class _LoraLinear(torch.autograd.Function):
    """x [B, T, in] -> [B, T, out]. `anchor` makes the result need a gradient where x does not: the first layer."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, parts: list[tuple[int, int, Factors]], anchor: Tensor
    ) -> Tensor:
        y = F.linear(x, weight, bias)
        lows: list[Tensor] = []
        for start, stop, f in parts:
            low = x[start:stop].flatten(0, 1) @ f.a.to(x.dtype).t()  # [N, rank]
            y[start:stop].flatten(0, 1).addmm_(low, f.b.to(x.dtype).t(), alpha=f.scale)
            lows.append(low)
        ctx.save_for_backward(x, weight, *lows)
        ctx.parts = parts
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dy = grads[0].contiguous()
        x, weight, *lows = ctx.saved_tensors
        dx = dy @ weight if ctx.needs_input_grad[0] else None
        for (start, stop, f), low in zip(ctx.parts, lows, strict=True):
            dy_N = dy[start:stop].flatten(0, 1)
            dlow_N = (dy_N @ f.b.to(dy.dtype)).mul_(f.scale)
            _add_product(f.grad_a, dlow_N.t(), x[start:stop].flatten(0, 1), 1.0)
            _add_product(f.grad_b, dy_N.t(), low, f.scale)
            if dx is not None:
                dx[start:stop].flatten(0, 1).addmm_(dlow_N, f.a.to(dy.dtype))
        return dx, None, None, None, None


def _add_product(total: Tensor, left: Tensor, right: Tensor, scale: float) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right, alpha=scale)
    else:
        total.add_(left @ right, alpha=scale)
