"""The rows of a forward of one token each: how many it has, and where they stand in it."""

from dataclasses import dataclass

import numpy as np

from base_model.stacked import FusedAdapter, Product
from rollout_service.embedded.backbone.interface import ForwardTurn
from rollout_service.embedded.pools import Pool, rounded
from rollout_service.embedded.sampler import SamplingPlan


@dataclass(slots=True)
class ForwardLayout:
    """The places of the rows under way in a forward; remade only when rows come or go."""

    pools: list[Pool]
    slots: np.ndarray  # [n] slot of each row of the forward
    size: int  # rows of the forward, rounded up
    adapters: list[FusedAdapter | None]  # [n]
    turns: list[ForwardTurn]  # [n]
    products: list[Product] | None  # None: not planned, or another plan came after it
    sampling: SamplingPlan
    watched: list[int]  # rows to look at after each token: stop strings, top log-probs, grammars
    masked: list[int]  # those with a grammar


def rounded_rows(num: int, min_rows: int) -> int:
    """4, 8, 16, 32, then multiples of 8, so that a few rows more cost little; at least `min_rows`."""
    num = max(num, min_rows)
    return rounded(num, 8) if num > 32 else exact_rows(num, min_rows)


def exact_rows(num: int, min_rows: int) -> int:
    """4, 8, 16, 32, 48, 64, then multiples of 64: the sizes of the self-test; at least `min_rows`."""
    num = max(num, min_rows)
    return rounded(num, 64) if num > 64 else next(size for size in (4, 8, 16, 32, 48, 64) if size >= num)
