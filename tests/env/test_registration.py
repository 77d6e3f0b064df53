"""Env workers that are gone are noticed, and the turns in their streams go to others."""

from common.bus.bus import Bus
from env_service.live.registration import Registration
from tests.common.test_bus import start

HOLD_S = 3600.0
LONG_AGO = 1


class Attending:
    """An env worker's registration. `missed`: how often it heard that others have its turns."""

    def __init__(self, bus: Bus, name: str) -> None:
        self.name = name
        self.missed_times = 0
        self.trusted_s = 0.0
        self._bus = bus
        self._stream = bus.cell.env_worker(name)
        self.registration = Registration(bus, name, self, hold_s=HOLD_S)  # pyright: ignore[reportArgumentType]

    def missed(self) -> None:
        self.missed_times += 1

    def trusted_until(self, until_s: float) -> None:
        self.trusted_s = until_s

    async def says_it_is_there(self) -> None:
        await self.registration.begin()

    async def is_late(self) -> None:
        await self._bus.client.zadd(self._bus.cell.env_workers, {self.name: LONG_AGO})

    async def gets(self, number: int) -> None:
        for n in range(number):
            await self._bus.publish([(self._stream, start(n))])

    async def has(self) -> int:
        return await self._bus.client.xlen(self._stream)

    async def is_there(self) -> bool:
        return await self._bus.client.zscore(self._bus.cell.env_workers, self.name) not in (None, LONG_AGO)


async def two(bus: Bus) -> tuple[Attending, Attending]:
    one, other = Attending(bus, "one"), Attending(bus, "other")
    for each in (one, other):
        await each.says_it_is_there()
        each.missed_times = 0
        await each.gets(1)
    return one, other


async def test_the_turns_of_a_worker_that_is_gone_go_to_all(bus: Bus) -> None:
    one, other = await two(bus)
    await other.gets(149)
    await other.is_late()
    await one.says_it_is_there()
    assert await bus.client.xlen(bus.cell.env) == 150
    assert not await bus.client.exists(bus.cell.env_worker("other")) and not await other.is_there()
    assert (await one.has(), one.missed_times) == (1, 0)
    # When it comes back, then it knows, and has a stream again
    await other.says_it_is_there()
    assert other.missed_times == 1
    assert await bus.client.exists(bus.cell.env_worker("other"))


async def test_an_outage_takes_no_worker_from_its_sessions(bus: Bus) -> None:
    # Given workers that Redis has not heard for long
    one, other = await two(bus)
    for each in (one, other):
        await each.is_late()
    # When one is heard again, then the other has time to come back
    await one.says_it_is_there()
    assert await other.is_there()
    await one.says_it_is_there()
    await other.says_it_is_there()
    assert [(await each.has(), each.missed_times) for each in (one, other)] == [(1, 0), (1, 0)]
    # But once: if it does not come, it is gone
    await other.is_late()
    await one.says_it_is_there()
    assert await bus.client.xlen(bus.cell.env) == 1


async def test_a_worker_that_has_begun_to_be_emptied_has_missed_its_turns(bus: Bus) -> None:
    one, other = await two(bus)
    await bus.client.zadd(bus.cell.env_workers, {"other": 0})  # as whoever empties it leaves it between two calls
    await one.is_late()
    await one.says_it_is_there()
    assert not await bus.client.zscore(bus.cell.env_workers, "other")
    await other.says_it_is_there()
    assert other.missed_times == 1


async def test_a_worker_that_leaves_gives_its_turns_to_all_and_takes_nobodys(bus: Bus) -> None:
    one, other = await two(bus)
    await other.is_late()
    await one.registration.close()
    assert await bus.client.xlen(bus.cell.env) == 1
    assert not await bus.client.exists(bus.cell.env_worker("one"))
    assert await other.has() == 1
