"""A process engine when its process dies, when slots are few, and when an adapter is broken. Its core here is no process, so that
tests can make it fail. The engine's contract is in `test_engine_contract.py`, the real vLLM in `test_vllm.py`."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any

import pytest
from msgspec.structs import replace

from common.cancellation import cancel_all
from common.errors import InvalidInput
from common.wire.messages import BASE
from rollout_service.engine import CorruptAdapter, Generated
from rollout_service.process import lora_slots
from rollout_service.process import process_engine as module
from rollout_service.process.core import Core
from rollout_service.process.process_engine import ProcessEngine
from tests.common.test_worker import until
from tests.support.engines_under_test import ProcessRunning, fake_core, process_engine
from tests.support.fake_core import FakeCore
from tests.support.rollout_cases import beat, files_of, one, ref, request

pytestmark = pytest.mark.asyncio


class Cores:
    """The cores of an engine's lives, in order; each is told the same."""

    def __init__(self, **told: Any) -> None:
        self.told = told
        self.made: list[FakeCore] = []

    def __call__(self) -> Core:
        self.made.append(fake_core(pid=len(self.made) + 1, **self.told))
        return self.made[-1]

    @property
    def last(self) -> FakeCore:
        return self.made[-1]


@contextlib.asynccontextmanager
async def started(make_core: Callable[[], Core], *jobs: str, **options: Any) -> AsyncGenerator[ProcessEngine]:
    engine = process_engine(make_core, ends=False, **options)
    await engine.start()
    try:
        for seed, job in enumerate(jobs):
            await engine.load_files(ref(job), files_of(seed))
        yield engine
    finally:
        await engine.stop()


async def test_later_turns_that_meet_their_keys_and_values_are_counted() -> None:
    cores = Cores()
    async with started(cores, "a") as engine:
        for turn, cached in ((0, 16), (1, 0), (2, 16)):
            cores.last.cached = cached
            await one(engine, request(ref("a"), turn=turn, max_tokens=2))
        counters = engine.counters()
    assert (counters["kv_hits"], counters["later_turns"]) == (1, 2)


async def test_turns_go_on_from_their_tokens_when_the_process_dies() -> None:
    cores = Cores()
    async with started(cores, "a") as engine:
        asked = request(ref("a"), max_tokens=200, temperature=0.0)
        whole = await one(engine, asked)
        task = asyncio.create_task(one(engine, asked))
        await until(lambda: (p := engine.partial(asked.id)) and p.num_sampled > 5)
        cores.last.dead.set()
        resumed = await task
        counted = engine.counters()
    assert (resumed.tokens, resumed.logprobs) == (whole.tokens, whole.logprobs)
    assert (resumed.num_sampled, counted["sampled_tokens"], counted["engine_restarts"]) == (200, 400, 1)
    assert len(cores.made) == 2 and engine.pid is None


async def test_a_turn_with_a_grammar_begins_again_in_the_next_process_and_nobody_saw_what_it_had() -> None:
    cores, told = Cores(), list[int]()
    async with started(cores, "a", masks=True) as engine:
        asked = request(ref("a"), max_tokens=50, temperature=0.0, grammar="start: /(.|\n)*/")
        task = asyncio.create_task(engine.generate(asked, on_token=lambda tokens, _: told.extend(tokens), beat=beat))
        await until(lambda: (p := engine.partial(asked.id)) and p.num_sampled > 5 and not p.tokens)
        cores.last.dead.set()
        answer = await task
        whole = await one(engine, request(ref("a"), max_tokens=50, temperature=0.0))
    assert (answer.tokens, answer.num_sampled, told) == (whole.tokens, 50, [])
    assert cores.last.lengths[0] == len(asked.tokens), "it follows its grammar from the first token that it samples"


