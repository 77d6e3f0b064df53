"""Compares the rollout speed of the torch engine with transformers' `model.generate`, at equal batch size, on one thread.

    python -m benchmarks.rollout [--base FOLDER] [--vllm] [--rows 64] [--tokens 48] [--rounds 7] [--json FILE]

Every round measures, one after the other: `model.generate` with one PEFT adapter; the engine with one adapter, with 8 and with 32
mixed in the batch; with --vllm also vLLM's CPU build with one and with 8. All sample at temperature 1, the same prompts, exactly
`--tokens` tokens a row. The ratios are of the same round, and the medians over the rounds are printed. The engine does more than
`model.generate`: it records log-probs, and a row's tokens and bits do not depend on its neighbours.
"""

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from base_model.adapter import Adapter, init_adapter, save_adapter
from base_model.decoder import Decoder
from base_model.device import prepare_cpu
from benchmarks._report import Goal, Report, in_turns_async, make_table, parsed, parser, ratio, show
from common.settings import TINY
from common.wire.messages import AdapterRef, LoraSpec, Sampling, TrajectoryRef, TurnRequest
from common.wire.transcript import shown
from rollout_service.__main__ import load_vllm
from rollout_service.embedded.backbone.fused import FusedDecoder
from rollout_service.embedded.torch_engine import TorchEngine
from rollout_service.engine import Engine
from rollout_service.settings import RolloutSettings

NUM_ADAPTERS = (1, 8, 32)
GROUP_SIZE = 8


class NoEnd:
    """Turns end by length alone, so that all measure the same number of tokens."""

    end_of_turn_ids: tuple[int, ...] = ()

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return ""

    def to_json(self) -> str:
        raise NotImplementedError("no grammar is asked for here")


def adapter_files(decoder: Decoder, seed: int) -> dict[str, bytes]:
    """An adapter's files, random."""
    initial = init_adapter(LoraSpec(8, 16.0), decoder.linear_shapes(), seed)
    random = torch.Generator().manual_seed(seed)
    b = {name: torch.randn(t.shape, generator=random) * 0.02 for name, t in initial.b.items()}
    return save_adapter(Adapter(initial.spec, initial.a, b), "tiny")


def prompts(rows: int) -> np.ndarray:
    """One prompt a group, all of 16 tokens: [rows, 16]."""
    groups = -(-rows // GROUP_SIZE)
    tokens = np.random.default_rng(0).integers(97, 122, (groups, 16))
    return tokens.repeat(GROUP_SIZE, axis=0)[:rows]


def peft_generate(base: Path, folder: Path, rows: int, num_tokens: int) -> Callable[[], int]:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(folder)).eval()
    model.generation_config.eos_token_id = None
    given = torch.from_numpy(prompts(rows))
    options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "pad_token_id": 0}

    def generate() -> int:
        with torch.inference_mode():
            mask = torch.ones_like(given)
            out = model.generate(given, attention_mask=mask, max_new_tokens=num_tokens, **options)
        return out.numel() - given.numel()

    return generate


