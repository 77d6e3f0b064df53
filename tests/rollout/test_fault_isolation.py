"""A turn that makes the engine's operations fail ends alone: the turns beside it lose nothing and get nothing twice."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest
import pytest_asyncio
import torch

from base_model.stacked import fuse
from common.wire.messages import TurnRequest
from rollout_service.embedded import batch, row_states
from rollout_service.embedded.pools import EngineLimits
from rollout_service.embedded.torch_engine import TorchEngine
from rollout_service.engine import Generated
from tests.support.rollout_cases import (
    adapter_of,
    beat,
    bits,
    decoder,
    exact_limits,
    files_of,
    nearly,
    one,
    prompt,
    ref,
    request,
    running,
)

pytestmark = pytest.mark.asyncio

FAULTY = 0.125
"""The temperature of a turn at which sampling fails."""
GOOD = {ref("a"): files_of(1), ref("b"): files_of(2, rank=3), ref("c"): files_of(3, rank=16)}
BAD = ref("bad")
Outcome = Generated | BaseException


@pytest_asyncio.fixture(params=["fast", pytest.param("deterministic", marks=pytest.mark.exact)])
async def engine(request: pytest.FixtureRequest) -> AsyncGenerator[TorchEngine]:
    limits = exact_limits(request.getfixturevalue("min_rows")) if request.param == "deterministic" else EngineLimits()
    async with running(adapters={**GOOD, BAD: files_of(4)}, limits=limits, ends=False) as engine:
        yield engine


def good(*, temperature: float = 0.0, **options: Any) -> list[TurnRequest]:
    """A turn of each tenant."""
    asked: dict[str, Any] = {"max_tokens": 12, "temperature": temperature} | options
    return [request(adapter, sample=i, **asked) for i, adapter in enumerate(GOOD)]


def warmth(engine: TorchEngine) -> float:
    """Greedy where last digits may differ."""
    return 1.0 if is_exact(engine) else 0.0


async def together(engine: TorchEngine, asked: Sequence[TurnRequest]) -> list[Outcome]:
    """The turns' results or errors, all in one batch from the first step."""
    with engine._wake:  # pyright: ignore[reportPrivateUsage] the engine's thread sees all of them at once
        turns = [asyncio.create_task(one(engine, each)) for each in asked]
        await asyncio.sleep(0)
    return await asyncio.gather(*turns, return_exceptions=True)


async def check(engine: TorchEngine, found: Sequence[Outcome], asked: Sequence[TurnRequest]) -> None:
    """Each is what it is alone: to the bit in deterministic mode."""
    alone = [await one(engine, each) for each in asked]
    assert [f for f in found if not isinstance(f, Generated)] == []
    assert all(same(engine, f, e) for f, e in zip(found, alone, strict=True))
    assert [f.num_sampled for f in found if isinstance(f, Generated)] == [e.num_sampled for e in alone]
    assert engine.in_use == 0


def same(engine: TorchEngine, found: Outcome, expected: Outcome) -> bool:
    assert isinstance(found, Generated) and isinstance(expected, Generated)
    return bits(found) == bits(expected) if is_exact(engine) else nearly(found, expected)


def is_exact(engine: TorchEngine) -> bool:
    return engine._running._limits.exact  # pyright: ignore[reportPrivateUsage]


def breaks(monkeypatch: pytest.MonkeyPatch, error: Exception, *, after: int = 0) -> list[int]:
    """Lets sampling fail in forwards with a turn of temperature FAULTY, but for the first `after`. Returns their numbers of rows."""
    sizes, real = list[int](), batch.sample

    def sample(logits: torch.Tensor, uniforms: torch.Tensor, plan: Any, *rest: Any) -> Any:
        if plan.temperature is not None and (plan.temperature == FAULTY).any():
            sizes.append(len(logits))
            if len(sizes) > after:
                raise error
        return real(logits, uniforms, plan, *rest)

    monkeypatch.setattr(batch, "sample", sample)
    return sizes


def is_of_bad(outcome: Outcome, words: str) -> bool:
    return isinstance(outcome, RuntimeError) and "job bad " in str(outcome) and words in str(outcome)