async def test_prompt_log_probs_are_asked_for_until_they_came_and_then_no_more() -> None:
    cores = Cores()
    async with started(cores, "a") as engine:
        asked = request(ref("a"), max_tokens=200, temperature=0.0, prompt_logprobs=-1)
        whole = await one(engine, asked)
        task = asyncio.create_task(one(engine, asked))
        await until(lambda: (p := engine.partial(asked.id)) and p.num_sampled > 5)
        cores.last.dead.set()
        resumed = await task
    assert resumed.prompt_logprobs.data == whole.prompt_logprobs.data and resumed.tokens == whole.tokens
    assert [core.prompts_scored for core in cores.made] == [2, 0]


async def test_a_process_that_leaves_out_prompt_log_probs_is_given_up_and_the_turn_fails_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "RESTART_DELAYS_S", (0.0,))
    async with started(Cores(skips_prompts=True)) as engine:
        with pytest.raises(InvalidInput, match="died 4 times"):
            await one(engine, request(max_tokens=3, prompt_logprobs=2))


async def test_a_resumed_turn_draws_from_another_stream_and_the_same_each_time() -> None:
    async with started(Cores()) as engine:
        whole = await one(engine, request(max_tokens=60))
        done = (whole.tokens[:20], whole.logprobs[:20])
        first, again = [await one(engine, request(max_tokens=60, partial=done)) for _ in range(2)]
    assert first.tokens == again.tokens and first.tokens[:20] == whole.tokens[:20]
    assert first.tokens[20:] != whole.tokens[20:] and first.tokens[20:40] != whole.tokens[:20]


async def test_a_process_starts_in_its_turn_to_load_the_first_time_and_again() -> None:
    cores, held, seen = Cores(), threading.Lock(), list[bool]()

    @contextlib.contextmanager
    def turn() -> Generator[None]:
        with held:
            yield

    def make_core() -> Core:
        seen.append(held.locked())
        return cores()

    async with started(make_core, "a", turn=turn) as engine:
        assert not held.locked(), "and then others load"
        cores.last.dead.set()
        await until(lambda: len(seen) == 2 and not held.locked())
        await one(engine, request(ref("a"), max_tokens=5))
    assert seen == [True, True]


async def test_a_process_that_does_not_come_up_again_is_tried_until_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RESTART_DELAYS_S", (0.0, 0.01))
    cores = Cores()
    async with started(cores) as engine:
        cores.told["fails_to_start"] = True
        cores.last.dead.set()
        task = asyncio.create_task(one(engine, request(max_tokens=3)))
        await until(lambda: len(cores.made) >= 4)
        cores.told["fails_to_start"] = False
        assert len((await task).tokens) == 3


async def test_an_engine_that_cannot_start_says_so() -> None:
    engine = process_engine(Cores(fails_to_start=True))
    with pytest.raises(OSError, match="no memory"):
        await engine.start()


async def test_a_process_that_gives_no_token_for_long_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SILENCE_S", 0.2)
    cores = Cores(hangs=True)
    async with started(cores) as engine:
        task = asyncio.create_task(one(engine, request(max_tokens=3)))
        await until(lambda: cores.last.running)
        cores.told["hangs"] = False
        assert len((await task).tokens) == 3
    assert len(cores.made) == 2


async def test_a_turn_that_kills_the_process_fails_alone_in_the_end() -> None:
    cores = Cores(deadly=frozenset({"bad"}))
    async with started(cores, "a", "bad") as engine:
        good = [one(engine, request(ref("a"), sample=i, max_tokens=30)) for i in range(8)]
        done = await asyncio.gather(one(engine, request(ref("bad"))), *good, return_exceptions=True)
    assert isinstance(done[0], InvalidInput) and "died 4 times" in str(done[0])
    assert all(isinstance(g, Generated) and len(g.tokens) == 30 for g in done[1:])


