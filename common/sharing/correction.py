"""Corrects a share of the rollout slots by what it got of the engines' time.

A part of the turns under way is not that part of the engines' seconds: a short turn spends more of its time elsewhere, a
long prompt more of the engine's. So a share grows while it gets less than is due, and shrinks while more.
"""

from collections.abc import Iterable, Mapping
from math import sqrt

JOBS = "jobs"
"""The kind of the engine seconds of jobs. Completions and samples in bulk have the names of their places."""
MIN_MEASURED_S = 2.0
"""Engine seconds needed before a difference counts as more than chance."""
MAX_FACTOR = 2.0


def numbers(pairs: Iterable[bytes]) -> dict[str, float]:
    """Seconds by kind, from the fields and values of a hash."""
    words = iter(pairs)
    return {kind.decode(): float(seconds) for kind, seconds in zip(words, words, strict=True)}


def _lost(served: Mapping[str, float], before: Mapping[str, float]) -> bool:
    """Has Redis lost some of it?"""
    return any(served.get(kind, 0.0) < seconds for kind, seconds in before.items())


class Correction:
    """The factor of one share."""

    def __init__(self) -> None:
        self.factor = 1.0
        self._before: Mapping[str, float] | None = None

    def look(self, served: Mapping[str, float], kind: str, due: float, *, asks: bool) -> None:
        """Goes half the way (of the logarithm) to the factor with which `kind` would have got its due.

        `served`: engine seconds so far, by kind. `due`: part of all, 0 to 1. `asks`: it wants more than it has; else
        its use tells nothing.
        """
        before = self._before
        if before is None or _lost(served, before) or not asks or not 0 < due < 1:
            self._before = served
            return
        got = {each: seconds - before.get(each, 0.0) for each, seconds in served.items()}
        if sum(got.values()) < MIN_MEASURED_S:
            return
        self._before = served
        part = max(got.get(kind, 0.0) / sum(got.values()), due / MAX_FACTOR**2)
        self.factor = min(MAX_FACTOR, max(1 / MAX_FACTOR, self.factor * sqrt(due / part)))
