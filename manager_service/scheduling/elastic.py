"""Says how many rollout workers a cell wants, and which one may stop although it has rows. It waits for nothing; the simulator uses it too.

    turns that run, wait, or would be issued ─► `wanted` ─► Pool.look ─► whether a worker retires, and which

A worker that retires hands its rows back with their tokens, and the others go on with them: a pool shrinks while its longest
turns still run. Which one is Laminar's Algorithm 1, with all others as the destination.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

TARGET = 0.8
"""The part of slots, and of keys and values, that is filled: the rest is for what comes at once."""
FEW_ROWS = 0.5
"""A worker with fewer rows than this part of its slots may retire."""
RETIRE_EVERY_S = 5.0
"""Least time between two choices of a worker that retires: by then reports show where the last one's rows are. So long must fewer
have been wanted before the first: between two steps jobs want few."""
EXAMPLE = "write --rollout 1:4 for one to four workers, as turns want them, or --rollout 4 for always four"


class WorkerRange(NamedTuple):
    """Bounds on the number of rollout workers."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: str) -> "WorkerRange":
        """`1:4`; of `4`, `4:4`. Raises ValueError."""
        found = re.fullmatch(r"(\d{1,4})(?::(\d{1,4}))?", text.strip(), re.ASCII)
        least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if found is None or (found[2] and not 1 <= least <= most):
            raise ValueError(f"{text!r} is neither a number of workers nor a range of one or more: {EXAMPLE}")
        return cls(least, most)

    @property
    def is_fixed(self) -> bool:
        return self.least == self.most

    def clamp(self, number: int) -> int:
        return min(max(number, self.least), self.most)

    def __str__(self) -> str:
        return f"{self.least}:{self.most}"


class WorkerLoad(NamedTuple):
    """One live rollout worker, by its last report."""

    worker: str
    slots: int
    rows: int = 0
    kv_tokens: int | None = None  # whose keys and values it holds at most; None: it does not say
    kv_used: int | None = None  # by its rows


def row_slots(workers: Sequence[WorkerLoad]) -> float:
    """Rows for which a worker has slots, and keys and values as today's rows take them, on average. 0: no worker."""
    rows = sum(worker.rows for worker in workers if worker.kv_used is not None)
    each = sum(worker.kv_used or 0 for worker in workers) / rows if rows else 0.0
    fits = (min(w.slots, w.kv_tokens / each if each and w.kv_tokens is not None else math.inf) for w in workers)
    return sum(fits) / len(workers) if workers else 0.0


def wanted(turns: float, row_slots: float) -> int:
    """Workers for so many turns: those that run, wait, or would be issued if there were slots. `row_slots`: of one worker; 0:
    unknown, then one worker finds out."""
    return math.ceil(turns / (TARGET * row_slots)) if row_slots else min(1, math.ceil(turns))


def retire(workers: Sequence[WorkerLoad], wanted: int, *, repack: bool = True) -> str | None:
    """The worker that may stop, as the others have room for its rows; None if none may. Whatever waits would be read by a worker with
    so few rows: nothing does. `repack`: it may still have rows."""
    if len(workers) <= max(1, wanted):
        return None
    first = min(workers, key=lambda each: (each.rows, each.kv_used or 0, each.worker))
    others = [each for each in workers if each is not first]
    slots = sum(max(0, math.floor(TARGET * each.slots) - each.rows) for each in others)
    kv_tokens = sum(max(0.0, TARGET * (each.kv_tokens or math.inf) - (each.kv_used or 0)) for each in others)
    fits = first.rows < FEW_ROWS * first.slots and first.rows <= slots and (first.kv_used or 0) <= kv_tokens
    return first.worker if not first.rows or (repack and fits) else None


@dataclass
class Retirement:
    """Chooses one worker after the other, by a clock of the caller's. When one has started none retires for as long as that took: so a
    pool of slow starts shrinks rarely."""

    repack: bool = True
    worker: str | None = None
    _unsettled_s: float | None = None
    _next_s: float = -math.inf

    def look(self, now_s: float, workers: Sequence[WorkerLoad], wanted: int, *, settled: bool) -> str | None:
        """The worker that is to stop now. `settled`: no worker starts or stops."""
        if not settled:
            self._unsettled_s = now_s if self._unsettled_s is None else self._unsettled_s
        elif self._unsettled_s is not None:
            self._next_s, self._unsettled_s = max(self._next_s, 2 * now_s - self._unsettled_s), None
        if len(workers) <= wanted:
            self._next_s = max(self._next_s, now_s + RETIRE_EVERY_S)
        if not settled or len(workers) <= wanted:
            self.worker = None
        elif now_s >= self._next_s:
            self.worker = retire(workers, wanted, repack=self.repack)
            self._next_s = now_s + RETIRE_EVERY_S if self.worker else self._next_s
        return self.worker