async def test_scores_that_are_not_numbers_are_their_adapters_fault_and_harm_no_other_job() -> None:
    cores = Cores(poison=frozenset({"bad"}))
    async with started(cores, "a", "bad") as engine:
        good = [request(ref("a"), sample=i, max_tokens=30, temperature=0.0) for i in range(6)]
        bad = [request(ref("bad"), sample=i, max_tokens=30) for i in range(6)]
        asked = [r for pair in zip(bad, good, strict=True) for r in pair]
        done = await asyncio.gather(*[one(engine, r) for r in asked], return_exceptions=True)
        restarts = engine.counters()["engine_restarts"]
    async with started(Cores(), "a") as engine:
        expected = [await one(engine, r) for r in good]
    assert all(isinstance(d, CorruptAdapter) for d in done[::2])
    assert [d.tokens for d in done[1::2] if isinstance(d, Generated)] == [e.tokens for e in expected]
    assert restarts <= 13  # each turn that saw such a score at most once in company, and the culprit's alone


async def test_an_adapter_that_the_process_cannot_read_fails_its_own_job_alone() -> None:
    cores = Cores(unreadable=frozenset({"bad"}))
    async with started(cores, "a", "bad") as engine:
        good = asyncio.create_task(one(engine, request(ref("a"), max_tokens=20)))
        with pytest.raises(CorruptAdapter, match="cannot read it: not for me"):
            await one(engine, request(ref("bad")))
        assert len((await good).tokens) == 20
    assert len(cores.made) == 1


async def test_a_rank_above_the_limit_is_refused_with_the_setting_that_raises_it() -> None:
    async with started(Cores()) as engine:
        with pytest.raises(InvalidInput, match=r"rank 32.*at most 16.*MARLAAS_VLLM_MAX_LORA_RANK"):
            await engine.load_files(ref("a"), files_of(1, rank=32))


async def test_more_adapters_than_slots_queue_and_all_succeed() -> None:
    jobs = [f"job{i}" for i in range(11)]
    cores = Cores()
    async with started(cores, *jobs, max_loras=3) as engine:
        cores.last.max_loras = 4
        asked = [request(ref(job), sample=i, max_tokens=6) for i in range(4) for job in jobs]
        asked += [request(BASE, sample=i, max_tokens=6) for i in range(4)]
        done = await asyncio.gather(*[one(engine, r) for r in asked])
    assert [g.adapter for g in done] == [r.adapter for r in asked]
    assert cores.last.most_loaded == 4


async def test_a_turn_has_a_stream_of_its_own_only_if_its_user_named_a_seed() -> None:
    cores = Cores()
    async with started(cores) as engine:
        await one(engine, request(max_tokens=2))
        await one(engine, request(max_tokens=2, seeded=False))
    assert [seed is None for seed in cores.last.seeds] == [False, True]


async def test_tokens_come_one_by_one_only_where_they_are_streamed_or_searched_for_a_stop_string() -> None:
    core = fake_core()
    async with ProcessRunning(lambda: core)() as engine:
        await one(engine, request(max_tokens=2))
        await engine.generate(request(max_tokens=2), on_token=lambda tokens, logprobs: None, beat=beat)
        await one(engine, request(max_tokens=2, stop=("x",)))
    assert core.by_token == [False, True, True]


async def test_turns_of_an_adapter_that_has_a_slot_overtake_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    async with started(Cores(), "busy", "late", max_loras=1) as engine:
        # Given a turn that has a slot, and one that waits for it
        long = asyncio.create_task(one(engine, request(ref("busy"), max_tokens=10_000)))
        await until(lambda: engine.counters()["sampled_tokens"])
        late = asyncio.create_task(one(engine, request(ref("late"), max_tokens=5)))
        await until(lambda: engine.counters()["adapter_waiting"] == 1)
        # Then another of the same adapter goes first, and once the one in line has waited long enough none does
        await one(engine, request(ref("busy"), sample=1, max_tokens=5))
        monkeypatch.setattr(lora_slots, "MAX_OVERTAKEN_S", 0.0)
        behind = asyncio.create_task(one(engine, request(ref("busy"), sample=2, max_tokens=5)))
        await until(lambda: engine.counters()["adapter_waiting"] == 2)
        long.cancel()
        await late
        await behind


