"""Arrivals of requests: drawn from a seed, or read from a trace.

`draw` makes rates like those of lambdaScale's `workload/Burst.txt` (github.com/lambda-scale/lambda-scale): calm, a spell of spikes, calm, a
longer spell of spikes, then next to nothing. In a spell, spikes follow gaps; levels are normal, and each second's noise is. How like they
are, tests/simulator/test_spikes.py says with that file's figures. Files have either

    a number on each line                       requests in each second: `Burst.txt`
    TIMESTAMP,ContextTokens,GeneratedTokens     of each request: Azure's public traces of LLM inference
"""

import csv
import itertools
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import NamedTuple

CALM, SPIKE, GAP, EMPTY = (5.2, 0.2, 0.4, 100.0), (9.5, 1.6, 1.0, 10.0), (4.1, 0.8, 0.7, 6.0), (-0.7, 0.0, 0.4, 100.0)
"""Stretches: mean and deviation of the level, deviation of a second's noise, mean seconds beyond three."""
SPELLS = ((48, [CALM]), (165, [SPIKE, GAP]), (160, [CALM]), (220, [SPIKE, GAP]), (414, [EMPTY]))
"""Seconds, give or take a tenth, and the stretches in them."""
PROMPT, TOKENS = (760.0, 0.99, 14_000), (151.0, 0.86, 1000)
"""Median, sigma and maximum of log-normal lengths: those of Azure's hour of conversations."""
COLUMNS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]


class TraceRequest(NamedTuple):
    """One request. `at_s`: since the trace began."""

    at_s: float
    prompt: int  # tokens
    tokens: int  # that are sampled


@dataclass(frozen=True)
class Arrivals:
    """Requests in each second, and the lengths that they may have, as tokens of prompt and answer."""

    name: str
    rates: Sequence[float]
    lengths: Sequence[tuple[int, int]]
    turns: Sequence[TraceRequest] = ()
    """The requests as they were, of a trace that tells."""

    def requests(self, times: float) -> list[TraceRequest]:
        """Draws so many times as many, as a Poisson process in each second: the same for the same arguments."""
        rng, found = random.Random(f"requests {self.name}"), list[TraceRequest]()
        for second, rate in enumerate(self.rates):
            at_s = rng.expovariate(rate * times) if rate else 1.0
            while at_s < 1.0:
                found.append(TraceRequest(second + at_s, *rng.choice(self.lengths)))
                at_s += rng.expovariate(rate * times)
        return found


def draw(seed: int) -> Arrivals:
    rng, rates = random.Random(f"spikes {seed}"), list[float]()
    for seconds, stretches in SPELLS:
        end = len(rates) + round(seconds * rng.uniform(0.9, 1.1))
        for mean, deviation, noise, length in itertools.cycle(stretches):
            level = rng.gauss(mean, deviation)
            rates += [max(0.0, rng.gauss(level, noise)) for _ in range(3 + round(rng.expovariate(1 / length)))]
            if len(rates) >= end:
                break
        del rates[end:]
    return Arrivals(f"drawn {seed}", rates, _lengths())


@cache
def _lengths() -> list[tuple[int, int]]:
    rng = random.Random("lengths")

    def draw(median: float, sigma: float, most: int) -> int:
        return min(most, max(1, round(median * math.exp(rng.gauss(0, sigma)))))

    return [(draw(*PROMPT), draw(*TOKENS)) for _ in range(10_000)]


def read(path: Path) -> Arrivals:
    """Raises OSError, and ValueError naming the line of what is neither kind of trace."""
    rates, lengths, times = list[float](), list[tuple[int, int]](), list[datetime]()
    with path.open(encoding="utf-8-sig", newline="") as file:
        for number, row in enumerate(csv.reader(file), 1):
            try:
                if len(row) == 1 and 0 <= (rate := float(row[0])) < math.inf:
                    rates.append(rate)
                elif row and row != COLUMNS:
                    at, prompt, tokens = row
                    times.append(datetime.fromisoformat(at))
                    lengths.append((int(prompt), max(1, int(tokens))))
            except ValueError as error:
                what = f"is neither a number of requests nor {','.join(COLUMNS)}"
                raise ValueError(f"{path}, line {number}: {','.join(row)!r} {what}") from error
    since = min(times, default=None)
    turns = [
        TraceRequest((at - since).total_seconds(), *each) for at, each in zip(times, lengths, strict=True) if since
    ]
    if turns:
        counts = Counter(int(each.at_s) for each in turns)
        rates = [float(counts[second]) for second in range(max(counts) + 1)]
    if not any(rates):
        raise ValueError(f"{path}: no request in it")
    return Arrivals(path.stem, rates, lengths or _lengths(), turns)
