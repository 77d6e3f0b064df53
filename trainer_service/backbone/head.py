"""Computes log-probs of targets from hidden states, in chunks of scores, differentiable in the hidden states.

Axes: M targets, E hidden, V vocabulary.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from common.models.footprint import MAX_SCORES

MIN_ROWS = 8  # of a matrix product
Slopes = tuple[Tensor, Tensor | None]
"""Log-probs [M], and d logprob / d hidden [M, E] if it is wanted."""


def target_logprobs(
    hidden_ME: Tensor,
    head_VE: Tensor,
    targets_M: Tensor,
    temperatures_M: Tensor,
    learned_M: Tensor | None,
    max_scores: int = MAX_SCORES,
    fused: bool = False,
) -> Tensor:
    """float32 log_softmax(hidden @ head / temperature) of each target, [M].

    `learned_M`: the targets that may have a gradient; None: all. `max_scores`: logits that exist at one time.
    `fused`: by a Triton kernel.
    """
    return _TargetLogprobs.apply(  # pyright: ignore[reportReturnType]
        hidden_ME, head_VE, targets_M, temperatures_M, learned_M, max_scores, fused
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
        fused: bool,
    ) -> Tensor:
        slope_ME = torch.zeros_like(hidden_ME) if ctx.needs_input_grad[0] else None
        logprobs_M = torch.empty_like(temperatures_M)
        compute = _by_kernel if fused else _plainly
        chunk = max(1, max_scores // len(head_VE))
        for own, learn in _chunks(len(targets_M), learned_M, chunk):
            about = (head_VE, targets_M[own], temperatures_M[own], learn and slope_ME is not None)
            logprobs_M[own], slope = compute(_head(hidden_ME[own], head_VE), *about)
            if slope_ME is not None and slope is not None:
                slope_ME[own] = slope
        ctx.save_for_backward(slope_ME)
        return logprobs_M

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (slope_ME,) = ctx.saved_tensors
        return grads[0].to(slope_ME.dtype)[:, None] * slope_ME, None, None, None, None, None, None


def _chunks(num: int, learned_M: Tensor | None, chunk: int) -> list[tuple[Tensor | slice, bool]]:
    """Targets, a chunk at a time, with whether they learn. Those that do come first: the host knows how many they are."""
    if learned_M is None:
        return [(slice(start, start + chunk), True) for start in range(0, num, chunk)]
    learn_M = torch.zeros(num, device=learned_M.device).index_fill_(0, learned_M, 1.0)
    rest_M = learn_M.argsort(stable=True)[: num - len(learned_M)]
    return [(own, some is learned_M) for some in (learned_M, rest_M) for own in some.split(chunk) if len(own)]


def _by_kernel(logits_MV: Tensor, head_VE: Tensor, targets_M: Tensor, temperatures_M: Tensor, slopes: bool) -> Slopes:
    from trainer_service.backbone.device_kernels.head_kernel import head_logprobs_  # here: not every torch has Triton

    logprobs_M = head_logprobs_(logits_MV, targets_M, temperatures_M, slopes)
    return logprobs_M, _head(logits_MV, head_VE.t()) if slopes else None


def _plainly(logits_MV: Tensor, head_VE: Tensor, targets_M: Tensor, temperatures_M: Tensor, slopes: bool) -> Slopes:
    scores_MV = logits_MV.float().div_(temperatures_M[:, None]).log_softmax(-1)
    logprobs_M = scores_MV.gather(1, targets_M[:, None]).squeeze(1)
    if not slopes:
        return logprobs_M, None
    mean_ME = _head(scores_MV.exp_().to(head_VE.dtype), head_VE.t())
    return logprobs_M, (head_VE[targets_M] - mean_ME).div_(temperatures_M[:, None])


def _head(x_MI: Tensor, weight_OI: Tensor) -> Tensor:
    """x W', [M, O]. Adds rows to a product of few, which would take another kernel, with other bits."""
    missing = max(0, MIN_ROWS - len(x_MI))
    return F.linear(F.pad(x_MI, (0, 0, 0, missing)), weight_OI)[: len(x_MI)]
