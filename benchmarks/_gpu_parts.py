"""The measurements of `benchmarks.gpu` on a base model, a function each."""

import asyncio
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from base_model.adapter import load_adapter, save_adapter
from base_model.decoder import Decoder
from base_model.stacked import FusedAdapter, fuse
from benchmarks._gpu_bases import Shape, random_model
from benchmarks._lengths import answer_tokens
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
from trainer_service.open_step import OpenStep, TrainState
from trainer_service.packing import Budget
from trainer_service.selftest import random_rows
from trainer_service.training import Trainer

ROWS = 64
PROMPT = 64
NUM_ROWS, NUM_PROMPT, NUM_WRITTEN = 8, 3072, 1024
ROW = NUM_PROMPT + NUM_WRITTEN
"""Rows of the step whose memory is planned, and their tokens."""
TOP = 8
STEPS = 32
"""Steps of decoding that are timed."""
SIDE, TOKENS = 8192, 7432
"""Sides of the square product that shows the most operations a second; tokens of the other products."""
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


def measure_training(
    trainer: Trainer, decoder: Decoder, jobs: list[Job], repetitions: int, peak_flops: float
) -> dict[str, Any]:
    """Fused steps: the time of the whole, and of its three phases; what the device does meanwhile; and the operations of computed
    tokens. Of a beginning that rows share, the tokens count once."""
    device = trainer.backbone.device
    runs: dict[str, Callable[[], Any]] = {
        "whole": timed(done(lambda: fused(trainer, jobs), device)),
        "phases": lambda: _phases(trainer, jobs),
    }
    took = in_turns(runs, repetitions, warm_up=2)
    metrics = [trained.metrics for trained in fused(trainer, jobs)]
    computed = sum((m["forward_tokens"] or 0.0) * (1 - (m["padding_share"] or 0.0)) for m in metrics)
    step_s = statistics.median(took["whole"])
    phases = zip(("begin_ms", "batches_ms", "finish_ms"), zip(*took["phases"], strict=True), strict=True)
    return {
        **{name: 1e3 * statistics.median(seconds) for name, seconds in phases},
        **device_work(lambda: fused(trainer, jobs), device, step_s),
        "computed": computed,
        "tokens_per_s": computed / step_s,
        "mfu_percent": 100 * training_flops(decoder, jobs, computed) / step_s / peak_flops,
        "peak_gib": peak_bytes(device, lambda: fused(trainer, jobs)) / 2**30,
    }


def _phases(trainer: Trainer, jobs: Sequence[Job]) -> list[float]:
    """Seconds in which fused steps begin, compute their micro-batches, and end."""
    opened: list[OpenStep] = []

    def compute() -> None:
        while under_way := [step.opened for step in opened if not step.done]:
            trainer.micro_batch(under_way)

    parts: tuple[Callable[[], object], ...] = (
        lambda: opened.extend([trainer.begin(*job) for job in jobs]),
        compute,
        lambda: [trainer.finish(step) for step in opened],
    )
    return [timed(done(part, trainer.backbone.device))() for part in parts]


def training_flops(decoder: Decoder, jobs: Sequence[Job], computed: float) -> float:
    """Operations of products with weights: two a weight in the forward, and two for the gradient of what goes in, for the head of
    written tokens alone. Attention and adapters, a few percent, are left out; and what checkpoints compute again."""
    written = sum(len(step.rows.tokens) - PROMPT * len(step.rows.lengths) for step, _ in jobs)
    weights = sum(out * width for out, width in decoder.linear_shapes().values())
    return 4 * (computed * weights + written * decoder.head.numel())


def peak_bytes(device: torch.device, work: Callable[[], object]) -> float:
    """The most memory of a GPU that is taken at one time; NaN elsewhere, where no work is done."""
    if device.type != "cuda":
        return float("nan")
    torch.cuda.reset_peak_memory_stats(device)
    work()
    return float(torch.cuda.max_memory_allocated(device))


