"""The torch engine against transformers and PEFT, its caches, and its promise of equal bits."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from base_model.kernels import NotDeterministic
from common.errors import InvalidInput
from common.rng import uniform
from rollout_service.embedded.backbone.fused import FusedDecoder, packed_linear, torch_linear
from rollout_service.embedded.backbone.layout import exact_rows, rounded_rows
from rollout_service.embedded.batch import RunningRows
from rollout_service.embedded.pools import EngineLimits
from rollout_service.embedded.sampler import SamplingPlan, sample
from rollout_service.embedded.selftest import selftest
from tests.support.rollout_cases import (
    bits,
    exact_limits,
    files_of,
    model,
    one,
    peft_model,
    prompt,
    ref,
    request,
    running,
)
from tests.support.trainer_cases import load_shallow


@pytest.mark.asyncio
async def test_tokens_and_log_probs_are_those_of_transformers_and_peft(tmp_path: Path) -> None:
    files = files_of(5, rank=6, alpha=24.0)
    model = peft_model(tmp_path, files)
    asked = [prompt(t) for t in ("add 37+58", "reverse cabin", "count a in banana")]
    async with running(adapters={ref("a"): files}, ends=False) as engine:
        greedy = [request(ref("a"), tokens=t, temperature=0.0, max_tokens=12) for t in asked]
        found = await asyncio.gather(*[one(engine, r) for r in greedy])
        warm = [request(ref("a"), tokens=t, temperature=0.7, max_tokens=12) for t in asked]
        sampled = await asyncio.gather(*[one(engine, r) for r in warm])
    for tokens, mine in zip(asked, found, strict=True):
        theirs = model.generate(torch.tensor([tokens]), max_new_tokens=12, do_sample=False, eos_token_id=-1)
        assert theirs[0, len(tokens) :].tolist() == mine.tokens
        assert np.abs(_log_probs(model, tokens, mine.tokens, 1.0) - mine.logprobs).max() < 1e-4
    for tokens, mine in zip(asked, sampled, strict=True):
        assert np.abs(_log_probs(model, tokens, mine.tokens, 0.7) - mine.logprobs).max() < 1e-4


@pytest.mark.parametrize("num_rows", [1, 48, 300])
def test_a_packed_product_is_torchs_except_for_rounding(num_rows: int) -> None:
    weight, bias, x = torch.randn(96, 64), torch.randn(96), torch.randn(2 * num_rows, 64)[::2]
    for own in (None, bias):
        torch.testing.assert_close(packed_linear(weight, own)(x), torch_linear(weight, own)(x), atol=1e-4, rtol=1e-4)


def _log_probs(model: Any, tokens: list[int], answer: list[int], temperature: float) -> np.ndarray:
    with torch.no_grad():
        logits = model(torch.tensor([[*tokens, *answer]])).logits[0, len(tokens) - 1 : -1].float()
    return torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(answer)[:, None])[:, 0].numpy()


@pytest.mark.asyncio
async def test_a_prompt_shared_by_a_group_is_kept_once_for_each_adapter() -> None:
    async with running(adapters={ref("a"): files_of(1), ref("b"): files_of(2)}) as engine:
        batch = engine._running  # pyright: ignore[reportPrivateUsage]
        asked = [request(adapter, sample=i, max_tokens=3) for adapter in (ref("a"), ref("b")) for i in range(8)]
        done = await asyncio.gather(*[one(engine, r) for r in asked])
        prefixes = batch._prefill._prefixes  # pyright: ignore[reportPrivateUsage]
        assert {key[0] for key in prefixes._entries} == {ref("a"), ref("b")}  # pyright: ignore[reportPrivateUsage]
        await engine.drop(ref("a"))
        await one(engine, replace(request(ref("b"), max_tokens=1), tenant="another"))
        assert len(prefixes._entries) == 2  # pyright: ignore[reportPrivateUsage]
        assert {key[0] for key in prefixes._entries} == {ref("b")}  # pyright: ignore[reportPrivateUsage]
    assert sum(g.busy_s for g in done) > 0


@pytest.mark.asyncio
@pytest.mark.exact
async def test_a_drawn_version_0_has_the_base_models_bits_also_beside_other_adapters(min_rows: int) -> None:
    adapters = {ref("loaded", 0): files_of(1, size=0.0), ref("b"): files_of(2, rank=3)}
    async with running(adapters=adapters, limits=exact_limits(min_rows)) as engine:
        others = [request(ref("b"), sample=i, max_tokens=30) for i in range(5)]
        own = [
            [request(ref(job, 0), tokens=prompt("sort 40213"), sample=i, max_tokens=20, untrained=job == "fresh") for i in range(6)]
            for job in ("loaded", "fresh")
        ]  # fmt: skip
        found = await asyncio.gather(*[one(engine, r) for r in [*own[0], *others, *own[1]]])
    assert [bits(g) for g in found[:6]] == [bits(g) for g in found[11:]]


def shallow() -> FusedDecoder:
    return FusedDecoder(load_shallow(), exact=True)


@pytest.mark.exact
def test_the_self_test_passes_here_and_would_see_a_difference(monkeypatch: pytest.MonkeyPatch, min_rows: int) -> None:
    assert selftest(shallow(), min_rows)
    forward = FusedDecoder.forward

    def by_rows(self: FusedDecoder, tokens: torch.Tensor, *rest: Any) -> torch.Tensor:
        return forward(self, tokens, *rest) * (1 + 1e-6 * len(tokens))

    monkeypatch.setattr(FusedDecoder, "forward", by_rows)
    with pytest.raises(NotDeterministic):
        selftest(shallow(), min_rows)


@pytest.mark.exact
def test_the_self_test_fills_all_slots(monkeypatch: pytest.MonkeyPatch, min_rows: int) -> None:
    expected, forward = selftest(shallow(), min_rows), FusedDecoder.forward
    assert selftest(shallow(), min_rows, 128) == expected  # workers with more slots compute the same

    def breaks_beyond_64(self: FusedDecoder, tokens: torch.Tensor, positions: torch.Tensor, parts: Any) -> torch.Tensor:
        hidden = forward(self, tokens, positions, parts)
        is_step = positions.min() > 0  # no prompt begins in it
        return hidden * (1 + 1e-6) if len(hidden) == 128 and is_step else hidden

    monkeypatch.setattr(FusedDecoder, "forward", breaks_beyond_64)
    assert selftest(shallow(), min_rows, 64) == expected
    with pytest.raises(NotDeterministic):
        selftest(shallow(), min_rows, 128)


@pytest.mark.parametrize(
    "num,least,exact,expected",
    [(1, 4, 4, 4), (4, 4, 4, 4), (5, 4, 8, 8), (17, 4, 32, 32), (1, 8, 8, 8), (9, 8, 16, 16), (33, 4, 48, 40)]
    + [(49, 4, 64, 56), (64, 4, 64, 64), (65, 4, 128, 72), (129, 4, 192, 136)],
)
def test_forwards_have_rounded_rows(num: int, least: int, exact: int, expected: int) -> None:
    assert (exact_rows(num, least), rounded_rows(num, least)) == (exact, expected)


def test_a_batch_refuses_memory_that_does_not_hold_one_context() -> None:
    with pytest.raises(InvalidInput, match=r"context.*MARLAAS_ROLLOUT_KV_BYTES"):
        RunningRows(model(), end_ids=(), decode=lambda _: "", limits=EngineLimits(kv_bytes=1000))


def test_top_k_keeps_the_best_tokens_and_top_p_counts_among_these() -> None:
    logits = torch.tensor([[0.05, 0.4, 0.15, 0.4]]).log().expand(4000, 4)
    uniforms = torch.from_numpy(uniform(1, "test", np.arange(4000)))
    rows = torch.arange(4000).unsqueeze(1) % 4
    top_k = torch.tensor([4, 1, 3, 3])[rows]
    top_p = torch.tensor([1.0, 1.0, 1.0, 0.8], dtype=torch.float64)[rows]  # the best two have 0.84 of the best three
    drawn = sample(logits, uniforms, SamplingPlan(None, None, False, top_p, 0, top_k))
    found = [set(drawn.tokens[row::4].tolist()) for row in range(4)]
    assert found == [{0, 1, 2, 3}, {1}, {1, 2, 3}, {1, 3}]
    share = torch.bincount(drawn.tokens[2::4], minlength=4) / 1000
    assert torch.allclose(share, torch.tensor([0.0, 0.4, 0.15, 0.4]) / 0.95, atol=0.05)
    assert torch.allclose(drawn.logprobs, logits[0][drawn.tokens], atol=1e-6)  # of the whole vocabulary


@pytest.mark.asyncio
async def test_a_failed_forward_is_told_to_its_rows_and_the_engine_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running() as engine:
        expected = await one(engine, request(max_tokens=4))
        model = engine._running._model  # pyright: ignore[reportPrivateUsage]
        logits, calls = model.logits, iter([True])

        def fails_once(hidden: torch.Tensor) -> torch.Tensor:
            if next(calls, False):
                raise MemoryError("out of memory")
            return logits(hidden)

        model.logits = fails_once  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="out of memory"):
            await one(engine, request(max_tokens=4))
        assert bits(await one(engine, request(max_tokens=4))) == bits(expected)
