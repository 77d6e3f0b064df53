"""Simulated rollout workers: own streams, LoRA slots, deaths, versions on their way, and pools that follow their turns."""

import math
from collections.abc import Sequence
from functools import partial

import msgspec
import pytest

from common.wire.messages import AdapterRef
from simulator.calibration import LogNormal, PolicyRun, Size
from simulator.clock import Clock
from simulator.engine import MAX_OVERTAKEN_S, AdapterSlots
from simulator.links import NUM_PARTS, Links
from tests.simulator.test_simulator import AGENTIC, TAIL, run

A, B = (AdapterRef("t", job, 1) for job in "ab")
FOUR = Size(rollout=4, rollout_slots=8)
SPREAD = Size(adapter_bytes=100e6, store_bytes_per_s=80e6, link_bytes_per_s=20e6)
CHAIN = msgspec.structs.replace(SPREAD, relay=True)


def play(clock: Clock) -> None:
    while clock.step():
        pass


def test_later_turns_go_back_to_the_worker_that_has_their_keys_and_values() -> None:
    shared = run(AGENTIC, "marlaas", 4, size=FOUR)[1]
    own = run(AGENTIC, "marlaas", 4, size=msgspec.structs.replace(FOUR, own_streams=True))[1]
    assert own.met > 0.9 and shared.met < 0.5


def test_a_turn_of_an_adapter_in_a_slot_overtakes_for_a_while() -> None:
    clock, let_in = Clock(), list[str]()
    slots = AdapterSlots(clock, 2, 0.0)  # one of them is for chats

    def enter(name: str, adapter: AdapterRef) -> None:
        slots.enter(adapter, lambda: let_in.append(name))

    clock.at(0, lambda: enter("a1", A))
    clock.at(1, lambda: enter("b1", B))
    clock.at(2, lambda: enter("a2", A))
    clock.at(1 + MAX_OVERTAKEN_S, lambda: enter("a3", A))
    for at_s in (30, 31):
        clock.at(at_s, lambda: slots.leave(A))
    play(clock)
    assert let_in == ["a1", "a2", "b1"], "b1 waited for 20 s, so a3 is behind it"


def test_the_turns_of_a_killed_worker_go_on_after_its_lease() -> None:
    slow = msgspec.structs.replace(TAIL, turn_tokens=LogNormal.of(200, 0.0))
    base = Size(rollout=2, rollout_slots=64)
    world, found = run(slow, "marlaas", 2, size=msgspec.structs.replace(base, kills_s=(0.5,), lease_s=2.0))
    assert world.issued == world.settled
    assert len(world.fleet.all) == 3, "another takes its place"
    assert 2.0 < found.makespan_s < run(slow, "marlaas", 2, size=base)[1].makespan_s + 3.0


# ---- versions on their way ------------------------------------------------------------------------------------------


def arrivals(size: Size, num: int, *, lost: Sequence[tuple[float, int]] = ()) -> tuple[dict[int, float], Links]:
    """Returns when each worker had a version that all asked for at once; some are `lost` at a time."""
    clock, here = Clock(), dict[int, float]()
    links = Links(clock, 0.0, size)

    def arrive(worker: int) -> None:
        here[worker] = clock.now

    for worker in range(num):
        links.when_here(worker, A, partial(arrive, worker))
    for at_s, worker in lost:
        clock.at(at_s, lambda worker=worker: links.forget(worker))
    play(clock)
    return here, links


def test_all_who_read_the_store_share_its_link() -> None:
    assert arrivals(SPREAD, 2)[0] == pytest.approx({0: 5.0, 1: 5.0}), "each at the speed of its own link"
    assert arrivals(SPREAD, 8)[0] == pytest.approx(dict.fromkeys(range(8), 10.0))


def test_a_chain_ends_one_part_later_for_each_who_follows() -> None:
    part_s = 100e6 / NUM_PARTS / 20e6
    assert arrivals(CHAIN, 8)[0] == pytest.approx({worker: 5.0 + worker * part_s for worker in range(8)})


@pytest.mark.parametrize(("sources", "loaders"), [(1, 16), (2, 16), (1, 31), (4, 31)])
def test_a_chain_takes_hardly_longer_than_a_binomial_pipeline(sources: int, loaders: int) -> None:
    """Its rounds are as few as there can be; in each every worker that has a part sends one."""
    part_s = 100e6 / NUM_PARTS / 20e6
    here, links = arrivals(CHAIN, sources)
    began_s = links.clock.now
    for worker in range(sources, sources + loaders):
        links.when_here(worker, A, lambda worker=worker: here.update({worker: links.clock.now}))
    play(links.clock)
    rounds = NUM_PARTS + math.ceil(math.log2((loaders + sources) / sources)) - 1
    assert (max(here.values()) - began_s) / part_s <= 1.07 * rounds
    assert (max(here.values()) - began_s) / part_s == pytest.approx(NUM_PARTS + math.ceil(loaders / sources) - 1)


def test_who_loses_its_holder_goes_on_from_its_part() -> None:
    here, _ = arrivals(CHAIN, 6, lost=[(2.5, 0), (3.0, 3)])
    assert here.keys() == {1, 2, 4, 5}
    assert max(here.values()) < 5.1


def test_with_a_relay_only_workers_with_turns_of_the_job_load_ahead() -> None:
    """Four workers read the store at 20 MB/s each, eight at 10."""
    for size, spread_s in ((CHAIN, 5.0), (SPREAD, 10.0)):
        _, links = arrivals(size, 2)
        links.announce(A.next(), range(8))
        play(links.clock)
        assert links.spread_s == pytest.approx([spread_s], abs=0.02)


# ---- pools ----------------------------------------------------------------------------------------------------------


def test_a_pool_that_repacks_holds_fewer_workers_than_one_that_stops_empty_ones() -> None:
    tail = msgspec.structs.replace(TAIL, turn_tokens=LogNormal.of(200, 1.0), max_tokens=4000, num_steps=2)

    def held(**changes: object) -> PolicyRun:
        size = msgspec.structs.replace(Size(rollout=4, rollout_slots=16, start_s=0.5), **changes)
        world, found = run(tail, "marlaas", 4, size=size)
        assert world.issued == world.settled
        return found

    fixed, empty, repack = held(), held(least_rollout=1), held(least_rollout=1, repack=True)
    assert fixed.held_s == pytest.approx(4 * fixed.makespan_s)
    assert repack.held_s < empty.held_s < fixed.held_s
    assert repack.tokens_per_held_s > empty.tokens_per_held_s > fixed.tokens_per_held_s
