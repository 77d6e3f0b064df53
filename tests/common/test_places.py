"""Places that tenants share: by weight, and with one that is kept for those who hold none."""

import asyncio
from collections import Counter
from itertools import pairwise

import pytest

from common.sharing.places import EMPTY_ROUNDS, Places, Rounds


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Calls:
    """Calls of tenants, each of which holds its place until it is told to end."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self.begun: list[str] = []
        self._ends: list[tuple[str, asyncio.Event]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.beats = Counter[str]()

    async def begin(self, tenant: str, weight: float = 1.0) -> "asyncio.Task[None]":
        task = asyncio.create_task(self._hold(tenant, weight))
        self._tasks.add(task)
        await settle()
        return task

    async def _hold(self, tenant: str, weight: float) -> None:
        async with self._places.one(tenant, weight, lambda: self.beats.update([tenant])):
            end = asyncio.Event()
            self.begun.append(tenant)
            self._ends.append((tenant, end))
            await end.wait()

    async def end_oldest(self) -> None:
        self._ends.pop(0)[1].set()
        await settle()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_places_are_shared_by_weight_in_seconds_whatever_the_number_of_calls() -> None:
    clock = Clock()
    calls = Calls(Places(lambda: 8, clock=clock))
    for _ in range(400):
        await calls.begin("heavy", 3.0)
    for _ in range(400):
        await calls.begin("light", 1.0)
    for _ in range(200):
        clock.now += 1.0 / 8
        await calls.end_oldest()
    got = Counter(calls.begun)
    assert got["heavy"] / got["light"] == pytest.approx(3.0, rel=0.1)


async def test_a_tenant_that_holds_none_gets_the_place_that_is_kept() -> None:
    calls = Calls(Places(lambda: 2))
    for _ in range(50):
        await calls.begin("hog")
    assert calls.begun == ["hog", "hog"]
    await calls.begin("a")
    assert calls.begun == ["hog", "hog", "a"]
    await calls.begin("b")
    assert calls.begun == ["hog", "hog", "a"]
    await calls.end_oldest()
    assert calls.begun == ["hog", "hog", "a", "b"]


async def test_one_tenants_calls_begin_in_their_order_and_hear_that_the_queue_moves() -> None:
    calls = Calls(Places(lambda: 1))
    await calls.begin("a")
    await calls.begin("a")
    assert (calls.begun, calls.beats) == (["a"], Counter())
    await calls.end_oldest()
    assert (calls.begun, calls.beats) == (["a", "a"], Counter(a=1))


async def test_those_who_wait_hear_from_time_to_time_that_the_queue_moves() -> None:
    clock = Clock()
    calls = Calls(Places(lambda: 1, clock=clock))
    for _ in range(5):
        await calls.begin("a")
    await calls.end_oldest()
    await calls.end_oldest()
    assert calls.beats == Counter(a=4), "once, and four waited then"
    clock.now += 1.0
    await calls.end_oldest()
    assert calls.beats == Counter(a=6)


async def test_a_call_that_is_cancelled_leaves_its_place_to_the_next() -> None:
    calls = Calls(Places(lambda: 1))
    running, waiting = await calls.begin("a"), await calls.begin("a")
    await calls.begin("a")
    waiting.cancel()
    await settle()
    running.cancel()
    await settle()
    assert calls.begun == ["a", "a"]
    both = [await calls.begin("a"), await calls.begin("a")]
    await calls.end_oldest()  # was cancelled: ends nothing
    await calls.end_oldest()
    both[0].cancel()  # in the moment in which it is given its place
    await settle()
    assert len(calls.begun) == 4


async def test_of_each_tenants_calls_one_goes_on_in_some_rounds_of_the_event_loop() -> None:
    rounds, at, went = Rounds(), 0, Counter[tuple[str, int]]()

    async def compute(tenant: str) -> None:
        for _ in range(4):
            await rounds.next(tenant)
            went[tenant, at] += 1

    calls = [asyncio.create_task(compute(tenant)) for tenant in ("hog", "hog", "hog", "small")]
    calls.append(gone := asyncio.create_task(compute("hog")))
    await asyncio.sleep(0)
    gone.cancel()
    while not all(call.done() for call in calls):
        at += 1
        await asyncio.sleep(0)
    assert went.total() == 16 and set(went.values()) == {1}
    hogs = [at for who, at in went if who == "hog"]
    assert min(after - before for before, after in pairwise(hogs[:6])) > EMPTY_ROUNDS
    ends = {tenant: max(at for who, at in went if who == tenant) for tenant in ("hog", "small")}
    assert ends["small"] < ends["hog"]
