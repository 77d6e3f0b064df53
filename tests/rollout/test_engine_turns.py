"""The torch engine keeps a trajectory's past between its turns: it computes only new tokens, and the result is the same."""

import asyncio
import random

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from common.wire.messages import AdapterRef, TurnRequest
from rollout_service.embedded.backbone.compiling import compiling
from rollout_service.embedded.pools import EngineLimits
from rollout_service.embedded.prefix import LEAST_SHARED, TurnCache
from rollout_service.embedded.torch_engine import TorchEngine
from rollout_service.engine import Generated
from tests.support.rollout_cases import files_of, nearly, one, prompt, ref, request, running

REPLY = prompt("the tool says 95")
TEXTS = ("add 37+58", "reverse cabin", "count a in banana")
Talks = list[list[Generated]]


async def talk(engine: TorchEngine, *, turns: int = 4) -> Talks:
    """Several trajectories of two adapters at once, turn by turn; each has a prompt and replies of a length of its own."""

    async def trajectory(adapter: AdapterRef, sample: int) -> list[Generated]:
        tokens, found = prompt(TEXTS[sample % 3]), list[Generated]()
        for turn in range(turns):
            asked = request(adapter, tokens=tokens, group=sample, turn=turn, temperature=0.0, max_tokens=12)
            found.append(await one(engine, asked))
            tokens = [*tokens, *found[-1].tokens, *REPLY[: 3 + 4 * sample]]
        return found

    return await asyncio.gather(*(trajectory(ref(name), sample) for name in "ab" for sample in range(4)))


def prefilled(engine: TorchEngine) -> float:
    return engine.counters()["prefill_tokens"]


def hits(engine: TorchEngine) -> tuple[float, float]:
    """Later turns that met their keys and values, of how many."""
    counters = engine.counters()
    return counters["kv_hits"], counters["later_turns"]


async def talks(limits: EngineLimits) -> tuple[Talks, float]:
    """The second of two rounds, and how many tokens it prefilled: the first shows the engine that these jobs have turns."""
    async with running(adapters={ref("a"): files_of(1), ref("b"): files_of(2, rank=16)}, limits=limits) as engine:
        await talk(engine, turns=2)
        before, (found, later) = prefilled(engine), hits(engine)
        second, most = await talk(engine), 24 if limits.turns else 0
        assert hits(engine) == (found + most, later + 24)
        return second, prefilled(engine) - before


@pytest.mark.parametrize("most_together", [0, 256])
@pytest.mark.asyncio
async def test_a_later_turn_computes_what_is_new_and_gives_the_same(
    most_together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiling().wait()
    monkeypatch.setattr("rollout_service.embedded.batch.MAX_NEW_TOGETHER", most_together)
    whole, all_tokens = await talks(EngineLimits(turn_bytes=0))
    kept, new_tokens = await talks(EngineLimits())
    for mine, theirs in zip(kept, whole, strict=True):
        for turn, expected in zip(mine, theirs, strict=True):
            assert turn.tokens == expected.tokens
            assert np.abs(np.array(turn.logprobs) - expected.logprobs).max() < 1e-4
    # of each later turn: the last token of the turn before, and all but the last of the reply
    assert new_tokens == sum(3 + 4 * sample for sample in range(4)) * 2 * 3 < all_tokens / 2


@pytest.mark.asyncio
async def test_other_tokens_than_those_that_were_kept_are_computed_whole() -> None:
    adapters = {ref("a"): files_of(1)}
    asked = [request(ref("a"), group=3, turn=turn, temperature=0.0, max_tokens=4) for turn in (0, 1)]
    changed = request(ref("a"), group=3, turn=1, tokens=prompt("reverse cabin"), max_tokens=4)
    async with running(adapters=adapters) as engine:
        for each in asked:
            await one(engine, each)
        before = hits(engine)
        found = await one(engine, changed)
        assert hits(engine) == (before[0], before[1] + 1)
    async with running(adapters=adapters) as engine:
        assert nearly(found, await one(engine, changed))


def chat(tokens: list[int], tenant: str = "acme", name: str = "a") -> TurnRequest:
    asked = request(ref(name), tokens=tokens, temperature=0.0, max_tokens=12, stop_ids=(), reply_to="reply:x")
    return replace(asked, chat=True, tenant=tenant)


@pytest.mark.asyncio
async def test_a_chat_computes_only_what_its_tenants_earlier_chats_did_not() -> None:
    begun = prompt(" ".join(TEXTS))
    adapters = {ref("a"): files_of(1), ref("b"): files_of(2)}
    async with running(adapters=adapters) as engine:
        answer = (await one(engine, chat(begun))).tokens
        # Given the text of an answer whose tokens are others from the fifth on, as a template may show it
        following = [*begun, *answer[:4], *REPLY]
        assert REPLY[0] != answer[4]
        before = prefilled(engine)
        found = await one(engine, chat(following))
        assert prefilled(engine) - before == len(REPLY) - 1
        # Then other tenants and adapters gain nothing from it, and a prompt that has little of it is computed whole
        less = [*begun[:8], *REPLY, *REPLY]
        for asked in (chat(following, tenant="bluebird"), chat(following, name="b"), chat(less)):
            before = prefilled(engine)
            await one(engine, asked)
            assert prefilled(engine) - before == len(asked.tokens.numpy()) - 1
    async with running(adapters=adapters) as engine:
        assert nearly(found, await one(engine, chat(following)))


def test_of_many_chats_the_one_that_begins_most_alike_is_found_whichever_have_gone() -> None:
    rng, turns, found = random.Random(0), TurnCache(budget_bytes=4 * 60), 0
    for _ in range(2000):
        ids = [rng.randrange(300, 302) for _ in range(rng.randrange(2, 9))]
        asked, before = chat(ids, tenant=rng.choice("ab")), ids[:-1]
        kept = [np.frombuffer(key[2], "<i4").tolist() for key in turns if key[1] == asked.tenant]  # pyright: ignore
        shared = [num for each in kept for num in range(len(ids)) if each[:num] == before[:num]]
        past = turns.take(asked)
        assert (past is None) == (not kept or max(shared) < LEAST_SHARED * len(before) // 1)
        assert past is None or past.flatten().tolist() == before[: max(shared)]
        found += past is not None
        turns.keep(asked, asked.transcript.ids, torch.tensor(ids, dtype=torch.float32).view(1, -1, 1, 1))
    assert found > 1000
    turns.drop(ref("a"))
    assert turns.num_bytes == 0 and turns.take(chat([300, 301])) is None


@pytest.mark.asyncio
async def test_nothing_is_kept_of_single_turns_samples_and_dropped_adapters() -> None:
    async with running(adapters={ref("a"): files_of(1)}) as engine:
        turns = engine._running._prefill.turns  # pyright: ignore[reportPrivateUsage]
        for group in range(4):
            await one(engine, request(ref("a"), group=group, max_tokens=30))
        await one(engine, request(ref("a"), turn=1, reply_to="reply:x", max_tokens=30))
        assert turns.num_bytes == 0
        for turn in (1, 2):
            await one(engine, request(ref("a"), group=9, turn=turn, temperature=0.0, max_tokens=30))
        assert turns.num_bytes > 0
        await engine.drop(ref("a"))
        await one(engine, request(max_tokens=1))
        assert turns.num_bytes == 0
