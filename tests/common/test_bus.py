"""The bus against a real Redis: delivery, settling, taking over, claim checks, reconnection."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
import redis.asyncio as aioredis

from common.bus.bus import Bus, Delivery, Progress, Settlement, Undecodable, Unfetched, fetched
from common.bus.payloads import CLAIM_CHECK_BYTES
from common.bus.streams import GROUP_ENV, GROUP_ROLLOUT, Cell
from common.errors import InvalidInput
from common.store.objects import Objects
from common.wire.messages import BASE, Cancel, EnvSpec, GradeRequest, Sampling, Start
from common.worker.own_streams import OwnStreams
from common.worker.settler import MOST_BYTES, Settler
from common.worker.telemetry import About, Reporter
from common.worker.underway import Inbox
from harness.proxy import Proxy
from harness.redis_server import RedisServer, find_valkey
from manager_service.launcher.embedded_redis import find_server

CELL = Cell("tiny")


def start(number: int = 0, item: dict[str, object] | None = None) -> Start:
    return Start(
        id=f"job/{number}",
        tenant="acme",
        job="job",
        partition=3,
        adapter=BASE,
        purpose="train",
        seed=1,
        group=number,
        samples=(0, 1),
        item=item,
        env=EnvSpec("single_turn"),
        sampling=Sampling(),
    )


async def holding(bus: Bus, num: int = 1, consumer: str = "w") -> list[Delivery]:
    """Entries that a worker has read."""
    await bus.ensure_group(CELL.env, GROUP_ENV)
    await bus.publish([(CELL.env, start(n)) for n in range(num)])
    return await bus.read([CELL.env], GROUP_ENV, consumer, count=num)


async def take_over(bus: Bus, consumer: str, min_idle_ms: int = 0) -> list[Delivery]:
    found = await bus.find_idle(CELL.env, GROUP_ENV, min_idle_ms=min_idle_ms)
    return await bus.claim(CELL.env, GROUP_ENV, consumer, found, min_idle_ms=min_idle_ms)


async def test_each_of_many_entries_settled_at_once_says_all_of_its_message(bus: Bus) -> None:
    held = await holding(bus, 2)
    # Given outputs of which many resemble each other, one is another's double, one is short, and one travels by object storage
    large = start(4, {"text": "x" * (CLAIM_CHECK_BYTES + 1)})
    many = [start(n, {"text": "x" * 4096}) for n in (1, 2, 10, 10, 300)]
    outputs = [(CELL.rollout, message) for message in [*many, large, start(5, {"text": "x" * 4096}), start(6), *many]]
    finished = [await bus.written(Settlement(held[0], outputs)), await bus.written(Settlement(held[1], outputs[:2]))]
    # When they are settled beside others
    await bus.settle(finished)
    # Then each is there, in order
    found = await bus.follow(CELL.rollout, "0", block_ms=None)
    assert [message for _, message in found] == [message for _, message in [*outputs, *outputs[:2]]]


async def test_the_second_to_settle_publishes_nothing(bus: Bus) -> None:
    # Given an entry that two workers hold, because the first was thought dead
    (first,) = await holding(bus, consumer="a")
    (second,) = await take_over(bus, "b")
    assert second.deliveries == 2
    # When both settle it
    assert await bus.settle([Settlement(second, [(CELL.rollout, start())])]) == [True]
    assert await bus.settle([Settlement(first, [(CELL.rollout, start())])]) == [False]
    # Then its result stands once
    assert await bus.client.xlen(CELL.rollout) == 1


async def test_what_is_for_a_worker_without_a_stream_goes_to_all(bus: Bus) -> None:
    await bus.client.xgroup_create(CELL.env_worker("here"), GROUP_ENV, id="0", mkstream=True)
    await bus.ensure_group(CELL.rollout, GROUP_ROLLOUT)
    await bus.publish([(CELL.rollout, start())])
    (held,) = await bus.read([CELL.rollout], GROUP_ROLLOUT, "w", count=1)
    outputs = [(CELL.env_worker(name), start(n)) for n, name in enumerate(["here", "gone"])]
    assert await bus.settle([Settlement(held, [*outputs, (CELL.reply("gone"), start(2))])]) == [True]
    found = {stream: await bus.follow(stream, "0", block_ms=None) for stream in (CELL.env_worker("here"), CELL.env)}
    assert [[message.id for _, message in entries] for entries in found.values()] == [["job/0"], ["job/1"]]
    assert not await bus.client.exists(CELL.env_worker("gone"), CELL.reply("gone"))


async def test_reading_brings_no_stream_of_a_worker_into_being(bus: Bus) -> None:
    inboxes = [CELL.env_worker("gone"), CELL.env]
    assert not await bus.read_in_order(inboxes, GROUP_ENV, "gone", count=1)
    assert not await bus.client.exists(inboxes[0]) and await bus.client.exists(inboxes[1])
    # Nor does settling what it held when its stream was taken away
    held = Delivery(inboxes[0], GROUP_ENV, "1-1", start())
    assert await bus.settle([Settlement(held, [(CELL.rollout, start())])]) == [False]
    assert not await bus.client.exists(inboxes[0], CELL.rollout)


async def test_what_was_settled_by_a_call_whose_answer_was_lost_is_not_called_lost(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    (held,) = await holding(bus)
    settle: Any = bus._settle  # pyright: ignore[reportPrivateUsage]
    answers: list[Any] = []

    async def losing(**arguments: Any) -> Any:
        answers.append(await settle(**arguments))
        if len(answers) == 1:
            raise ConnectionResetError
        return answers[-1]

    monkeypatch.setattr(bus, "_settle", losing)
    assert await bus.settle([Settlement(held, [(CELL.rollout, start())])]) == [True]
    assert [entries != 0 for (entries,) in answers] == [True, False]
    assert await bus.client.xlen(CELL.rollout) == 1


async def test_large_outputs_that_finish_together_are_settled_by_several_scripts(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = await holding(bus, 12)
    settler = Settler(bus, Reporter("w", "env", "tiny", About(slots=12)), lambda window_s: window_s)
    outputs = [start(n, {"text": os.urandom(450_000).hex()}) for n in range(12)]
    for delivery, output in zip(held, outputs, strict=True):
        settler.add(await bus.written(Settlement(delivery, [(CELL.rollout, output)])))
    settle: Any = bus._settle  # pyright: ignore[reportPrivateUsage]
    sizes = list[int]()

    async def measured(*, keys: list[str], args: list[Any]) -> Any:
        sizes.append(sum(len(value) for value in args if isinstance(value, bytes)))
        return await settle(keys=keys, args=args)

    monkeypatch.setattr(bus, "_settle", measured)
    await settler.settle()
    assert len(sizes) == 3 and max(sizes) <= MOST_BYTES
    assert [message for _, message in await bus.follow(CELL.rollout, "0", block_ms=None)] == outputs
    assert await bus.client.xlen(CELL.env) == 0


async def test_only_the_holder_renews_and_that_is_no_delivery(bus: Bus) -> None:
    (held,) = await holding(bus, consumer="a")
    for _ in range(5):
        assert await bus.renew(CELL.env, GROUP_ENV, "a", [held.entry]) == 1
    assert await bus.renew(CELL.env, GROUP_ENV, "b", [held.entry]) == 0
    assert [taken.deliveries for taken in await take_over(bus, "b")] == [2]
    assert await bus.renew(CELL.env, GROUP_ENV, "a", [held.entry]) == 0


async def test_what_a_dead_worker_left_is_found_behind_any_number_of_living_entries(bus: Bus) -> None:
    await bus.ensure_group(CELL.env, GROUP_ENV)
    await bus.publish([(CELL.env, start(n)) for n in range(40)])
    living = await bus.read([CELL.env], GROUP_ENV, "living", count=39)
    (left,) = await bus.read([CELL.env], GROUP_ENV, "dead", count=1)
    await asyncio.sleep(0.3)
    await bus.renew(CELL.env, GROUP_ENV, "living", [d.entry for d in living])
    (taken,) = await take_over(bus, "other", min_idle_ms=200)
    assert taken.entry == left.entry


async def test_a_flushed_redis_is_an_empty_one_not_an_error(bus: Bus) -> None:
    (held,) = await holding(bus)
    await bus.client.flushall()
    assert await bus.renew(CELL.env, GROUP_ENV, "w", [held.entry]) == 0
    assert await bus.settle([Settlement(held, [(CELL.rollout, start())])]) == [False]


@pytest.mark.parametrize("program", [find_server, find_valkey])
async def test_a_full_redis_drains(tmp_path: Path, program: Callable[[], Path]) -> None:
    server = RedisServer.start(tmp_path, program=program())
    bus = Bus.connect(server.url, CELL)
    try:
        # Given a Redis above its limit
        await bus.ensure_group(CELL.env, GROUP_ENV)
        await bus.publish([(CELL.env, start(n)) for n in range(3)])
        held = await bus.read([CELL.env], GROUP_ENV, "w", count=3)
        stream = CELL.rollout_worker("w")
        own = OwnStreams(bus, "w", [Inbox(CELL.rollout_first, GROUP_ROLLOUT, own=stream)], 10.0)
        await own.begin()
        await bus.publish([(stream, start(n)) for n in range(2)])
        await bus.client.config_set("maxmemory", 1)
        # When work settles, then its outputs stand and its inputs are gone
        async with asyncio.timeout(60):
            assert await bus.settle([Settlement(d, [(CELL.rollout, start())]) for d in held]) == [True] * 3
        assert (await bus.client.xlen(CELL.env), await bus.client.xlen(CELL.rollout)) == (0, 3)
        # And a worker is there, reads, and leaves what waits for it to the others
        async with asyncio.timeout(60):
            await own.begin()
            assert len(await bus.read_in_order([stream], GROUP_ROLLOUT, "w", count=1, tells=own.tells)) == 1
            await own.leave()
        assert (await bus.client.xlen(stream), await bus.client.xlen(CELL.rollout_first)) == (1, 1)
    finally:
        await bus.close()
        server.stop()


async def test_a_workers_own_stream_never_stays_for_good(bus: Bus) -> None:
    own = CELL.trainer("w")
    # Given the stream of a worker that may die at any moment
    await bus.ensure_group(own, "trainer", keep_s=60)
    assert 0 < await bus.client.ttl(own) <= 60
    # When Redis loses it, and a read makes it anew, then it goes by itself too
    await bus.client.delete(own)
    assert await bus.read([own], "trainer", "w", count=1) == []
    assert 0 < await bus.client.ttl(own) <= 60


async def test_progress_is_kept_by_the_holder_until_the_entry_is_settled(bus: Bus) -> None:
    (held,) = await holding(bus, consumer="a")
    for consumer, head, begin, tail in (("a", b"1.", 2, b"xx"), ("a", b"2.", 4, b"yy"), ("b", b"3.", 2, b"zzzz")):
        await bus.renew(CELL.env, GROUP_ENV, consumer, [held.entry], {held.entry: Progress(head, begin, tail)})
    (taken,) = await take_over(bus, "c")
    assert taken.progress == b"2.xxyy"
    await bus.settle([Settlement(taken)])
    assert await bus.client.keys(CELL.partial(CELL.env, "*")) == []


async def test_progress_that_nobody_settles_goes_after_a_day(bus: Bus) -> None:
    (held,) = await holding(bus, consumer="a")
    for begin in (2, 4):
        await bus.renew(CELL.env, GROUP_ENV, "a", [held.entry], {held.entry: Progress(b"1.", begin, b"xx")})
        key = CELL.partial(CELL.env, held.entry)
        assert 86_000 < await bus.client.ttl(key) <= 86_400
        await bus.client.persist(key)


async def test_progress_is_never_written_behind_a_gap(bus: Bus) -> None:
    # Given progress whose end was lost, as by a Redis that another took the place of
    (held,) = await holding(bus, consumer="a")
    await bus.renew(CELL.env, GROUP_ENV, "a", [held.entry], {held.entry: Progress(b"1.", 2, b"xx")})
    # When its holder writes what follows on that end, then the beginning stands as it is, and the entry is renewed
    assert await bus.renew(CELL.env, GROUP_ENV, "a", [held.entry], {held.entry: Progress(b"2.", 6, b"zz")}) == 1
    (taken,) = await take_over(bus, "b")
    assert taken.progress == b"1.xx"


@pytest.mark.parametrize("num_own", [1, 3])
async def test_who_looks_first_and_finds_its_own_work_idle_keeps_nobody_else_from_it(bus: Bus, num_own: int) -> None:
    await bus.ensure_group(CELL.env, GROUP_ENV)
    await bus.publish([(CELL.env, start(n)) for n in range(4)])
    held = [d.entry for d in await bus.read([CELL.env], GROUP_ENV, "a", count=4)]

    async def look(own: list[str]) -> list[str]:
        found = await bus.find_idle(CELL.env, GROUP_ENV, min_idle_ms=0, every_ms=60_000, own=own, count=2)
        return [idle.entry for idle in found]

    # When a worker looks whose work hangs, then it finds that of others, also behind more of its own than one answer holds
    assert await look(held[:num_own]) == [held[num_own]]
    # And the next one finds the hung work
    assert await look([]) == held[:2]
    assert await look([]) == []


async def test_an_entry_that_cannot_be_read_says_whose_it_is(bus: Bus) -> None:
    await bus.ensure_group(CELL.env, GROUP_ENV)
    whose = {"id": "job/1", "job": "job", "partition": "3", "kind": "Newer"}
    newer = msgspec.msgpack.encode({**whose, "partition": 3, "more": "x"})
    # Given an entry with plain fields, one of a kind that is not known here, and one that was cut short
    await bus.client.xadd(CELL.env, {**whose, "payload": b"\xff"})
    for payload in (newer, newer[:-1]):
        await bus.client.xadd(CELL.env, {"payload": payload})
    for delivery in await bus.read([CELL.env], GROUP_ENV, "w", count=3):
        assert isinstance(delivery.message, Undecodable) and delivery.message.plain == whose


async def test_a_call_without_an_answer_is_made_again_on_a_fresh_connection(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.bus.bus.DEADLINE_S", 0.3)
    async with linked_bus(redis_url) as (bus, link):
        await bus.ensure_group(CELL.env, GROUP_ENV)
        # Given connections that lead nowhere any more, as those to a vanished host
        link.fall_silent()
        link.speak()
        # When it is called, then an answer comes all the same
        async with asyncio.timeout(60):
            await bus.publish([(CELL.env, start())])
            assert len(await bus.read([CELL.env], GROUP_ENV, "w", count=1, block_ms=100)) == 1


@contextlib.asynccontextmanager
async def linked_bus(redis_url: str) -> AsyncGenerator[tuple[Bus, Proxy]]:
    link = Proxy(int(urlsplit(redis_url).port or 0))
    await link.open()
    bus = Bus.connect(f"redis://127.0.0.1:{link.port}/0", CELL)
    try:
        yield bus, link
    finally:
        await bus.close()
        await link.shut()


async def test_wrong_credentials_end_in_a_line(tmp_path: Path) -> None:
    server = RedisServer.start(tmp_path)
    bus = Bus.connect(server.url, CELL)
    wrong = Bus.connect(server.url.replace("redis://", "redis://:wrong@"), CELL)
    try:
        await bus.client.config_set("requirepass", "right")
        with pytest.raises(InvalidInput, match="MARLAAS_REDIS_URL"):
            await wrong.publish([(CELL.env, start())])
    finally:
        await wrong.close()
        await bus.close()
        server.stop()


async def test_a_large_payload_travels_as_a_claim_check(bus: Bus, objects: Objects) -> None:
    await bus.ensure_group(CELL.env, GROUP_ENV)
    large = start(item={"text": "x" * (CLAIM_CHECK_BYTES + 1)})
    await bus.publish([(CELL.env, large)])
    rows: Any = await bus.client.xrange(CELL.env)
    [(_, fields)] = rows
    assert b"payload" not in fields and b"ref" in fields
    (delivery,) = await bus.read([CELL.env], GROUP_ENV, "w", count=1)
    assert (await fetched(delivery)).message == large
    assert len(await objects.paths("payloads/job")) == 1


async def test_an_entry_that_goes_back_as_it_is_can_be_read_again(bus: Bus, objects: Objects) -> None:
    await bus.ensure_group(CELL.env, GROUP_ENV)
    await bus.publish([(CELL.env, start(0)), (CELL.env, start(1, {"text": "x" * (CLAIM_CHECK_BYTES + 1)}))])
    await bus.client.xadd(CELL.env, {"id": "job/2", "payload": b"garbage"})
    before: Any = await bus.client.xrange(CELL.env)
    held = await bus.read([CELL.env], GROUP_ENV, "w", count=10)
    assert [type(delivery.message) for delivery in held] == [Start, Unfetched, Undecodable]
    assert await bus.settle([Settlement(delivery, None) for delivery in held]) == [True, True, True]
    # Then its fields are the same, and nothing new is in object storage
    after: Any = await bus.client.xrange(CELL.env)
    assert [fields for _, fields in after] == [fields for _, fields in before]
    assert len(await objects.paths("payloads/job")) == 1
    # And who was late gives nothing back
    assert await bus.settle([Settlement(delivery, None) for delivery in held]) == [False, False, False]
    assert await bus.client.xlen(CELL.env) == 3
    again = await bus.read([CELL.env], GROUP_ENV, "other", count=10)
    assert [delivery.deliveries for delivery in again] == [1, 1, 1]


async def test_what_is_no_message_is_delivered_as_such(bus: Bus) -> None:
    await bus.ensure_group(CELL.env, GROUP_ENV)
    await bus.client.xadd(CELL.env, {"payload": b"\x93garbage"})
    await bus.client.xadd(CELL.env, {"ref": "payloads/none"})
    found = await bus.read([CELL.env], GROUP_ENV, "w", count=10)
    assert [type((await fetched(d)).message) for d in found] == [Undecodable, Undecodable]


async def test_reply_streams_are_written_only_while_they_exist(bus: Bus) -> None:
    reply = CELL.reply("api-1")
    request = GradeRequest(
        id="g", tenant="t", job="", partition=0, env=EnvSpec("x"), item={}, output_text="", reply_to=reply
    )
    await bus.ensure_group(CELL.env, GROUP_ENV)
    await bus.publish([(CELL.env, start(0)), (CELL.env, start(1))])
    one, two = await bus.read([CELL.env], GROUP_ENV, "w", count=2)
    await bus.settle([Settlement(one, [(reply, request)])])
    assert await bus.client.exists(reply) == 0
    await bus.client.xadd(reply, {"made": "by the API replica"})
    await bus.settle([Settlement(two, [(reply, request)])])
    assert await bus.client.xlen(reply) == 2


async def test_broadcasts_are_read_from_the_oldest_and_trimmed_by_age(bus: Bus) -> None:
    for epoch in range(3):
        message = Cancel(id=f"c{epoch}", tenant="t", job="j", partition=0, epoch=epoch)
        await bus.broadcast(CELL.control, message, keep_s=60)
    found = await bus.follow(CELL.control, "0", block_ms=None)
    assert [m.epoch for _, m in found] == [0, 1, 2]
    assert await bus.follow(CELL.control, found[-1][0], block_ms=None) == []


async def test_calls_wait_for_a_redis_that_comes_back(redis_server: RedisServer, tmp_path: Path) -> None:
    # Given a bus on a Redis of its own, with an entry in it
    server = RedisServer.start(tmp_path)
    bus = Bus.connect(server.url, CELL)
    try:
        await bus.ensure_group(CELL.env, GROUP_ENV)
        await bus.publish([(CELL.env, start(1))])
        # When Redis is killed, and a call is made meanwhile
        os.kill(server.pid, signal.SIGKILL)
        server.wait()
        reading = asyncio.create_task(bus.read([CELL.env], GROUP_ENV, "w", count=1))
        await asyncio.sleep(0.2)
        assert not reading.done()
        # Then it is answered once Redis is back, from the append-only file
        server.restart()
        (delivery,) = await asyncio.wait_for(reading, 60)
        assert isinstance(delivery.message, Start)
        assert await bus.settle([Settlement(delivery)]) == [True]
    finally:
        await bus.close()
        server.stop()


async def test_the_answer_to_a_call_that_was_cancelled_reaches_no_other_call(bus: Bus) -> None:
    # Given a call that waits in Redis, and is cancelled
    waiting = asyncio.ensure_future(bus.client.blpop(["list"], 60))
    async with asyncio.timeout(60):
        while not (await bus.client.info("clients"))["blocked_clients"]:
            await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.wait([waiting])
    # When Redis would answer it
    await bus.client.rpush("list", "late")
    # Then the next calls have answers of their own
    assert await bus.client.get("nothing") is None
    assert await bus.client.ping()


async def test_calls_one_after_another_share_a_connection_until_redis_closes_it(bus: Bus, redis_url: str) -> None:
    first = await bus.client.client_id()
    assert [await bus.client.client_id() for _ in range(3)] == [first] * 3
    async with aioredis.Redis.from_url(redis_url) as other:
        await other.client_kill_filter(_id=str(first))
    assert await bus.retrying(bus.client.client_id) > first


async def test_a_lost_group_is_made_again(bus: Bus) -> None:
    await bus.client.flushall()
    assert await bus.read([CELL.env], GROUP_ENV, "w", count=1) == []
    await bus.publish([(CELL.env, start())])
    assert len(await bus.read([CELL.env], GROUP_ENV, "w", count=1)) == 1


async def test_a_failing_output_leaves_the_input_pending(bus: Bus) -> None:
    # Given an output that Redis refuses
    (delivery,) = await holding(bus)
    await bus.client.set(CELL.rollout, "not a stream")
    # When the input is settled with it
    with pytest.raises(Exception, match="WRONGTYPE"):
        await bus.settle([Settlement(delivery, [(CELL.rollout, start())])])
    # Then the input is not lost
    assert len(await bus.read_pending(CELL.env, GROUP_ENV, "w")) == 1


async def test_a_script_cache_that_was_flushed_is_no_error(bus: Bus) -> None:
    (delivery,) = await holding(bus)
    await bus.client.script_flush()
    assert await bus.settle([Settlement(delivery)]) == [True]


async def test_of_two_streams_the_first_is_read_empty_first(bus: Bus) -> None:
    streams = [CELL.rollout_first, CELL.rollout]
    assert await bus.read_in_order(streams, GROUP_ROLLOUT, "w", count=3) == []  # which makes the groups
    for stream in streams[::-1]:
        await bus.publish([(stream, start(number)) for number in range(2)])
    first = await bus.read_in_order(streams, GROUP_ROLLOUT, "w", count=3)
    rest = await bus.read_in_order(streams, GROUP_ROLLOUT, "w", count=3)
    assert [d.stream for d in first] == [CELL.rollout_first, CELL.rollout_first, CELL.rollout]
    assert [d.stream for d in rest] == [CELL.rollout]
    assert [d.message.id for d in (*first, *rest)] == [start(n).id for n in (0, 1, 0, 1)]  # type: ignore[union-attr]
