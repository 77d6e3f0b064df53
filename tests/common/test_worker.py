"""The worker loop over a real Redis: settling, taking over, dead letters, pause, hand-back."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec.structs import replace

from common.bus.bus import Bus, Delivery, Idle, Out, Progress
from common.bus.streams import GROUP_ENV, Cell
from common.cancellation import cancel_all
from common.errors import StoreUnavailable, Unavailable
from common.pool.gate import Gate
from common.wire.codec import decode
from common.wire.messages import Cancel, DeadLetter, EnvSpec, Failure, GradeRequest, JobCommand, Message, Start
from common.worker.handlers import Beat
from common.worker.takeover import is_suspect
from common.worker.telemetry import About, Reporter
from common.worker.worker import Habits, Inbox, Worker
from tests.common.test_bus import start

CELL = Cell("tiny")
CHAT = CELL.rollout_chat
LEASE_S = 0.4


def command(number: int) -> JobCommand:
    return JobCommand(**start().about(), id=f"command/{number}", action="pause")


def asked() -> GradeRequest:
    return GradeRequest(
        **start().about(), id="asked", env=EnvSpec("single_turn"), item={}, output_text="", reply_to=CELL.reply("me")
    )


@dataclass
class Recorder:
    """A handler whose behaviour a test gives; it notes what it saw."""

    act: Callable[[Any, Beat], Any]
    seen: list[str] = field(default_factory=list)
    most_at_once: int = 0
    running: int = 0

    async def __call__(self, message: Start, beat: Beat) -> list[Out]:
        self.seen.append(message.id)
        self.running += 1
        self.most_at_once = max(self.most_at_once, self.running)
        try:
            await self.act(message, beat)
        finally:
            self.running -= 1
        return [(getattr(message, "reply_to", CELL.rollout), message)]

    def hand_back(self, message: Start) -> list[Out] | None:
        return None

    def failed(self, message: Start, failure: Failure) -> list[Out]:
        return [(CELL.scored(1), message)]


@dataclass
class ParkingRecorder(Recorder):
    def park(self, message: Start) -> list[Out]:
        return [(CELL.scored(0), message)]

    def drop(self, message: Start) -> list[Out]:
        return [(CELL.scored(2), message)]


async def at_once(message: Start, beat: Beat) -> None:
    return None


async def for_ever(message: Start, beat: Beat) -> None:
    while True:
        beat()
        await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def working(
    bus: Bus,
    handler: Recorder,
    *,
    slots: int = 4,
    name: str = "w",
    a_read: int | None = None,
    streams: Sequence[str] = (CELL.env,),
    own_slots: int = 0,
    most: int = 10,
    lease_s: float = LEASE_S,
    gate: Gate | None = None,
    **habits: Any,
) -> AsyncGenerator[Worker]:
    reporter = Reporter(name, "env", "tiny", About(slots=slots))
    inboxes = [Inbox(stream, GROUP_ENV, a_read) for stream in streams]
    if own_slots:
        inboxes.insert(0, Inbox(CHAT, GROUP_ENV, own_slots=own_slots))
    options: dict[str, Any] = {"lease_s": lease_s, "max_deliveries": most, "gate": gate}
    worker = Worker(bus, handler, inboxes, reporter, **options, habits=Habits(**habits))
    stop = asyncio.Event()
    task = asyncio.create_task(worker.run(stop))
    try:
        yield worker
    finally:
        stop.set()
        await asyncio.wait_for(task, 60)


async def until(condition: Callable[[], Any], seconds: float = 120.0) -> None:
    """Waits for what comes in moments on a machine with nothing else to do. Looks ever more seldom: many a look asks an API."""
    pause_s = 0.01
    async with asyncio.timeout(seconds):
        while True:
            value = condition()
            if await value if asyncio.iscoroutine(value) else value:
                return
            await asyncio.sleep(pause_s)
            pause_s = min(1.2 * pause_s, 0.1)


async def length(bus: Bus, stream: str, number: int) -> bool:
    return await bus.client.xlen(stream) == number


async def test_what_is_read_is_worked_on_and_settled(bus: Bus) -> None:
    async with working(bus, Recorder(at_once)):
        await bus.publish([(CELL.env, start(n)) for n in range(50)])
        await until(lambda: length(bus, CELL.rollout, 50))
        await until(lambda: length(bus, CELL.env, 0))


async def test_a_busy_worker_reads_what_comes_one_by_one_together_and_an_idle_one_waits_for_nothing(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.worker.worker.MOST_READ_S", 3600.0)
    monkeypatch.setattr("common.worker.settler.MOST_SOON_S", 3600.0)
    ended = asyncio.Event()

    async def first_until_told(message: Start, beat: Beat) -> None:
        await (ended.wait() if message == start(0) else asyncio.sleep(0))

    # Given a worker that was busy with one entry when others came
    handler = Recorder(first_until_told)
    async with working(bus, handler, slots=8, gather_s=3600.0):
        await bus.publish([(CELL.env, start(0))])
        await until(lambda: handler.seen)
        for n in range(1, 5):
            await bus.publish([(CELL.env, start(n))])
        await asyncio.sleep(0.05)
        assert handler.seen == [start(0).id]
        # When that ends, then all are read and settled without a window's delay
        ended.set()
        await until(lambda: length(bus, CELL.rollout, 5))


@pytest.mark.parametrize("awaited", ["a reply", "a trajectory that begins"])
async def test_what_somebody_waits_for_soon_settles_all_else(
    bus: Bus, monkeypatch: pytest.MonkeyPatch, awaited: str
) -> None:
    monkeypatch.setattr("common.worker.settler.MOST_S", 3600.0)

    async def first_for_ever(message: Message, beat: Beat) -> None:
        await (asyncio.Event().wait() if message == command(0) else asyncio.sleep(0))

    handler = Recorder(first_for_ever)
    async with working(bus, handler, slots=8, gather_s=3600.0, lease_s=60.0):
        # Given a result that waits for others since the script for the one before
        await bus.publish([(CELL.env, command(n)) for n in range(2)])
        await until(lambda: length(bus, CELL.rollout, 1))
        await bus.publish([(CELL.env, command(2))])
        await until(lambda: len(handler.seen) == 3)
        await asyncio.sleep(0.05)
        assert await length(bus, CELL.rollout, 1)
        # When what is awaited ends, then both are settled
        await bus.publish([(CELL.env, asked() if awaited == "a reply" else start(3))])
        await until(lambda: length(bus, CELL.rollout, 2 if awaited == "a reply" else 3))


async def test_no_more_is_read_than_there_are_slots(bus: Bus) -> None:
    handler = Recorder(for_ever)
    async with working(bus, handler, slots=3):
        await bus.publish([(CELL.env, start(n)) for n in range(10)])
        await until(lambda: handler.running == 3)
        await asyncio.sleep(0.1)
        assert handler.most_at_once == 3
        assert (await bus.client.xpending(CELL.env, GROUP_ENV))["pending"] == 3


async def test_a_worker_without_room_leaves_work_to_others(bus: Bus) -> None:
    full, other = Recorder(for_ever), Recorder(at_once)
    async with working(bus, full, name="full", a_read=1, has_room=lambda: False):
        await bus.publish([(CELL.env, start(n)) for n in range(6)])
        await until(lambda: full.seen)
        async with working(bus, other, name="other"):
            await until(lambda: len(other.seen) == 5)
        assert len(full.seen) == 1


@pytest.mark.parametrize(("slots", "most"), [(8, 3), (2, 9)], ids=["while it may", "up to its slots"])
async def test_a_worker_without_room_takes_what_nobody_else_waits_for(bus: Bus, slots: int, most: int) -> None:
    handler, num = Recorder(for_ever), min(slots, most)
    options: dict[str, Any] = {"has_room": lambda: False, "takes_leftovers": lambda: handler.running < most}
    async with working(bus, handler, slots=slots, a_read=1, **options):
        await bus.publish([(CELL.env, start(n)) for n in range(6)])
        await until(lambda: handler.running == num)
        await asyncio.sleep(0.2)
        assert handler.seen == [start(n).id for n in range(num)]
        assert (await bus.client.xpending(CELL.env, GROUP_ENV))["pending"] == num


async def test_an_idle_worker_gets_a_new_entry_before_one_that_takes_leftovers(bus: Bus) -> None:
    full, idle = Recorder(for_ever), Recorder(at_once)
    async with working(bus, full, name="full", a_read=1, has_room=lambda: False, takes_leftovers=lambda: True):
        await bus.publish([(CELL.env, start(0))])
        await until(lambda: full.seen)
        async with working(bus, idle, name="idle"):
            await asyncio.sleep(0.2)  # it waits for work now
            for n in range(1, 6):
                await bus.publish([(CELL.env, start(n))])
                await until(lambda n=n: len(idle.seen) + len(full.seen) == n + 1)
                await asyncio.sleep(0.1)
        assert idle.seen == [start(n).id for n in range(1, 6)]


async def test_a_worker_that_takes_one_at_a_time_does_so_from_all_its_inboxes(bus: Bus) -> None:
    handler, own = Recorder(for_ever), CELL.trainer("w")
    await bus.publish([(CELL.env, start(n)) for n in range(4)])
    await bus.publish([(own, start(9))])
    async with working(bus, handler, a_read=1, streams=(own, CELL.env), has_room=lambda: False):
        await until(lambda: handler.running)
        assert (await bus.client.xpending(CELL.env, GROUP_ENV))["pending"] == 0
        assert handler.seen == [start(9).id]


async def test_work_that_advances_is_not_taken_over(bus: Bus) -> None:
    handler, other = Recorder(for_ever), Recorder(at_once)
    async with working(bus, handler, name="a"):
        await bus.publish([(CELL.env, start())])
        await until(lambda: handler.seen)
        async with working(bus, other, name="b"):
            await asyncio.sleep(3 * LEASE_S)
            assert other.seen == []


async def test_work_that_hangs_is_taken_over_and_its_result_stands_once(bus: Bus) -> None:
    released = asyncio.Event()
    hung = Recorder(lambda message, beat: released.wait())
    async with working(bus, hung, name="a"):
        await bus.publish([(CELL.env, start())])
        await until(lambda: hung.seen)
        other = Recorder(at_once)
        async with working(bus, other, name="b"):
            await until(lambda: length(bus, CELL.rollout, 1))
            assert other.seen == ["job/0"]
            released.set()
            await asyncio.sleep(0.1)
            assert await bus.client.xlen(CELL.rollout) == 1


async def left_behind(bus: Bus, num: int, *, deliveries: int = 1) -> None:
    """Entries that workers held before they died."""
    await bus.ensure_group(CELL.env, GROUP_ENV)
    await bus.publish([(CELL.env, start(n)) for n in range(num)])
    await bus.read([CELL.env], GROUP_ENV, "dead", count=num)
    for _ in range(deliveries - 1):
        found = await bus.find_idle(CELL.env, GROUP_ENV, min_idle_ms=0)
        await bus.claim(CELL.env, GROUP_ENV, "dead", found, min_idle_ms=0)


async def test_a_busy_worker_takes_orphans_into_company(bus: Bus) -> None:
    await left_behind(bus, 3)
    handler = Recorder(for_ever)
    async with working(bus, handler, slots=4):
        # Given a worker whose slots are all taken, by work that does not end
        await bus.publish([(CELL.env, start(n)) for n in range(10, 20)])
        await until(lambda: handler.running == 4)
        # Then an orphan begins beside it, and no more than fit
        await until(lambda: handler.running == 5)
        await asyncio.sleep(2 * LEASE_S)
        assert handler.most_at_once == 5
        assert sorted(handler.seen)[0] == "job/0"


async def test_orphans_leave_a_worker_its_slots_as_far_as_it_has_places_beside(bus: Bus) -> None:
    await left_behind(bus, 1)
    handler = Recorder(for_ever)
    async with working(bus, handler, slots=4, orphan_slots=1):
        # Given an orphan that does not end
        await until(lambda: handler.running == 1)
        # When more comes than there are slots, then all of them are taken
        await bus.publish([(CELL.env, start(n)) for n in range(10, 20)])
        await until(lambda: handler.running == 5)
        await asyncio.sleep(2 * LEASE_S)
        assert handler.most_at_once == 5


async def test_more_orphans_than_places_beside_go_before_new_work(bus: Bus) -> None:
    await left_behind(bus, 3)
    ends = asyncio.Semaphore(0)

    async def act(message: Start, beat: Beat) -> None:
        await (for_ever(message, beat) if message.group < 10 else ends.acquire())

    handler = Recorder(act)
    async with working(bus, handler, slots=4, orphan_slots=1):
        # Given a full worker with an orphan beside, more of both to come
        await bus.publish([(CELL.env, start(n)) for n in range(10, 20)])
        await until(lambda: handler.running == 5)
        # When one of its own ends and then another, then an orphan begins each time
        for num in (6, 7):
            ends.release()
            await until(lambda num=num: len(handler.seen) == num)
        assert {start(n).id for n in range(3)} <= set(handler.seen)


async def test_orphans_that_do_not_advance_come_a_quarter_of_the_slots_at_a_time(bus: Bus) -> None:
    await left_behind(bus, 6)
    go_on = asyncio.Event()

    async def wait(message: Start, beat: Beat) -> None:
        await go_on.wait()
        await for_ever(message, beat)

    handler = Recorder(wait)
    async with working(bus, handler, slots=8):
        await until(lambda: handler.running == 2)
        await asyncio.sleep(LEASE_S / 2)
        assert handler.most_at_once == 2
        # And once they advance, all run together
        go_on.set()
        await until(lambda: handler.running == 6)


# ---- places of a stream's own ----------------------------------------------------------------------------------------


async def test_a_stream_has_places_of_its_own_also_in_a_worker_whose_slots_are_taken(bus: Bus) -> None:
    handler = Recorder(for_ever)
    async with working(bus, handler, slots=4, own_slots=2):
        # Given a full worker, with more to come
        await bus.publish([(CELL.env, start(n)) for n in range(10)])
        await until(lambda: handler.running == 4)
        # When entries of the stream come, then as many begin as it has places
        await bus.publish([(CHAT, start(n)) for n in range(10, 13)])
        await until(lambda: handler.running == 6)
        await asyncio.sleep(2 * LEASE_S)
        assert handler.most_at_once == 6 and {"job/10", "job/11"} <= set(handler.seen)
    # And what had begun goes back when the worker stops
    assert len(await bus.read([CHAT], GROUP_ENV, "other", count=9)) == 3


async def test_a_streams_own_places_stay_free_for_it_while_it_may_have_the_slots_too(bus: Bus) -> None:
    ends = asyncio.Semaphore(0)

    async def act(message: Start, beat: Beat) -> None:
        await (for_ever(message, beat) if message.group < 10 else ends.acquire())

    handler = Recorder(act)
    async with working(bus, handler, slots=4, own_slots=2):
        # Given entries of the stream in all places
        await bus.publish([(CHAT, start(n)) for n in range(10, 18)])
        await until(lambda: handler.running == 6)
        await bus.publish([(CELL.env, start(n)) for n in range(6)])
        # When they end, then others take the slots alone
        for _ in range(8):
            ends.release()
        await until(lambda: handler.running == 4 and len(handler.seen) == 12)
        await asyncio.sleep(2 * LEASE_S)
        assert handler.running == 4


async def test_entries_of_two_streams_with_the_same_id_have_a_place_each(bus: Bus) -> None:
    # Given entries that were written to two streams in the same millisecond
    await bus.publish([(CELL.env, start(n)) for n in range(4)])
    written: Any = await bus.client.xrange(CELL.env)
    for entry, fields in written:
        await bus.client.xadd(CHAT, fields, id=entry)
    ends = asyncio.Event()

    async def act(message: Start, beat: Beat) -> None:
        await ends.wait()

    handler = Recorder(act)
    async with working(bus, handler, slots=4, own_slots=4):
        await until(lambda: handler.running == 8)
        # When all have ended, then the places of all are free
        ends.set()
        await until(lambda: length(bus, CELL.rollout, 8))
        ends.clear()
        await bus.publish([(stream, start(n)) for n in range(4, 8) for stream in (CELL.env, CHAT)])
        await until(lambda: handler.running == 8)
        ends.set()


async def test_a_dead_workers_entries_of_a_stream_with_places_of_its_own_are_taken_over_into_these(bus: Bus) -> None:
    # Given two workers, one of which died
    await bus.ensure_group(CHAT, GROUP_ENV)
    await bus.publish([(CHAT, start(20))])
    await bus.read([CHAT], GROUP_ENV, "dead", count=1)
    handler = Recorder(for_ever)
    async with working(bus, handler, slots=4, own_slots=1):
        await until(lambda: handler.seen == ["job/20"])
        # When more comes than there are slots, then all of them are taken
        await bus.publish([(CELL.env, start(n)) for n in range(10)])
        await until(lambda: handler.running == 5)


async def test_what_was_delivered_twice_runs_alone(bus: Bus) -> None:
    # Given entries under which two workers died
    await left_behind(bus, 3, deliveries=2)
    # When another works, with more to do
    handler = Recorder(lambda message, beat: asyncio.sleep(0.02))
    async with working(bus, handler):
        await until(lambda: length(bus, CELL.rollout, 3))
        await bus.publish([(CELL.env, start(n)) for n in range(10, 14)])
        await until(lambda: length(bus, CELL.rollout, 7))
    # Then no two of them ran together
    assert handler.seen[:3] == ["job/0", "job/1", "job/2"]
    assert handler.most_at_once <= 4


async def test_what_was_delivered_twice_runs_in_company_if_it_advanced_the_last_time(bus: Bus) -> None:
    # Given entries under which two workers died, of which some had come further under the second
    await left_behind(bus, 4, deliveries=2)
    *innocent, suspect = await bus.pending(CELL.env, GROUP_ENV, after="0")
    new = {entry: Progress(b"", 0, b"+") for entry in innocent}
    await bus.renew(CELL.env, GROUP_ENV, "dead", innocent, new)
    # When another works, then those run together, and no suspect beside them
    handler = Recorder(for_ever)
    async with working(bus, handler, slots=16):
        await until(lambda: handler.running == 3)
        await asyncio.sleep(2 * LEASE_S)
        assert sorted(handler.seen) == ["job/0", "job/1", "job/2"]
    # And once they have died with several workers, they run alone too
    assert is_suspect(Idle(suspect, 2)) and not is_suspect(Idle(suspect, 4, advanced=True))
    assert is_suspect(Idle(suspect, 5, advanced=True))


@dataclass
class AgainRecorder(Recorder):
    again: list[tuple[str, int]] = field(default_factory=list)

    def delivered_again(self, message: Start, times: int) -> None:
        self.again.append((message.id, times))


async def test_a_handler_hears_how_often_a_message_was_delivered_before(bus: Bus) -> None:
    await left_behind(bus, 1, deliveries=2)
    handler = AgainRecorder(at_once)
    async with working(bus, handler):
        await bus.publish([(CELL.env, start(1))])
        await until(lambda: length(bus, CELL.rollout, 2))
    assert sorted(handler.seen) == ["job/0", "job/1"]
    assert handler.again == [("job/0", 2)]


async def test_a_suspect_waits_for_quiet_and_nothing_is_read_meanwhile(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.worker.takeover.MOST_ALONE_S", 3600.0)
    go_on = asyncio.Event()
    alone: list[int] = []

    async def act(message: Start, beat: Beat) -> None:
        if message.id == "job/0":
            alone.append(handler.running)
            return
        while not go_on.is_set():
            beat()
            await asyncio.sleep(0.02)

    handler = Recorder(act)
    await left_behind(bus, 1, deliveries=2)
    async with working(bus, handler, slots=2):
        await bus.publish([(CELL.env, start(10))])
        await until(lambda: "job/10" in handler.seen)
        await asyncio.sleep(2 * LEASE_S)
        await bus.publish([(CELL.env, start(11))])
        await asyncio.sleep(2 * LEASE_S)
        assert handler.seen == ["job/10"]
        go_on.set()
        await until(lambda: length(bus, CELL.rollout, 3))
    assert alone == [1]


async def test_a_suspect_that_takes_long_keeps_others_waiting_for_a_while_only(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.worker.takeover.MOST_ALONE_S", LEASE_S)
    handler = Recorder(for_ever)
    # Given a worker with work that does not end, and two suspects that do not end either
    await left_behind(bus, 2, deliveries=2)
    await bus.publish([(CELL.env, start(10))])
    async with working(bus, handler, slots=3):
        # Then one of them begins though it is not quiet, and what comes later beside it; the other waits, for another worker
        await until(lambda: handler.seen == ["job/10", "job/0"])
        await bus.publish([(CELL.env, start(11))])
        await until(lambda: handler.seen == ["job/10", "job/0", "job/11"])
        await asyncio.sleep(2 * LEASE_S)
        other = Recorder(for_ever)
        async with working(bus, other, name="other"):
            await until(lambda: other.seen == ["job/1"])
        assert len(handler.seen) == 3


async def test_who_kills_its_workers_late_is_the_only_dead_letter(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.worker.takeover.MOST_ALONE_S", 0.1)
    killed, most = asyncio.Event(), 6

    async def act(message: Start, beat: Beat) -> None:
        for _ in range(20):
            beat()
            await asyncio.sleep(0.02)
        if message.id == "job/0":
            killed.set()
            await asyncio.sleep(3600)

    handler = Recorder(act)
    await bus.publish([(CELL.env, start(0))])
    for life in range(1, most + 1):
        # Given workers of which each dies with all that it has, and more to do for each
        killed.clear()
        before = asyncio.all_tasks()
        worker = Worker(
            bus,
            handler,
            [Inbox(CELL.env, GROUP_ENV)],
            Reporter(f"w{life}", "env", "tiny", About(slots=4)),
            lease_s=LEASE_S,
            max_deliveries=most,
        )
        life_of = asyncio.create_task(worker.run(asyncio.Event()))
        for part in range(4):
            await bus.publish([(CELL.env, start(10 * life + part))])
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(killed.wait(), 0.1)
        await asyncio.wait_for(killed.wait(), 60)
        life_of.cancel()
        await cancel_all(asyncio.all_tasks() - before)
    # When one lives, then it has a dead letter of the one that killed them, and does all the rest
    async with working(bus, handler, most=most, name="last"):
        await until(lambda: length(bus, CELL.env, 0))
    assert handler.seen.count("job/0") == most
    assert await bus.client.xlen(CELL.dead) == 1 and await bus.client.xlen(CELL.rollout) == 4 * most


class HeldBack(Bus):
    """Gives what it read only once `go` is set."""

    def __init__(self, bus: Bus) -> None:
        super().__init__(bus.client, bus.cell)
        self.go = asyncio.Event()

    async def read(self, *given: Any, **options: Any) -> list[Delivery]:
        found = await super().read(*given, **options)
        if found:
            await self.go.wait()
        return found


async def test_what_is_read_as_a_suspect_begins_is_kept_until_that_has_ended(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.worker.takeover.MOST_ALONE_S", 3600.0)
    end = asyncio.Event()

    async def act(message: Start, beat: Beat) -> None:
        while message.id == "job/0" and not end.is_set():
            beat()
            await asyncio.sleep(0.02)

    handler, other, late = Recorder(act), Recorder(at_once), HeldBack(bus)
    # Given a worker that has read an entry in the moment in which a suspect one begins
    await left_behind(bus, 1, deliveries=2)
    await asyncio.sleep(LEASE_S)
    await bus.publish([(CELL.env, start(10))])
    async with working(late, handler, name="a"):
        await until(lambda: handler.seen == ["job/0"])
        late.go.set()
        # When that one runs for several leases, then nobody takes over what was read
        async with working(bus, other, name="b"):
            await asyncio.sleep(4 * LEASE_S)
            end.set()
            await until(lambda: length(bus, CELL.rollout, 2))
    assert (handler.seen, other.seen, handler.most_at_once) == (["job/0", "job/10"], [], 1)


@dataclass
class ResumingRecorder(Recorder):
    done: dict[str, bytes] = field(default_factory=dict)

    def progress(self, message: Start) -> tuple[bytes, bytes] | None:
        self.done[message.id] = self.done.get(message.id, b"") + b"+"
        return b"%4d" % len(self.done[message.id]), self.done[message.id]

    def resumed(self, message: Start, progress: bytes) -> Start:
        return replace(message, item={"resumed": progress.decode()})


async def test_progress_is_written_while_work_goes_on_and_another_worker_resumes_from_it(bus: Bus) -> None:
    # Given progress that a worker wrote before it died
    await left_behind(bus, 1)
    (entry,) = await bus.pending(CELL.env, GROUP_ENV, after="0")
    await bus.renew(CELL.env, GROUP_ENV, "dead", [entry], {entry: Progress(b"   2", 4, b"++")})
    # When another takes it over
    resumed: list[Any] = []

    async def act(message: Start, beat: Beat) -> None:
        resumed.append(message.item)
        await for_ever(message, beat)

    async def grown() -> bool:
        kept = await bus.client.get(CELL.partial(CELL.env, entry)) or b""
        return len(kept) > 8 and int(kept[:4]) == len(kept[4:])

    async with working(bus, ResumingRecorder(act), progress_s=0.02):
        # Then it begins from there, and writes on
        await until(lambda: resumed)
        assert resumed == [{"resumed": "   2++"}]
        await until(grown)


async def test_while_redis_is_too_full_work_is_renewed_and_no_progress_of_it_kept(bus: Bus) -> None:
    async def num_kept() -> int:
        return sum([await bus.client.strlen(key) for key in await bus.client.keys(CELL.partial(CELL.env, "*"))])

    handler, other = ResumingRecorder(for_ever), Recorder(at_once)
    # Given a Redis above 60 % of its limit
    used: Any = await bus.client.info("memory")
    await bus.client.config_set("maxmemory", int(used["used_memory"] / 0.7))
    try:
        async with working(bus, handler, name="a", progress_s=0.02):
            # When a worker has progress to keep for several leases
            await bus.publish([(CELL.env, start())])
            await until(lambda: len(handler.done.get("job/0", b"")) > 3)
            async with working(bus, other, name="b"):
                await asyncio.sleep(3 * LEASE_S)
            # Then nothing is written, and nobody takes its work over
            assert (other.seen, await num_kept()) == ([], 0)
            # And once there is room again, all of it is written
            await bus.client.config_set("maxmemory", 0)
            await until(num_kept)
    finally:
        await bus.client.config_set("maxmemory", 0)


async def test_an_entry_delivered_too_often_is_a_dead_letter_and_its_owner_hears_of_it(bus: Bus) -> None:
    await left_behind(bus, 1, deliveries=4)
    handler = Recorder(at_once)
    async with working(bus, handler, most=3):
        await until(lambda: length(bus, CELL.dead, 1))
        await until(lambda: length(bus, CELL.scored(1), 1))
    assert handler.seen == []


async def only_letter(bus: Bus, stream: str) -> DeadLetter:
    [(_, letter)] = await bus.follow(stream, "0", block_ms=None)
    assert isinstance(letter, DeadLetter)
    return letter


async def test_a_handler_that_raises_is_tried_again_and_then_a_dead_letter(bus: Bus) -> None:
    async def fail(message: Start, beat: Beat) -> None:
        raise ValueError("no")

    handler = Recorder(fail)
    async with working(bus, handler):
        await bus.publish([(CELL.env, start())])
        await until(lambda: length(bus, CELL.dead, 1))
    letter = await only_letter(bus, CELL.dead)
    assert letter.reason == "ValueError: no"
    assert decode(letter.payload) == start()
    assert len(handler.seen) == 3


async def test_unavailable_is_waited_for_and_counts_as_nothing(bus: Bus) -> None:
    attempts = 0

    async def twice_away(message: Start, beat: Beat) -> None:
        nonlocal attempts
        attempts += 1
        if attempts <= 2:
            raise Unavailable("the store is away")

    async with working(bus, Recorder(twice_away)):
        await bus.publish([(CELL.env, start())])
        await until(lambda: length(bus, CELL.rollout, 1))
    assert await bus.client.xlen(CELL.dead) == 0


@pytest.mark.parametrize(
    "stream,inbox",
    [(CELL.env, CELL.scored(3)), (CELL.train, CELL.adapters(3)), (CELL.trainer("w"), CELL.adapters(3))],
)
async def test_the_owner_hears_of_a_message_that_nobody_can_read(bus: Bus, stream: str, inbox: str) -> None:
    async with working(bus, Recorder(at_once), streams=(stream,)):
        await bus.client.xadd(stream, {"id": "job/1/0/1", "job": "job", "partition": 3, "payload": b"newer"})
        await until(lambda: length(bus, inbox, 1))
        await until(lambda: length(bus, stream, 0))
    for place in (inbox, CELL.dead):
        letter = await only_letter(bus, place)
        assert (letter.id, letter.job, letter.stream, letter.payload) == ("job/1/0/1", "job", stream, b"newer")


async def test_the_store_is_waited_for_beyond_all_limits_and_the_reports_say_so(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.worker.worker.UNAVAILABLE_LIMIT_S", 0.0)
    back = asyncio.Event()

    async def needs_store(message: Start, beat: Beat) -> None:
        if not back.is_set():
            raise StoreUnavailable("object storage, adapters/x: it is away")

    async def said() -> bool:
        reports: list[Any] = [message for _, message in await bus.follow(CELL.telemetry, "0", block_ms=None)]
        return any("it is away" in report.reason for report in reports)

    handler = Recorder(needs_store)
    async with working(bus, handler):
        await bus.publish([(CELL.env, start())])
        await until(said)
        assert len(handler.seen) > 2 and await bus.client.xlen(CELL.dead) == 0
        back.set()
        await until(lambda: length(bus, CELL.rollout, 1))


@pytest.mark.parametrize("park", [True, False])
async def test_a_cancel_frees_the_worker_at_once(bus: Bus, park: bool) -> None:
    handler = ParkingRecorder(for_ever)
    async with working(bus, handler, slots=2):
        await bus.publish([(CELL.env, start(n)) for n in range(4)])
        await until(lambda: handler.running == 2)
        cancel = Cancel(id="c", tenant="acme", job="job", partition=3, epoch=0, park=park)
        await bus.broadcast(CELL.control, cancel, keep_s=60)
        await until(lambda: length(bus, CELL.env, 0))
        assert handler.running == 0
        assert await bus.client.xlen(CELL.scored(0 if park else 2)) == 4
        assert len(handler.seen) == 2  # what had not begun never ran


async def test_work_that_cannot_be_parked_is_done_though_its_job_was_cancelled(bus: Bus) -> None:
    # Given a handler without `park` and `drop`, at work
    go_on = asyncio.Event()

    async def wait(message: Start, beat: Beat) -> None:
        await go_on.wait()

    handler = Recorder(wait)
    async with working(bus, handler, slots=1):
        await bus.publish([(CELL.env, start(n)) for n in range(2)])
        await until(lambda: handler.running == 1)
        # When its job is cancelled
        cancel = Cancel(id="c", tenant="acme", job="job", partition=3, epoch=0)
        await bus.broadcast(CELL.control, cancel, keep_s=60)
        await asyncio.sleep(0.2)
        go_on.set()
        # Then what had begun and what had not is done
        await until(lambda: length(bus, CELL.rollout, 2))


async def test_stopping_hands_work_back(bus: Bus) -> None:
    handler = Recorder(for_ever)
    async with working(bus, handler, slots=2):
        await bus.publish([(CELL.env, start(n)) for n in range(2)])
        await until(lambda: handler.running == 2)
    # Then nothing is pending, and all of it can be read by another at once
    assert (await bus.client.xpending(CELL.env, GROUP_ENV))["pending"] == 0
    assert len(await bus.read([CELL.env], GROUP_ENV, "other", count=10)) == 2


async def test_stopping_hands_back_what_it_has_taken_over(bus: Bus) -> None:
    # Given a suspect entry of a dead worker, and another one behind it
    await left_behind(bus, 2, deliveries=2)
    # When the worker that took the first over is stopped
    handler = Recorder(for_ever)
    async with working(bus, handler):
        await until(lambda: handler.running == 1)
    # Then only the other one is still the dead worker's
    assert handler.seen == ["job/0"]
    assert (await bus.client.xpending(CELL.env, GROUP_ENV))["pending"] == 1
    assert len(await bus.read([CELL.env], GROUP_ENV, "other", count=10)) == 1


async def test_stopping_lets_short_work_finish(bus: Bus) -> None:
    handler = Recorder(lambda message, beat: asyncio.sleep(0.2))
    async with working(bus, handler, drain_s=5.0):
        await bus.publish([(CELL.env, start())])
        await until(lambda: handler.running == 1)
    assert await bus.client.xlen(CELL.rollout) == 1


async def test_a_worker_says_who_it_is_and_that_it_leaves(bus: Bus) -> None:
    async with working(bus, Recorder(at_once)):
        await until(lambda: bus.client.exists(CELL.telemetry))
    reports: list[Any] = [message for _, message in await bus.follow(CELL.telemetry, "0", block_ms=None)]
    assert [r.state for r in reports][-1] == "stopped"
    assert reports[0].slots == 4 and reports[0].service == "env"
