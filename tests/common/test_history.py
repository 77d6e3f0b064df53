"""Conversations over a real Redis, of which every part is sent once."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from common.bus.bus import Bus, Delivery, Settlement
from common.bus.streams import GROUP_ENV, GROUP_ROLLOUT, Cell
from common.wire.history import MAX_CHANGED_CONTEXT_BYTES, ShortRequest, ShortResult, restored, shortened
from common.wire.messages import (
    BASE,
    AdapterRef,
    Message,
    Parked,
    Sampling,
    ScoredTrajectory,
    TrajectoryRef,
    TurnRequest,
    TurnResult,
    Usage,
    f32,
    i32,
)
from common.wire.transcript import shown, wrote
from harness.redis_server import RedisServer

CELL = Cell("tiny")
ADAPTER = AdapterRef("acme", "job", 1)
ABOUT: dict[str, Any] = {"tenant": "acme", "job": "job", "partition": 3, "epoch": 2}
FIRST = TurnRequest(
    **ABOUT,
    id="job/0/1/0/0",
    adapter=ADAPTER,
    trajectory=TrajectoryRef("train", 1, 0, 1),
    turn=0,
    transcript=shown(range(100)),
    sampling=Sampling(max_tokens=8),
    context=b"item, state 0" * 20,
)
SCORED = ScoredTrajectory(**ABOUT, id="s", adapter=ADAPTER, trajectory=FIRST.trajectory, stop_reason="stop", reward=1.0)
OWN = CELL.rollout_worker("rollout-1")
GROUPS = {CELL.rollout: GROUP_ROLLOUT, CELL.rollout_first: GROUP_ROLLOUT, OWN: GROUP_ROLLOUT, CELL.env: GROUP_ENV}


def answer(request: Any, **changes: Any) -> TurnResult:
    """The model's turn: its number, three times."""
    fields: dict[str, Any] = {"adapter": ADAPTER, "tokens": i32([request.turn] * 3), "logprobs": f32([-0.5] * 3)}
    usage = request.usage + Usage(sampled_tokens=3)
    about: dict[str, Any] = {"id": request.id, "request": request, "stop_reason": "stop", "usage": usage}
    return TurnResult(**ABOUT, **(about | fields | changes))


def following(result: Any, **changes: Any) -> TurnRequest:
    turn = result.request.turn + 1
    fields: dict[str, Any] = {
        "id": f"job/0/1/{turn}/0",
        "turn": turn,
        "transcript": result.so_far + shown([1000 + turn] * 2),
        "num_partial": 0,
        "context": b"item, state 0" * 19 + b"item, state %d" % turn,
        "usage": result.usage + Usage(env_s=0.5),
    }
    return replace(result.request, **(fields | changes))


async def read(bus: Bus, stream: str) -> Delivery:
    await bus.ensure_group(stream, GROUPS[stream])
    (found,) = await bus.read([stream], GROUPS[stream], "w", count=10)
    return found


async def taken_over(bus: Bus, stream: str) -> Delivery:
    idle = await bus.find_idle(stream, GROUPS[stream], min_idle_ms=0)
    (found,) = await bus.claim(stream, GROUPS[stream], "heir", idle, min_idle_ms=0)
    return found


async def go_on(bus: Bus, held: Delivery, stream: str, message: Message) -> int:
    """Settles with one output. Returns the bytes of its entry."""
    assert await bus.settle([Settlement(held, [(stream, message)])]) == [True]
    entries: Any = await bus.client.xrevrange(stream, count=1)
    return sum(len(part) for pair in entries[0][1].items() for part in pair)


async def first_turn(bus: Bus) -> None:
    """A conversation whose first turn waits for an env worker."""
    await bus.publish([(CELL.rollout, FIRST)])
    await go_on(bus, await read(bus, CELL.rollout), CELL.env, answer(FIRST))


def knows_nothing(bus: Bus) -> Bus:
    """Another worker's."""
    return Bus(bus.client, bus.cell)


async def histories(bus: Bus) -> list[bytes]:
    return [key async for key in bus.client.scan_iter(CELL.history("*"))]


