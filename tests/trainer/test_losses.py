"""The seven losses against a second implementation: token by token, written from the papers' formulas, in float64.

Its gradients are autograd's. `stopped` are the log-probs through which no gradient flows.
"""

import math
import statistics
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from common.tasks.advantages import AdvantageKind
from common.wire.messages import LossSpec
from trainer_service.batch import SampledRows
from trainer_service.losses import (
    RULES,
    MicroTerms,
    advantages,
    batch_of,
    k3,
    micro_terms,
    off_policy,
    row_terms,
    token_losses,
)

Rows = list[list[float]]
NAMES = sorted(RULES)
TRAINED = 1
"""The version that is trained."""
CLOSE = 1e-12
"""The most by which two computations in float64 may differ."""


# ---- the second implementation --------------------------------------------------------------------------------------


def naive_advantage(rewards: list[float], i: int, name: str) -> float:
    if len(rewards) < 2 or len(set(rewards)) == 1:
        return 0.0
    if name == "rloo":  # RLOO eq. 8: R_i minus the mean of the other k - 1
        others = rewards[:i] + rewards[i + 1 :]
        return rewards[i] - sum(others) / len(others)
    if name == "dr_grpo":  # Dr. GRPO: without the std
        return rewards[i] - statistics.mean(rewards)
    return (rewards[i] - statistics.mean(rewards)) / (statistics.stdev(rewards) + 1e-4)


def naive_token(name: str, policy: Tensor, sampled: Tensor, t: int, advantage: float, lag: int) -> Tensor:
    """The objective of one token of a row, which is maximised."""
    stopped = policy.detach()
    if name == "rloo":
        return (stopped[t] - sampled[t]).exp().clamp(max=2.0) * advantage * policy[t]
    if name == "cispo":
        return (stopped[t] - sampled[t]).exp().clamp(0.0, 4.0) * advantage * policy[t]
    low, high, weight = 0.2, 0.28 if name == "dapo" else 0.2, 1.0
    ratio = (policy[t] - sampled[t]).exp()
    if name == "gspo":
        low, high, ratio = 3e-4, 4e-4, (policy.mean() - sampled.mean()).exp()
    if name == "gspo" and lag == 0:
        # the old policy is the trainer's own; the sampler's difference is a truncated weight
        weight = (stopped.mean() - sampled.mean()).exp().clamp(max=2.0)
        ratio = (policy.mean() - stopped.mean()).exp()
    return weight * torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def naive_loss(spec: LossSpec, policy: list[Tensor], case: "Case", base: Rows | None = None) -> Tensor:
    kept = [i for i in range(len(policy)) if not (spec.mask_truncated and case.truncated[i])]
    total = torch.zeros((), dtype=torch.float64)
    for i in kept:
        group = [r for r, g in zip(case.rewards, case.groups, strict=True) if g == case.groups[i]]
        advantage = naive_advantage(group, case.groups[:i].count(case.groups[i]), spec.name)
        sampled = torch.tensor(case.sampled[i], dtype=torch.float64)
        row = sum(
            (naive_token(spec.name, policy[i], sampled, t, advantage, case.lags[i]) for t in range(len(sampled))),
            torch.zeros((), dtype=torch.float64),
        )
        if base:  # k3: r - log r - 1 with r = base / policy
            log_r = torch.tensor(base[i], dtype=torch.float64) - policy[i]
            row = row - spec.kl_coef * (log_r.exp() - log_r - 1).sum()
        if spec.name == "dr_grpo":
            total = total + row / spec.max_tokens / len(kept)
        elif spec.name in ("dapo", "cispo", "ppo"):
            total = total + row / sum(len(policy[j]) for j in kept)
        elif spec.name == "rloo":  # the log-prob of the whole trajectory
            total = total + row / len(kept)
        else:
            total = total + row / len(sampled) / len(kept)
    return -total


def naive(spec: LossSpec, case: "Case", base: Rows | None = None) -> tuple[float, list[float]]:
    """Loss and gradient in every log-prob."""
    policy = [torch.tensor(row, dtype=torch.float64, requires_grad=True) for row in case.policy]
    loss = naive_loss(spec, policy, case, base)
    loss.backward()  # pyright: ignore[reportUnknownMemberType]
    rows = [torch.zeros_like(row) if row.grad is None else row.grad for row in policy]
    return loss.item(), torch.cat(rows).tolist()


