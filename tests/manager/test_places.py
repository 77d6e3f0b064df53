"""Places that tenants share: no more than there are, and fair by weight."""

import asyncio
import threading
from collections import Counter

import pytest

from common.errors import Unavailable
from manager_service.api.errors import ApiError
from manager_service.api.places import MAX_WAITING, SharedPlaces
from manager_service.api.reading.helpers import SMALL_BYTES, Helpers
from manager_service.api.reading.tasks import ParseBody
from manager_service.records import TenantRecord


def tenant(name: str, weight: float = 1.0) -> TenantRecord:
    return TenantRecord(id=name, weight=weight, created_at=0)


async def test_what_exceeds_the_places_waits_until_one_is_given_back() -> None:
    places, running, most = SharedPlaces("places", lambda: 4), 0, 0  # and one that is kept for who holds none

    async def ask(name: str) -> None:
        nonlocal running, most
        async with places.one(tenant(name), 10):
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.01)
            running -= 1

    await asyncio.gather(*(ask(name) for name in "abcd" * 5))
    assert 4 <= most <= 5 and not running


async def test_there_is_always_one_place() -> None:
    places = SharedPlaces("places", lambda: 0)
    async with places.one(tenant("a"), 1):
        with pytest.raises(Unavailable, match="all places are taken; try again"):
            await places.take(tenant("a"), 0.05)


async def test_a_request_that_gives_up_waiting_takes_nothing() -> None:
    places = SharedPlaces("places", lambda: 1)
    async with places.one(tenant("a"), 1):
        waiting = asyncio.create_task(places.take(tenant("a"), 5))
        await asyncio.sleep(0.01)
        waiting.cancel()
    async with places.one(tenant("a"), 1):
        pass


async def test_a_request_that_is_cancelled_when_it_is_served_gives_its_place_back() -> None:
    places = SharedPlaces("places", lambda: 1)
    place = await places.take(tenant("a"), 1)
    waiting = asyncio.create_task(places.take(tenant("a"), 5))
    await asyncio.sleep(0.01)
    places.give_back(place)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    async with places.one(tenant("a"), 1):
        pass


async def served(num_places: int, asked: dict[TenantRecord, int], num: int) -> Counter[str]:
    """The tenants of the first `num` places that are given, if each asks for so many at once, one after another."""
    places, order, enough = SharedPlaces("places", lambda: num_places), list[str](), asyncio.Event()

    async def ask(record: TenantRecord) -> None:
        async with places.one(record, 60):
            order.append(record.id)
            if len(order) == num:
                enough.set()
            await asyncio.sleep(0.01)

    tasks = [asyncio.create_task(ask(record)) for record, count in asked.items() for _ in range(count)]
    await enough.wait()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return Counter(order[:num])


async def test_a_tenant_that_asks_for_much_first_leaves_others_their_share() -> None:
    for num_places in (1, 4):
        shares = await served(num_places, {tenant("hog"): 300, tenant("victim"): 60}, 44)
        assert shares["victim"] >= 18, shares


async def test_places_are_shared_by_weight() -> None:
    shares = await served(8, {tenant("light"): 100, tenant("heavy", 3.0): 100}, 80)
    assert shares["heavy"] == pytest.approx(60, abs=8), shares


async def test_too_many_waiting_requests_of_one_tenant_are_refused() -> None:
    places = SharedPlaces("places", lambda: 1)
    async with places.one(tenant("a"), 1):
        tasks = [asyncio.create_task(places.take(tenant("a"), 60)) for _ in range(MAX_WAITING)]
        await asyncio.sleep(0.05)
        with pytest.raises(ApiError, match="wait for places already") as refused:
            await places.take(tenant("a"), 60)
        assert refused.value.status_code == 429
        other = asyncio.create_task(places.take(tenant("b"), 60))
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    places.give_back(await other)


async def test_a_tenants_work_in_threads_keeps_no_other_tenants_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given more small texts of one tenant than there are threads, and none that is read to its end
    release, begun = threading.Event(), list[bytes]()

    def read(task: ParseBody, _tokenizers: object) -> bytes:
        begun.append(task.text)
        return task.text if task.text == b"other" or release.wait() else b""

    monkeypatch.setattr("manager_service.api.reading.helpers.do", read)
    reading = Helpers({}, {})
    texts = (reading.do(tenant("greedy"), ParseBody(b"greedy"), num_bytes=SMALL_BYTES) for _ in range(60))
    waiting = [asyncio.create_task(text) for text in texts]
    try:
        while not begun:
            await asyncio.sleep(0.01)
        # When another sends one, it is read
        asked = reading.do(tenant("other"), ParseBody(b"other"), num_bytes=SMALL_BYTES)
        assert await asyncio.wait_for(asked, 10) == b"other"
    finally:
        release.set()
        await asyncio.gather(*waiting)
