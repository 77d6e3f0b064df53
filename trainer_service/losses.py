"""The seven policy-gradient losses: advantages, ratios, clips, aggregation.

    loss     advantage         ratio to the sampling policy        clip           mean over           source
    grpo     (R - mean) / std  token                               .2 / .2        tokens of a row,    arXiv 2402.03300, eq. 3
                                                                                  then rows
    dr_grpo  R - mean          token                               .2 / .2        sum / max_tokens,   arXiv 2503.20783, sec. 3.1
                                                                                  then rows
    dapo     (R - mean) / std  token                               .2 / .28       tokens of the batch arXiv 2503.14476, eq. 8
    rloo     R - mean(others)  none; weight min(r, is_clip)        -              as grpo             arXiv 2402.14740, eq. 8
    cispo    (R - mean) / std  weight clip(r, low, high), stopped  0 to 4         tokens of the batch arXiv 2506.13585, eq. 4
    gspo     (R - mean) / std  geometric mean over the row         3e-4 / 4e-4    as grpo             arXiv 2507.18071, eq. 5
    ppo      (R - mean) / std  token                               .2 / .2        tokens of the batch arXiv 1707.06347, eq. 7

`clip_low`, `clip_high` are distances from 1 (r in [1 - low, 1 + high]), for `cispo` the bounds of the weight themselves.
`is_clip` matters to losses without a ratio only (truncated importance sampling: Espeholt et al. 2018, arXiv 1802.01561).
std is the sample's (n - 1), plus 1e-6, as in verl and TRL. A group of equal rewards, or of one row, has advantage 0.
`mask_truncated` is DAPO's overlong filtering: a truncated row's reward still counts in its group's mean and std (it is a
sample of the policy like any other), but the row is left out of the loss, numerator and denominators.

Axes: R rows of the batch, M tokens that the model wrote, of all rows of a batch or of a micro-batch.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from common.messages import LossSpec
from trainer_service.batch import Batch, Bools, Floats, Ints

STD_EPSILON = 1e-6
MAX_LOG_RATIO = 20.0  # beyond it a ratio counts as exp(20) without gradient: exp overflows float32 at 88


@dataclass(frozen=True, slots=True)
class Rule:
    """What sets one loss apart from the others."""

    advantage: Literal["standardised", "centred", "leave_one_out"]
    ratio: Literal["token", "sequence", "weight", "none"]
    clip_low: float
    clip_high: float
    mean: Literal["rows", "max_tokens", "tokens"]


RULES: dict[str, Rule] = {
    "grpo": Rule("standardised", "token", 0.2, 0.2, "rows"),
    "dr_grpo": Rule("centred", "token", 0.2, 0.2, "max_tokens"),
    "dapo": Rule("standardised", "token", 0.2, 0.28, "tokens"),
    "rloo": Rule("leave_one_out", "none", 0.0, 0.0, "rows"),
    "cispo": Rule("standardised", "weight", 0.0, 4.0, "tokens"),
    "gspo": Rule("standardised", "sequence", 3e-4, 4e-4, "rows"),
    "ppo": Rule("standardised", "token", 0.2, 0.2, "tokens"),
}


@dataclass(frozen=True, slots=True)
class RowTerms:
    """What the whole batch decides about each row, so that micro-batches only add up."""

    advantages_R: Floats
    weights_R: Floats  # factor of each token's loss: the reciprocal of its denominator; 0: not in the loss
    active_R: Bools  # rows that can have a gradient; the others need no forward


def row_terms(batch: Batch, spec: LossSpec) -> RowTerms:
    advantages_R = advantages(batch.rewards_R, batch.groups_R, RULES[spec.name].advantage)
    kept_R = batch.num_written_R() > 0
    if spec.mask_truncated:
        kept_R &= ~batch.truncated_R
    weights_R = token_weights(batch.num_written_R(), kept_R, spec)
    active_R = kept_R if spec.kl_coef else kept_R & (advantages_R != 0)
    return RowTerms(advantages_R, weights_R, active_R)


def advantages(rewards_R: Floats, groups_R: Ints, kind: str) -> Floats:
    """Each row's reward against those of its group, [R]."""
    advantages_R = np.zeros(len(rewards_R))
    for group in np.unique(groups_R):
        member_R = groups_R == group
        advantages_R[member_R] = _group_advantages(rewards_R[member_R], kind)
    return advantages_R


