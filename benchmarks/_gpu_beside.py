"""Other systems on the device of `benchmarks.gpu`, where they are installed: vLLM's decoding, and a step of TRL's GRPOTrainer."""

import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks._gpu_parts import PROMPT, ROWS, folder_of_shape
from benchmarks._lengths import answer_tokens
from benchmarks._report import in_turns_async, ratio
from benchmarks.peers.settings import Job, Settings
from benchmarks.rollout import GROUP_SIZE, NoEnd, engine_speed, random_files, request
from common.messages import AdapterRef, TrajectoryRef, TurnRequest
from common.skills import generate
from common.text.tokens import ChatTokenizer
from rollout_service.process.adapter_files import linear_shapes
from rollout_service.process.process_engine import ProcessEngine
from rollout_service.process.vllm_engine import VllmOptions, vllm_engine

CONTEXT, RANK = 2048, 8
BATCH = Settings(batch_size=4, group_size=GROUP_SIZE, max_tokens=64, lora_rank=RANK)
"""TRL's; a batch as large as a job's in `training`."""


# ---- vLLM -----------------------------------------------------------------------------------------------------------


class EndlessTurns(NoEnd):
    """The same, with the base model's figures that vLLM needs."""

    def __init__(self, known: ChatTokenizer) -> None:
        self.context, self.vocab_size = CONTEXT, known.vocab_size


def measure_vllm(shape: str, device: torch.device, num_adapters: int, repetitions: int) -> dict[str, float]:
    """Decodes with one adapter and with several in turn, prefills included. Raises InvalidInput where vLLM is not installed."""
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_decoded(folder_of_shape(shape, Path(folder)), device, num_adapters, repetitions))


async def _decoded(base: Path, device: torch.device, num_adapters: int, repetitions: int) -> dict[str, float]:
    engine = vllm_engine(_options(base, device, num_adapters), EndlessTurns(ChatTokenizer.load(base, CONTEXT)))
    await engine.start()
    try:
        return await _speeds(engine, base, num_adapters, repetitions)
    finally:
        await engine.stop()


async def _speeds(engine: ProcessEngine, base: Path, num_adapters: int, repetitions: int) -> dict[str, float]:
    refs = [AdapterRef("bench", f"job{number}", 1) for number in range(num_adapters)]
    shapes = linear_shapes(base)
    for seed, ref in enumerate(refs):
        await engine.load_files(ref, random_files(shapes, seed))
    cases = {"one": partial(engine_speed, engine, _asked(refs[:1])), "all": partial(engine_speed, engine, _asked(refs))}
    found = await in_turns_async(cases, repetitions)
    return {"tokens_per_s": statistics.median(found["all"]), "to_one_adapter": ratio(found["all"], found["one"])}


def _asked(refs: Sequence[AdapterRef]) -> list[TurnRequest]:
    """ROWS turns, evenly over the adapters, with the lengths of `decoding`."""
    prompts = np.random.default_rng(0).integers(0, 250, (ROWS, PROMPT))
    lengths = [answer_tokens(TrajectoryRef("train", 1, *divmod(number, GROUP_SIZE))) for number in range(ROWS)]
    return [request(refs[i % len(refs)], prompts[i], i, lengths[i]) for i in range(ROWS)]


def _options(base: Path, device: torch.device, num_adapters: int) -> VllmOptions:
    return VllmOptions(
        folder=base,
        device=device.type,
        dtype="bfloat16",
        slots=ROWS,
        max_loras=num_adapters,
        max_known=num_adapters,
        max_lora_rank=RANK,
        tensor_parallel=1,
        memory_fraction=0.9,
        kv_bytes=1 << 30,
        enforce_eager=False,
        idle_adapter_bytes=0,
    )


# ---- TRL ------------------------------------------------------------------------------------------------------------


def measure_trl(shape: str, device: torch.device, repetitions: int) -> dict[str, float]:
    """Whole steps of one job, generation by transformers: the median of those after the first. Raises ImportError without TRL."""
    with tempfile.TemporaryDirectory() as folder:
        times = _trained(folder_of_shape(shape, Path(folder)), device, 2 + repetitions)
    step_s = float(np.median(np.diff(times)[1:]))
    return {"step_s": step_s, "rows_per_s": BATCH.rows / step_s}


def _trained(base: Path, device: torch.device, num_steps: int) -> list[float]:
    """The times at which the answers of each step were rewarded, which is once a step."""
    from datasets import Dataset  # here: TRL needs them
    from peft import LoraConfig
    from trl import GRPOTrainer  # pyright: ignore[reportMissingImports]

    from benchmarks.peers.trl_jobs import config

    times: list[float] = []

    def rewards(completions: list[list[dict[str, str]]], **_: object) -> list[float]:
        times.append(time.perf_counter())
        return [len(turns[0]["content"]) % 5 / 4 for turns in completions]

    on_gpu = (
        {} if device.type == "cpu" else {"use_cpu": False, "bf16": True, "model_init_kwargs": {"dtype": "bfloat16"}}
    )
    settings = replace(BATCH, num_steps=num_steps)
    items = generate("add", seed=0, n=num_steps * BATCH.batch_size)
    trainer: Any = GRPOTrainer(
        model=str(base),
        reward_funcs=rewards,
        args=config(base / "trl", Job("bench", "add", 0), settings, **on_gpu),
        train_dataset=Dataset.from_list([{"prompt": item["messages"]} for item in items]),  # pyright: ignore
        peft_config=LoraConfig(r=RANK, lora_alpha=BATCH.lora_alpha, target_modules=list(BATCH.lora_targets)),
    )
    trainer.train()
    return times
