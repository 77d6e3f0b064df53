"""The faults of a run: drawn from the seed alone, each with a way to strike and to heal; and what they cost."""

from itertools import islice

import pytest

from chaos.faults import KINDS, LINKS, PROCESSES, REDIS, STORE, draw
from chaos.inflict import INFLICTIONS


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
