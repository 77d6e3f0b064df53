"""Holders that give little: whom a worker leaves for it, and whom it does not; and how many chains form, of which lengths."""

import asyncio
import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from common.bus.bus import Bus
from common.peers import chain, speed
from common.peers.holders import STORE, Holders
from common.peers.server import Offer
from common.peers.speed import FIRST_BYTES_PER_S, LOOK_S, SLOW_S, HolderSpeed, Usual
from harness.proxy import Proxy
from tests.common.test_peers import CELL, DATA, FILE, PATH, World, bytes_of, until_parts

SLOW_BYTES_PER_S = 100_000


# ---- the rule -------------------------------------------------------------------------------------------------------


def follow(
    holder: HolderSpeed, seconds: float, bytes_per_s: float, *, waits: float = 0.0, at_s: float | None = None
) -> float:
    """Ten parts a second come at this speed; before each the follower waits for the share `waits` of the time. Returns the clock."""
    now_s, step_s = holder.looked_s if at_s is None else at_s, 0.1
    for _ in range(round(seconds / step_s)):
        holder.came(0, 0.0, now_s + waits * step_s)
        now_s += step_s
        coming_s = (1 - waits) * step_s
        holder.came(round(bytes_per_s * coming_s), coming_s, now_s)
    return now_s


def test_who_sends_less_than_a_quarter_of_the_usual_for_a_while_is_slow() -> None:
    holder = HolderSpeed(Usual(), 0.0)
    now_s = follow(holder, 30, 20e6)
    assert holder.usual.bytes_per_s == pytest.approx(20e6, rel=0.01)
    now_s = follow(holder, 60, 6e6, at_s=now_s)
    assert not holder.is_slow, "it is used to that by now, too"
    now_s = follow(holder, 2 * LOOK_S, 0.5e6, at_s=now_s)
    assert not holder.is_slow
    follow(holder, SLOW_S + LOOK_S, 0.5e6, at_s=now_s)
    assert holder.is_slow


def test_a_first_holder_that_trickles_is_slow_and_the_next_at_that_speed_is_not() -> None:
    usual = Usual()
    first = HolderSpeed(usual, 0.0)
    follow(first, SLOW_S + 2 * LOOK_S, FIRST_BYTES_PER_S / 5)
    assert first.is_slow
    first.leave()
    second = HolderSpeed(usual, 0.0)
    follow(second, 60, FIRST_BYTES_PER_S / 5)
    assert not second.is_slow and not second.is_starved


def test_who_waits_itself_is_not_slow_but_starved() -> None:
    holder = HolderSpeed(Usual(20e6), 0.0)
    now_s = follow(holder, SLOW_S + 2 * LOOK_S, 20e6, waits=0.9)
    assert not holder.is_slow and not holder.is_starved, "its own follower moves first"
    now_s = follow(holder, SLOW_S, 20e6, waits=0.9, at_s=now_s)
    assert not holder.is_slow and holder.is_starved
    assert holder.usual.bytes_per_s == 20e6
    follow(holder, 2 * LOOK_S, 20e6, at_s=now_s)
    assert not holder.is_starved


# ---- over sockets ---------------------------------------------------------------------------------------------------


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "LOOK_S", 0.05)
    monkeypatch.setattr(speed, "ADAPTS", 0.0)
    monkeypatch.setattr(speed, "SLOW_S", 0.3)
    monkeypatch.setattr(chain, "SLOW_S", 0.3)
    monkeypatch.setattr(chain, "HEAR_S", 30.0)


def left(logs: Iterable[Mapping[str, str]]) -> list[tuple[str, str]]:
    """Holders that were left, and why."""
    return [(line["holder"], line["reason"]) for line in logs if line["event"] == "holder_lost"]


@pytest.mark.usefixtures("soon")
async def test_a_holder_that_trickles_is_left_for_the_store(world: World) -> None:
    first = await world.worker("first", proxy=Proxy(0, bytes_per_s=SLOW_BYTES_PER_S))
    second = await world.worker("second")
    await first.read(FILE, PATH)
    with capture_logs() as logs:
        assert await second.read(FILE, PATH) == DATA
    assert [(holder, "SlowHolder" in reason) for holder, reason in left(logs)] == [("first", True)]
    assert len(world.objects.starts) == 2


@pytest.mark.usefixtures("soon")
async def test_a_slow_holder_is_better_than_none(world: World) -> None:
    # Given a follower of one that gives little, and another that joined later and has the only place at the store
    first = await world.worker("first", proxy=Proxy(0, bytes_per_s=7 * SLOW_BYTES_PER_S))
    await first.read(FILE, PATH)
    second = await world.worker("second")
    usual = second._usual  # pyright: ignore[reportPrivateUsage]
    usual.bytes_per_s = 1.0
    read = asyncio.create_task(second.read(FILE, PATH))
    await until_parts(world.cached("second"), 1)
    bus = Bus.connect(world.url, CELL)
    world.stack.push_async_callback(bus.close)
    reader = Holders(bus, "reader", store_places=1)
    reader.address = "127.0.0.1:1"
    await reader.renew([Offer(FILE, Path(), number=99, source=STORE)])
    # When the follower expects more
    usual.bytes_per_s = 1e9
    with capture_logs() as logs:
        assert await read == DATA
    assert [holder for holder, _ in left(logs)] == ["first"]
    assert bytes_of(second) == (0, len(DATA))


@pytest.mark.usefixtures("soon")
async def test_who_follows_one_that_is_slow_itself_follows_that_ones_holder(world: World) -> None:
    # Given a worker that gets little, and is content with it, and one that follows it
    proxy = Proxy(0, bytes_per_s=SLOW_BYTES_PER_S)
    first = await world.worker("first", proxy=proxy)
    await first.read(FILE, PATH)
    second, third = await world.worker("second"), await world.worker("third")
    second._usual.bytes_per_s = 1.0  # pyright: ignore[reportPrivateUsage]
    behind = asyncio.create_task(second.read(FILE, PATH))
    await until_parts(world.cached("second"), 1)
    # When the way to the first is as fast as it can be for others
    holders, offers = first.holders, list(first._offers.values())  # pyright: ignore[reportPrivateUsage]
    holders.address = f"127.0.0.1:{proxy.target_port}"
    await holders.renew(offers)
    with capture_logs() as logs:
        assert await third.read(FILE, PATH) == DATA
    assert [(holder, "behind its own holder" in reason) for holder, reason in left(logs)] == [("second", True)]
    assert bytes_of(third) == (0, len(DATA)) and world.objects.starts == [0]
    behind.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await behind


# ---- chains ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("places", [1, 3])
async def test_three_sources_make_three_chains_of_one_length(redis_url: str, places: int) -> None:
    """Workers that are whole, or as many places at the store."""
    whole = ["a", "b", "c"] if places == 1 else []
    alive, follows = list[tuple[Holders, Offer]](), dict[str, str]()
    async with contextlib.AsyncExitStack() as stack:
        bus = Bus.connect(redis_url, CELL)
        stack.push_async_callback(bus.close)
        for name in [*whole, *(f"w{number}" for number in range(9))]:
            holders = Holders(bus, name, store_places=places)
            holders.address, offer = f"{name}:1", Offer(FILE, Path())
            if name in whole:
                offer.has(len(FILE.parts))
            else:
                follows[name], _ = await holders.join(offer, ())
            alive.append((holders, offer))
            for each, its in alive:
                await each.renew([its])
    assert sorted(follows[f"w{number}"] for number in range(3)) == (whole or [STORE] * 3)
    assert all(follows[f"w{number}"] == f"w{number - 3}" for number in range(3, 9))
