"""The contract of every rollout engine. `running` gives the engine under test: see `engines_under_test.py`."""

import asyncio
from typing import Any

import numpy as np
import pytest

from common.cancellation import cancel_all
from common.errors import CorruptObject, InvalidInput, NotFound
from common.wire.messages import BASE
from rollout_service.engine import CorruptAdapter, Generated
from tests.support.engines_under_test import KINDS, Running
from tests.support.rollout_cases import beat, bits, broken_files, files_of, nearly, one, prompt, ref, request, tokenizer

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(600),  # vLLM's start counts
    pytest.mark.parametrize("running", KINDS, indirect=True),
]
MIXED = {
    ref("a"): files_of(1),
    ref("b"): files_of(2, rank=3, alpha=5.0),
    ref("c"): files_of(3, rank=16, targets=("q_proj", "v_proj")),
    ref("d"): files_of(4, rank=8, targets=("down_proj", "o_proj")),
}


def mixed_requests(running: Running) -> list[Any]:
    """Adapters, ranks, lengths, temperatures and limits of every kind; greedy where last digits may differ."""
    texts = ("add 1+2", "sort 40213", "reverse " + "cabin" * 9, "count a in banana")
    names = [*MIXED, BASE]
    return [
        request(
            names[i % len(names)],
            tokens=prompt(texts[i % 4]),
            group=i // 4,
            sample=i % 4,
            temperature=(1.0, 0.0, 0.7)[i % 3] if running.exact else 0.0,
            max_tokens=5 + i,
        )
        for i in range(20)
    ]


def same(running: Running, found: Generated, expected: Generated) -> bool:
    """Compares to the bit, or but for last digits."""
    return bits(found) == bits(expected) if running.exact else nearly(found, expected)


async def test_mixed_adapters_in_one_batch_give_the_same_as_each_alone(running: Running) -> None:
    async with running(adapters=MIXED, ends=False) as engine:
        asked = mixed_requests(running)
        together = await asyncio.gather(*[one(engine, r) for r in asked])
        alone = [await one(engine, r) for r in asked[:10]]
    assert all(same(running, t, a) for t, a in zip(together, alone, strict=False))
    assert [g.adapter for g in together] == [r.adapter for r in asked]


async def test_a_version_0_that_changes_nothing_needs_no_loading_and_gives_what_the_base_gives(
    running: Running,
) -> None:
    fresh = ref("fresh", 0)
    async with running(adapters=MIXED, ends=False) as engine:
        asked = [request(fresh, sample=i, max_tokens=8, temperature=0.0, untrained=True) for i in range(4)]
        found = await asyncio.gather(*[one(engine, r) for r in [*asked, *mixed_requests(running)]])
        expected = [await one(engine, request(BASE, sample=i, max_tokens=8, temperature=0.0)) for i in range(4)]
        assert fresh not in engine.resident()
        with pytest.raises(NotFound):
            await one(engine, request(fresh, max_tokens=8))
    assert all(same(running, f, e) for f, e in zip(found, expected, strict=False))
    assert {g.adapter for g in found[:4]} == {fresh}


async def test_slots_and_order_of_arrival_change_nothing(running: Running) -> None:
    asked = mixed_requests(running)
    async with running(adapters=MIXED, ends=False) as engine:
        expected = await asyncio.gather(*[one(engine, r) for r in asked])
    for slots in (5, 33):  # one slot: each alone, as above
        async with running(adapters=MIXED, ends=False, slots=slots) as engine:
            found = await asyncio.gather(*[one(engine, r) for r in reversed(asked)])
        assert all(same(running, f, e) for f, e in zip(reversed(found), expected, strict=True))


async def test_sampling_depends_on_seed_group_sample_and_turn_but_not_on_attempt_or_job(running: Running) -> None:
    files = files_of(1)
    async with running(adapters={ref("a"): files, ref("z", 4): files}) as engine:
        first = await one(engine, request(ref("a"), max_tokens=12, temperature=2.0))
        again = await one(engine, request(ref("z", 4), attempt=5, max_tokens=12, temperature=2.0))
        changes: list[dict[str, Any]] = [
            {"seed": 8},
            {"group": 1},
            {"sample": 1},
            {"turn": 1},
            {"purpose": "eval"},
        ]
        others = [await one(engine, request(ref("a"), max_tokens=12, temperature=2.0, **change)) for change in changes]
    assert same(running, again, first)
    assert all(g.tokens != first.tokens for g in others)


