"""The measurements of `benchmarks.gpu` on a base model, a function each."""

import asyncio
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from base_model.adapter import load_adapter, save_adapter
from base_model.decoder import Decoder
from base_model.stacked import FusedAdapter, fuse
from benchmarks._gpu_bases import Shape, random_model, random_modules
from benchmarks._lengths import LONGEST, answer_tokens
from benchmarks._report import in_turns, ratio, timed
from benchmarks.fused import Job, all_active, fused
from benchmarks.rollout import GROUP_SIZE, NoEnd, adapter_files, request
from benchmarks.training import ADAPTER, LORA, PeftLoop, Workload, initial_state, make_step, step_of
from common.models.base_shape import BaseShape
from common.models.footprint import MAX_SCORES, TrainingBytes, training_bytes
from common.wire.messages import AdapterRef, Rows, TrajectoryRef, f32, i32, u8
from common.wire.transcript import transcript
from harness.bases import FIRST_WORD, LAST_WORD, QWEN3_06B, make_random_base
from rollout_service.embedded.backbone.interface import EngineBackbone
from rollout_service.embedded.batch import RunningRows
from rollout_service.embedded.pools import EngineLimits
from rollout_service.embedded.row_states import TurnRow
from rollout_service.embedded.torch_engine import TorchEngine
from trainer_service.batch import parse_rows
from trainer_service.open_step import TrainState
from trainer_service.packing import Budget
from trainer_service.selftest import random_rows
from trainer_service.training import Trainer

ROWS = 64
PROMPT = 64
NUM_ROWS, NUM_PROMPT, NUM_WRITTEN = 8, 3072, 1024
ROW = NUM_PROMPT + NUM_WRITTEN
"""Rows of the step whose memory is planned, and their tokens."""
TOP = 8
PROFILED = 8
"""Steps of decoding that warm up, or that a profiler sees: it keeps every call."""
SOURCE = "def grade(sample, item):\n    return sum(map(ord, sample['output_text'])) % 5 / 4\n"
GRADER = {"type": "python", "name": "sum", "source": SOURCE}
"""Rewards differ, whatever a model with random weights writes."""
JOB_S = 300.0
"""The longest that two jobs are waited for."""


# ---- training -------------------------------------------------------------------------------------------------------


def heavy_tailed(trainer: Trainer, num_jobs: int) -> list[Job]:
    """A step of each of several jobs."""
    work = Workload("heavy tail", 4, 8, (PROMPT, PROMPT + 1), (1, 2))
    jobs: list[Job] = []
    for job in range(num_jobs):
        step = make_step(work, job, num_written=lambda g, s, job=job: answer_tokens(TrajectoryRef("train", job, g, s)))
        jobs.append((all_active(step), initial_state(trainer, job, LORA)))
    return jobs


def measure_training(trainer: Trainer, jobs: list[Job], repetitions: int) -> dict[str, float]:
    """Fused and separate steps in turn; operations and padding of one fused step."""
    device = trainer.backbone.device
    runs: dict[str, Callable[[], object]] = {
        "fused": lambda: fused(trainer, jobs),
        "separate": lambda: [trainer.step(*job, lambda: None) for job in jobs],
    }
    seconds = in_turns({name: timed(done(work, device)) for name, work in runs.items()}, repetitions)
    peak = peak_bytes(device, runs["fused"])
    with FlopCounterMode(display=False) as counter:
        metrics = [trained.metrics for trained in fused(trainer, jobs)]
    forward = [m["forward_tokens"] or 0.0 for m in metrics]
    padding = sum(tokens * (m["padding_share"] or 0.0) for tokens, m in zip(forward, metrics, strict=True)) / sum(
        forward
    )
    fused_s = statistics.median(seconds["fused"])
    num_tokens = sum(len(step.rows.tokens) for step, _ in jobs)
    return {
        "tokens": num_tokens,
        "tokens_per_s": num_tokens / fused_s,
        "to_separate": ratio(seconds["separate"], seconds["fused"]),
        "flops_per_s": counter.get_total_flops() * (1 - padding) / fused_s,
        "padding": padding,
        "peak_bytes": peak,
    }


def peak_bytes(device: torch.device, work: Callable[[], object]) -> float:
    """The most memory of a GPU that is taken at one time; NaN elsewhere, where no work is done."""
    if device.type != "cuda":
        return float("nan")
    torch.cuda.reset_peak_memory_stats(device)
    work()
    return float(torch.cuda.max_memory_allocated(device))