@pytest.mark.parametrize("after", [0, 5])
async def test_a_turn_whose_sampling_fails_ends_alone_and_once(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    sizes = breaks(monkeypatch, ValueError("poison"), after=after)
    asked = good(temperature=warmth(engine), num_top_logprobs=2)
    bad = request(BAD, temperature=FAULTY, max_tokens=12)
    *found, failed = await together(engine, [*asked, bad])
    assert is_of_bad(failed, "poison") and sizes == [4] * (after + 1) + [1]
    assert all(isinstance(f, Generated) and len(f.top_logprobs) == 12 for f in found)
    await check(engine, found, asked)


async def test_a_stream_beside_it_gets_each_token_once(engine: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    breaks(monkeypatch, ValueError("poison"), after=5)
    came, asked = list[int](), request(ref("a"), max_tokens=12, temperature=0.0)

    def on_token(tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        came.extend(tokens)

    with engine._wake:  # pyright: ignore[reportPrivateUsage]
        stream = asyncio.create_task(engine.generate(asked, on_token=on_token, beat=beat))
        bad = asyncio.create_task(one(engine, request(BAD, temperature=FAULTY, max_tokens=12)))
        await asyncio.sleep(0)
    found, failed = await asyncio.gather(stream, bad, return_exceptions=True)
    assert is_of_bad(failed, "poison")
    assert isinstance(found, Generated) and len(came) > 6 and came == found.tokens[: len(came)]
    await check(engine, [found], [asked])


@pytest.mark.parametrize("tokens", [prompt(), prompt()[:1]], ids=["prefill", "step"])
async def test_a_turn_whose_adapters_product_fails_ends_alone(engine: TorchEngine, tokens: list[int]) -> None:
    spoil(engine)
    asked = good(temperature=warmth(engine), tokens=tokens)
    *found, failed = await together(engine, [*asked, request(BAD, tokens=tokens)])
    assert is_of_bad(failed, "size")
    await check(engine, found, asked)


def spoil(engine: TorchEngine) -> None:
    """Gives the faulty job's adapter factors of another base, of one rank with a neighbour's."""
    adapters, config = engine._adapters, decoder().config  # pyright: ignore[reportPrivateUsage]
    shapes = {name: (out, inner + 1) for name, (out, inner) in decoder().linear_shapes().items()}
    adapter = adapter_of(4)
    wide = {name: torch.cat([a, a[:, :1]], dim=1) for name, a in adapter.a.items()}
    broken = type(adapter)(adapter.spec, wide, adapter.b)
    adapters[BAD] = fuse(broken, shapes, config.num_layers, like=decoder().embedding)


async def test_a_turn_that_cannot_take_its_slot_leaves_it_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    real = row_states.key_of

    def key_of(seed: int, *rest: Any) -> Any:
        if seed == 666:
            raise OverflowError("poison")
        return real(seed, *rest)

    monkeypatch.setattr(row_states, "key_of", key_of)
    limits = EngineLimits(slots=2)
    async with running(adapters={**GOOD, BAD: files_of(4)}, limits=limits, ends=False) as engine:
        bad = [request(BAD, seed=666, sample=i) for i in range(5)]
        asked = good()
        found = await together(engine, [*bad, *asked])
        assert all(is_of_bad(each, "poison") for each in found[:5])
        await check(engine, found[5:], asked)


async def test_when_memory_runs_out_no_turn_is_tried_alone(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = breaks(monkeypatch, MemoryError("no memory"))
    asked = good()
    found = await together(engine, [*asked, request(BAD, temperature=FAULTY)])
    assert all(isinstance(each, RuntimeError) and "no memory" in str(each) for each in found) and sizes == [4]
    await check(engine, await together(engine, asked), asked)


async def test_turns_that_fail_only_together_go_on_one_by_one(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = batch.sample

    def sample(logits: torch.Tensor, *rest: Any) -> Any:
        if len(logits) > 1:
            raise ValueError("too many")
        return real(logits, *rest)

    monkeypatch.setattr(batch, "sample", sample)
    asked = good(temperature=warmth(engine))
    await check(engine, await together(engine, asked), asked)
