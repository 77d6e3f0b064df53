"""The rollout handler and its adapter cache, over an honest fake engine and over the torch engine."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest

from common.bus.streams import Cell
from common.errors import NotFound, Unavailable
from common.models.base_digest import BaseIdentity
from common.peers.chain import Relay
from common.store.adapters import PEFT_FILES, AdapterStore, InThread, Manifest
from common.store.objects import Objects
from common.store.parts import PARTED_BYTES, StoredFile
from common.wire.messages import BASE, AdapterRef, Failure, Parked, ScoredTrajectory, TurnDelta, TurnRequest, TurnResult
from rollout_service.adapters import AdapterCache
from rollout_service.embedded.pools import EngineLimits
from rollout_service.engine import Beat, Engine, Generated, OnToken, Partial
from rollout_service.handler import RolloutHandler
from rollout_service.turns import weights_of
from tests.support.rollout_cases import beat, files_of, ref, request, running

pytestmark = pytest.mark.asyncio
CELL = Cell("tiny")


@dataclass
class FakeEngine:
    """Answers each turn with tokens 1, 2, 3 once `go` is set; knows which adapters it was given."""

    size: int = 10
    slots: int = 4
    in_use: int = 0
    kv_tokens: int | None = None
    echo: AdapterRef | None = None
    loads: list[AdapterRef] = field(default_factory=list[AdapterRef])
    held: list[AdapterRef] = field(default_factory=list[AdapterRef])
    go: asyncio.Event = field(default_factory=asyncio.Event)
    sampled: Partial | None = None

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def load_files(self, adapter: AdapterRef, files: Mapping[str, bytes]) -> int:
        await asyncio.sleep(0)
        self.loads.append(adapter)
        self.held.append(adapter)
        return self.size

    async def drop(self, adapter: AdapterRef) -> None:
        await asyncio.sleep(0)
        self.held.remove(adapter)

    def resident(self) -> list[AdapterRef]:
        return self.held

    async def generate(self, request: TurnRequest, *, on_token: OnToken | None = None, beat: Beat) -> Generated:
        assert weights_of(request).is_base or weights_of(request) in self.held
        await self.go.wait()
        return Generated(self.echo or request.adapter, [1, 2, 3], [-0.1, -0.2, -0.3], "stop", "", [], 3, 0.5)

    def partial(self, request_id: str) -> Partial | None:
        return self.sampled


class CountingStore(AdapterStore):
    """A store that counts its reads and may be away."""

    def __init__(self, objects: Objects) -> None:
        super().__init__(objects)
        self.reads = 0
        self.away = False

    async def read(
        self, adapter: AdapterRef, names: Iterable[str] = PEFT_FILES, beside: InThread = asyncio.to_thread
    ) -> dict[str, bytes]:
        self.reads += 1
        if self.away:
            raise Unavailable("the store is away")
        return await super().read(adapter, names, beside)


async def store_with(*adapters: AdapterRef, files: dict[str, bytes] | None = None) -> tuple[CountingStore, Objects]:
    objects = Objects.open("memory:///")
    store = CountingStore(objects)
    for adapter in adapters:
        manifest = Manifest(
            adapter=adapter,
            base_model="tiny",
            attempt="",
            files={},
            parent=None,
            batch="b",
            seed=1,
            next_group=0,
        )
        await store.commit(manifest, files or files_of(1))
    return store, objects


@contextlib.asynccontextmanager
async def serving(
    engine: Engine, store: AdapterStore, *, deterministic: bool = False, idle_bytes: int = 0
) -> AsyncGenerator[tuple[RolloutHandler, list[tuple[str, TurnDelta]]]]:
    deltas: list[tuple[str, TurnDelta]] = []

    async def send(stream: str, delta: TurnDelta) -> None:
        await asyncio.sleep(0)
        deltas.append((stream, delta))

    cache = AdapterCache(store, engine, idle_bytes=idle_bytes)
    yield RolloutHandler(engine, cache, CELL, send_delta=send, worker="w", deterministic=deterministic), deltas
    await cache.close()


async def turn(handler: RolloutHandler, asked: TurnRequest) -> tuple[str, TurnResult]:
    ((stream, result),) = await handler(asked, beat)
    assert isinstance(result, TurnResult)
    return stream, result


async def test_a_turn_goes_to_env_with_its_adapter_and_what_it_cost() -> None:
    store, _ = await store_with(ref("a"))
    async with running(adapters={}) as engine, serving(engine, store) as (handler, _):
        asked = request(ref("a"), max_tokens=5)
        stream, result = await turn(handler, asked)
    assert (stream, result.id, result.partition, result.failure) == (CELL.env, asked.id, 3, None)
    assert (result.adapter, result.request, result.worker) == (ref("a"), asked, "w")
    assert len(result.tokens) == len(result.logprobs) == result.usage.sampled_tokens > 0
    assert result.usage.prompt_tokens == len(asked.tokens) and result.usage.rollout_s > 0


async def test_a_version_0_that_changes_nothing_is_sampled_before_the_store_has_it() -> None:
    store, _ = await store_with()
    async with running(adapters={}) as engine, serving(engine, store) as (handler, _):
        _, early = await turn(handler, request(ref("a", 0), max_tokens=5, untrained=True))
        _, missing = await turn(handler, request(ref("a", 0), max_tokens=5))
    assert (early.adapter, early.failure, store.reads) == (ref("a", 0), None, 1)
    assert missing.failure is not None and missing.failure.kind == "invalid"


@pytest.mark.parametrize("reply_to", ["", CELL.reply("api")])
async def test_progress_is_all_that_another_worker_needs_to_go_on(reply_to: str) -> None:
    store, _ = await store_with()
    tokens, logprobs = list(range(100, 170)), [-0.5] * 70
    engine = FakeEngine(sampled=Partial(tokens, logprobs, num_sampled=70, busy_s=1.5))
    async with serving(engine, store) as (handler, _):
        asked = request(BASE, max_tokens=200, reply_to=reply_to)
        head, body = handler.progress(asked) or (b"", b"")
        resumed = handler.resumed(asked, head + body)
        assert resumed.tokens.numpy().tolist() == [*asked.tokens.numpy(), *tokens]
        assert resumed.num_partial == 70 and resumed.num_prompt == len(asked.tokens)
        assert resumed.written.numpy()[-70:].all() and resumed.logprobs.numpy()[-1] == np.float32(-0.5)
        spent = resumed.usage
        assert (spent.prompt_tokens, spent.sampled_tokens, spent.rollout_s) == (len(asked.tokens), 70, 1.5)
        # A worker that goes on from there, and dies too, leaves all of the turn and its whole cost
        engine.sampled = Partial([*tokens, 7], [*logprobs, -0.1], num_sampled=1, busy_s=0.5)
        again = handler.resumed(asked, b"".join(handler.progress(resumed) or ()))
        assert again.num_partial == 71 and again.usage.rollout_s == 2.0 and again.usage.sampled_tokens == 71


API: dict[str, Any] = {"purpose": "chat", "reply_to": CELL.reply("api")}


@pytest.mark.parametrize(
    "num,asked,deterministic",
    [
        (32, {}, False),
        (70, {"reply_to": "reply:x", "stream": True}, False),
        (70, {"reply_to": "reply:x", "num_top_logprobs": 1}, False),
        (70, {}, True),
        (70, {"reply_to": "reply:x"}, True),
    ],
    ids=["short", "streamed", "with alternatives", "deterministic", "deterministic reply"],
)
async def test_no_progress_is_kept_of_turns_that_would_not_go_on_from_it(
    num: int, asked: dict[str, Any], deterministic: bool
) -> None:
    store, _ = await store_with()
    engine = FakeEngine(sampled=Partial([1] * num, [0.0] * num, num_sampled=num, busy_s=1.0))
    async with serving(engine, store, deterministic=deterministic) as (handler, _):
        assert handler.progress(request(BASE, max_tokens=200, **asked)) is None


async def test_inference_is_answered_on_its_reply_stream_with_deltas_before() -> None:
    store, _ = await store_with()
    async with running(ends=False) as engine, serving(engine, store) as (handler, deltas):
        asked = request(BASE, purpose="chat", reply_to=CELL.reply("api"), stream=True, max_tokens=20)
        stream, result = await turn(handler, asked)
        resumed = request(
            BASE,
            purpose="chat",
            reply_to=CELL.reply("api"),
            stream=True,
            max_tokens=20,
            partial=(result.tokens.numpy()[:7].tolist(), result.logprobs.numpy()[:7].tolist()),
        )
        before = len(deltas)
        _, again = await turn(handler, resumed)
    assert stream == CELL.reply("api") and {s for s, _ in deltas} == {stream}
    assert deltas[before][1].offset == 7 and again.tokens == result.tokens
    offset = 0
    for _, delta in deltas[:before]:
        assert delta.offset == offset
        offset += len(delta.tokens)
    assert 0 < offset <= len(result.tokens)


async def test_an_engine_that_used_another_adapter_is_an_error() -> None:
    store, _ = await store_with(ref("a"))
    engine = FakeEngine(echo=ref("b"))
    engine.go.set()
    async with serving(engine, store) as (handler, _):
        with pytest.raises(RuntimeError, match="the engine used b@1"):
            await handler(request(ref("a")), beat)


@pytest.mark.parametrize("deterministic", [False, True])
async def test_handing_back_keeps_the_tokens_unless_bits_must_not_change(deterministic: bool) -> None:
    store, _ = await store_with()
    partial = Partial([5, 6], [-1.0, -2.0], 1, 0.25)
    async with serving(FakeEngine(sampled=partial), store, deterministic=deterministic) as (handler, _):
        asked = request(BASE, partial=([5], [-1.0]))
        ((stream, handed),) = handler.hand_back(asked)
        ((asker, chat),) = handler.hand_back(request(BASE, **API, partial=([5], [-1.0])))
    assert (
        (stream, asker) == (CELL.rollout_first, CELL.reply("api"))
        and isinstance(handed, TurnRequest)
        and isinstance(chat, TurnRequest)
    )
    assert handed.num_prompt == chat.num_prompt == asked.num_prompt
    assert (handed.num_partial, chat.num_partial) == (0 if deterministic else 2, 2)
    assert chat.tokens.numpy()[-2:].tolist() == [5, 6] and chat.written.numpy()[-2:].tolist() == [1, 1]
    assert np.allclose(chat.logprobs.numpy()[-2:], [-1, -2])
    assert (handed.usage.sampled_tokens, handed.usage.rollout_s) == (1, 0.25)


async def handed_back(handler: RolloutHandler, engine: Engine, asked: TurnRequest) -> TurnRequest:
    """Stops a turn after some tokens, and returns the request that the worker hands back."""
    task = asyncio.create_task(handler(asked, beat))
    while (partial := engine.partial(asked.id)) is None or len(partial.tokens) < 5:
        await asyncio.sleep(0.001)
    task.cancel()
    await asyncio.wait([task])
    ((_, handed),) = handler.hand_back(asked)
    assert isinstance(handed, TurnRequest)
    return handed


async def test_a_turn_handed_back_halfway_ends_as_if_nothing_had_happened() -> None:
    store, _ = await store_with(ref("a"))
    asked = request(ref("a"), max_tokens=300)
    async with running(ends=False, limits=EngineLimits(slots=2)) as engine, serving(engine, store) as (handler, _):
        _, whole = await turn(handler, asked)
        handed = await handed_back(handler, engine, asked)
        assert 5 <= handed.num_partial < 300
        _, moved = await turn(handler, handed)
    assert moved.tokens == whole.tokens
    assert np.allclose(moved.logprobs.numpy(), whole.logprobs.numpy(), atol=1e-4)
    assert moved.usage.sampled_tokens == 300


async def test_a_turn_handed_back_halfway_has_the_alternatives_to_each_of_its_tokens() -> None:
    store, _ = await store_with()
    asked = request(BASE, reply_to="reply:x", temperature=0.0, max_tokens=40, num_top_logprobs=2)
    async with running(ends=False) as engine, serving(engine, store) as (handler, _):
        handed = await handed_back(handler, engine, asked)
        _, moved = await turn(handler, handed)
    assert [top[0][0] for top in moved.top_logprobs] == moved.tokens.numpy().tolist()


async def test_a_paused_turn_is_parked_as_it_began() -> None:
    store, _ = await store_with()
    async with serving(FakeEngine(), store) as (handler, _):
        fresh = request(ref("a"))
        ((stream, parked),) = handler.park(request(ref("a"), partial=([5, 6], [-1.0, -2.0])))
    assert stream == CELL.scored(3) and isinstance(parked, Parked)
    assert parked.request == fresh and parked.job == "a"


async def test_a_dead_letter_is_told_to_the_owner_or_to_the_replica_that_asked() -> None:
    store, _ = await store_with()
    failure = Failure("dead_letter", "delivered too often")
    async with serving(FakeEngine(), store) as (handler, _):
        ((stream, scored),) = handler.failed(request(ref("a"), sample=2), failure)
        ((reply, result),) = handler.failed(request(BASE, purpose="chat", reply_to="r"), failure)
        judging = msgspec.structs.replace(request(BASE, sample=2), judges=ref("a"))
        ((asker, judged),) = handler.failed(judging, failure)
    assert stream == CELL.scored(3) and isinstance(scored, ScoredTrajectory) and scored.trajectory.sample == 2
    assert (scored.reward, scored.failure, scored.stop_reason) == (None, failure, "failed")
    assert reply == "r" and isinstance(result, TurnResult) and result.failure == failure
    assert asker == CELL.env and isinstance(judged, TurnResult) and judged.failure == failure


async def test_an_adapter_that_is_corrupt_or_missing_fails_its_own_turns_alone() -> None:
    store, objects = await store_with(ref("good"), ref("torn"))
    manifest = await store.manifest(ref("torn"))
    assert manifest is not None
    path = f"{ref('torn').path()}/{manifest.attempt}/adapter_model.safetensors"
    data = await objects.get(path)
    await objects.delete(path)
    await objects.create(path, data[:-1] + b"x")
    async with running() as engine, serving(engine, store) as (handler, _):
        names = ("good", "torn", "missing")
        answers = await asyncio.gather(*[turn(handler, request(ref(n), max_tokens=4)) for n in names])
    kinds = [result.failure.kind if result.failure else None for _, result in answers]
    assert kinds == [None, "corrupt_adapter", "invalid"]


async def test_an_adapter_of_another_base_model_fails_its_turn() -> None:
    store, _ = await store_with(ref("a"))
    store.base = BaseIdentity("twin")
    engine = FakeEngine()
    async with serving(engine, store) as (handler, _):
        _, result = await turn(handler, request(ref("a")))
    assert result.failure is not None and "was trained on 'tiny', not on 'twin'" in result.failure.reason
    assert engine.loads == []


async def test_a_store_that_is_away_is_not_the_turns_fault() -> None:
    store, _ = await store_with(ref("a"))
    store.away = True
    engine = FakeEngine()
    engine.go.set()
    async with serving(engine, store) as (handler, _):
        with pytest.raises(Unavailable):
            await handler(request(ref("a")), beat)
        store.away = False
        _, result = await turn(handler, request(ref("a")))
    assert result.tokens.numpy().tolist() == [1, 2, 3]


async def test_concurrent_turns_share_one_download_and_one_that_is_cancelled_harms_no_other() -> None:
    store, _ = await store_with(ref("a"))
    engine = FakeEngine()
    async with serving(engine, store) as (handler, _):
        tasks = [asyncio.create_task(handler(request(ref("a"), sample=i), beat)) for i in range(6)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        engine.go.set()
        await asyncio.gather(*tasks[1:])
    assert store.reads == 1 and engine.loads == [ref("a")] and tasks[0].cancelled()


async def test_an_adapter_is_dropped_when_no_request_names_it_and_never_before() -> None:
    store, _ = await store_with(ref("a"), ref("b"))
    engine = FakeEngine()
    async with serving(engine, store) as (handler, _):
        first = asyncio.create_task(handler(request(ref("a")), beat))
        second = asyncio.create_task(handler(request(ref("a"), sample=1), beat))
        while engine.held != [ref("a")]:
            await asyncio.sleep(0.001)
        first.cancel()
        await asyncio.wait([first])
        assert engine.held == [ref("a")]
        engine.go.set()
        await second
        assert engine.held == []
        await handler(request(ref("a")), beat)
    assert engine.loads == [ref("a"), ref("a")]


async def test_idle_adapters_are_kept_up_to_a_budget_the_latest_used_first() -> None:
    refs = [ref("a", v) for v in range(4)]
    store, _ = await store_with(*refs)
    engine = FakeEngine(size=10)
    engine.go.set()
    async with serving(engine, store, idle_bytes=25) as (handler, _):
        for adapter in (refs[0], refs[1], refs[0], refs[2], refs[3]):
            await handler(request(adapter), beat)
        assert engine.held == [refs[2], refs[3]] and store.reads == 4


@dataclass
class SlowToDrop(FakeEngine):
    """Drops nothing before `may_drop` is set."""

    may_drop: asyncio.Event = field(default_factory=asyncio.Event)
    asked: asyncio.Event = field(default_factory=asyncio.Event)

    async def drop(self, adapter: AdapterRef) -> None:
        self.asked.set()
        await self.may_drop.wait()
        await super().drop(adapter)


async def test_adapters_that_are_used_or_dropped_while_others_are_dropped_stay_right() -> None:
    refs = [ref("a", v) for v in range(3)]
    store, _ = await store_with(*refs)
    engine = SlowToDrop()
    cache = AdapterCache(store, engine, idle_bytes=0)
    for adapter in refs[:3]:
        cache.prefetch(adapter)
    while len(engine.held) < 3:
        await asyncio.sleep(0.001)

    async def use(adapter: AdapterRef) -> None:
        async with cache.hold(adapter):
            pass

    first = asyncio.create_task(use(refs[2]))
    await engine.asked.wait()  # the first adapter goes; all others are idle
    async with cache.hold(refs[1]):
        second = asyncio.create_task(use(refs[2]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)  # the second use found the same idle adapters as the first, and waits behind it
        engine.may_drop.set()
        await asyncio.gather(first, second)
        assert engine.held == [refs[1]], "what is used stays, what is idle goes once"
    assert engine.held == []
    await cache.close()


class CountingRelay(Relay):
    """Reads no file of any peer."""

    def __init__(self) -> None:
        self.is_usable = True
        self.sizes: list[int] = []

    async def read(self, file: StoredFile, path: str) -> bytes:
        self.sizes.append(file.size)
        return bytes(file.size)

    def counters(self) -> dict[str, float]:
        return {"peer_bytes": 5.0}


async def test_with_a_relay_a_new_version_is_kept_for_jobs_that_had_turns_here_and_not_loaded() -> None:
    large = files_of(1) | {PEFT_FILES[0]: bytes(PARTED_BYTES + 1)}
    store, _ = await store_with(ref("a", 2), ref("b", 2), files=large)
    relay, engine = CountingRelay(), FakeEngine()
    store.relay = relay
    cache = AdapterCache(store, engine, idle_bytes=1000)
    cache.expect(ref("a", 1))
    for job in ("b", "a"):
        cache.prefetch(ref(job, 2))
    while not relay.sizes:
        await asyncio.sleep(0.001)
    assert (relay.sizes, engine.loads, store.reads) == ([PARTED_BYTES + 1], [], 1)
    relay.is_usable = False
    cache.prefetch(ref("b", 2))
    while not engine.loads:
        await asyncio.sleep(0.001)
    assert engine.loads == [ref("b", 2)], "without a node folder as without a relay"
    await cache.close()
    assert cache.counters()["peer_bytes"] == 5


async def test_with_a_relay_a_small_new_version_is_read_once_and_loaded() -> None:
    store, _ = await store_with(ref("a", 2))
    store.relay, engine = CountingRelay(), FakeEngine()
    cache = AdapterCache(store, engine, idle_bytes=1000)
    cache.expect(ref("a", 1))
    cache.prefetch(ref("a", 2))
    while not engine.held:
        await asyncio.sleep(0.001)
    assert store.reads == 1
    await cache.close()


async def test_a_prefetched_adapter_is_there_when_it_is_named() -> None:
    store, _ = await store_with(ref("a"))
    engine = FakeEngine()
    cache = AdapterCache(store, engine, idle_bytes=1000)
    cache.prefetch(ref("a"))
    cache.prefetch(ref("gone"))
    while not engine.held:
        await asyncio.sleep(0.001)
    async with cache.hold(ref("a")):
        assert store.reads == 2
    with pytest.raises(NotFound):
        async with cache.hold(ref("gone")):
            pass
    counters = cache.counters()
    assert counters["loads"] == 1 and counters["load_s"] > 0, "what was not there was not loaded"
    await cache.close()
