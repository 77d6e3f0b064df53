"""Tests which pool workers bases get their place on: what holds of any demand, and what each placement is for."""

from collections import Counter
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.pool.choosing import WaitingBase
from common.pool.placement import ALIKE, FULL, PlacementRule, PoolRow, may_open, place

PLACEMENTS = st.sampled_from(get_args(PlacementRule))
DEMAND = st.dictionaries(st.sampled_from("abcdefgh"), st.floats(0, 2.5))
BYTES = dict(zip("abcdefgh", (1.0, 2.0, 1.0, 3.0, 1.0, 2.0, 5.0, 1.0), strict=True))
HERE = st.lists(st.frozensets(st.sampled_from("abcdefgh"), max_size=3), min_size=1, max_size=5)
ROOMY = 1e9


def rows_of(here: list[frozenset[str]], limit: float = 4.0) -> list[PoolRow]:
    return [PoolRow(f"w{number}", limit, in_memory) for number, in_memory in enumerate(here)]


def loads(found: dict[str, tuple[str, ...]], demand: dict[str, float]) -> Counter[str]:
    """Each worker's load, a base's shared evenly between those that its demand asked for."""
    result = Counter[str]()
    for base, workers in found.items():
        for worker in workers:
            result[worker] += demand[base] / len(workers)  # pyright: ignore[reportArgumentType]
    return result


@given(PLACEMENTS, DEMAND, HERE)
def test_no_worker_gets_more_than_fits_and_no_base_waits_where_there_is_room(
    placement: PlacementRule, demand: dict[str, float], here: list[frozenset[str]]
) -> None:
    rows = rows_of(here)
    found = place(placement, demand, BYTES, rows)
    used, alone = Counter[str](), Counter[str]()
    for base, workers in found.items():
        assert len(set(workers)) == len(workers) <= max(1, round(demand[base] + 0.5))
        for worker in workers:
            used[worker] += BYTES[base]  # pyright: ignore[reportArgumentType]
            alone[worker] += 1
    assert found.keys() == demand.keys() and all(num <= 4.0 for num in used.values())
    for base in (base for base, workers in found.items() if not workers):
        full = all(used[row.worker] + BYTES[base] > 4.0 for row in rows)
        assert full or (placement == "isolated" and (BYTES[base] > 4.0 or len(alone) == len(rows)))
    assert placement != "isolated" or set(alone.values()) <= {1}


@given(PLACEMENTS, DEMAND, HERE)
def test_where_nothing_changes_every_base_stays(
    placement: PlacementRule, demand: dict[str, float], here: list[frozenset[str]]
) -> None:
    rows, seen = rows_of(here), list[dict[str, tuple[str, ...]]]()
    for _ in range(4):
        seen.append(place(placement, demand, BYTES, rows))
        rows = [replace(row, in_memory={base for base in demand if row.worker in seen[-1][base]}) for row in rows]
    assert {base: set(workers) for base, workers in seen[2].items()} == {
        base: set(workers) for base, workers in seen[3].items()
    }


@given(DEMAND, HERE)
def test_spread_evens_loads_and_pack_keeps_workers_free(demand: dict[str, float], here: list[frozenset[str]]) -> None:
    demand = {base: min(load, 1.0) for base, load in demand.items()}
    rows = rows_of(here, limit=ROOMY)
    spread, pack = (place(placement, demand, BYTES, rows) for placement in ("spread", "pack"))
    assert place("backfill", demand, BYTES, rows) == spread
    even = loads(spread, demand)
    assert max(even.values(), default=0.0) - min(even[row.worker] for row in rows) <= 1.0 + ALIKE
    fresh = place("pack", demand, BYTES, rows_of([frozenset[str]()] * len(rows), limit=ROOMY))
    filled = sorted((load for load in loads(fresh, demand).values() if load), reverse=True)
    assert len(filled) <= 1 or filled[-1] + filled[-2] > FULL - max(demand.values()), "two could be one"
    assert pack.keys() == spread.keys()


def test_a_base_stays_where_it_is_in_memory_and_large_ones_get_several_workers() -> None:
    rows = rows_of([frozenset(), frozenset("a"), frozenset("b")], limit=ROOMY)
    assert place("spread", {"a": 0.5, "b": 0.5}, BYTES, rows) == {"a": ("w1",), "b": ("w2",)}
    assert place("pack", {"a": 0.3, "b": 0.3}, BYTES, rows) == {"a": ("w1",), "b": ("w2",)}
    assert place("pack", {"c": 0.3, "d": 0.3}, BYTES, rows) == {"c": ("w0",), "d": ("w0",)}
    assert len(place("spread", {"a": 2.4}, BYTES, rows)["a"]) == 3
    assert place("isolated", {"a": 0.1, "b": 0.1, "c": 0.1, "d": 0.1}, BYTES, rows)["d"] == ()
    only = rows_of([frozenset("ab")])
    assert place("isolated", {"a": 0.1, "b": 0.9}, BYTES, only) == {"a": ("w0",), "b": ()}, "it came later"
    refused = [replace(row, refused={"a"}) for row in rows[:2]]
    assert place("spread", {"a": 0.5}, BYTES, [*refused, rows[2]]) == {"a": ("w2",)}


@pytest.mark.parametrize("placement", get_args(PlacementRule))
def test_off_its_place_a_base_opens_only_by_backfill_on_an_idle_worker_that_it_waited_for(
    placement: PlacementRule,
) -> None:
    known = WaitingBase(base="a", waited_s=4.9, operation_s=2.0, opening_s=3.0)
    off = {"a": ("w1",)}
    assert may_open(placement, "w1", [known], off, is_idle=False) == [known]
    assert may_open(placement, "w0", [known], off, is_idle=True) == []
    long = replace(known, waited_s=5.0)
    assert may_open(placement, "w0", [long], off, is_idle=False) == []
    assert may_open(placement, "w0", [long], off, is_idle=True) == ([long] if placement == "backfill" else [])


@pytest.mark.parametrize("placement", get_args(PlacementRule))
def test_a_base_that_has_a_place_nowhere_opens_anywhere_unless_bases_are_isolated(placement: PlacementRule) -> None:
    known = WaitingBase(base="a", waited_s=0.1, operation_s=2.0, opening_s=3.0)
    for places in ({}, {"a": ()}):
        assert may_open(placement, "w0", [known], places, is_idle=False) == ([] if placement == "isolated" else [known])
