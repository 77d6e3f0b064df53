"""A heavy-tailed law of the lengths of answers: log-normal. A length is a function of seed, group and sample."""

import math
from statistics import NormalDist

from common import rng
from common.wire.messages import TrajectoryRef

MEDIAN = 16
SIGMA = math.log(10) / NormalDist().inv_cdf(0.99)
"""The 99th percentile is ten times the median."""
LONGEST = 40 * MEDIAN


def answer_tokens(ref: TrajectoryRef) -> int:
    uniform = float(rng.uniform(ref.seed, "length", ref.group, ref.sample))
    tokens = MEDIAN * math.exp(SIGMA * NormalDist().inv_cdf(min(max(uniform, 1e-9), 1 - 1e-9)))
    return min(max(1, round(tokens)), LONGEST)