async def test_greedy_is_the_most_likely_token_and_records_log_probs_at_temperature_one(running: Running) -> None:
    async with running(ends=False) as engine:
        greedy = await one(engine, request(temperature=0.0, max_tokens=6, num_top_logprobs=3))
        coldest = await one(engine, request(temperature=1e-38, max_tokens=6, num_top_logprobs=3))
        cold = await one(engine, request(temperature=0.001, max_tokens=6))
    assert same(running, coldest, greedy) and cold.tokens == greedy.tokens
    assert greedy.tokens == [top[0][0] for top in greedy.top_logprobs]
    assert np.allclose(greedy.logprobs, [top[0][1] for top in greedy.top_logprobs])
    assert all(len(top) == 3 for top in greedy.top_logprobs)


async def test_an_end_of_turn_token_ends_the_turn_and_is_its_last_token(running: Running) -> None:
    async with running() as engine:
        done = await one(engine, request(temperature=0.0, max_tokens=64))
    assert done.stop_reason == "stop" and done.stop_string == ""
    assert done.tokens[-1] in tokenizer().end_of_turn_ids
    assert not set(done.tokens[:-1]) & set(tokenizer().end_of_turn_ids)


async def test_a_stop_string_ends_the_turn_and_its_tokens_are_kept(running: Running) -> None:
    question = prompt("sort 40213")
    async with running(ends=False) as engine:
        whole = await one(engine, request(tokens=question, temperature=0.0, max_tokens=8))
        stop = tokenizer().decode(whole.tokens[1:3])
        asked = request(tokens=question, temperature=0.0, max_tokens=8, stop=("never this", stop))
        done = await one(engine, asked)
    assert (done.stop_reason, done.stop_string) == ("stop", stop)
    assert done.tokens == whole.tokens[:3]


async def test_top_p_draws_only_from_the_best_tokens(running: Running) -> None:
    async with running(ends=False) as engine:
        asked = [
            request(sample=i, temperature=2.0, max_tokens=1, top_p=1e-6 if i % 2 else 1.0, num_top_logprobs=1)
            for i in range(40)
        ]
        done = await asyncio.gather(*[one(engine, r) for r in asked])
    assert all(g.tokens[0] == g.top_logprobs[0][0][0] for g in done[1::2])
    assert len({g.tokens[0] for g in done[::2]}) > 3


async def test_top_k_of_one_is_greedy_beside_rows_that_draw_from_all(running: Running) -> None:
    async with running(ends=False) as engine:
        greedy = await one(engine, request(temperature=0.0, max_tokens=12))
        asked = [request(sample=i, temperature=2.0, max_tokens=12, top_k=(1, 0, 2**64 - 1)[i % 3]) for i in range(9)]
        done = await asyncio.gather(*[one(engine, r) for r in asked])
        free = [await one(engine, request(sample=i, temperature=2.0, max_tokens=12)) for i in (1, 2)]
    assert all(g.tokens == greedy.tokens for g in done[::3])
    assert not any(g.tokens == greedy.tokens for i, g in enumerate(done) if i % 3)
    assert not running.exact or [bits(g) for g in done[1:3]] == [bits(g) for g in free]


async def test_top_k_draws_from_the_best_tokens_as_often_as_they_are_likely(running: Running) -> None:
    async with running(ends=False) as engine:
        best = (await one(engine, request(temperature=1.5, max_tokens=1, num_top_logprobs=3))).top_logprobs[0]
        asked = [request(sample=i, temperature=1.5, max_tokens=1, top_k=3) for i in range(300)]
        done = await asyncio.gather(*[one(engine, r) for r in asked])
    weights = np.exp([logprob for _, logprob in best])
    counts = [sum(g.tokens == [token] for g in done) for token, _ in best]
    assert sum(counts) == 300
    assert np.allclose(np.array(counts) / 300, weights / weights.sum(), atol=0.1)
    if running.scales_prompts:  # log-probs are of the whole vocabulary
        assert all(np.isclose(dict(best)[g.tokens[0]], g.logprobs[0], atol=1e-4) for g in done)


