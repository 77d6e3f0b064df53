"""Every engine says how likely the tokens of a prompt were, with the adapter that the request names."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.errors import InvalidInput
from common.wire.messages import BASE, TurnRequest
from rollout_service.engine import Engine, Generated
from rollout_service.process.process_engine import ProcessEngine
from tests.support.engines_under_test import KINDS, Running, needs_vllm
from tests.support.rollout_cases import bits, files_of, one, peft_model, prompt, ref, request

pytestmark = [pytest.mark.timeout(600)]  # vLLM's start counts
on_all = pytest.mark.parametrize("running", KINDS, indirect=True)
on_real_models = pytest.mark.parametrize(
    "running", ["torch", pytest.param("vllm", marks=[pytest.mark.vllm, needs_vllm])], indirect=True
)


@contextlib.asynccontextmanager
async def undisturbed(running: Running, **options: Any) -> AsyncGenerator[Engine]:
    """An engine whose process, if it has one, must not die meanwhile: turns would go on in the next."""
    async with running(**options) as engine:
        yield engine
        assert not isinstance(engine, ProcessEngine) or not engine.counters()["engine_restarts"]


in_session = pytest.mark.asyncio(loop_scope="session")
FILES = {ref("a"): files_of(1), ref("b"): files_of(2, rank=3, alpha=5.0), ref("c"): files_of(3, targets=("q_proj",))}


def scores(generated: Generated) -> np.ndarray:
    return generated.prompt_logprobs.numpy()


def same_scores(found: Generated, expected: Generated) -> bool:
    return np.allclose(scores(found), scores(expected), atol=1e-4, equal_nan=True)


def random_tokens(num: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, num).tolist()


def expected_scores(folder: Path, asked: TurnRequest) -> tuple[np.ndarray, np.ndarray]:
    """Log-probs by transformers and PEFT: [num_prompt - 1] of the tokens, [num_prompt - 1, 2] of the best there."""
    files = FILES[asked.adapter] if not asked.adapter.is_base else files_of(1, size=0.0)
    model, tokens = peft_model(folder, files), torch.from_numpy(asked.tokens.numpy().astype(np.int64))
    with torch.no_grad():
        logits = model(tokens.unsqueeze(0)).logits[0, :-1] / (asked.sampling.temperature or 1.0)
    logprobs = torch.log_softmax(logits, -1)
    return logprobs.gather(1, tokens[1:, None])[:, 0].numpy(), logprobs.topk(2).values.numpy()


@on_real_models
@in_session
async def test_they_are_those_of_transformers_and_peft_for_mixed_adapters_and_lengths(
    running: Running, tmp_path: Path
) -> None:
    # Given prompts that are longer together than one forward of a prefill
    lengths, names = (2, 17, 900, 2047, 33, 300, 900, 5), [*FILES, BASE]
    temperatures = (1.0, 0.0, 0.7) if running.scales_prompts else (1.0, 0.0)
    asked = [
        request(
            names[i % 4],
            tokens=random_tokens(num, i),
            sample=i,
            max_tokens=1,
            temperature=temperatures[i % len(temperatures)],
            prompt_logprobs=-1,
            num_top_logprobs=2 * (i % 2),
        )
        for i, num in enumerate(lengths)
    ]
    async with undisturbed(running, adapters=FILES, ends=False) as engine:
        found = await asyncio.gather(*[one(engine, r) for r in asked])
    for each, mine in zip(asked, found, strict=True):
        assert np.isnan(scores(mine)[0]) and len(scores(mine)) == each.num_prompt
        expected, best = expected_scores(tmp_path, each)
        assert np.abs(scores(mine)[1:] - expected).max() < 1e-4
        if each.sampling.num_top_logprobs:
            tops = [[value for _, value in top] for top in mine.prompt_top_logprobs[1:]]
            assert np.abs(np.array(tops) - best).max() < 1e-4


@on_all
@in_session
async def test_as_many_as_asked_for_have_one_and_the_first_token_never(running: Running) -> None:
    num, asked = len(prompt()), (1, 3, -1, 5000)
    async with undisturbed(running, ends=False) as engine:
        found = [await one(engine, request(max_tokens=1, prompt_logprobs=n)) for n in asked]
        single = await one(engine, request(tokens=[65], max_tokens=1, prompt_logprobs=-1))
        begun = await one(engine, request(tokens=[65], partial=([66], [-1.0]), max_tokens=2, prompt_logprobs=-1))
        plain = await one(engine, request(max_tokens=1))
    assert [int(np.isfinite(scores(g)).sum()) for g in found] == [1, 3, num - 1, num - 1]
    for count, each in zip((1, 3, num - 1), found, strict=False):
        assert np.allclose(scores(each)[-count:], scores(found[2])[-count:], atol=1e-4)
    assert np.isnan([*scores(single), *scores(begun)]).tolist() == [True, True]
    assert len(plain.prompt_logprobs) == 0


@on_all
@in_session
async def test_a_prompt_is_scored_beside_the_best_tokens_without_sampling_one(running: Running) -> None:
    async with undisturbed(running, ends=False) as engine:
        found = await one(engine, request(max_tokens=0, prompt_logprobs=-1, num_top_logprobs=3))
        nothing = await one(engine, request(max_tokens=0))
        sampled = await one(engine, request(max_tokens=1, prompt_logprobs=-1))
    first, *tops = found.prompt_top_logprobs
    assert first == [] and len(tops) == len(prompt()) - 1
    for token, logprob, top in zip(prompt()[1:], scores(found)[1:].tolist(), tops, strict=True):
        values = [value for _, value in top]
        assert values == sorted(values, reverse=True) and len(values) == 3
        assert dict(top).get(token, logprob) == logprob <= values[0]  # to the bit: clients look so for the greedy token
    assert same_scores(found, sampled) and sampled.prompt_top_logprobs == []
    assert (found.tokens, found.stop_reason) == (nothing.tokens, nothing.stop_reason) == ([], "length")


@on_all
@in_session
async def test_whether_they_are_asked_for_changes_no_token(running: Running) -> None:
    """Nor do neighbours that share the prompt, or that found it in a cache."""
    temperature = 1.0 if running.exact else 0.0

    def asked(sample: int, num: int) -> TurnRequest:
        return request(ref("a"), sample=sample, max_tokens=6, temperature=temperature, prompt_logprobs=num)

    async with undisturbed(running, adapters=FILES, ends=False) as engine:
        plain = [await one(engine, asked(i, 0)) for i in range(3)]
        mixed = await asyncio.gather(*[one(engine, asked(i, (-1, 0, 4)[i])) for i in range(3)])
        alone = [await one(engine, asked(i, (-1, 0, 4)[i])) for i in range(3)]
    for found in (mixed, alone):
        assert [g.tokens for g in found] == [g.tokens for g in plain]
        if running.exact:
            assert [bits(g) for g in found] == [bits(g) for g in plain]
    for together, single in zip(mixed, alone, strict=True):
        assert same_scores(together, single)
        assert not running.exact or scores(together).tobytes() == scores(single).tobytes()


@on_all
@in_session
async def test_a_resumed_turn_brings_those_of_its_prompt_also_if_nothing_is_left_to_sample(running: Running) -> None:
    async with undisturbed(running, adapters=FILES, ends=False) as engine:
        whole = await one(engine, request(ref("a"), max_tokens=20, temperature=0.0, prompt_logprobs=-1))
        for cut in (7, 20):
            done = (whole.tokens[:cut], whole.logprobs[:cut])
            asked = request(ref("a"), partial=done, max_tokens=20, temperature=0.0, prompt_logprobs=-1)
            resumed = await one(engine, asked)
            assert resumed.tokens == whole.tokens and resumed.num_sampled == 20 - cut
            assert same_scores(resumed, whole) and resumed.stop_reason == "length"


@on_all
@in_session
async def test_a_prompt_with_a_later_turn_is_computed_from_its_beginning(running: Running) -> None:
    async with undisturbed(running, adapters=FILES, ends=False) as engine:
        tokens = prompt()
        for turn in range(3):
            asked = request(ref("a"), tokens=tokens, turn=turn, max_tokens=4, temperature=0.0, stop_ids=(), group=2)
            tokens = [*tokens, *(await one(engine, asked)).tokens, *prompt("and now?")]
        found = await one(engine, request(ref("a"), tokens=tokens, turn=3, group=2, max_tokens=1, prompt_logprobs=-1))
        fresh = await one(engine, request(ref("a"), tokens=tokens, sample=5, max_tokens=1, prompt_logprobs=-1))
    assert np.isfinite(scores(found)[1:]).all() and same_scores(found, fresh)


@on_all
@in_session
async def test_what_cannot_be_computed_is_refused_by_the_name_of_its_field(running: Running) -> None:
    async with undisturbed(running, ends=False) as engine:
        for wrong, name in (
            (request(prompt_logprobs=-2), "prompt_logprobs"),
            (request(tokens=[65] * 2048, prompt_logprobs=1), "prompt_logprobs"),
            (request(top_k=-1), "top_k"),
            (request(num_top_logprobs=-1), "num_top_logprobs"),
            (request(num_top_logprobs=5000), "num_top_logprobs"),
            (request(max_tokens=-1), "max_tokens"),
            (request(stop_ids=(5000,)), "stop_ids"),
            (request(stop_ids=(-1,)), "stop_ids"),
            (request(stop_ids=(1,) * 129), "stop_ids"),
        ):
            with pytest.raises(InvalidInput, match=name):
                await one(engine, wrong)
        if not running.scales_prompts:
            with pytest.raises(InvalidInput, match="prompt_logprobs at temperature 1"):
                await one(engine, request(temperature=0.7, prompt_logprobs=1))