def measure_kernels(
    default: Trainer, decoder: Decoder, names: Sequence[str], jobs: list[Job], repetitions: int
) -> dict[str, float]:
    """Steps of several jobs, by this trainer and with these kernels in turn; operations are those of this trainer.

    Raises ImportError without what a kernel needs, RuntimeError where it cannot run.
    """
    trainers = {"kernels": _with_kernels(default, decoder, names), "default": default}
    device = default.backbone.device
    runs = {name: timed(done(lambda each=each: fused(each, jobs), device)) for name, each in trainers.items()}
    seconds = in_turns(runs, repetitions)
    with FlopCounterMode(display=False) as counter:
        fused(default, jobs)
    fused_s = statistics.median(seconds["kernels"])
    return {
        "tokens_per_s": sum(len(step.rows.tokens) for step, _ in jobs) / fused_s,
        "flops_per_s": counter.get_total_flops() / fused_s,
        "to_default": ratio(seconds["default"], seconds["kernels"]),
    }


def _with_kernels(default: Trainer, decoder: Decoder, names: Sequence[str]) -> Trainer:
    """A trainer over the same weights that keeps as much for the backward."""
    from trainer_service.backbone.device_kernels.kernel_choice import use_kernels  # here: they import transformers
    from trainer_service.backbone.modules import ModulesBackbone

    own, backbone = default.backbone, random_modules(decoder)
    assert isinstance(own, ModulesBackbone) and isinstance(backbone, ModulesBackbone)
    use_kernels(backbone, names)
    alike = replace(backbone, num_checkpointed=own.num_checkpointed, max_scores=own.max_scores)
    return Trainer(alike, default.budget)


def measure_plan(trainer: Trainer, shape: Shape) -> dict[str, float]:
    """Trains 8 rows of 4,096 tokens, as many in a micro-batch as fit. Both figures are without what the process takes, and without
    holes between allocations; elsewhere than on a GPU nothing is trained, and the peak is NaN.

    Raises ImportError without transformers.
    """
    from trainer_service.backbone.modules import ModulesBackbone  # here: a lent GPU may lack transformers

    backbone = trainer.backbone
    assert isinstance(backbone, ModulesBackbone), "it is what `marlaas plan --gpu` reckons with"
    trainer = replace(trainer, backbone=replace(backbone, max_scores=MAX_SCORES), share_prefixes=False)
    itemsize, num_checkpointed = backbone.model.dtype.itemsize, backbone.num_checkpointed
    planned = _planned(trainer.budget, shape, itemsize=itemsize, num_checkpointed=num_checkpointed)
    before = torch.cuda.memory_allocated(backbone.device) if backbone.device.type == "cuda" else 0
    taken = peak_bytes(backbone.device, lambda: _train(trainer)) - before
    wanted = planned.total - planned.process - planned.holes
    return {"peak_bytes": planned.weights + taken, "planned_bytes": wanted}


