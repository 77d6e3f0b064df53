"""Tests that pool workers agree on the places of base models, over a real Redis."""

import asyncio
from typing import Any

import pytest

from common.bus.bus import Bus
from common.bus.streams import ALL_CELLS
from common.pool import placing
from common.pool.base_states import BaseState
from common.pool.choosing import WaitingBase
from common.pool.looking import HOLD_S, Unread
from common.pool.placement import PlacementRule
from common.pool.placing import BaseNeed, Placing, WorkerRow, places_of

LIMIT = 10


@pytest.fixture(autouse=True)
def short_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "AVERAGE_S", 0.02)


class Workers:
    """Pool workers, each with what it serves and what it has loaded."""

    def __init__(self, bus: Bus, placement: PlacementRule, num: int) -> None:
        names = [f"rollout-{number}" for number in range(num)]
        self.all = [Placing(Bus(bus.client, ALL_CELLS), "rollout", name, placement, slots=4) for name in names]
        self.states = {base: BaseState(base, "", 4, num_bytes=1) for base in "abc"}

    async def tell(self, *served: str, unread: dict[str, int] | None = None) -> dict[str, tuple[str, ...]]:
        """The places on which all agree, once each has served one base ("": none) for long."""
        seen = {base: Unread((unread or {}).get(base, 0)) for base in self.states}
        for _ in range(2):
            for each, base in zip(self.all, served, strict=True):
                each.measure(base or None, seen)
            await asyncio.sleep(0.2)
            for each, base in zip(self.all, served, strict=True):
                each.measure(base or None, seen)
        for _ in range(2):
            for each, base in zip(self.all, served, strict=True):
                await each.tell(LIMIT, self.states, base)
        assert all(each.places == self.all[0].places for each in self.all)
        return self.all[0].places


async def test_all_workers_compute_the_same_places_from_what_each_tells(bus: Bus) -> None:
    workers = Workers(bus, "spread", 2)
    assert await workers.tell("", "") == {}
    assert await workers.tell("a", "b") == {"a": ("rollout-0",), "b": ("rollout-1",)}
    # One for which more waits than its worker reads at a time gets another
    assert await workers.tell("a", "", unread={"a": 9}) == {"a": ("rollout-0", "rollout-1")}
    # and one that waits is known to all before it was served
    assert set(await workers.tell("a", "b", unread={"c": 1})) == {"a", "b", "c"}
    assert workers.all[0].is_off("b") and not workers.all[0].is_off("a") and not workers.all[0].is_off("unknown")
    assert await workers.tell("", "") == {}


async def test_places_of_a_worker_that_is_silent_go_to_others_and_one_that_refuses_gets_none(bus: Bus) -> None:
    workers = Workers(bus, "spread", 2)
    assert (await workers.tell("a", "b"))["b"] == ("rollout-1",)
    key = ALL_CELLS.pool("rollout")
    rows: Any = await bus.client.hgetall(key)
    time, _, row = rows[b"rollout-1"].partition(b" ")
    await bus.client.hset(key, "rollout-1", b"%d %s" % (int(time) - HOLD_S - 1, row))
    assert await bus.client.hlen(key) == 2
    await workers.all[0].tell(LIMIT, workers.states, "a")
    assert await bus.client.hlen(key) == 1 and workers.all[0].places == {"a": ("rollout-0",)}
    workers.states["a"].refuse("it does not fit")
    await workers.all[0].tell(LIMIT, workers.states, "")
    assert workers.all[0].places == {"a": ()}
    assert 0 < await bus.client.ttl(key) <= HOLD_S, "nothing stays of a service that has ended"


async def test_isolated_a_base_waits_for_a_worker_of_its_own_until_one_has_no_work_any_more(bus: Bus) -> None:
    workers = Workers(bus, "isolated", 1)
    assert await workers.tell("a") == {"a": ("rollout-0",)}
    assert await workers.tell("a", unread={"b": 100}) == {"a": ("rollout-0",), "b": ()}
    waiting = [WaitingBase(base="b", waited_s=60.0, operation_s=1.0, opening_s=1.0)]
    (worker,) = workers.all
    assert worker.may_open(waiting, {"b": Unread(1)}, is_idle=True) == []
    # Work that only this worker can do needs no place
    assert worker.may_open(waiting, {"b": Unread(1, num_own=1)}, is_idle=False) == waiting
    assert await workers.tell("", unread={"b": 100}) == {"b": ("rollout-0",)}
    assert worker.may_open(waiting, {"b": Unread(1)}, is_idle=False) == waiting


def test_needs_of_all_workers_add_up_and_the_first_that_saw_work_says_when_it_came() -> None:
    rows = {
        "w1": WorkerRow(LIMIT, ["b"], [], {"a": BaseNeed(5.0, 9.0, 0.6), "b": BaseNeed(3.0, 9.0, 0.1)}, {}),
        "w0": WorkerRow(LIMIT, [], [], {"a": BaseNeed(2.0, 9.0, 0.6)}, {}),
    }
    assert places_of("spread", rows) == {"b": ("w1",), "a": ("w0", "w1")}
    assert places_of("isolated", rows) == {"a": ("w0",), "b": ("w1",)}