def of_trl(name: str, case: "Case", max_tokens: int) -> tuple[float, list[float]]:
    """Loss and gradient as TRL 1.16's GRPOTrainer and RLOOTrainer state them, on padded tensors and groups of one size."""
    rewards_GK = torch.tensor(case.rewards, dtype=torch.float64).view(-1, 4)
    centred_GK = rewards_GK - rewards_GK.mean(1, keepdim=True)
    others_GK = (rewards_GK.sum(1, keepdim=True) - rewards_GK) / 3
    scaled_GK = centred_GK / (rewards_GK.std(1, keepdim=True) + 1e-4)
    kinds = {"dr_grpo": centred_GK, "rloo": rewards_GK - others_GK}
    advantages_R1 = kinds.get(name, scaled_GK).reshape(-1, 1)
    rows = list(range(len(case.rewards)))
    mask_RW = torch.tensor([[t < len(case.policy[i]) for t in range(WIDTH)] for i in rows]).double()
    logprobs_RW = padded(case.policy, rows).requires_grad_()
    log_ratio_RW = logprobs_RW - padded(case.sampled, rows)
    low, high = {"gspo": (3e-4, 4e-4), "dapo": (0.2, 0.28)}.get(name, (0.2, 0.2))
    if name == "gspo":  # importance_sampling_level "sequence"
        log_ratio_RW = (log_ratio_RW * mask_RW).sum(1, keepdim=True) / mask_RW.sum(1, keepdim=True)
    if name == "rloo":
        log_ratio_RW = (log_ratio_RW * mask_RW).sum(1, keepdim=True)
    ratio = log_ratio_RW.exp()
    loss_RW = -torch.minimum(ratio * advantages_R1, ratio.clamp(1 - low, 1 + high) * advantages_R1)
    if name == "cispo":
        loss_RW = -ratio.clamp(max=4.0).detach() * advantages_R1 * logprobs_RW
    if name == "rloo":
        loss = loss_RW.mean()
    elif name in ("grpo", "gspo"):
        loss = ((loss_RW * mask_RW).sum(1) / mask_RW.sum(1)).mean()
    else:
        loss = (loss_RW * mask_RW).sum() / (len(rows) * max_tokens if name == "dr_grpo" else mask_RW.sum())
    loss.backward()  # pyright: ignore[reportUnknownMemberType]
    assert logprobs_RW.grad is not None
    return loss.item(), logprobs_RW.grad[mask_RW > 0].tolist()


# ---- cases ----------------------------------------------------------------------------------------------------------


class Case:
    """Three groups of mixed rewards, one of equal rewards, one of a single row; rows of 1 to 9 tokens."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.groups = [0] * 4 + [1] * 3 + [2] * 5 + [3] * 3 + [4]
        self.rewards = [float(x) for x in rng.choice([0.0, 0.5, 1.0], len(self.groups))]
        self.rewards[:2] = [0.0, 1.0]
        self.rewards[12:15] = [0.3] * 3
        self.truncated = [bool(x) for x in rng.random(len(self.groups)) < 0.3]
        lengths = rng.integers(1, 10, len(self.groups))
        self.sampled: Rows = [(-3 * rng.random(n)).tolist() for n in lengths]
        self.policy: Rows = [(np.array(row) + rng.normal(0, 0.6, len(row))).tolist() for row in self.sampled]
        self.lags = [i % 2 for i in range(len(self.groups))]  # versions between sampling and training
        self.base: Rows = [(np.array(row) + rng.normal(0, 0.3, len(row))).tolist() for row in self.sampled]

    def batch(self) -> SampledRows:
        return SampledRows(
            tokens=[np.zeros(len(row) + 2, np.int64) for row in self.sampled],
            logprobs=[np.array([0.0, 0.0, *row]) for row in self.sampled],
            written=[np.array([False, False] + [True] * len(row)) for row in self.sampled],
            groups_R=np.array(self.groups),
            rewards_R=np.array(self.rewards),
            versions_R=TRAINED - np.array(self.lags),
            truncated_R=np.array(self.truncated),
        )


WIDTH = 9
FLOAT64 = torch.zeros((), dtype=torch.float64)


def padded(values: Rows, rows: list[int]) -> torch.Tensor:
    """[R, WIDTH]; what stands behind a row's tokens must not matter."""
    return torch.tensor([values[i] + [-0.7] * (WIDTH - len(values[i])) for i in rows], dtype=torch.float64)


