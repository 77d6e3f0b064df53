"""Compares both rollout engines: tokens/s, the vLLM engine with 1, 4 and 16 adapters in one batch, and the sampling gap by dtype.

    python -m benchmarks.engines [--rows 64] [--tokens 48] [--rounds 5] [--json FILE]

All sample at temperature 1 the same prompts, exactly `--tokens` tokens a row. Rounds go through all cases one after the
other, so that load falls on all alike; medians are printed. The sampling gap is the trainer's own metric: the mean of
|log-prob in training - log-prob at sampling| over turns that ended by themselves, of questions that `tiny` knows, with an
adapter; the trainer computes in float32. vLLM is skipped where it is not installed (`make vllm`).
"""

import asyncio
import importlib.util
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from base_model.adapter import load_adapter
from base_model.decoder import Decoder
from base_model.device import prepare_cpu
from benchmarks._report import Goal, Report, in_turns_async, make_table, run
from benchmarks.rollout import NoEnd, adapter_files, engine_speed, prompts, request
from benchmarks.training import step_of
from common.messages import AdapterRef, LoraSpec, LossSpec, Rows, TurnRequest, f32, i32, u8
from common.settings import TINY
from common.skills import SKILLS, generate
from common.text.tokens import ChatTokenizer
from common.transcript import transcript
from rollout_service.embedded.backbone.fused import FusedDecoder
from rollout_service.embedded.torch_engine import TorchEngine
from rollout_service.engine import Engine, Generated
from rollout_service.process.vllm_engine import VllmOptions, vllm_engine
from trainer_service import lora
from trainer_service.backbone.sequences import DecoderBackbone
from trainer_service.optimiser import Moments
from trainer_service.training import Trainer, TrainState

ADAPTERS = (1, 4, 16)
DTYPES = {"float32": 0.001, "bfloat16": 0.01}
"""The bound of the sampling gap."""
REF = AdapterRef("bench", "gap", 1)


class NoEndOfTiny(NoEnd):
    """The same, with the base model's figures that vLLM needs."""

    context = 2048
    vocab_size = 272


def options(dtype: str) -> VllmOptions:
    return VllmOptions(
        folder=TINY,
        device="cpu",
        dtype=dtype,
        slots=64,
        max_loras=max(ADAPTERS),
        max_known=64,
        max_lora_rank=16,
        tensor_parallel=1,
        memory_fraction=0.9,
        kv_bytes=1 << 28,
        enforce_eager=True,
        idle_adapter_bytes=0,
    )


async def together(engine: Engine, asked: Sequence[TurnRequest]) -> list[Generated]:
    return await asyncio.gather(*[engine.generate(r, beat=lambda: None) for r in asked])


def mixed(num_adapters: int, rows: int, num_tokens: int) -> list[TurnRequest]:
    """Neighbouring rows are of different adapters."""
    refs = [AdapterRef("bench", f"job{i}", 1) for i in range(num_adapters)]
    return [request(refs[i % num_adapters], tokens, i, num_tokens) for i, tokens in enumerate(prompts(rows))]


async def load_all(engine: Engine, decoder: Decoder) -> None:
    await engine.start()
    for i in range(max(ADAPTERS)):
        await engine.load_files(AdapterRef("bench", f"job{i}", 1), adapter_files(decoder, i))


# ---- the sampling gap -----------------------------------------------------------------------------------------------


