"""Computes advantages: how much better an answer is than the others of its group, for trainers and managers."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from common.wire.messages import JobLoss

AdvantageKind = Literal["standardised", "centred", "leave_one_out", "one"]
ADVANTAGES: dict[JobLoss, AdvantageKind] = {
    "grpo": "standardised",
    "dr_grpo": "centred",
    "dapo": "standardised",
    "rloo": "leave_one_out",
    "cispo": "standardised",
    "gspo": "standardised",
    "ppo": "standardised",
    "cross_entropy": "one",
}
"""The kind that each loss has; `trainer_service/losses.py` names the sources."""
STD_EPSILON = 1e-4


def group_advantages(rewards: NDArray[np.float64], kind: AdvantageKind) -> NDArray[np.float64]:
    """Compares each reward with its group's, [G]; `one`: 1 whatever the rewards. 0 for equal rewards."""
    n = len(rewards)
    if kind == "one":
        return np.ones(n)
    if n < 2 or rewards.min() == rewards.max():
        return np.zeros(n)
    centred = rewards - rewards.mean()
    if kind == "standardised":
        return centred / (rewards.std(ddof=1) + STD_EPSILON)
    if kind == "leave_one_out":
        return centred * n / (n - 1)  # R - (sum - R) / (n - 1)
    return centred
