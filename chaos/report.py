"""Prints faults as they strike, the verdict, and the time that each cause has cost."""

import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from chaos.faults import Fault

Strike = tuple[float, Fault]
"""Time at which a fault struck, in monotonic seconds."""


@dataclass
class Story:
    """The events of an act."""

    began: float = field(default_factory=time.monotonic)
    strikes: list[Strike] = field(default_factory=list[Strike])
    """Strikes that hit something, or may still do so."""
    missed: list[Fault] = field(default_factory=list[Fault])
    """Faults that hit nothing."""
    pace: float = 0.0
    """Versions a second, undisturbed."""
    commits: list[float] = field(default_factory=list[float])
    """Times at which each version was committed, in monotonic seconds."""
    ended: float = 0.0
    """Time at which the last fault was healed."""
    wrong: list[str] = field(default_factory=list[str])
    warnings: list[str] = field(default_factory=list[str])
    """Tells what this run meant to try and did not."""

    def tell(self, line: str) -> None:
        sys.stdout.write(f"{time.monotonic() - self.began:7.1f} s  {line}\n")
        sys.stdout.flush()

    def strike(self, fault: Fault) -> None:
        self.strikes.append((time.monotonic(), fault))
        lasts = f" for {fault.seconds:.1f} s" if fault.seconds else ""
        self.tell(f"{fault.number:4d}  {fault.kind} {fault.victim}{lasts}")

    def miss(self, fault: Fault) -> None:
        """The fault hit nothing: it is none that was survived."""
        self.strikes = [strike for strike in self.strikes if strike[1] is not fault]
        self.missed.append(fault)
        self.tell(f"{fault.number:4d}  hit nothing")

    def never_hit(self) -> list[str]:
        """Causes of which no strike hit anything."""
        missed = Counter(fault.cause for fault in self.missed)
        for _, fault in self.strikes:
            del missed[fault.cause]
        return [f"{cause} struck {num} times and hit nothing" for cause, num in sorted(missed.items())]


@dataclass(frozen=True, slots=True)
class Cost:
    cause: str
    num: int  # faults
    lost_s: float  # in all


def costs(story: Story) -> list[Cost]:
    """Time lost by cause, dearest first. Each fault answers for the time until the next: for the part of it in which the
    undisturbed pace would have made the versions that are missing. Below zero: there were more than at that pace."""
    num, lost = Counter[str](), defaultdict[str, float](float)
    bounds = [*(at for at, _ in story.strikes), story.ended]
    for (start, until), (_, fault) in zip(pairwise(bounds), story.strikes, strict=True):
        made = sum(start <= at < until for at in story.commits)
        num[fault.cause] += 1
        lost[fault.cause] += until - start - made / story.pace
    found = [Cost(cause, num[cause], lost[cause]) for cause in num]
    return sorted(found, key=lambda cost: -cost.lost_s)


def table(found: Iterable[Cost]) -> str:
    lines = [f"{'cause':24}{'faults':>8}{'lost s':>9}{'s each':>8}"]
    lines += [f"{c.cause:24}{c.num:8d}{c.lost_s:9.1f}{c.lost_s / c.num:8.2f}" for c in found]
    return "\n".join(lines)