def ours(spec: LossSpec, case: Case, parts: list[list[int]], base: Rows | None = None) -> tuple[float, list[float]]:
    """Loss and gradient in every log-prob, added up over micro-batches of rows."""
    batch = batch_of(case.batch(), row_terms(case.batch(), spec), spec, TRAINED)
    total, gradients = 0.0, {}
    for rows in parts:
        own, written_RW = micro_terms([(batch, rows)], WIDTH, FLOAT64)
        logprobs_RW = padded(case.policy, rows).requires_grad_()
        loss_RW, _ = token_losses(own, logprobs_RW, written_RW)
        if base:
            loss_RW = loss_RW + own.kl_coefs_R1 * k3(logprobs_RW, padded(base, rows))
        loss = (loss_RW * own.weights_RW * written_RW).sum()
        loss.backward()
        total += loss.item()
        gradients |= dict(zip(rows, logprobs_RW.grad.tolist(), strict=True))  # pyright: ignore
    return total, [x for i in range(len(case.policy)) for x in gradients[i][: len(case.policy[i])]]


def close_to(expected: tuple[float, list[float]]) -> Any:
    return tuple(pytest.approx(each, abs=CLOSE, rel=0) for each in expected)


EVERYTHING = [list(range(16))]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("seed", "mask_truncated"), [(0, False), (1, True)])
def test_loss_and_gradient_equal_the_papers_formula(name: str, seed: int, mask_truncated: bool) -> None:
    case, spec = Case(seed), LossSpec(name=name, mask_truncated=mask_truncated, max_tokens=12)  # pyright: ignore

    assert ours(spec, case, EVERYTHING) == close_to(naive(spec, case))


@pytest.mark.parametrize("name", NAMES)
def test_kl_to_the_base_is_added_token_by_token(name: str) -> None:
    case, spec = Case(3), LossSpec(name=name, kl_coef=0.3)  # pyright: ignore

    assert ours(spec, case, EVERYTHING, case.base) == close_to(naive(spec, case, case.base))