def request(
    adapter: AdapterRef, tokens: Sequence[int] | np.ndarray, sample: int, num_tokens: int, temperature: float = 1.0
) -> TurnRequest:
    return TurnRequest(
        id=f"{adapter}/{sample}",
        tenant=adapter.tenant,
        job=adapter.job,
        partition=0,
        adapter=adapter,
        trajectory=TrajectoryRef("train", 1, sample // GROUP_SIZE, sample % GROUP_SIZE),
        turn=0,
        transcript=shown(tokens),
        sampling=Sampling(max_tokens=num_tokens, temperature=temperature, stop_ids=()),
    )


async def engine_speed(engine: Engine, asked: Sequence[TurnRequest]) -> float:
    """Tokens a second."""
    started = time.perf_counter()
    done = await asyncio.gather(*[engine.generate(r, beat=lambda: None) for r in asked])
    return sum(len(g.tokens) for g in done) / (time.perf_counter() - started)


def side_by_side(refs: Sequence[AdapterRef], rows: int, num_tokens: int) -> list[TurnRequest]:
    """Requests in which each adapter has as many rows as the others, next to each other."""
    return [request(refs[i * len(refs) // rows], tokens, i, num_tokens) for i, tokens in enumerate(prompts(rows))]


async def generate_speed(generate: Callable[[], int]) -> float:
    started = time.perf_counter()
    return generate() / (time.perf_counter() - started)


async def measure(base: Path, rows: int, num_tokens: int, rounds: int, *, with_vllm: bool) -> dict[str, float]:
    decoder = Decoder.load(base)
    files = [adapter_files(decoder, i) for i in range(max(NUM_ADAPTERS))]
    refs = [AdapterRef("bench", f"job{i}", 1) for i in range(max(NUM_ADAPTERS))]
    engines: dict[str, Engine] = {"engine": TorchEngine(FusedDecoder(decoder, exact=False), NoEnd())}
    if with_vllm:
        settings = RolloutSettings(engine="vllm", base_models=f"base={base}", max_context=256)
        engines["vllm"] = load_vllm(settings, base)
    for engine in engines.values():
        await engine.start()
        for ref, content in zip(refs, files, strict=True):
            await engine.load_files(ref, content)
    with tempfile.TemporaryDirectory() as folder:
        for name, data in files[0].items():
            (Path(folder) / name).write_bytes(data)
        generate = peft_generate(base, Path(folder), rows, num_tokens)
    asked = {num: side_by_side(refs[:num], rows, num_tokens) for num in NUM_ADAPTERS}
    cases = [("engine", num) for num in NUM_ADAPTERS] + [("vllm", num) for num in NUM_ADAPTERS[:2] if with_vllm]
    mixed = {f"{name}_{num}": partial(engine_speed, engines[name], asked[num]) for name, num in cases}
    speeds = await in_turns_async({**mixed, "generate": partial(generate_speed, generate)}, rounds)
    for engine in engines.values():
        await engine.stop()
    return summary(speeds)


def summary(speeds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Medians; each ratio is taken within its round."""
    found: dict[str, float] = {}
    for name, each in speeds.items():
        found[f"{name}_tokens_per_s"] = statistics.median(each)
        found[f"{name}_over_generate"] = ratio(each, speeds["generate"])
        found[f"{name}_over_engine_1"] = ratio(each, speeds["engine_1"])
    return found


def report(given: Any) -> Report:
    prepare_cpu(1)
    found = asyncio.run(measure(given.base, given.rows, given.tokens, given.rounds, with_vllm=given.vllm))
    names = [name.removesuffix("_tokens_per_s") for name in found if name.endswith("_tokens_per_s")]
    lines = [(name, found[f"{name}_tokens_per_s"], found[f"{name}_over_generate"]) for name in names]
    goals = [
        Goal("8 adapters against model.generate with one", found["engine_8_over_generate"], 1.0, " x"),
        Goal("8 adapters against the engine with one", found["engine_8_over_engine_1"], 0.85, " x"),
        Goal("32 adapters against the engine with one", found["engine_32_over_engine_1"], 0.9, " x"),
    ]
    title = f"Rollout, {given.rows} rows of {given.tokens} tokens"
    return Report([make_table(title, ("with so many adapters", "tokens/s", "x generate"), lines)], found, goals)


if __name__ == "__main__":
    options = parser(__doc__, rows=64, tokens=48, rounds=7)
    options.add_argument("--base", type=Path, default=TINY, metavar="FOLDER", help="default: `tiny`")
    options.add_argument("--vllm", action="store_true", help="vLLM too, which `make vllm` installs")
    given = parsed(options, {"rows": 32, "tokens": 8, "rounds": 1})
    show(report(given), given.json)
