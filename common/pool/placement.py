"""Decides which pool workers each base model has its place on: a pure function, which all of them compute alike.

    isolated   a base has workers of its own; one that finds none free waits
    pack       the fullest worker below FULL that has it in memory, else the fullest below FULL; so that workers stay free
    spread     the least loaded worker; of workers loaded alike one that has it in memory
    backfill   as spread; and an idle worker opens a base off its places that nobody served for as long as that costs

A base that needs more than one worker's time has places on several. Places do not move work: `may_open` limits what a worker chooses
from (`common/pool/choosing.py`). One that fits nowhere beside the others opens anywhere, and ends what it needs the memory of; `isolated`
lets it wait.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Literal

from common.pool.choosing import WaitingBase

PlacementRule = Literal["isolated", "pack", "spread", "backfill"]
FULL = 0.85
"""Share of a worker's time beyond which `pack` gives it no more."""
ALIKE = 0.1
"""Loads that differ by less than this share of a worker's time count as equal: a base does not move for less."""


@dataclass(frozen=True, slots=True)
class PoolRow:
    """A pool worker, as places see it."""

    worker: str
    limit_bytes: float
    """Memory of the bases that have their place on it, together."""
    in_memory: Collection[str] = ()
    refused: Collection[str] = ()
    """Bases that cannot be opened there."""


@dataclass(slots=True)
class _Filled:
    """A pool worker, and what has got a place on it."""

    row: PoolRow
    load: float = 0.0
    num_bytes: float = 0.0
    bases: set[str] = field(default_factory=set[str])

    def takes(self, base: str, num_bytes: float) -> bool:
        is_able = base not in self.bases and base not in self.row.refused
        return is_able and self.num_bytes + num_bytes <= self.row.limit_bytes

    def add(self, base: str, load: float, num_bytes: float) -> None:
        self.load, self.num_bytes = self.load + load, self.num_bytes + num_bytes
        self.bases.add(base)


def place(
    placement: PlacementRule, demand: Mapping[str, float], num_bytes: Mapping[str, float], rows: Sequence[PoolRow]
) -> dict[str, tuple[str, ...]]:
    """Gives each base its workers: one, or as many as its demand needs; none to a base that fits nowhere.

    `demand`: of each base with work the share of one worker's time that it needs, in the order in which they came. Bases in memory get
    their places first, in falling order of demand, then the others as they came; under `isolated` all as they came. Each gets one
    before any gets more. The result depends on nothing else.
    """
    filled = [_Filled(row) for row in rows]
    places: dict[str, tuple[str, ...]] = dict.fromkeys(demand, ())
    nums = {base: max(1, ceil(demand[base] - ALIKE)) for base in _ordered(placement, demand, rows)}
    for num_before in range(len(rows)):
        for base in (base for base, num in nums.items() if num > num_before):
            load = demand[base] / nums[base]
            if worker := _chosen(placement, base, load, num_bytes[base], filled):
                worker.add(base, load, num_bytes[base])
                places[base] = (*places[base], worker.row.worker)
    return places


def may_open(
    placement: PlacementRule,
    worker: str,
    waiting: Sequence[WaitingBase],
    places: Mapping[str, Sequence[str]],
    *,
    is_idle: bool,
) -> list[WaitingBase]:
    """The bases that this worker may open, by their places. `is_idle`: nothing waits or runs for its open base."""

    def may(base: WaitingBase) -> bool:
        workers = places.get(base.base, ())
        if worker in workers or (not workers and placement != "isolated"):
            return True
        return placement == "backfill" and is_idle and base.waited_s >= base.operation_s + base.opening_s

    return [base for base in waiting if may(base)]


def _ordered(placement: PlacementRule, demand: Mapping[str, float], rows: Sequence[PoolRow]) -> Iterator[str]:
    here = {base for row in rows for base in row.in_memory if placement != "isolated"}
    yield from sorted((base for base in demand if base in here), key=lambda base: -demand[base])
    yield from (base for base in demand if base not in here)


def _chosen(
    placement: PlacementRule, base: str, load: float, num_bytes: float, filled: Sequence[_Filled]
) -> _Filled | None:
    """The worker for a base; None: there is none. Of equal workers the first."""
    able = [worker for worker in filled if worker.takes(base, num_bytes)]
    if placement == "isolated":
        able = [worker for worker in able if not worker.bases]
    if not able:
        return None

    def lacks(worker: _Filled) -> bool:
        return base not in worker.row.in_memory

    if placement == "isolated":
        return min(able, key=lacks)
    least = min(worker.load for worker in able)
    if placement == "pack" and (below := [worker for worker in able if worker.load + load <= FULL]):
        return min(below, key=lambda worker: (lacks(worker), -worker.load))
    return min((worker for worker in able if worker.load < least + ALIKE), key=lacks)
