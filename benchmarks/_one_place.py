"""One place of a service under a rule that chooses base models: an exact model of it, in which production's `choose` is one of the rules.

Operations of a base model come in queues, one is worked on at a time, and opening another base model takes a while.
"""

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from common.pool.choosing import OpenSlice, WaitingBase, choose

LOOK_S = 0.05
SLICE_MAX_S = 30.0


@dataclass
class Place:
    operation_s: float
    opening_s: float
    num_bases: int
    lingers: bool = True
    now_s: float = 0.0
    open: int = 0
    opened_at_s: float = 0.0
    busy_at_s: float = 0.0
    pause_s: float = 0.0
    closed_at_s: dict[int, float] = field(default_factory=dict[int, float])
    waits: list[float] = field(default_factory=list[float])
    queues: list[deque[float]] = field(default_factory=list[deque[float]])
    """Times of the work that waits, of each base model."""

    def run(
        self, rule: "Rule", arrivals: Iterable[tuple[float, int]], gap_s: float = 0.0, until_s: float = 1e9
    ) -> None:
        """Works until nothing comes any more, or until then. `gap_s`: whoever asked asks again so long after an answer; 0: never."""
        coming = list(arrivals)
        heapq.heapify(coming)
        self.queues = [deque() for _ in range(self.num_bases)]
        while (coming or any(self.queues)) and self.now_s < until_s:
            while coming and coming[0][0] <= self.now_s:
                came_s, base = heapq.heappop(coming)
                self.queues[base].append(came_s)
            base = rule(self)
            if base != self.open:
                self.closed_at_s[self.open] = self.now_s
                self.pause_s = self.queues[base][0] - self.closed_at_s.get(base, -math.inf)
                self.now_s, self.open = self.now_s + self.opening_s, base
                self.opened_at_s = self.busy_at_s = self.now_s
            elif self.queues[base]:
                self.waits.append(self.now_s - self.queues[base].popleft())
                self.now_s = self.busy_at_s = self.now_s + self.operation_s
                if gap_s:
                    heapq.heappush(coming, (self.now_s + gap_s, base))
            else:
                self.now_s += LOOK_S

    def waiting(self) -> list[int]:
        return [base for base, queue in enumerate(self.queues) if queue and base != self.open]


Rule = Callable[[Place], int]
"""The base model that is open next."""


def by_ratio(place: Place) -> int:
    """Production's rule; `lingers` False: without its second part."""
    idle_s = place.now_s - place.busy_at_s if place.lingers else 1e9
    opening_s, now_s = place.opening_s, place.now_s
    current = OpenSlice(
        base=str(place.open),
        is_busy=bool(place.queues[place.open]),
        lasted_s=now_s - place.opened_at_s,
        idle_s=idle_s,
        opening_s=opening_s,
        pause_s=place.pause_s,
    )
    waiting = [
        WaitingBase(
            base=str(base),
            waited_s=now_s - place.queues[base][0],
            operation_s=place.operation_s,
            opening_s=opening_s,
            is_loaded=True,
        )
        for base in place.waiting()
    ]
    chosen = choose(current, waiting, num_bases=place.num_bases, slice_max_s=SLICE_MAX_S)
    return int(chosen[0].base) if chosen else place.open


def first_come(place: Place) -> int:
    return (
        min((queue[0], base) for base, queue in enumerate(place.queues) if queue)[1]
        if any(place.queues)
        else place.open
    )


def in_turn(place: Place) -> int:
    """Each base model until nothing of it waits."""
    if place.queues[place.open] or not (waiting := place.waiting()):
        return place.open
    return min(waiting, key=lambda base: (base - place.open) % place.num_bases)


def mean_wait_s(rule: Rule, seed: int, load: float, operation_s: float, num: int, num_bases: int) -> float:
    """The mean over `num` operations that come at random, evenly over base models; opening one takes as long as two operations."""
    drawn = random.Random(seed)
    times = itertools.accumulate(drawn.expovariate(load / operation_s) for _ in range(num))
    place = Place(operation_s, 2 * operation_s, num_bases)
    place.run(rule, [(at_s, drawn.randrange(num_bases)) for at_s in times])
    return sum(place.waits) / num


def rate(*, lingers: bool, gap_s: float = 0.1, opening_s: float = 2.0, seconds: float = 600.0) -> float:
    """Operations a second of two clients of two base models, of 0.05 s each, who think for `gap_s` after each answer."""
    place = Place(0.05, opening_s, 2, lingers)
    place.run(by_ratio, [(0.0, 0), (0.0, 1)], gap_s, seconds)
    return len(place.waits) / seconds
