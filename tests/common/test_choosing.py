"""Tests the choice of the base model that a pool worker opens next: each rule, and what follows from them over time."""

from dataclasses import dataclass
from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st

from common.pool.choosing import MAX_LINGER_S, OpenSlice, WaitingBase, choose, linger_s, longest_slice_s, ranked

SECONDS = st.floats(0, 1e5)
COSTS = st.floats(0.001, 100)
SLICE_MAX_S = 30.0


@st.composite
def bases(draw: st.DrawFn, *, least: int = 0, most: int = 8) -> list[WaitingBase]:
    return [
        WaitingBase(
            base=f"base-{number}",
            waited_s=draw(SECONDS),
            operation_s=draw(COSTS),
            opening_s=draw(COSTS),
            is_loaded=draw(st.booleans()),
            weight=draw(st.floats(0.1, 10)),
            since_closed_s=draw(st.one_of(st.just(inf), SECONDS)),
        )
        for number in range(draw(st.integers(least, most)))
    ]


@st.composite
def slices(draw: st.DrawFn) -> OpenSlice:
    is_busy = draw(st.booleans())
    idle_s = 0.0 if is_busy else draw(SECONDS)
    return OpenSlice(
        base="open", is_busy=is_busy, lasted_s=idle_s + draw(SECONDS), idle_s=idle_s, opening_s=draw(COSTS)
    )


def chosen(current: OpenSlice | None, waiting: list[WaitingBase]) -> list[WaitingBase]:
    return choose(current, waiting, num_bases=len(waiting) + 1, slice_max_s=SLICE_MAX_S)


@given(st.one_of(st.none(), slices()), bases())
def test_a_slice_lasts_an_idle_one_lingers_and_a_base_waits_as_long_as_its_opening_takes_unless_it_is_loaded(
    current: OpenSlice | None, waiting: list[WaitingBase]
) -> None:
    found = chosen(current, waiting)
    if found and current and current.is_busy:
        assert current.lasted_s >= longest_slice_s(current.opening_s, SLICE_MAX_S)
    elif found and current:
        assert current.idle_s >= min(linger_s(base.opening_s, current.pause_s) for base in found)
    assert all(base.is_loaded or base.waited_s >= base.opening_s for base in found)
    assert linger_s(1e9, 0.0) == MAX_LINGER_S


def test_bases_that_open_fast_keep_no_slow_one_waiting() -> None:
    """They come again before the open base has been idle for as long as the slow one's linger."""
    fast = [WaitingBase(base=name, waited_s=0.05, operation_s=0.1, opening_s=0.05, is_loaded=True) for name in "ab"]
    slow = WaitingBase(base="slow", waited_s=5.0, operation_s=0.1, opening_s=1.0)
    current = OpenSlice(base="c", is_busy=False, lasted_s=0.2, idle_s=0.02, opening_s=0.05)
    assert chosen(current, [slow]) == []
    assert chosen(current, [*fast, slow])[0] == slow


def test_a_base_lingers_for_the_next_only_if_its_work_came_soon_after_it_was_last_closed() -> None:
    other = WaitingBase(base="other", waited_s=9.0, operation_s=0.1, opening_s=2.0)
    for pause_s, follow in ((0.1, []), (0.6, [other])):
        idle = OpenSlice(base="c", is_busy=False, lasted_s=1.0, idle_s=0.2, opening_s=2.0, pause_s=pause_s)
        assert chosen(idle, [other]) == follow


@given(st.one_of(st.none(), slices()), bases(least=1))
def test_no_place_idles_while_a_base_has_waited_for_the_linger_and_its_opening(
    current: OpenSlice | None, waiting: list[WaitingBase]
) -> None:
    if current and (current.is_busy or current.idle_s < MAX_LINGER_S):
        return
    ripe = {base.base for base in waiting if base.waited_s >= max(base.opening_s, linger_s(base.opening_s, 0.0))}
    assert ripe <= {base.base for base in chosen(current, waiting)}


@given(bases())
def test_the_overdue_come_first_and_the_others_by_their_ratio(waiting: list[WaitingBase]) -> None:
    order = ranked(waiting, num_bases=len(waiting), slice_max_s=SLICE_MAX_S)
    assert sorted(base.base for base in order) == sorted(base.base for base in waiting)
    overdue = [base for base in order if base.unserved_s > len(waiting) * longest_slice_s(base.opening_s, SLICE_MAX_S)]
    assert order[: len(overdue)] == overdue
    assert [base.unserved_s for base in overdue] == sorted((base.unserved_s for base in overdue), reverse=True)
    ratios = [base.ratio for base in order[len(overdue) :]]
    assert ratios == sorted(ratios, reverse=True)


@dataclass
class Base:
    """One that always has work: a new entry comes as soon as its slice reads the last one, or `backlog_s` before that."""

    operation_s: float
    opening_s: float
    weight: float
    backlog_s: float
    closed_at_s: float = -inf
    unread_since_s: float = 0.0


@settings(max_examples=40, deadline=None)
@given(st.lists(st.builds(Base, COSTS, COSTS, st.floats(0.1, 10), st.floats(0, 1e4)), min_size=2, max_size=6))
def test_no_base_waits_for_more_than_two_rounds_of_the_longest_slices(pool: list[Base]) -> None:
    drain_s = 2.0
    slice_s = max(longest_slice_s(base.opening_s, SLICE_MAX_S) for base in pool)
    most_s = 2 * len(pool) * (slice_s + drain_s + max(base.opening_s for base in pool))
    now_s, current = 0.0, None
    for _ in range(200):
        waiting = [
            WaitingBase(
                base=str(number),
                waited_s=now_s - base.unread_since_s,
                operation_s=base.operation_s,
                opening_s=base.opening_s,
                is_loaded=True,
                weight=base.weight,
                since_closed_s=now_s - base.closed_at_s,
            )
            for number, base in enumerate(pool)
            if number != current
        ]
        assert all(base.unserved_s <= most_s for base in waiting)
        current = int(ranked(waiting, num_bases=len(pool), slice_max_s=SLICE_MAX_S)[0].base)
        base = pool[current]
        now_s += base.opening_s + longest_slice_s(base.opening_s, SLICE_MAX_S) + drain_s
        base.closed_at_s, base.unread_since_s = now_s, max(0.0, now_s - base.backlog_s)
