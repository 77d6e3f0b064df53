"""Draws tokens from scores: exact log-probs over the whole vocabulary, one uniform number a token, by inverse CDF.

Axes: B rows, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class SamplingPlan:
    """The sampling parameters of the rows of a forward; remade only when rows come or go."""

    temperature: Tensor | None  # [B, 1], 1 for greedy rows; None: 1 for all
    greedy: Tensor | None  # [B] bool; None: no row is
    all_greedy: bool
    top_p: Tensor | None  # [B, 1] float64; None: 1 for all
    num_top: int  # log-probs of that many best tokens, for all rows


@dataclass(slots=True)
class Sampled:
    """The next token of each row of a forward."""

    tokens: Tensor  # [B]
    logprobs: Tensor  # [B]; not a number where the row's scores are not
    top: tuple[Tensor, Tensor] | None  # [B, num_top] log-probs, tokens


def sample(logits: Tensor, uniforms: Tensor, plan: SamplingPlan) -> Sampled:
    """Draws a token for each row. logits float32 [B, V], uniforms float64 [B] in [0, 1)."""
    if plan.temperature is not None:
        logits = logits / plan.temperature
    logprobs = torch.log_softmax(logits, dim=-1)
    if plan.all_greedy:
        tokens = logits.argmax(-1)
    else:
        tokens = _draw(logprobs, uniforms, plan.top_p)
        if plan.greedy is not None:
            tokens = torch.where(plan.greedy, logits.argmax(-1), tokens)
    chosen = logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)
    top = logprobs.topk(plan.num_top, dim=-1) if plan.num_top else None
    return Sampled(tokens, chosen, (top.values, top.indices) if top else None)


def _draw(logprobs: Tensor, uniforms: Tensor, top_p: Tensor | None) -> Tensor:
    """Inverse CDF: the first token whose cumulative probability exceeds u. [B]"""
    weights = logprobs.exp()
    if top_p is not None:
        weights = _nucleus(weights, top_p)
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    target = uniforms.unsqueeze(1) * cumulative[:, -1:]
    found = torch.searchsorted(cumulative, target, right=True)
    return found.squeeze(1).clamp_(max=logprobs.shape[1] - 1)


def _nucleus(weights: Tensor, top_p: Tensor) -> Tensor:
    """Keeps the fewest best tokens that together reach top_p; rows with top_p 1 keep all."""
    best, order = weights.sort(dim=-1, descending=True)
    before = best.cumsum(-1, dtype=torch.float64) - best
    best = best.masked_fill((before >= top_p) & (top_p < 1), 0.0)
    return torch.zeros_like(weights).scatter_(1, order, best)
