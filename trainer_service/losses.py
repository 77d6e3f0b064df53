"""Computes the losses of jobs (advantages: common/tasks/advantages.py) and, by the same formula, of runs (data.py).

    loss     advantage         ratio to the sampling policy        clip           mean over           source
    grpo     (R - mean) / std  token                               .2 / .2        tokens of a row,    arXiv 2402.03300, eq. 3
                                                                                  then rows
    dr_grpo  R - mean          token                               .2 / .2        sum / most tokens,  arXiv 2503.20783, sec. 3.1
                                                                                  then rows
    dapo     (R - mean) / std  token                               .2 / .28       tokens of the batch arXiv 2503.14476, eq. 8
    rloo     R - mean(others)  none; weight min(r, is_clip)        -              sum, then rows      arXiv 2402.14740, eq. 8
    cispo    (R - mean) / std  weight clip(r, low, high), stopped  0 to 4         tokens of the batch arXiv 2506.13585, eq. 4
    gspo     (R - mean) / std  geometric mean over the row         3e-4 / 4e-4    as grpo             arXiv 2507.18071, eq. 5
    ppo      (R - mean) / std  token                               .2 / .2        tokens of the batch arXiv 1707.06347, eq. 7

Rows that nobody sampled, a supervised job's, have `cross_entropy`: advantage 1, weight 1, the mean over the tokens of the batch.

`clip_low`, `clip_high` are distances from 1 (r in [1 - low, 1 + high]); for `cispo` they are the bounds of the weight.
`is_clip` bounds the weight of a loss without a ratio (truncated importance sampling: Espeholt et al. 2018, arXiv 1802.01561)
and, with `truncate_ratios`, the ratio of the others.
std is the sample's (n - 1), plus 1e-4, as in TRL. A group of equal rewards, or of one row, has advantage 0.
The most tokens, `max_tokens` of the loss, are those that the model can write in one trajectory of the job.
At lag 0 (rows that the trained version sampled) the old policy of `gspo` is the trainer's own: see `_bounds`.
`mask_truncated` is DAPO's overlong filtering: a truncated row's reward counts in its group's mean and std, as a sample of
the policy, but the row is left out of the loss, numerator and denominators.

Axes: R rows of a batch, or of a micro-batch that may mix batches; W places for the tokens that the model wrote in a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from common.tasks.advantages import ADVANTAGES, AdvantageKind, group_advantages
from common.wire.messages import LossName, LossSpec
from trainer_service.batch import Batch, Bools, Floats, Ints, SampledRows, Terms

MAX_LOG_RATIO = 20.0  # beyond it a ratio counts as exp(20) without gradient: exp overflows float32 at 88


@dataclass(frozen=True, slots=True)
class Rule:
    """The properties in which the losses differ."""

    ratio: Literal["token", "sequence", "weight", "none"]
    clip_low: float
    clip_high: float
    mean: Literal["rows", "sums", "max_tokens", "tokens"]


RULES: dict[LossName, Rule] = {
    "grpo": Rule("token", 0.2, 0.2, "rows"),
    "dr_grpo": Rule("token", 0.2, 0.2, "max_tokens"),
    "dapo": Rule("token", 0.2, 0.28, "tokens"),
    "rloo": Rule("none", 0.0, 0.0, "sums"),
    "cispo": Rule("weight", 0.0, 4.0, "tokens"),
    "gspo": Rule("sequence", 3e-4, 4e-4, "rows"),
    "ppo": Rule("token", 0.2, 0.2, "tokens"),
}


CROSS_ENTROPY = Rule("weight", 1.0, 1.0, "tokens")


def rule_of(spec: LossSpec) -> Rule:
    return CROSS_ENTROPY if spec.name == "cross_entropy" else RULES[spec.name]


@dataclass(frozen=True, slots=True)
class RowTerms:
    """The terms of each row of a TrainStep that depend on the whole batch and its loss."""

    advantages_R: Floats
    weights_R: Floats  # of each token's loss: the reciprocal of its denominator; 0: not in the loss
    active_R: Bools  # rows that can have a gradient; the others need no forward


class MicroTerms(NamedTuple):
    """A micro-batch's terms of targets, 0 where a row has none, and of rows; ordered as in `Terms`."""

    sampled_RW: Tensor  # log-prob at sampling
    advantages_RW: Tensor
    weights_RW: Tensor  # factor of the loss
    low_RW: Tensor  # bounds of the ratio, or of the weight
    high_RW: Tensor
    averaged_RW: Tensor  # 1: counts in the mean of an anchored ratio
    limit_R1: Tensor  # the largest ratio
    is_sequence_R1: Tensor  # 1: the ratio is the row's geometric mean
    is_anchored_R1: Tensor  # 1: it is too, but each token has only the gradient of its own log-prob
    is_weight_R1: Tensor  # 1: the bounded ratio is a weight through which no gradient flows
    kl_coefs_R1: Tensor
    betas_R1: Tensor  # coefficient of half the squared log-ratio
    is_current_R1: Tensor  # 1: the version that is trained has sampled the row
    has_anchored: bool
    has_betas: bool


