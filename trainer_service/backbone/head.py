"""Computes log-probs of targets from hidden states, in chunks of scores, differentiable in the hidden states.

Axes: M targets, E hidden, V vocabulary.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from common.models.footprint import MAX_SCORES

MIN_ROWS = 8  # of a matrix product


def target_logprobs(
    hidden_ME: Tensor,
    head_VE: Tensor,
    targets_M: Tensor,
    temperatures_M: Tensor,
    learned_M: Tensor | None,
    max_scores: int = MAX_SCORES,
) -> Tensor:
    """float32 log_softmax(hidden @ head / temperature) of each target, [M].

    `learned_M`: the targets that may have a gradient; None: all. `max_scores`: logits that exist at one time.
    """
    return _TargetLogprobs.apply(  # pyright: ignore[reportReturnType]
        hidden_ME, head_VE, targets_M, temperatures_M, learned_M, max_scores
    )


class _TargetLogprobs(torch.autograd.Function):
    """Hidden states [M, E] and a frozen head [V, E] -> log-probs [M], without keeping [M, V].

    d logprob / d hidden = (head[target] - softmax @ head) / temperature does not depend on the loss's gradient: the forward
    computes it, a chunk of M at a time, and the backward is one product by rows.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ME: Tensor,
        head_VE: Tensor,
        targets_M: Tensor,
        temperatures_M: Tensor,
        learned_M: Tensor | None,
        max_scores: int,
    ) -> Tensor:
        slope_ME = _empty_slope(hidden_ME, learned_M) if ctx.needs_input_grad[0] else None
        logprobs_M = torch.empty_like(temperatures_M)
        chunk = max(1, max_scores // len(head_VE))
        for start in range(0, len(targets_M), chunk):
            own = slice(start, start + chunk)
            temperatures_M1 = temperatures_M[own, None]
            scores_MV = _head(hidden_ME[own], head_VE).float().div_(temperatures_M1).log_softmax(-1)
            logprobs_M[own] = scores_MV.gather(1, targets_M[own, None]).squeeze(1)
            if slope_ME is not None and learned_M is None:
                slope_ME[own] = _slope(scores_MV, head_VE, targets_M[own], temperatures_M1)
            elif slope_ME is not None and learned_M is not None:
                some = learned_M[(learned_M >= start) & (learned_M < start + chunk)]
                slope_ME[some] = _slope(scores_MV[some - start], head_VE, targets_M[some], temperatures_M[some, None])
        ctx.save_for_backward(slope_ME)
        return logprobs_M

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (slope_ME,) = ctx.saved_tensors
        return grads[0].to(slope_ME.dtype)[:, None] * slope_ME, None, None, None, None, None


def _empty_slope(hidden_ME: Tensor, learned_M: Tensor | None) -> Tensor:
    """Room for the slopes; those of targets without a gradient stay 0."""
    return torch.empty_like(hidden_ME) if learned_M is None else torch.zeros_like(hidden_ME)


def _slope(scores_MV: Tensor, head_VE: Tensor, targets_M: Tensor, temperatures_M1: Tensor) -> Tensor:
    """d logprob / d hidden, [M, E]; overwrites the scores."""
    mean_ME = _head(scores_MV.exp_().to(head_VE.dtype), head_VE.t())
    return (head_VE[targets_M] - mean_ME).div_(temperatures_M1)


def _head(x_MI: Tensor, weight_OI: Tensor) -> Tensor:
    """x W', [M, O]. Adds rows to a product of few, which would take another kernel, with other bits."""
    missing = max(0, MIN_ROWS - len(x_MI))
    return F.linear(F.pad(x_MI, (0, 0, 0, missing)), weight_OI)[: len(x_MI)]
