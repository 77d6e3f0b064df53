"""The faults of a run: drawn from the seed alone, each with a way to strike and to heal; and what they cost."""

from collections import Counter
from itertools import islice

import pytest

from chaos.faults import KINDS, LINKS, PROCESSES, REDIS, STORE, Fault, draw
from chaos.inflict import DAY_S, INFLICTIONS, jump_s
from chaos.report import Story, costs


def test_a_seed_draws_the_same_faults_however_many_are_taken() -> None:
    assert list(islice(draw(7), 50)) == list(islice(draw(7), 1000))[:50]
    assert list(islice(draw(7), 50)) != list(islice(draw(8), 50))


@pytest.mark.parametrize("seed", range(20))
def test_of_a_thousand_faults_three_hundred_are_sigkills_and_every_kind_is_among_them(seed: int) -> None:
    faults = list(islice(draw(seed), 1000))
    assert sum(fault.kind == "kill" for fault in faults) >= 300
    assert {(fault.kind, fault.victim.split("-")[0]) for fault in faults} == {
        (kind.name, victim.split("-")[0]) for kind in KINDS for victim in kind.victims
    }


def test_each_kind_of_fault_can_be_inflicted() -> None:
    groups = {**dict.fromkeys(PROCESSES, "process"), **dict.fromkeys(LINKS, "link"), REDIS: REDIS, STORE: STORE}
    assert {(kind.name, groups[victim]) for kind in KINDS for victim in kind.victims} == set(INFLICTIONS)


def test_clocks_jump_both_ways_by_a_second_to_a_day() -> None:
    jumps = [jump_s(n / 1000) for n in range(1000)]
    assert min(jumps) == -DAY_S and 0.9 * DAY_S < max(jumps) < DAY_S
    assert min(map(abs, jumps)) == 1.0
    assert Counter(jump > 0 for jump in jumps) == {True: 500, False: 500}


def test_a_fault_answers_for_the_versions_that_are_missing_until_the_next() -> None:
    def fault(number: int, kind: str) -> Fault:
        return Fault(number, kind, "env-1", 0.0, 0.0, 1.0)

    # Given two versions a second undisturbed, and none for two seconds after the first of three faults
    story = Story(
        strikes=[(0.0, fault(1, "kill")), (4.0, fault(2, "clock")), (6.0, fault(3, "kill"))], pace=2.0, ended=7
    )
    story.commits = [2.25, 2.75, 3.25, 3.75, 4.25, 4.75, 5.25, 5.75, 6.5]
    # Then the first has cost them, and the third half a second
    assert {cost.cause: (cost.num, cost.lost_s) for cost in costs(story)} == {
        "kill env": (2, 2.5),
        "clock env": (1, 0.0),
    }