NUM_OF_TARGETS = MicroTerms._fields.index("limit_R1")
ANCHORED, BETAS = (MicroTerms._fields.index(name) - NUM_OF_TARGETS for name in ("is_anchored_R1", "betas_R1"))


def micro_terms(parts: "Sequence[tuple[Batch, Sequence[int]]]", width: int, like: Tensor) -> tuple[MicroTerms, Tensor]:
    """The terms of some rows of several batches in order, with dtype and device of `like`, and which of the `width` places of a
    row are targets, [R, W]."""
    spans = [
        (batch.terms, starts[row], starts[row + 1])
        for batch, rows in parts
        for starts in [batch.starts_R]
        for row in rows
    ]
    counts_R = np.array([stop - start for _, start, stop in spans])
    is_target_RW = np.arange(width) < counts_R[:, None]
    of_targets_KRW = np.zeros((NUM_OF_TARGETS, *is_target_RW.shape))
    of_targets_KRW[:, is_target_RW] = np.concatenate(
        [terms.of_targets_KM[:, start:stop] for terms, start, stop in spans], axis=1
    )
    of_rows_KR = np.concatenate([batch.terms.of_rows_KR[:, list(rows)] for batch, rows in parts], axis=1)
    has_anchored, has_betas = (bool(of_rows_KR[kind].any()) for kind in (ANCHORED, BETAS))
    dense = [*torch.from_numpy(of_targets_KRW).to(like), *torch.from_numpy(of_rows_KR).to(like)[:, :, None]]
    return MicroTerms._make([*dense, has_anchored, has_betas]), torch.from_numpy(is_target_RW).to(like.device)


def batch_of(rows: SampledRows, terms: RowTerms, spec: LossSpec, version: int) -> Batch:
    """The batch of a TrainStep that trains `version`: the model reads all before a row's last trained token."""
    rule, current_R = rule_of(spec), rows.versions_R == version
    places = [np.flatnonzero(mask) for mask in rows.written]
    counts_R = rows.num_written_R()
    ones_M = np.ones(counts_R.sum())
    low_R, high_R, limit_R = _bounds(rule, spec, current_R)
    by_row = (terms.advantages_R, terms.weights_R, low_R, high_R)
    sampled = [row_T[place] for row_T, place in zip(rows.logprobs, places, strict=True)]
    is_weight = rule.ratio in ("weight", "none")
    by_row_KR = np.broadcast_arrays(limit_R, rule.ratio == "sequence", 0, is_weight, spec.kl_coef, 0, current_R)
    return Batch(
        inputs=[tokens[: place[-1] if len(place) else 0] for tokens, place in zip(rows.tokens, places, strict=True)],
        predictors=[place - 1 for place in places],
        targets=[tokens[place] for tokens, place in zip(rows.tokens, places, strict=True)],
        groups_R=rows.groups_R,
        parts_R=np.zeros(len(rows), np.int64),
        wanted_R=terms.active_R,
        learned_R=np.ones(len(rows), bool),
        terms=Terms(
            np.stack([np.concatenate([ones_M[:0], *sampled]), *(np.repeat(each, counts_R) for each in by_row), ones_M]),
            np.stack(by_row_KR).astype(np.float64),
            [np.ones(count, bool) for count in counts_R],
        ),
        temperature=spec.temperature,
        kl_coef=spec.kl_coef,
    )


def row_terms(batch: SampledRows, spec: LossSpec) -> RowTerms:
    """Computes the terms of each row of a batch."""
    advantages_R = advantages(batch.rewards_R, batch.groups_R, ADVANTAGES[spec.name])
    kept_R = batch.num_written_R() > 0
    if spec.mask_truncated:
        kept_R &= ~batch.truncated_R
    return RowTerms(
        advantages_R=advantages_R,
        weights_R=token_weights(batch.num_written_R(), kept_R, spec),
        active_R=kept_R if spec.kl_coef else kept_R & (advantages_R != 0),
    )


def _bounds(rule: Rule, spec: LossSpec, current_R: Bools) -> tuple[Floats, Floats, Floats]:
    """Each row's bounds of the ratio, or of the weight, and its largest ratio (truncated importance sampling; infinite: any).
    `current_R`: rows at lag 0."""
    low = rule.clip_low if spec.clip_low is None else spec.clip_low
    high = rule.clip_high if spec.clip_high is None else spec.clip_high
    if rule.ratio == "none":
        low, high = 0.0, spec.is_clip
    elif rule.ratio != "weight":
        low, high = 1.0 - low, 1.0 + high
    limit = spec.is_clip if spec.truncate_ratios and rule.ratio != "none" else np.inf
    # At lag 0 the old policy of whole-row ratios is the trainer's own, and its difference to the sampler a weight: the ratio is then 1, and
    # no clip binds. GSPO's narrow bounds would clip the sampler's rounding. With policy p and sampler s, min(p.detach() / s, is_clip)
    # (p / p.detach()) A is min(p / s, is_clip) A with a weight's gradient: the truncated ratio, without bounds.
    own_R = current_R & (rule.ratio == "sequence")
    return np.where(own_R, 0.0, low), np.where(own_R, np.inf, high), np.where(own_R, spec.is_clip, limit)