@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradient_equal_trls(name: str) -> None:
    case, spec = Case(5), LossSpec(name=name, max_tokens=12)  # pyright: ignore
    case.groups, case.lags = [i // 4 for i in range(16)], [1] * 16
    if (
        name == "rloo"
    ):  # TRL clips the whole row's ratio, this loss truncates each token's: they meet where the ratio is 1
        case.policy = case.sampled
    loss, gradient = ours(spec, case, EVERYTHING)
    theirs = of_trl(name, case, 12)

    assert gradient == pytest.approx(theirs[1], abs=CLOSE, rel=0)
    assert name == "rloo" or loss == pytest.approx(theirs[0], abs=CLOSE, rel=0)


@pytest.mark.parametrize("kind", ["standardised", "centred", "leave_one_out"])
def test_equal_rewards_and_lone_rows_have_no_advantage(kind: AdvantageKind) -> None:
    rewards = np.array([0.1] * 7 + [5.0])  # the mean of seven times 0.1 is not 0.1 in floating point

    got = advantages(rewards, np.array([0] * 7 + [1]), kind)

    assert got.tolist() == [0.0] * 8


def lone_rows(spec: LossSpec, advantages_: list[float], sampled_R1: torch.Tensor, *, lag: int = 0) -> MicroTerms:
    """Rows of one token with these advantages and log-probs at sampling, `lag` versions ago."""
    num = len(advantages_)
    batch = SampledRows(
        tokens=[np.zeros(2, np.int64)] * num,
        logprobs=[np.zeros(2)] * num,
        written=[np.array([False, True])] * num,
        groups_R=np.arange(num),
        rewards_R=np.zeros(num),
        versions_R=np.zeros(num, np.int64),
        truncated_R=np.zeros(num, bool),
    )
    terms = replace(row_terms(batch, spec), advantages_R=np.array(advantages_))
    lone, _ = micro_terms([(batch_of(batch, terms, spec, lag), range(num))], 1, sampled_R1)
    return lone._replace(sampled_RW=sampled_R1)


WRITTEN = torch.ones(2, 1, dtype=torch.bool)


@pytest.mark.parametrize("name", NAMES)
def test_the_clips_of_a_job_replace_the_defaults(name: str) -> None:
    logprobs_RW = torch.tensor([[math.log(1.5)], [math.log(0.5)]])
    narrow = LossSpec(name=name, clip_low=0.1, clip_high=0.1, is_clip=0.1)  # pyright: ignore
    wide = LossSpec(name=name, clip_low=0.0 if name == "cispo" else 0.9, clip_high=9.0, is_clip=9.0)  # pyright: ignore

    clipped = [
        token_losses(lone_rows(spec, [1.0, -1.0], torch.zeros(2, 1), lag=1), logprobs_RW, WRITTEN)[1].flatten().tolist()
        for spec in (narrow, wide)
    ]

    assert clipped == [[True, True], [False, False]]


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_gspo_clips_no_noise_of_the_sampler(advantage: float) -> None:
    # Given rows of the trained version whose log-probs at sampling are off by what bfloat16 rounds away, and by what it does not
    logprobs_RW = torch.tensor([[-1.0], [-1.0], [-1.0]], requires_grad=True)
    sampled_R1 = torch.tensor([[-0.994], [-1.006], [-4.0]])
    terms = lone_rows(LossSpec(name="gspo", clip_low=1e-4, clip_high=1e-4), [advantage] * 3, sampled_R1)

    # When their loss is computed
    loss_RW, clipped_RW = token_losses(terms, logprobs_RW, torch.ones(3, 1, dtype=torch.bool))
    loss_RW.sum().backward()

    # Then each has the gradient of its advantage times its importance weight, which is truncated
    weights = [math.exp(-0.006), math.exp(0.006), 2.0]
    assert not clipped_RW.any() and logprobs_RW.grad is not None
    assert logprobs_RW.grad.flatten().tolist() == pytest.approx([-advantage * weight for weight in weights])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_an_absurd_ratio_gives_a_finite_loss_and_gradient(name: str, advantage: float) -> None:
    logprobs_RW = torch.tensor([[-1.0], [-200.0]], requires_grad=True)
    terms = lone_rows(LossSpec(name=name), [advantage] * 2, torch.tensor([[-200.0], [-1.0]]))  # pyright: ignore

    loss_RW, _ = token_losses(terms, logprobs_RW, WRITTEN)
    loss_RW.sum().backward()

    assert torch.isfinite(loss_RW).all() and logprobs_RW.grad is not None and torch.isfinite(logprobs_RW.grad).all()


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "ppo", "cispo", "gspo"])
def test_beyond_the_sampling_gap_no_ratio_weighs_more_than_is_clip(name: Any) -> None:
    """r A is -min(r, 2) A with the gradient of a weight min(r, 2), where the clip of the loss itself does not bind."""
    ratios = torch.tensor([0.9, 1.0, 1.9, 2.5, 50.0])
    sampled_R1, written_R1 = torch.full((5, 1), -1.0), torch.ones(5, 1, dtype=torch.bool)

    def losses(truncated: bool) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs_R1 = (sampled_R1 + ratios[:, None].log()).requires_grad_()
        spec = LossSpec(name, truncate_ratios=truncated, clip_low=0.5, clip_high=100.0)
        loss_R1, _ = token_losses(lone_rows(spec, [-1.0] * 5, sampled_R1, lag=1), logprobs_R1, written_R1)
        loss_R1.sum().backward()
        assert logprobs_R1.grad is not None
        return loss_R1.detach().flatten(), logprobs_R1.grad.flatten()

    free, bound = losses(False), losses(True)
    assert torch.equal(free[0][:3], bound[0][:3]) and torch.equal(free[1][:3], bound[1][:3])
    assert torch.allclose(bound[1], ratios.clamp(max=2.0)) and torch.allclose(free[1], ratios)


def test_how_far_the_policy_is_from_the_one_that_sampled() -> None:
    case = Case(3)
    rows = list(range(len(case.policy)))
    written = torch.tensor([[t < len(row) for t in range(WIDTH)] for row in case.policy])
    kl_RW, ratio_RW, square_RW = off_policy(padded(case.policy, rows), padded(case.sampled, rows), written)
    for i, (policy, sampled) in enumerate(zip(case.policy, case.sampled, strict=True)):
        ratios = [math.exp(p - s) for p, s in zip(policy, sampled, strict=True)]
        beyond = [0.0] * (WIDTH - len(ratios))
        assert ratio_RW[i].tolist() == pytest.approx(ratios + beyond)
        assert square_RW[i].tolist() == pytest.approx([r * r for r in ratios] + beyond)
        assert kl_RW[i].tolist() == pytest.approx([r - 1 - math.log(r) for r in ratios] + beyond)