def _group_advantages(rewards: Floats, kind: str) -> Floats:
    n = len(rewards)
    if n < 2 or rewards.min() == rewards.max():
        return np.zeros(n)
    centred = rewards - rewards.mean()
    if kind == "standardised":
        return centred / (rewards.std(ddof=1) + STD_EPSILON)
    if kind == "leave_one_out":
        return centred * n / (n - 1)  # R - (sum - R) / (n - 1)
    return centred


def token_weights(num_written_R: Ints, kept_R: Bools, spec: LossSpec) -> Floats:
    """The factor of each token's loss by row, [R]; denominators count kept rows of the whole batch."""
    mean = RULES[spec.name].mean
    if mean == "tokens":
        denominator_R = np.full(len(kept_R), num_written_R[kept_R].sum(), np.float64)
    elif mean == "max_tokens":
        denominator_R = np.full(len(kept_R), kept_R.sum() * spec.max_tokens, np.float64)
    else:
        denominator_R = kept_R.sum() * num_written_R.astype(np.float64)
    return np.where(kept_R, 1.0 / np.maximum(denominator_R, 1.0), 0.0)


def token_losses(
    spec: LossSpec, logprobs_M: Tensor, sampled_M: Tensor, advantages_M: Tensor, rows_M: Tensor
) -> tuple[Tensor, Tensor]:
    """(loss, 1 where the clip binds) of each token, [M] both; the weighted sum of the first is the policy loss.

    `sampled_M`: log-probs at sampling; `rows_M`: a number for each token's row, rows whole. The clip binds where it
    takes away the gradient, and for `cispo` and `rloo` where it changes the weight.
    """
    rule = RULES[spec.name]
    low = rule.clip_low if spec.clip_low is None else spec.clip_low
    high = rule.clip_high if spec.clip_high is None else spec.clip_high
    log_ratio_M = (logprobs_M - sampled_M).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if rule.ratio == "none":
        return _weighted(logprobs_M, log_ratio_M, advantages_M, 0.0, spec.is_clip)
    if rule.ratio == "weight":
        return _weighted(logprobs_M, log_ratio_M, advantages_M, low, high)
    if rule.ratio == "sequence":
        log_ratio_M = _row_means(log_ratio_M, rows_M)
    return _clipped(log_ratio_M.exp(), advantages_M, low, high)


def _clipped(ratio_M: Tensor, advantages_M: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """PPO's pessimistic surrogate, -min(r A, clip(r) A)."""
    free_M = ratio_M * advantages_M
    bound_M = ratio_M.clamp(1.0 - low, 1.0 + high) * advantages_M
    return -torch.minimum(free_M, bound_M), (bound_M < free_M).detach()


def _weighted(
    logprobs_M: Tensor, log_ratio_M: Tensor, advantages_M: Tensor, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """REINFORCE with a bounded importance weight through which no gradient flows."""
    ratio_M = log_ratio_M.detach().exp()
    weight_M = ratio_M.clamp(low, high)
    return -weight_M * advantages_M * logprobs_M, weight_M != ratio_M


def _row_means(values_M: Tensor, rows_M: Tensor) -> Tensor:
    """Each token's row mean, [M]."""
    _, row_M = torch.unique(rows_M, return_inverse=True)
    sums = values_M.new_zeros(int(row_M.max()) + 1).index_add(0, row_M, values_M)
    counts = torch.bincount(row_M).to(values_M)
    return (sums / counts)[row_M]


def k3(logprobs_M: Tensor, base_M: Tensor) -> Tensor:
    """KL(policy || base) of each token, [M]: exp(d) - d - 1 with d = base - policy. Never negative.

    Schulman 2020, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html
    """
    difference_M = (base_M - logprobs_M).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return difference_M.exp() - difference_M - 1.0