def advantages(rewards_R: Floats, groups_R: Ints, kind: AdvantageKind) -> Floats:
    """Compares each row's reward with those of its group, [R]; `one`: 1 whatever the rewards."""
    advantages_R = np.zeros(len(rewards_R))
    for group in np.unique(groups_R):
        member_R = groups_R == group
        advantages_R[member_R] = group_advantages(rewards_R[member_R], kind)
    return advantages_R


def token_weights(num_written_R: Ints, kept_R: Bools, spec: LossSpec) -> Floats:
    """The factor of each token's loss by row, [R]; denominators count kept rows of the whole batch."""
    num_rows = float(kept_R.sum())
    denominators: dict[str, Any] = {
        "rows": num_rows * num_written_R,
        "sums": num_rows,
        "max_tokens": num_rows * spec.max_tokens,
        "tokens": float(num_written_R[kept_R].sum()),
    }
    return np.where(kept_R, 1.0 / np.maximum(denominators[rule_of(spec).mean], 1.0), 0.0)


def token_losses(terms: MicroTerms, logprobs_RW: Tensor, written_RW: Tensor) -> tuple[Tensor, Tensor]:
    """Computes (loss, whether the clip binds) of each target, [R, W] both; the weighted sum of the first is the loss.

    One formula for all losses, so that rows of different jobs and runs share it. Only places in `written_RW` are targets; others
    count nowhere. A clip binds where it removes the gradient, or changes a ratio that is the weight.
    """
    advantages_RW, is_weight_R1 = terms.advantages_RW, terms.is_weight_R1 > 0
    difference_RW = logprobs_RW - terms.sampled_RW
    log_ratio_RW = difference_RW.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    log_ratio_RW = torch.where(terms.is_sequence_R1 > 0, _row_means(log_ratio_RW, written_RW), log_ratio_RW)
    if terms.has_anchored:
        anchored_RW = _row_means(log_ratio_RW, terms.averaged_RW).detach() + logprobs_RW - logprobs_RW.detach()
        log_ratio_RW = torch.where(terms.is_anchored_R1 > 0, anchored_RW, log_ratio_RW)
    ratio_RW = _truncated(log_ratio_RW, terms.limit_R1).exp()
    bound_RW = ratio_RW.clamp(terms.low_RW, terms.high_RW)
    free_RW, clipped_RW = ratio_RW * advantages_RW, bound_RW * advantages_RW
    pessimistic_RW = torch.minimum(free_RW, clipped_RW)  # PPO's surrogate
    reinforce_RW = bound_RW.detach() * advantages_RW * logprobs_RW
    binds_RW = torch.where(is_weight_R1, bound_RW != ratio_RW, clipped_RW < free_RW)
    loss_RW = -torch.where(is_weight_R1, reinforce_RW, pessimistic_RW)
    if terms.has_betas:
        loss_RW = loss_RW + 0.5 * terms.betas_R1 * difference_RW.square()
    return loss_RW, binds_RW & written_RW


def _truncated(log_ratio_RW: Tensor, limit_R1: Tensor) -> Tensor:
    """Truncated importance sampling: a ratio r becomes min(r, limit), and its gradient min(r, limit) d log r.

    Ionides 2008, doi 10.1198/106186008X320456. The ratio to the log-probs at sampling *is* the importance weight; a clipped
    surrogate leaves it unbounded where the advantage is negative.
    """
    return log_ratio_RW - (log_ratio_RW - limit_R1.log()).clamp(min=0.0).detach()


def _row_means(values_RW: Tensor, written_RW: Tensor) -> Tensor:
    """The mean over each row's tokens, [R, 1]."""
    counts_R1 = written_RW.sum(1, keepdim=True).clamp(min=1)
    return (values_RW * written_RW).sum(1, keepdim=True) / counts_R1


def k3(logprobs: Tensor, base: Tensor) -> Tensor:
    """KL(policy || base) of each token: exp(d) - d - 1 with d = base - policy. Never negative.

    Schulman 2020, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html
    """
    difference = (base - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return difference.exp() - difference - 1.0


def off_policy(logprobs_RW: Tensor, sampled_RW: Tensor, written_RW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compares the trained policy with the sampler: (KL(sampling || trained), ratio r, r²) of each token, [R, W], else 0. Uses
    float64, and k3 as expm1: rounding leaves about 1e-7 of log r, and 1e-14 of its square."""
    difference_RW = (logprobs_RW.detach().double() - sampled_RW.double()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio_RW = difference_RW.exp() * written_RW
    return (difference_RW.expm1() - difference_RW) * written_RW, ratio_RW, ratio_RW.square()