async def test_stop_ids_end_a_turn_instead_of_the_models_own_and_none_at_all_if_there_are_none(
    running: Running,
) -> None:
    async with running() as engine:
        end = (await one(engine, request(temperature=0.0, max_tokens=64))).tokens[-1]

        def asked(stop_ids: tuple[int, ...] | None, **options: Any) -> Any:
            return request(temperature=0.0, max_tokens=40, stop_ids=stop_ids, **options)

        endless = await one(engine, asked(()))
        assert (len(endless.tokens), endless.stop_reason) == (40, "length") and end in endless.tokens
        other = next(token for token in endless.tokens[endless.tokens.index(end) + 1 :] if token != end)
        first = endless.tokens.index(other) + 1
        cases = [asked(None), asked((other,)), asked((other, end, 7)), asked(()), asked((end,))]
        own, only_other, either, none, same_id = await asyncio.gather(*[one(engine, r) for r in cases])
        resumed = await one(engine, asked((other,), partial=(only_other.tokens, only_other.logprobs)))
    assert own.tokens == same_id.tokens == endless.tokens[: endless.tokens.index(end) + 1]
    assert (only_other.tokens, only_other.stop_reason, only_other.stop_string) == (endless.tokens[:first], "stop", "")
    assert len(either.tokens) == min(first, len(own.tokens)) and none.tokens == endless.tokens
    assert (resumed.tokens, resumed.stop_reason, resumed.num_sampled) == (only_other.tokens, "stop", 0)


async def test_each_trajectory_ends_within_its_own_context(running: Running) -> None:
    async with running(ends=False) as engine:
        prompts = [[65] * 90, [65] * 90, [65] * 100, [65] * 2043]
        asked = (100, 0, 100, 4096)  # 0: what the engine serves; more than that is no more
        turns = [
            request(tokens=tokens, max_tokens=64, max_context=most, group=number, name=str(number))
            for number, (tokens, most) in enumerate(zip(prompts, asked, strict=True))
        ]
        own, unbound, full, served = await asyncio.gather(*(one(engine, turn) for turn in turns))
        resumed = await one(
            engine,
            request(tokens=prompts[0], partial=(own.tokens[:4], own.logprobs[:4]), max_tokens=64, max_context=100),
        )
    assert (len(own.tokens), own.stop_reason) == (10, "context")
    assert (len(unbound.tokens), unbound.stop_reason) == (64, "length")
    assert (full.tokens, full.stop_reason) == ([], "context")
    assert (len(served.tokens), served.stop_reason) == (5, "context")
    assert (len(resumed.tokens), resumed.stop_reason) == (10, "context")


async def test_a_turn_resumed_from_its_tokens_ends_as_the_uninterrupted_one(running: Running) -> None:
    async with running(adapters={ref("a"): files_of(1)}, ends=False) as engine:
        temperature = 1.3 if running.exact else 0.0
        whole = await one(engine, request(ref("a"), max_tokens=100, temperature=temperature))
        for cut in (1, 63, 64, 65, 99, 100):
            done = (whole.tokens[:cut], whole.logprobs[:cut])
            resumed = await one(engine, request(ref("a"), partial=done, max_tokens=100, temperature=temperature))
            assert resumed.tokens == whole.tokens
            assert resumed.logprobs[:cut] == whole.logprobs[:cut]
            assert np.allclose(resumed.logprobs, whole.logprobs, atol=1e-4)
            assert (resumed.stop_reason, resumed.num_sampled) == ("length", 100 - cut)