@pytest.mark.parametrize("remembers", [True, False])
async def test_every_part_of_a_conversation_is_sent_once(bus: Bus, remembers: bool) -> None:
    async def at(stream: str) -> tuple[Bus, Delivery]:
        """The next worker: the same as before, or one that knows nothing."""
        worker = bus if remembers else knows_nothing(bus)
        return worker, await read(worker, stream)

    request, stream, sizes = FIRST, CELL.rollout, list[int]()
    await bus.publish([(stream, FIRST)])
    for _ in range(8):
        worker, held = await at(stream)
        assert held.message == request
        sizes.append(await go_on(worker, held, CELL.env, answer(held.message)))
        worker, held = await at(CELL.env)
        assert held.message == answer(request) and len(await histories(bus)) == 1
        request, stream = following(answer(request)), CELL.rollout_first
        sizes.append(await go_on(worker, held, stream, following(held.message)))
    assert max(sizes) - min(sizes[:2]) < 100 and max(sizes) < len(FIRST.context) + 4 * 100
    worker, held = await at(stream)
    await go_on(worker, held, CELL.env, answer(held.message))
    worker, held = await at(CELL.env)
    await go_on(worker, held, CELL.scored(3), SCORED)
    assert not await histories(bus)


async def test_turns_that_go_back_to_their_worker_are_known_on_both_sides(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a conversation of which both have read the first turn
    bus.owns.add(OWN)
    await bus.ensure_group(OWN, GROUP_ROLLOUT)
    await first_turn(bus)
    request, env = FIRST, knows_nothing(bus)
    held = await read(env, CELL.env)
    # Then neither reads its history again
    for each in (bus, env):
        monkeypatch.setattr(each._histories, "_pipelined", pytest.fail)  # pyright: ignore[reportPrivateUsage]
    for _ in range(3):
        request = following(answer(request))
        await go_on(env, held, OWN, request)
        held = await read(bus, OWN)
        assert held.message == request
        await go_on(bus, held, CELL.env, answer(request))
        held = await read(env, CELL.env)


async def test_who_takes_over_reads_what_the_dead_worker_knew(bus: Bus) -> None:
    await first_turn(bus)
    held = await read(bus, CELL.env)
    heir = knows_nothing(bus)
    again = await taken_over(heir, CELL.env)
    assert again.message == held.message == answer(FIRST)
    # The first of the two to settle counts, the other changes nothing
    await go_on(heir, again, CELL.rollout_first, following(answer(FIRST)))
    assert await bus.settle([Settlement(held, [(CELL.scored(3), SCORED)])]) == [False]
    assert (await read(knows_nothing(bus), CELL.rollout_first)).message == following(answer(FIRST))
    assert await bus.settle([Settlement(held, None)]) == [False] and len(await histories(bus)) == 1


@pytest.mark.parametrize(
    "gone", [Parked(**ABOUT, id="p", request=FIRST), SCORED, following(answer(FIRST), judges=BASE)]
)
async def test_what_refers_to_nothing_ends_the_history(bus: Bus, gone: Message) -> None:
    await first_turn(bus)
    assert len(await histories(bus)) == 1
    await go_on(bus, await read(bus, CELL.env), CELL.scored(3), gone)
    assert not await histories(bus)
    assert [message for _, message in await bus.follow(CELL.scored(3), "0", block_ms=None)] == [gone]


async def test_work_that_goes_back_as_it_was_keeps_its_history(bus: Bus) -> None:
    await first_turn(bus)
    assert await bus.settle([Settlement(await read(bus, CELL.env), None)]) == [True]
    assert (await read(knows_nothing(bus), CELL.env)).message == answer(FIRST)


async def test_a_turn_that_moves_begins_a_history_anew(bus: Bus) -> None:
    await first_turn(bus)
    second = following(answer(FIRST))
    await go_on(bus, await read(bus, CELL.env), CELL.rollout_first, second)
    moved = replace(second, transcript=second.transcript + wrote([7, 8], [-1, -1]), num_partial=2)
    await go_on(bus, await read(bus, CELL.rollout_first), CELL.rollout_first, moved)
    assert not await histories(bus)
    held = await read(knows_nothing(bus), CELL.rollout_first)
    assert held.message == moved
    await go_on(bus, held, CELL.env, answer(held.message))
    assert (await read(knows_nothing(bus), CELL.env)).message == answer(moved)


async def test_what_another_worker_began_is_not_in_the_history(bus: Bus) -> None:
    await bus.publish([(CELL.rollout, FIRST)])
    held = replace(await read(bus, CELL.rollout), progress=b"some")
    result = answer(held.message)
    await go_on(bus, held, CELL.env, result)
    assert not await histories(bus) and (await read(bus, CELL.env)).message == result


async def test_a_history_outlives_redis(tmp_path: Path) -> None:
    server = RedisServer.start(tmp_path)
    try:
        bus = server.bus("tiny")
        await bus.publish([(CELL.rollout, FIRST)])
        await go_on(bus, await read(bus, CELL.rollout), CELL.env, answer(FIRST))
        server.stop()
        server.restart()
        fresh = server.bus("tiny")
        assert (await read(fresh, CELL.env)).message == answer(FIRST)
        await bus.close()
        await fresh.close()
    finally:
        server.stop()


async def test_a_redis_that_went_back_in_time_may_go_on_otherwise(bus: Bus) -> None:
    # Given a worker that knows how a conversation went on
    await bus.publish([(CELL.rollout, FIRST)])
    before: Any = await bus.client.dump(CELL.rollout)
    first = await read(bus, CELL.rollout)
    await go_on(bus, first, CELL.env, answer(FIRST))
    env = knows_nothing(bus)
    await go_on(env, await read(env, CELL.env), CELL.rollout_first, following(answer(FIRST)))
    # When Redis forgets that, and the model says something else
    await bus.client.flushall()
    await bus.client.restore(CELL.rollout, 0, before)
    other = answer(FIRST, tokens=i32([9]), logprobs=f32([-2]))
    rollout = knows_nothing(bus)
    await go_on(rollout, await read(rollout, CELL.rollout), CELL.env, other)
    stranger = knows_nothing(bus)
    await go_on(stranger, await read(stranger, CELL.env), CELL.rollout_first, following(other))
    held = await read(rollout, CELL.rollout_first)
    await go_on(rollout, held, CELL.env, answer(following(other)))
    # Then the worker reads what was said this time
    assert (await read(env, CELL.env)).message == answer(following(other))


async def test_a_history_that_is_gone_makes_no_message(bus: Bus) -> None:
    await first_turn(bus)
    await bus.client.delete(*await histories(bus))
    assert "without its history" in (await read(knows_nothing(bus), CELL.env)).message.reason  # pyright: ignore


async def test_what_another_worker_settled_while_it_was_read_is_no_message(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given an entry that a worker was given, which stops before it reads the history
    await first_turn(bus)
    slow = knows_nothing(bus)
    read_histories = slow._histories.read  # pyright: ignore[reportPrivateUsage]

    async def late(*args: Any) -> Any:
        await go_on(bus, await taken_over(bus, CELL.env), CELL.scored(3), SCORED)
        return await read_histories(*args)

    monkeypatch.setattr(slow._histories, "read", late)  # pyright: ignore[reportPrivateUsage]
    # When another takes the entry over and settles it, then the first has nothing to work on
    assert await slow.read([CELL.env], GROUP_ENV, "slow", count=10) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"sampling": Sampling(max_tokens=9)},
        {"transcript": shown(range(200))},
        {"context": b"x" * (MAX_CHANGED_CONTEXT_BYTES + 1)},
        {"turn": 2},
        {"reply_to": "r"},
    ],
)
def test_a_request_that_does_not_follow_from_its_result_is_sent_whole(changes: dict[str, Any]) -> None:
    result = answer(FIRST)
    assert isinstance(shortened(result, following(result)), ShortRequest)
    assert shortened(result, following(result, **changes)) is None
    assert shortened(None, following(result)) is None


@given(st.binary(max_size=600), st.binary(max_size=3), st.binary(max_size=3), st.binary(max_size=600))
def test_any_change_of_the_context_comes_back(begin: bytes, before: bytes, after: bytes, end: bytes) -> None:
    result = answer(replace(FIRST, context=begin + before + end))
    request = following(result, context=begin + after + end)
    said, short = shortened(result.request, result), shortened(result, request)
    assert said and isinstance(short, ShortRequest) and len(short.context) <= len(after + end)
    assert restored([result.request, said], short) == request


def test_a_result_says_all_that_its_request_does_not() -> None:
    for changes in ({}, {"adapter": BASE}, {"stop_string": "x", "top_logprobs": [[(1, -0.5)]], "usage": Usage(1, 2)}):
        result = answer(FIRST, **changes)
        short = shortened(FIRST, result)
        assert isinstance(short, ShortResult) and restored([FIRST], short) == result
    assert shortened(replace(FIRST, turn=1), answer(FIRST)) is None, "of another request"
    chat = replace(FIRST, reply_to="r")
    assert shortened(chat, answer(chat)) is None
