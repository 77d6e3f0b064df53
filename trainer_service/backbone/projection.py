"""The decoder's linear layers, with each sequence's adapter; only the adapters train.

Each sequence goes through its own adapter: one batched product a factor serves all adapters of a shape.
Forward y = x W' + s (x A') B'. Backward, with g = s dy B: dx = dy W + g A, dA = g' x, dB = dy' (s x A').
W is frozen and has no gradient; dA and dB are added in place to the adapter's gradient, sequence by sequence, so that
their bits do not depend on the rest of the micro-batch.

Axes: B sequences, T positions.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer_service.backbone.interface import AdapterPlace
from trainer_service.lora import AdapterStack


@dataclass(slots=True)
class Part:
    """The sequences [start, stop) of a micro-batch, and the place of each one's adapter in one stack."""

    start: int
    stop: int
    stack: AdapterStack
    places_B: Tensor
    scales_B11: Tensor


@dataclass(slots=True)
class Projection:
    """The decoder's `project`: each sequence through the base layer and its adapter. Parts do not overlap."""

    parts: Sequence[Part]
    _anchor: Tensor = field(default_factory=lambda: torch.zeros((), requires_grad=True))

    @classmethod
    def of(cls, adapters: Sequence[AdapterPlace]) -> "Projection":
        """`adapters`: each sequence's, those of one stack side by side."""
        parts: list[Part] = []
        for stack, group in itertools.groupby(adapters, key=lambda adapter: adapter[0]):
            start, places = parts[-1].stop if parts else 0, [place for _, place in group]
            scales = torch.tensor([stack.scales[place] for place in places], device=stack.device)
            places_B = torch.tensor(places, device=stack.device)
            parts.append(Part(start, start + len(places), stack, places_B, scales[:, None, None]))
        return cls(parts)

    def __call__(self, name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        parts = [part for part in self.parts if name in part.stack.factors]
        if not parts:
            return F.linear(x, weight, bias)
        return _LoraLinear.apply(x, weight, bias, name, parts, self._anchor)  # pyright: ignore[reportReturnType]


class _LoraLinear(torch.autograd.Function):
    """x [B, T, in] -> [B, T, out]. `anchor` gives the result a gradient where x has none: the first layer."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, name: str, parts: list[Part], anchor: Tensor
    ) -> Tensor:
        y = F.linear(x, weight, bias)
        lows: list[Tensor] = []
        for part in parts:
            a, b = _gathered(part, name, x.dtype)
            low = _product(x[part.start : part.stop], a.transpose(1, 2)).mul_(part.scales_B11)  # [B, T, rank]
            y[part.start : part.stop].baddbmm_(low, b.transpose(1, 2))
            lows.append(low)
        ctx.save_for_backward(x, weight, *lows)
        ctx.name, ctx.parts = name, parts
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dy = grads[0].contiguous()
        x, weight, *lows = ctx.saved_tensors
        dx = dy @ weight if ctx.needs_input_grad[0] else None
        for part, low in zip(ctx.parts, lows, strict=True):
            a, b = _gathered(part, ctx.name, dy.dtype)
            own, factors = slice(part.start, part.stop), part.stack.factors[ctx.name]
            dlow = _product(dy[own], b).mul_(part.scales_B11)
            _add(factors.grad_a, part.places_B, torch.bmm(dlow.transpose(1, 2), x[own]))
            _add(factors.grad_b, part.places_B, torch.bmm(dy[own].transpose(1, 2), low))
            if dx is not None:
                dx[own].baddbmm_(dlow, a)
        return dx, None, None, None, None, None


def _gathered(part: Part, name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Gathers each sequence's A [B, rank, in] and B [B, out, rank]."""
    factors = part.stack.factors[name]
    a, b = (factor.index_select(0, part.places_B) for factor in (factors.a, factors.b))
    return a.to(dtype), b.to(dtype)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """torch.bmm with the same bits for any number of products: a lone one of one column takes another kernel."""
    if len(left) == 1 and right.shape[-1] == 1:
        return torch.bmm(left.expand(2, -1, -1), right.expand(2, -1, -1))[:1]
    return torch.bmm(left, right)


def _add(totals: Tensor, places_B: Tensor, grads: Tensor) -> None:
    """Adds each sequence's gradient to its adapter's, in order of the sequences."""
    totals.index_add_(0, places_B, grads.to(totals.dtype))