def questions(tokenizer: ChatTokenizer, num: int) -> list[list[int]]:
    known = [skill for skill in SKILLS if not SKILLS[skill].needs_calculator]
    items = [item for skill in known for item in generate(skill, seed=0, n=-(-num // len(known)))]
    return [tokenizer.render(item["messages"]) for item in items[:num]]


async def measure_gap(engine: Engine, tokenizer: ChatTokenizer, decoder: Decoder, temperature: float = 1.0) -> float:
    """Sampling gap of an engine that has started, with an adapter of its own."""
    files = adapter_files(decoder, 0)
    await engine.load_files(REF, files)
    asked = [request(REF, tokens, i, 32, temperature) for i, tokens in enumerate(questions(tokenizer, 64))]
    gap = sampling_gap(decoder, files, asked, await together(engine, asked))
    await engine.drop(REF)
    return gap


def sampling_gap(
    decoder: Decoder, files: dict[str, bytes], asked: Sequence[TurnRequest], done: Sequence[Generated]
) -> float:
    """The metric of a real training step on these turns; every second one is rewarded."""
    adapter = load_adapter(files)
    state = TrainState.of(adapter, Moments.zeros(lora.flatten(adapter).numel(), torch.device("cpu")))
    spec = LoraSpec(adapter.spec.rank, adapter.spec.alpha)
    step = step_of(rows_of(asked, done), REF, spec, LossSpec(temperature=asked[0].sampling.temperature))
    gap = Trainer(DecoderBackbone(decoder)).step(step, state, lambda: None).metrics["sampling_gap"]
    assert gap is not None
    return gap


def rows_of(asked: Sequence[TurnRequest], done: Sequence[Generated]) -> Rows:
    """One group of all turns."""
    prompts_R = [r.tokens.numpy() for r in asked]
    return Rows(
        transcript=transcript(
            np.concatenate([t for p, g in zip(prompts_R, done, strict=True) for t in (p, g.tokens)]),
            np.concatenate([t for p, g in zip(prompts_R, done, strict=True) for t in (0.0 * p, g.logprobs)]),
            np.concatenate([[0] * len(p) + [1] * len(g.tokens) for p, g in zip(prompts_R, done, strict=True)]),
        ),
        lengths=i32([len(p) + len(g.tokens) for p, g in zip(prompts_R, done, strict=True)]),
        groups=i32([0] * len(done)),
        samples=i32(range(len(done))),
        rewards=f32([i % 2 for i in range(len(done))]),
        versions=i32([REF.version] * len(done)),
        truncated=u8([0] * len(done)),
    )


# ---- all of it ------------------------------------------------------------------------------------------------------


async def measure_speeds(rows: int, num_tokens: int, rounds: int, *, with_vllm: bool) -> dict[str, float]:
    decoder = Decoder.load(TINY)
    engines: dict[str, Engine] = {"torch": TorchEngine(FusedDecoder(decoder, exact=False), NoEnd())}
    if with_vllm:
        engines["vllm"] = vllm_engine(options("float32"), NoEndOfTiny())
    for engine in engines.values():
        await load_all(engine, decoder)
    asked = {num: mixed(num, rows, num_tokens) for num in ADAPTERS}
    cases = {f"{name}_{num}": partial(engine_speed, e, asked[num]) for name, e in engines.items() for num in ADAPTERS}
    found = await in_turns_async(cases, rounds)
    for engine in engines.values():
        await engine.stop()
    return {name: statistics.median(values) for name, values in found.items()}


async def measure_gaps(*, with_vllm: bool) -> dict[str, float]:
    """Sampling gaps by engine and dtype."""
    decoder, tokenizer = Decoder.load(TINY), ChatTokenizer.load(TINY)
    found: dict[str, float] = {}
    for dtype in DTYPES:
        own = FusedDecoder(Decoder.load(TINY, dtype=getattr(torch, dtype)), exact=False)
        engines: dict[str, Engine] = {"torch": TorchEngine(own, tokenizer)}
        if with_vllm:
            engines["vllm"] = vllm_engine(options(dtype), tokenizer)
        for name, engine in engines.items():
            await engine.start()
            found[f"{name}_{dtype}"] = await measure_gap(engine, tokenizer, decoder)
            await engine.stop()
    return found


def report(given: Any) -> Report:
    prepare_cpu(1)
    with_vllm = importlib.util.find_spec("vllm") is not None
    speeds = asyncio.run(measure_speeds(given.rows, given.tokens, given.rounds, with_vllm=with_vllm))
    gaps = asyncio.run(measure_gaps(with_vllm=with_vllm))
    names = ["torch", "vllm"] if with_vllm else ["torch"]
    title = f"tokens/s, {given.rows} rows of {given.tokens} tokens"
    columns = ("engine, float32", *(f"{num} adapters" for num in ADAPTERS))
    tables = [make_table(title, columns, [(n, *(speeds[f"{n}_{num}"] for num in ADAPTERS)) for n in names])]
    columns = ("engine", *DTYPES)
    tables.append(make_table("sampling gap", columns, [(n, *(gaps[f"{n}_{d}"] for d in DTYPES)) for n in names]))
    goals = [
        Goal(f"sampling gap of {name} in {dtype}", gaps[f"{name}_{dtype}"], bound, more_is_better=False)
        for name in names
        for dtype, bound in DTYPES.items()
    ]
    notes = [] if with_vllm else ["vLLM is not installed (make vllm): the torch engine alone"]
    return Report(tables, {**speeds, **{f"gap_{k}": v for k, v in gaps.items()}}, goals, notes)


if __name__ == "__main__":
    run(__doc__, report, rows=64, tokens=48, rounds=5)
