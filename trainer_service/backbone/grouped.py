"""Linear layers with the adapters of packed tokens; only the adapters train.

One adapter's tokens are contiguous, so `grouped_mm` multiplies all adapters of a rank at once. It needs rows of a multiple
of ALIGNMENT bytes (ranks are padded), and on CUDA bfloat16 with capability >= 8.0. Else each adapter has its own product.
Forward y = x W' + s (x A') B'. Backward, with g = s dy B: dx = dy W + g A, dA = g' x, dB = dy' (s x A').

Axes: N tokens of a pack, n of a lane, G adapters of a lane, I and O widths of a layer, R padded rank.
"""

import itertools
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
    """The tokens [start, stop) of a pack, whose adapters are of one stack."""

    start: int
    stop: int
    stack: AdapterStack
    places_G: Tensor
    ends_G: Tensor  # int32, counted from start: where each adapter's tokens end
    cuts: tuple[int, ...]  # the same, for the host
    scales_n1: Tensor

    def factors(self, name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The adapters' A [G, R, I] and B [G, O, R]."""
        factors = self.stack.factors[name]
        a, b = (factor.index_select(0, self.places_G).to(dtype) for factor in (factors.a, factors.b))
        missing = -a.shape[1] % (ALIGNMENT // dtype.itemsize)
        return F.pad(a, (0, 0, 0, missing)), F.pad(b, (0, missing))

    def add_gradients(self, name: str, grads_a: Tensor, grads_b: Tensor) -> None:
        """Adds [G, R, I] and [G, O, R] to the adapters' gradients."""
        factors = self.stack.factors[name]
        rank = factors.a.shape[1]
        factors.grad_a.index_add_(0, self.places_G, grads_a[:, :rank].to(factors.grad_a.dtype))
        factors.grad_b.index_add_(0, self.places_G, grads_b[:, :, :rank].to(factors.grad_b.dtype))


def lanes_of(adapters: Sequence[AdapterPlace], lengths: Sequence[int]) -> list[Lane]:
    """`adapters`, `lengths`: of each sequence; neighbours of one adapter share products, those of one stack a lane."""
    lanes: list[Lane] = []
    start = 0
    sequences = zip(adapters, lengths, strict=True)
    for stack, own in itertools.groupby(sequences, key=lambda sequence: sequence[0][0]):
        places: list[int] = []
        counts: list[int] = []
        for place, group in itertools.groupby(own, key=lambda sequence: sequence[0][1]):
            places.append(place)
            counts.append(sum(length for _, length in group))
        ends_G, device = np.cumsum(counts), stack.device
        scales_n1 = torch.from_numpy(np.repeat(np.array([stack.scales[p] for p in places], np.float32), counts))[
            :, None
        ]
        lanes.append(
            Lane(
                start,
                start + int(ends_G[-1]),
                stack,
                torch.tensor(places, device=device),
                torch.from_numpy(ends_G.astype(np.int32)).to(device),
                tuple(ends_G.tolist()),
                scales_n1.to(device),
            )
        )
        start = lanes[-1].stop
    return lanes


@dataclass(slots=True)
class CurrentLanes:
    """The lanes of the pass under way, which transformers' modules cannot take as an argument."""

    lanes: Sequence[Lane] = ()

    @contextmanager
    def using(self, lanes: Sequence[Lane]) -> Generator[None]:
        before, self.lanes = self.lanes, lanes
        try:
            yield
        finally:
            self.lanes = before


class LoraLinear(torch.nn.Module):
    """A frozen linear layer of the base, through which each token goes with its own adapter."""

    def __init__(self, base: torch.nn.Linear, name: str, current: CurrentLanes) -> None:
        super().__init__()
        self.base, self._name, self._current = base, name, current
        self._anchor = torch.zeros((), requires_grad=True)

    def forward(self, x: Tensor) -> Tensor:
        """x [1, N, I] -> [1, N, O]"""
        lanes = [lane for lane in self._current.lanes if self._name in lane.stack.factors]
        if not lanes:
            return self.base(x)
        y = _GroupedLoraLinear.apply(
            x.flatten(0, -2), self.base.weight, self.base.bias, self._name, lanes, self._anchor
        )
        return y.unflatten(0, x.shape[:-1])  # pyright: ignore


class _GroupedLoraLinear(torch.autograd.Function):
    """x [N, I] -> [N, O]. `anchor` gives the result a gradient where x has none: the first layer."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, name: str, lanes: list[Lane], anchor: Tensor
    ) -> Tensor:
        y = F.linear(x, weight, bias)
        lows: list[Tensor] = []
        for lane in lanes:
            a, b = lane.factors(name, x.dtype)
            low = _by_group(x[lane.start : lane.stop], a.transpose(1, 2), lane).mul_(lane.scales_n1)  # [n, R]
            y[lane.start : lane.stop] += _by_group(low, b.transpose(1, 2), lane)
            lows.append(low)
        ctx.save_for_backward(x, weight, *lows)
        ctx.name, ctx.lanes = name, lanes
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dy = grads[0].contiguous()
        x, weight, *lows = ctx.saved_tensors
        dx = dy @ weight if ctx.needs_input_grad[0] else None
        for lane, low in zip(ctx.lanes, lows, strict=True):
            a, b = lane.factors(ctx.name, dy.dtype)
            own = slice(lane.start, lane.stop)
            dlow = _by_group(dy[own], b, lane).mul_(lane.scales_n1)
            lane.add_gradients(ctx.name, _over_tokens(dlow, x[own], lane), _over_tokens(dy[own], low, lane))
            if dx is not None:
                dx[own] += _by_group(dlow, a, lane)
        return dx, None, None, None, None, None


def _by_group(x_nI: Tensor, weights_GIO: Tensor, lane: Lane) -> Tensor:
    """Each adapter's tokens times its own matrix, [n, O]."""
    if _is_served(x_nI, weights_GIO.shape[2]):
        return F.grouped_mm(x_nI, weights_GIO, offs=lane.ends_G)
    return torch.cat([x @ w for x, w in zip(_cut(x_nI, lane), weights_GIO, strict=True)])


def _over_tokens(left_nO: Tensor, right_nI: Tensor, lane: Lane) -> Tensor:
    """left' right of each adapter's own tokens, [G, O, I]."""
    if _is_served(left_nO, right_nI.shape[1]):
        return F.grouped_mm(left_nO.t(), right_nI, offs=lane.ends_G)
    return torch.stack([a.t() @ b for a, b in zip(_cut(left_nO, lane), _cut(right_nI, lane), strict=True)])


def _is_served(x: Tensor, other: int) -> bool:
    """Says whether grouped_mm multiplies x [n, I] and matrices whose rows have `other` values."""
    if x.is_cuda and not (x.dtype == torch.bfloat16 and torch.cuda.get_device_capability(x.device) >= (8, 0)):
        return False
    return x.shape[1] * x.dtype.itemsize % ALIGNMENT == 0 and other * x.dtype.itemsize % ALIGNMENT == 0


def _cut(x: Tensor, lane: Lane) -> tuple[Tensor, ...]:
    return x.tensor_split(lane.cuts[:-1])