def _planned(budget: Budget, shape: Shape, *, itemsize: int, num_checkpointed: int) -> TrainingBytes:
    most = min(budget.tokens, budget.num_bytes / budget.bytes_per_token if budget.bytes_per_token else budget.tokens)
    tokens = min(NUM_ROWS, max(1, int(most // ROW))) * ROW
    c = shape.config
    sizes = BaseShape(
        num_layers=c.num_layers,
        hidden=c.hidden,
        ffn=shape.inner,
        num_heads=c.num_heads,
        num_kv_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        vocab=c.vocab,
        context=c.context,
        tied=c.tied,
        head_norms=True,
    )
    return training_bytes(
        sizes,
        tokens=tokens,
        longest=ROW,
        itemsize=itemsize,
        rank=LORA.rank,
        gpu=True,
        num_checkpointed=num_checkpointed,
    )


def _train(trainer: Trainer) -> None:
    prompts, written = np.full(NUM_ROWS, NUM_PROMPT), np.full(NUM_ROWS, NUM_WRITTEN)
    rows = random_rows(num_prompt=prompts, num_written=written, group_size=4)
    trainer.step(step_of(rows), initial_state(trainer, 0, LORA), lambda: None)


# ---- decoding -------------------------------------------------------------------------------------------------------


def random_adapters(decoder: Decoder, num: int) -> list[FusedAdapter]:
    shapes, layers = decoder.linear_shapes(), decoder.config.num_layers
    files = (adapter_files(decoder, seed) for seed in range(num))
    return [fuse(load_adapter(each), shapes, layers, like=decoder.embedding) for each in files]


def rows_of(adapters: Sequence[FusedAdapter]) -> list[TurnRow]:
    """ROWS turns, evenly over the adapters, of the law's lengths, with prompts of their own."""
    rng = np.random.default_rng(0)
    rows: list[TurnRow] = []
    for number in range(ROWS):
        job = number % len(adapters)
        num_tokens = answer_tokens(TrajectoryRef("train", 1, number // 8, number % 8))
        asked = request(AdapterRef("bench", f"job{job}", 1), rng.integers(0, 250, PROMPT), number, num_tokens)
        rows.append(TurnRow(asked, adapters[job], handle=None))
    return rows


def decode(model: EngineBackbone, rows: Sequence[TurnRow], num_steps: int = LONGEST) -> float:
    """Seconds of the forwards after the first, prefills left out."""
    batch = RunningRows(model, end_ids=(), decode=lambda _: "", limits=EngineLimits(slots=ROWS, kv_bytes=8 << 30))
    with torch.inference_mode():
        for row in rows:
            batch.add(TurnRow(row.request, row.adapter, handle=None))
        batch.advance()
        first_s = batch.meter.decode_s
        for _ in range(num_steps):
            if batch.has_work:
                batch.advance()
    return batch.meter.decode_s - first_s


def bytes_read(model: EngineBackbone, rows: Sequence[TurnRow]) -> float:
    """Bytes that all forwards but the first have to read at least."""
    config, size = model.config, model.embedding.element_size()
    row_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * size
    shapes = model.linear_shapes().values()
    weights = size * (sum(out * width for out, width in shapes) + model.embedding.numel())  # the head is as large
    steps_of: Counter[FusedAdapter] = Counter()
    total = 0.0
    for row in rows:
        steps = row.request.sampling.max_tokens - 1
        total += row_bytes * sum(row.request.num_prompt + t for t in range(1, steps + 1))
        assert row.adapter is not None, "every row has an adapter"
        steps_of[row.adapter] = max(steps_of[row.adapter], steps)
    return total + weights * max(steps_of.values()) + sum(a.num_bytes * n for a, n in steps_of.items())


def measure_decoding(model: EngineBackbone, adapters: Sequence[FusedAdapter], repetitions: int) -> dict[str, float]:
    """Decodes with one adapter and with all in turn."""
    alone, mixed = rows_of(adapters[:1]), rows_of(adapters)
    num_tokens = sum(row.request.sampling.max_tokens - 1 for row in mixed)
    decode(model, mixed, PROFILED)
    seconds = [(decode(model, alone), decode(model, mixed)) for _ in range(repetitions)]
    mixed_s = statistics.median(s for _, s in seconds)
    return {
        "tokens_per_s": num_tokens / mixed_s,
        "to_one_adapter": statistics.median(one / all_ for one, all_ in seconds),
        "bytes_per_s": bytes_read(model, mixed) / mixed_s,
    }


# ---- both ends ------------------------------------------------------------------------------------------------------


def measure_against_peft(trainer: Trainer, decoder: Decoder, jobs: list[Job], repetitions: int) -> dict[str, float]:
    """Fused steps, and one step of a plain PEFT loop for each job, in turn. Raises ImportError without PEFT."""
    loop, base = PeftLoop(random_model(decoder, "sdpa")), trainer.backbone
    batches = [parse_rows(step.rows, version=0, vocab=base.vocab, context=base.context) for step, _ in jobs]
    runs: dict[str, Callable[[], object]] = {
        "fused": lambda: fused(trainer, jobs),
        "peft": lambda: [loop.step(batch) for batch in batches],
    }
    seconds = in_turns({name: timed(done(work, base.device)) for name, work in runs.items()}, repetitions)
    return {
        "steps_per_s": len(jobs) / statistics.median(seconds["fused"]),
        "peft_steps_per_s": len(jobs) / statistics.median(seconds["peft"]),
        "to_peft": ratio(seconds["peft"], seconds["fused"]),
    }


def measure_gap(trainer: Trainer, model: EngineBackbone) -> dict[str, float]:
    """Samples rows on the embedded engine with an adapter that is not at zero, and trains on them: the mean difference between
    both log-probs of a token, and what both base models are in."""
    initial = initial_state(trainer, 0, LORA)
    noise_P = torch.randn(len(initial.values_P), generator=torch.Generator().manual_seed(0)) * 0.02
    state = replace(initial, values_P=initial.values_P + noise_P.to(initial.values_P.device))
    trained = trainer.step(step_of(asyncio.run(_sampled(model, state))), state, lambda: None)
    return {"gap": trained.metrics["sampling_gap"] or 0.0, "tokens": float(trained.trained_tokens)}


async def _sampled(model: EngineBackbone, state: TrainState) -> Rows:
    """A group of 8 samples for each of some prompts."""
    engine = TorchEngine(model, NoEnd(), limits=EngineLimits(slots=ROWS, kv_bytes=8 << 30))
    await engine.start()
    await engine.load_files(ADAPTER, save_adapter(state.adapter, "base"))
    prompts = np.random.default_rng(0).integers(0, 250, (ROWS // GROUP_SIZE, PROMPT)).repeat(GROUP_SIZE, axis=0)
    asked = [
        request(ADAPTER, prompt, n, answer_tokens(TrajectoryRef("train", 2, n, 0))) for n, prompt in enumerate(prompts)
    ]
    found = await asyncio.gather(*(engine.generate(each, beat=lambda: None) for each in asked))
    await engine.stop()
    counts = [len(each.tokens) for each in found]
    return Rows(
        transcript=transcript(
            np.concatenate([[*prompt, *each.tokens] for prompt, each in zip(prompts, found, strict=True)]),
            np.concatenate([[0.0] * PROMPT + each.logprobs for each in found]),
            np.concatenate([[0] * PROMPT + [1] * count for count in counts]),
        ),
        lengths=i32([PROMPT + count for count in counts]),
        groups=i32(np.arange(ROWS) // GROUP_SIZE),
        samples=i32(np.arange(ROWS) % GROUP_SIZE),
        rewards=f32(np.arange(ROWS) % 2),
        versions=i32([0] * ROWS),
        truncated=u8([0] * ROWS),
    )


def measure_job(shape: str, device: torch.device) -> dict[str, float]:
    """A step of each of two jobs through all services, on one device. Raises ImportError for what the services lack."""
    names = ("MARLAAS_ROLLOUT_DEVICE", "MARLAAS_TRAINER_DEVICE")
    variables = dict.fromkeys(names, str(device)) | {"MARLAAS_MAX_CONTEXT": "2048"}
    with tempfile.TemporaryDirectory() as folder:
        base = folder_of_shape(shape, Path(folder))
        return asyncio.run(_trained({"MARLAAS_BASE_MODELS": f"base={base}", **variables}))


def folder_of_shape(shape: str, parent: Path) -> Path:
    """Writes a base model of that shape, or of Qwen3-0.6B's in place of a larger one."""
    sizes, last_word = ({}, FIRST_WORD) if shape == "tiny" else (QWEN3_06B, LAST_WORD)
    return make_random_base(parent / "base", last_word=last_word, **sizes)


async def _trained(variables: dict[str, str]) -> dict[str, float]:
    from harness.live import running  # here: a lent GPU may lack what the services need, Redis first of all

    since = time.monotonic()
    async with running(environment=variables, notify=print) as (_, api):
        start_s = time.monotonic() - since
        ids = [await _submit(api, seed) for seed in range(2)]
        ended = await api.until_done(*ids, seconds=JOB_S)
        whole_s = time.monotonic() - since
        if failed := [job["error"] for job in ended if job["status"] != "succeeded"]:
            raise RuntimeError(f"a job ended otherwise than well: {failed[0]}")
        events = [event for job in ids for event in await api.events(job)]
    metrics = [event["data"] for event in events if event["type"] == "metrics" and "loss" in event["data"]]
    return {"start_s": start_s, "whole_s": whole_s, "gap": max(row["sampling_gap"] for row in metrics)}


async def _submit(api: Any, seed: int) -> str:
    hyper = {"batch_size": 2, "group_size": 4, "max_tokens": 16, "lora_rank": LORA.rank, "max_steps": 1}
    body = {
        "model": "base",
        "seed": seed,
        "training_file": await api.file("sort", "train", 32),
        "method": {"type": "reinforcement", "reinforcement": {"grader": GRADER, "hyperparameters": hyper}},
    }
    return (await api.post("/fine_tuning/jobs", body))["id"]


# ---- the device -----------------------------------------------------------------------------------------------------


def done(work: Callable[[], object], device: torch.device) -> Callable[[], None]:
    """Waits for the device after the work, so that a clock around it counts all of it; and now, for what came before."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    def do() -> None:
        work()
        wait()

    wait()
    return do


def busiest(run: Callable[[], object], device: torch.device) -> list[tuple[str, float]]:
    """Operations by their share of the device's time, the largest first."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=activities) as profiled:
        run()
    events: list[Any] = list(profiled.key_averages())
    kind = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    shares = Counter({event.key: getattr(event, kind) for event in events})
    return [(name[:60], 100 * took / max(1.0, shares.total())) for name, took in shares.most_common(TOP)]
