"""Runs AdamW over one flat tensor, and saves its state as bytes.

Loshchilov & Hutter 2019, arXiv 1711.05101, algorithm 2 (decoupled weight decay), constant rate. All operations are
elementwise in a fixed order, so the same state and gradient always give the same bits.

Axes: P all values of an adapter.
"""

from dataclasses import dataclass

import safetensors
import safetensors.torch
import torch
from torch import Tensor
from torch.optim.adamw import adamw

from common.errors import CorruptObject
from common.wire.messages import OptimSpec


@dataclass(frozen=True, slots=True)
class Moments:
    """The optimiser's memory of one adapter, float32."""

    mean_P: Tensor  # first moment
    square_P: Tensor  # second moment
    num_steps: int

    @classmethod
    def zeros(cls, num_values: int, device: torch.device) -> "Moments":
        return cls(torch.zeros(num_values, device=device), torch.zeros(num_values, device=device), 0)


def clip_gradient(grad_P: Tensor, max_norm: float) -> Tensor:
    """Scales the gradient in place to a norm of at most `max_norm` (0: any), as torch's clip_grad_norm_; returns the norm before."""
    norm = torch.linalg.vector_norm(grad_P)
    if max_norm > 0:
        exact = norm.double()
        grad_P.mul_(torch.where(exact > max_norm, max_norm / (exact + 1e-6), 1.0))
    return norm


def update(values_P: Tensor, grad_P: Tensor, moments: Moments, spec: OptimSpec) -> Moments:
    """Runs AdamW once, in place on the values; returns the new moments. Torch's fused kernel reads memory once."""
    mean_P, square_P = moments.mean_P.clone(), moments.square_P.clone()
    steps = torch.tensor(float(moments.num_steps), device=values_P.device)
    adamw(
        [values_P],
        [grad_P],
        [mean_P],
        [square_P],
        [],
        [steps],
        fused=True,
        amsgrad=False,
        beta1=spec.beta1,
        beta2=spec.beta2,
        lr=spec.learning_rate,
        weight_decay=spec.weight_decay,
        eps=spec.eps,
        maximize=False,
    )
    return Moments(mean_P, square_P, moments.num_steps + 1)


def save_moments(moments: Moments) -> bytes:
    """Saves safetensors: `mean`, `square` (flat, in the adapter's order) and `num_steps`."""
    tensors = {
        "mean": moments.mean_P.cpu(),
        "square": moments.square_P.cpu(),
        "num_steps": torch.tensor(moments.num_steps),
    }
    return safetensors.torch.save(tensors)


def load_moments(data: bytes, num_values: int, device: torch.device) -> Moments:
    """The inverse of `save_moments`. Raises CorruptObject unless they are moments of `num_values` values."""
    try:
        tensors = safetensors.torch.load(data)
        mean_P, square_P, num_steps = tensors["mean"], tensors["square"], int(tensors["num_steps"])
    except (KeyError, ValueError, safetensors.SafetensorError) as error:
        raise CorruptObject(f"not an optimiser state: {error}") from error
    if mean_P.shape != (num_values,) or square_P.shape != (num_values,):
        raise CorruptObject("the optimiser state does not match the adapter")
    return Moments(mean_P.to(device), square_P.to(device), num_steps)
