"""Tests of difference and of equality for paired values: alone and among others, the same job and the same seed.

A test that finds no difference proves no equality, so there are both: a permutation test whose null hypothesis is that sharing
changes nothing, and TOST (Schuirmann 1987, doi 10.1007/BF01068419), whose null hypothesis is that it changes the mean by at least
a margin.
"""

import math
from collections.abc import Sequence

import numpy as np

EXACT_SIGNS = 14  # up to 2^14 sign flips are all tried
NUM_FLIPS = 20_000
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(200)


def t_cdf(t: float, dof: int) -> float:
    """P(T ≤ t). With t = √dof tan φ the density is c cos^(dof - 1) φ over a finite interval: Gauss and Legendre."""
    if math.isinf(t):
        return float(t > 0)
    half = math.atan(t / math.sqrt(dof)) / 2
    scale = math.exp(math.lgamma((dof + 1) / 2) - math.lgamma(dof / 2)) / math.sqrt(math.pi)
    return 0.5 + scale * half * float((_WEIGHTS * np.cos(half * (_NODES + 1)) ** (dof - 1)).sum())


def standard_error(values: Sequence[float]) -> float:
    """Standard error of their mean; nan for fewer than two."""
    return float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def sign_flip_p(differences: Sequence[float], seed: int = 0) -> float:
    """Probability of a sum as far from 0 as the one found, if each difference might as well have the other sign.

    All signs are tried if there are few, otherwise random ones, the found ones counted in (Phipson and Smyth 2010,
    doi 10.2202/1544-6115.1585). Axes: F flips, S pairs.
    """
    num = len(differences)
    if num <= EXACT_SIGNS:
        signs_FS = 1.0 - 2.0 * ((np.arange(2**num)[:, None] >> np.arange(num)) & 1)
    else:
        random = np.random.default_rng(seed)
        signs_FS = np.vstack([np.ones(num), random.choice([-1.0, 1.0], (NUM_FLIPS, num))])
    sums_F = np.abs(signs_FS @ np.array(differences))
    return float((sums_F >= sums_F[0] * (1 - 1e-9) - 1e-15).mean())


def holm(ps: Sequence[float]) -> list[float]:
    """Adjusted for how many tests there are (Holm 1979), in the given order."""
    adjusted, reached = [0.0] * len(ps), 0.0
    for rank, i in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        reached = max(reached, min(1.0, ps[i] * (len(ps) - rank)))
        adjusted[i] = reached
    return adjusted


def tost_p(differences: Sequence[float], margin: float) -> float:
    """Small: the mean difference lies within ± margin. nan for fewer than two differences."""
    middle, error = float(np.mean(differences)), standard_error(differences)
    if math.isnan(error):
        return math.nan
    if error == 0:
        return float(abs(middle) >= margin)
    dof = len(differences) - 1
    return max(1 - t_cdf((middle + margin) / error, dof), t_cdf((middle - margin) / error, dof))