async def test_cancelling_frees_the_slot_and_keeps_what_was_sampled(running: Running) -> None:
    async with running(ends=False, slots=1) as engine:
        seen: list[int] = []
        came = asyncio.Event()

        def on_token(tokens: Any, logprobs: Any) -> None:
            seen.extend(tokens)
            came.set()

        long = asyncio.create_task(engine.generate(request(max_tokens=2000), on_token=on_token, beat=beat))
        await came.wait()
        assert engine.in_use == 1
        long.cancel()
        await asyncio.wait([long])
        assert engine.in_use == 0
        partial = engine.partial(request().id)
        next_one = await one(engine, request(name="next", max_tokens=2))
    assert long.cancelled() and len(next_one.tokens) == 2
    assert partial is not None and partial.num_sampled == len(partial.tokens) >= len(seen) > 0
    assert partial.tokens[: len(seen)] == seen and partial.busy_s > 0


async def test_tokens_come_as_they_are_sampled_each_once(running: Running) -> None:
    async with running(ends=False) as engine:
        calls: list[tuple[list[int], list[float]]] = []
        done = await engine.generate(
            request(max_tokens=20), on_token=lambda t, p: calls.append((list(t), list(p))), beat=beat
        )
    streamed = [t for tokens, _ in calls for t in tokens]
    assert len(calls) > 3 and streamed == done.tokens[: len(streamed)] and len(streamed) >= 15


async def test_a_broken_adapter_fails_its_own_rows_alone(running: Running) -> None:
    async with running(adapters={ref("bad"): broken_files(), ref("a"): files_of(1)}, ends=False) as engine:
        temperature = 1.0 if running.exact else 0.0
        good = [request(ref("a"), sample=i, max_tokens=6, temperature=temperature) for i in range(6)]
        bad = [request(ref("bad"), sample=i) for i in range(6)]
        expected = [await one(engine, r) for r in good]
        asked = [r for pair in zip(good, bad, strict=True) for r in pair]
        done = await asyncio.gather(*[one(engine, r) for r in asked], return_exceptions=True)
        after = await asyncio.gather(*[one(engine, r) for r in good])  # in slots that the broken rows had
    assert all(isinstance(e, CorruptAdapter) for e in done[1::2])
    for found in (done[::2], after):
        assert all(isinstance(f, Generated) and same(running, f, e) for f, e in zip(found, expected, strict=True))


async def test_files_that_are_no_adapter_of_this_base_are_refused(running: Running) -> None:
    async with running() as engine:
        files = files_of(1)
        with pytest.raises(CorruptObject):
            await engine.load_files(ref("a"), {**files, "adapter_model.safetensors": b"nonsense"})
        assert engine.resident() == []


async def test_an_adapter_must_be_resident_and_a_request_sensible(running: Running) -> None:
    async with running() as engine:
        for wrong, error in (
            (request(ref("a")), NotFound),
            (request(tokens=[]), InvalidInput),
            (request(tokens=[5000]), InvalidInput),
            (request(max_tokens=-1), InvalidInput),
        ):
            with pytest.raises(error):
                await one(engine, wrong)


async def test_nothing_of_one_version_is_used_for_another(running: Running) -> None:
    async with running(adapters={ref("a", 1): files_of(1)}, ends=False) as engine:
        first = await one(engine, request(ref("a", 1), max_tokens=4, temperature=0.0))
        await engine.load_files(ref("a", 2), files_of(2))
        second = await one(engine, request(ref("a", 2), max_tokens=4, temperature=0.0))
        await engine.drop(ref("a", 1))
        assert engine.resident() == [ref("a", 2)]
        await engine.load_files(ref("a", 1), files_of(3))  # the same name with other weights: no cache may remember
        third = await one(engine, request(ref("a", 1), max_tokens=4, temperature=0.0))
    async with running(adapters={ref("a", 1): files_of(3), ref("a", 2): files_of(2)}, ends=False) as engine:
        again = [await one(engine, request(ref("a", v), max_tokens=4, temperature=0.0)) for v in (2, 1)]
    assert same(running, again[0], second) and same(running, again[1], third)
    assert not same(running, second, first) and not same(running, third, first)


async def test_beat_is_called_while_tokens_come(running: Running) -> None:
    beats: list[int] = []
    async with running(ends=False) as engine:
        turn = asyncio.create_task(engine.generate(request(max_tokens=1000), beat=lambda: beats.append(1)))
        while len(beats) < 2 and not turn.done():
            await asyncio.sleep(0.01)
        await cancel_all([turn])
    assert beats