def measure_plan(trainer: Trainer, shape: Shape) -> dict[str, float]:
    """Trains 8 rows of 4,096 tokens, as many in a micro-batch as fit. Both figures are without what the process takes, and without
    holes between allocations; elsewhere than on a GPU nothing is trained, and the peak is NaN.

    Raises ImportError without transformers.
    """
    from trainer_service.backbone.modules import ModulesBackbone  # here: a lent GPU may lack transformers

    backbone = trainer.backbone
    assert isinstance(backbone, ModulesBackbone), "it is what `marlaas plan --gpu` reckons with"
    trainer = replace(trainer, backbone=replace(backbone, max_scores=MAX_SCORES), share_prefixes=False)
    planned = _planned(trainer.budget, backbone, shape)
    before = torch.cuda.memory_allocated(backbone.device) if backbone.device.type == "cuda" else 0
    taken = peak_bytes(backbone.device, lambda: _train(trainer)) - before
    wanted = planned.total - planned.process - planned.holes
    return {"peak_bytes": planned.weights + taken, "planned_bytes": wanted}


def _planned(budget: Budget, backbone: Any, shape: Shape) -> TrainingBytes:
    most = min(budget.tokens, budget.num_bytes / budget.bytes_per_token if budget.bytes_per_token else budget.tokens)
    tokens = min(NUM_ROWS, max(1, int(most // ROW))) * ROW
    c, size = shape.config, backbone.model.dtype.itemsize
    widths = (c.num_heads, c.num_kv_heads, c.head_dim, c.vocab, c.context)
    sizes = BaseShape(c.num_layers, c.hidden, shape.inner, *widths, tied=c.tied, head_norms=True)
    plan = partial(training_bytes, sizes, tokens=tokens, longest=ROW, itemsize=size, rank=LORA.rank, gpu=True)
    return plan(num_checkpointed=backbone.num_checkpointed)


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
    """ROWS turns, evenly over the adapters, with prompts of their own; none ends while it is timed."""
    rng = np.random.default_rng(0)
    rows: list[TurnRow] = []
    for number in range(ROWS):
        job = number % len(adapters)
        asked = request(AdapterRef("bench", f"job{job}", 1), rng.integers(0, 250, PROMPT), number, 2 * STEPS)
        rows.append(TurnRow(asked, adapters[job], handle=None))
    return rows


def under_way(model: EngineBackbone, rows: Sequence[TurnRow]) -> RunningRows:
    """The rows after their prompts and two steps, which warm up."""
    batch = RunningRows(model, end_ids=(), decode=lambda _: "", limits=EngineLimits(slots=ROWS, kv_bytes=8 << 30))
    for row in rows:
        batch.add(TurnRow(row.request, row.adapter, handle=None))
    for _ in range(3):
        batch.advance()
    return batch


def decode(model: EngineBackbone, rows: Sequence[TurnRow]) -> float:
    """Seconds of a step."""
    with torch.inference_mode():
        batch = under_way(model, rows)
        first_s = batch.meter.decode_s
        for _ in range(STEPS):
            batch.advance()
    return (batch.meter.decode_s - first_s) / STEPS


def bytes_read(model: EngineBackbone, rows: Sequence[TurnRow]) -> float:
    """Bytes that a step, amid the timed ones, has to read at least."""
    config, size = model.config, model.embedding.element_size()
    token_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * size
    shapes = model.linear_shapes().values()
    weights = size * (sum(out * width for out, width in shapes) + model.embedding.numel())  # the head is as large
    adapters = {row.adapter for row in rows if row.adapter}
    kept = sum(row.request.num_prompt + STEPS // 2 for row in rows) * token_bytes
    return weights + kept + sum(adapter.num_bytes for adapter in adapters)


def measure_decoding(
    model: EngineBackbone, adapters: Sequence[FusedAdapter], repetitions: int, peak: float
) -> dict[str, Any]:
    """Decodes with one adapter and with all in turn; and what the device does in a step with all. `peak`: bytes a second."""
    alone, mixed = rows_of(adapters[:1]), rows_of(adapters)
    seconds = in_turns({"alone": lambda: decode(model, alone), "mixed": lambda: decode(model, mixed)}, repetitions)
    step_s = statistics.median(seconds["mixed"])
    per_s = bytes_read(model, mixed) / step_s
    with torch.inference_mode():
        worked = device_work(under_way(model, mixed).advance, model.embedding.device, step_s)
    figures = {"read_gb_per_s": per_s / 1e9, "mbu_percent": 100 * per_s / peak}
    return {**worked, **figures, "to_one_adapter": ratio(seconds["alone"], seconds["mixed"])}


# ---- both ends ------------------------------------------------------------------------------------------------------


def measure_against_peft(trainer: Trainer, decoder: Decoder, jobs: list[Job]) -> dict[str, float]:
    """Fused steps, and one step of a plain PEFT loop for each job, twice in turn. Raises ImportError without PEFT."""
    loop, base = PeftLoop(random_model(decoder, "sdpa")), trainer.backbone
    batches = [parse_rows(step.rows, version=0, vocab=base.vocab, context=base.context) for step, _ in jobs]
    runs: dict[str, Callable[[], object]] = {
        "fused": lambda: fused(trainer, jobs),
        "peft": lambda: [loop.step(batch) for batch in batches],
    }
    seconds = in_turns({name: timed(done(work, base.device)) for name, work in runs.items()}, 2)
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


def device_work(run: Callable[[], object], device: torch.device, step_s: float) -> dict[str, Any]:
    """Kernels of a run that takes `step_s` without a profiler, the share of the time in which the device is busy, and those that
    keep it so the longest. On a processor, torch's operations."""
    cuda = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda) as profiled:
        done(run, device)()
    events = [e for e in profiled.events() or () if not cuda or e.device_type.name == "CUDA"]
    took_us: Counter[str] = Counter()
    for event in events:
        took_us[event.name] += event.device_time if cuda else event.self_cpu_time_total
    busiest = [(name[:60], us / step_s / 1e4) for name, us in took_us.most_common(TOP)]
    busy = took_us.total() / step_s / 1e4
    return {"step_ms": 1e3 * step_s, "kernels": len(events), "busy_percent": busy, "busiest": busiest}


def measure_ceilings(shape: Shape, device: torch.device) -> dict[str, float]:
    """Measures the most that the device does: a copy's bytes a second, read and written; operations a second of products, in bfloat16;
    and the time of grouped products into rank 8 and out of it, for 8 adapters."""
    cuda = device.type == "cuda"
    hidden, inner, tokens = shape.config.hidden, shape.inner, TOKENS if cuda else SIDE // 128
    ends_G = torch.arange(1, 9, dtype=torch.int32, device=device) * (tokens // 8)

    def drawn(*size: int) -> torch.Tensor:
        return torch.randn(*size, device=device, dtype=torch.bfloat16)

    source, target = torch.empty(2, 1 << (29 if cuda else 20), device=device, dtype=torch.bfloat16)
    found = {"copy GB/s": 2 * source.nbytes / _seconds(lambda: target.copy_(source), device) / 1e9}
    for sizes in ((SIDE,) * 3 if cuda else (64,) * 3, (tokens, hidden, inner), (tokens, inner, hidden)):
        n, k, m = sizes
        a, b = drawn(n, k), drawn(k, m)
        found[f"product {n} x {k} x {m}, TFLOP/s"] = 2 * n * k * m / _seconds(lambda a=a, b=b: a @ b, device) / 1e12
    for name, k, m in (("into", hidden, 8), ("out of", 8, hidden)):
        a, b = drawn(tokens, k), drawn(8, m, k).transpose(1, 2)
        work = partial(torch.nn.functional.grouped_mm, a, b, offs=ends_G)
        found[f"grouped product {name} rank 8, µs"] = 1e6 * _seconds(work, device)
    return found


def _seconds(work: Callable[[], object], device: torch.device, number: int = 20) -> float:
    """Seconds of one of so many runs, one after the other."""

    def repeat() -> None:
        for _ in range(number):
            work()

    done(repeat, device)()  # it warms up
    return timed(done(repeat, device))() / number