async def test_a_job_that_never_pauses_does_not_keep_its_slot_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora_slots, "MAX_OVERTAKEN_S", 0.1)
    async with started(Cores(), "busy", "late", max_loras=1) as engine:
        engine_full = asyncio.Event()

        async def stream(first: int) -> None:
            for i in range(200):
                await one(engine, request(ref("busy"), sample=first + i, max_tokens=5))
                engine_full.set()

        flood = [asyncio.create_task(stream(1000 * i)) for i in range(4)]
        await engine_full.wait()
        await one(engine, request(ref("late"), max_tokens=5))
        assert not any(task.done() for task in flood)
        for task in flood:
            task.cancel()
        await asyncio.wait(flood)


async def test_chats_go_before_what_waits_for_a_slot_and_one_is_kept_for_them() -> None:
    jobs = [f"job{i}" for i in range(6)]
    async with started(Cores(), *jobs, "chat", max_loras=3) as engine:
        flood = [asyncio.create_task(one(engine, request(ref(job), max_tokens=10_000))) for job in jobs]
        await until(lambda: engine.counters()["adapter_waiting"] == 4)
        await one(engine, replace(request(ref("chat"), max_tokens=5), chat=True))
        assert engine.counters()["adapter_waiting"] == 4
        assert not any(task.done() for task in flood)
        await cancel_all(flood)


async def test_versions_0_that_change_nothing_share_the_base_models_weights_and_nothing_that_is_cached() -> None:
    cores = Cores()
    async with started(cores) as engine:
        for asked in (BASE, ref("a", 0), ref("b", 0)):
            await one(engine, request(asked, max_tokens=2, untrained=asked != BASE))
    assert cores.last.num_added == 1 and len(set(cores.last.salts)) == 3


async def test_what_is_cached_for_a_tenant_serves_no_other() -> None:
    cores = Cores()
    async with started(cores) as engine:
        for tenant in ("acme", "bluebird"):
            await one(engine, replace(request(BASE, max_tokens=2), tenant=tenant))
    assert len(set(cores.last.salts)) == 2


async def test_an_adapter_that_is_dropped_and_loaded_again_gets_a_number_of_its_own() -> None:
    cores = Cores()
    async with started(cores, "a") as engine:
        await one(engine, request(ref("a"), max_tokens=2))
        await engine.drop(ref("a"))
        await engine.load_files(ref("a"), files_of(5))
        await one(engine, request(ref("a"), max_tokens=2))
    assert len(set(cores.last.named)) == 2


async def test_cancelling_aborts_the_turn_in_the_process_wherever_it_is() -> None:
    cores = Cores()
    async with started(cores, "a", "b", max_loras=1, slots=2) as engine:
        running = asyncio.create_task(one(engine, request(ref("a"), max_tokens=1000, name="running")))
        await until(lambda: cores.last.running)
        for_slot = asyncio.create_task(one(engine, request(ref("b"), name="for a slot")))
        for_turn_slot = asyncio.create_task(one(engine, request(ref("a"), sample=1, name="for a slot")))
        await until(lambda: engine.counters()["adapter_waiting"])
        for task in (for_turn_slot, for_slot, running):
            task.cancel()
            await asyncio.wait([task])
        await until(lambda: not cores.last.running)
        assert (engine.in_use, engine.counters()["adapter_waiting"], len(cores.last.aborted)) == (0, 0, 1)
        assert len((await one(engine, request(ref("b"), max_tokens=2))).tokens) == 2


async def test_turns_that_wait_for_a_slot_stay_alive_while_the_process_gives_tokens() -> None:
    beats: list[int] = []
    async with started(Cores(), "a", "b", max_loras=1) as engine:
        first = asyncio.create_task(engine.generate(request(ref("a"), max_tokens=1500), beat=beat))
        await until(lambda: engine.counters()["sampled_tokens"])
        second = asyncio.create_task(engine.generate(request(ref("b"), max_tokens=1), beat=lambda: beats.append(1)))
        await until(lambda: beats)
        assert not second.done()
        first.cancel()
        await second
