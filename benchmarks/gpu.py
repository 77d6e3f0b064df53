"""Measures on a GPU training and decoding in the shapes of larger models, and how much of the device they use for what.

    python -m benchmarks.gpu [--shapes qwen3-0.6b qwen3-8b] [--jobs 1 8 32] [--repetitions 3] [--seconds 540] [--json FILE]
    python -m benchmarks.gpu --quick                                  # one shape, one repetition: a minute or two
    python -m benchmarks.gpu --device cpu --shapes tiny --jobs 1 2    # tries the benchmark itself

Weights are random, in bfloat16; adapters have rank 8 on all linear layers. transformers' modules train and sample, as they do on CUDA
(`--backbone decoder`: ours). Answers have lengths log-normal with median 16 and 99th percentile 160 tokens. Of each shape:

    training   one step of each of N jobs, 4 groups of 8 rows each, fused, against N separate steps; and with 2 rows of 16 tokens each;
               and the most memory that a fused step takes on a GPU, weights included. MFU: floating-point operations of what is
               executed, less the share of padding, over what the device can do
    kernels    the same fused step of most jobs with each of `--kernels` (MARLAAS_TRAINER_KERNELS; none: the plain path), and with those
               that a trainer takes by itself in turn
    peft       the same fused step of PEFT_JOBS jobs in turn with a plain loop of transformers + PEFT, a step for each job
    decoding   64 rows of N adapters on the embedded engine. MBU: bytes that each step must read (weights, adapters at work, keys and
               values) over what the device can read
    plan       the most memory of a step of 8 rows of 4,096 tokens, and what `marlaas plan` says of it, both without the process and without
               holes between allocations
    gap        between the log-probs of tokens that the engine sampled and those of the trainer, both in bfloat16
    busiest    operations by their share of the device's time

And of the first shape a whole job, through all services on the one device. A part that fails says why, and the others go on; parts that
would begin after `--seconds` are left out, and said so. Without a GPU nothing is measured. What a bare machine needs is in
docs/benchmarks.md.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from base_model.device import find_device, give_back_memory, prepare_cpu
from benchmarks import _gpu_parts as parts
from benchmarks._gpu_bases import SHAPES_OF_BASES, random_decoder, sampling_backbone, training_modules
from benchmarks._report import Goal, Report, console, make_table, parser, positive, show
from benchmarks.fused import NUM_JOBS, SHAPES, fused, make_jobs
from common.errors import InvalidInput
from common.settings import explained
from trainer_service.backbone.sequences import DecoderBackbone
from trainer_service.memory import fit
from trainer_service.packing import Budget
from trainer_service.settings import TrainerSettings
from trainer_service.training import Trainer

PEAKS = {"H100": (989e12, 3.35e12), "H200": (989e12, 4.8e12), "A100": (312e12, 2.04e12)}
"""Peaks from the data sheets (SXM): bfloat16 operations a second without sparsity, bytes a second."""
PEFT_JOBS = 8
MICRO_BATCH_TOKENS = 16_384
"""Tokens of a micro-batch, if memory allows."""
KERNELS = ("varlen", "varlen,lora,compile", "none")
FORESEEN = "memory that `marlaas plan` foresees, off the peak by"
UNKNOWN = float("nan")


@dataclass(slots=True)
class Parts:
    """Runs the parts one after the other: what each measured, by its name, and why others have measured nothing."""

    until: float  # by the monotonic clock
    to: Path | None
    found: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    failures: list[str] = field(default_factory=list[str])

    def run(self, name: str, measure: Callable[[], dict[str, Any]]) -> None:
        since = time.monotonic()
        if since > self.until:
            self.failures.append(f"{name}: left out, the time is up")
            return
        try:
            self.found[name] = measure()
        except (Exception, SystemExit) as error:  # one part's trouble costs no other
            reason = str(error).partition("\n")[0]
            self.failures.append(f"{name}: failed, {type(error).__name__}: {reason}")
        give_back_memory()
        took = f"{name}: {time.monotonic() - since:.0f} s"
        console.print(took if name in self.found else f"{took}; {self.failures[-1]}", markup=False)
        if self.to:  # a run that is ended early keeps what it has
            self.to.write_text(json.dumps(self.figures))

    @property
    def figures(self) -> dict[str, Any]:
        return {"parts": self.found, "failures": self.failures}


def peaks(device: torch.device) -> tuple[float, float]:
    """Operations and bytes a second; NaN for a device that is not known."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak for known, peak in PEAKS.items() if known in name), (UNKNOWN, UNKNOWN))


def measure_shape(run: Parts, shape: str, given: Any, device: torch.device) -> None:
    """All parts of one shape."""
    decoder = random_decoder(SHAPES_OF_BASES[shape], device, torch.bfloat16)
    backbone = DecoderBackbone(decoder) if given.backbone == "decoder" else training_modules(decoder)
    trainer = Trainer(backbone, Budget(MICRO_BATCH_TOKENS))
    fit(trainer, 0)
    if given.backbone == "transformers":
        run.run(f"{shape}, plan", lambda: parts.measure_plan(trainer, SHAPES_OF_BASES[shape]))
    most, times = max(given.jobs), given.repetitions
    for n in given.jobs:
        jobs = parts.heavy_tailed(trainer, n)
        run.run(f"{shape}, training, N = {n}", partial(parts.measure_training, trainer, jobs, times))
    small = make_jobs(trainer, SHAPES[0], most)
    run.run(f"{shape}, small steps, N = {most}", partial(parts.measure_training, trainer, small, times))
    jobs = parts.heavy_tailed(trainer, min(PEFT_JOBS, most))
    against = partial(parts.measure_against_peft, trainer, decoder, jobs, times)
    run.run(f"{shape}, peft, N = {len(jobs)}", against)
    adapters, sampling = parts.random_adapters(decoder, most), sampling_backbone(decoder, given.backbone)
    for n in given.jobs:
        decoding = partial(parts.measure_decoding, sampling, adapters[:n], times)
        run.run(f"{shape}, decoding, N = {n}", decoding)
    run.run(f"{shape}, gap", lambda: parts.measure_gap(trainer, sampling))
    last, rows = parts.heavy_tailed(trainer, most), parts.rows_of(adapters)
    busiest: dict[str, Callable[[], object]] = {
        "a fused step": lambda: fused(trainer, last),
        "decoding": lambda: parts.decode(sampling, rows, parts.PROFILED),
    }
    for what, work in busiest.items():
        run.run(f"{shape}, busiest, {what}", lambda work=work: dict(parts.busiest(work, device)))
    for names in given.kernels if given.backbone == "transformers" else ():
        chosen = () if names == "none" else names.split(",")
        work = partial(parts.measure_kernels, trainer, decoder, chosen, last, times)
        run.run(f"{shape}, kernels, {names}, N = {most}", work)


TRAINING = ("", "tokens", "tokens/s", "x separate", "TFLOP/s", "MFU %", "padding %", "peak GiB")


def tables(found: dict[str, dict[str, Any]], peak: tuple[float, float]) -> list[Any]:
    kinds = {name: name.split(", ")[1] for name in found if ", " in name}

    def of(*chosen: str) -> list[tuple[str, dict[str, Any]]]:
        return [(name, f) for name, f in found.items() if kinds.get(name) in chosen]

    def work(f: dict[str, Any]) -> tuple[float, float]:
        return f["flops_per_s"] / 1e12, 100 * f["flops_per_s"] / peak[0]

    training = [
        (name, f["tokens"], f["tokens_per_s"], f["to_separate"], *work(f), 100 * f["padding"], f["peak_bytes"] / 2**30)
        for name, f in of("training", "small steps")
    ]
    kernels = [(name, f["tokens_per_s"], f["to_default"], *work(f)) for name, f in of("kernels")]
    decoding = [
        (name, f["tokens_per_s"], f["to_one_adapter"], f["bytes_per_s"] / 1e9, 100 * f["bytes_per_s"] / peak[1])
        for name, f in of("decoding")
    ]
    both_ends = of("plan", "peft", "gap", "whole job")
    others = [(f"{name}: {figure}", value) for name, f in both_ends for figure, value in f.items()]
    return [
        make_table("Fused training", TRAINING, training),
        make_table("Fused training with kernels", ("", "tokens/s", "x default", "TFLOP/s", "MFU %"), kernels),
        make_table(f"Decoding {parts.ROWS} rows", ("", "tokens/s", "x one adapter", "GB/s", "MBU %"), decoding),
        make_table("Both ends", ("", ""), others),
        *(make_table(name, ("", "%"), list(f.items())) for name, f in of("busiest")),
    ]


def goals(found: dict[str, dict[str, Any]], shapes: Sequence[str], peak: tuple[float, float]) -> list[Goal]:
    """A part that failed has no goal: its failure is told beside them."""
    small = "fused to separate steps of 2 rows of 16 tokens"
    promised = [
        (f"training, N = {NUM_JOBS}", "flops_per_s", "MFU of a fused step", 100 / peak[0], 40.0, " %"),
        (f"small steps, N = {NUM_JOBS}", "to_separate", small, 1.0, 4.0, " x"),
        (f"peft, N = {PEFT_JOBS}", "to_peft", f"steps/s to transformers + PEFT, {PEFT_JOBS} jobs", 1.0, 4.0, " x"),
        (f"decoding, N = {NUM_JOBS}", "bytes_per_s", "bandwidth used in decoding", 100 / peak[1], 60.0, " %"),
        (f"decoding, N = {NUM_JOBS}", "to_one_adapter", f"decoding with {NUM_JOBS} adapters to one", 1.0, 0.9, " x"),
    ]
    return [
        Goal(f"{shape}: {what}", found[f"{shape}, {part}"][figure] * factor, limit, unit)
        for shape in shapes
        for part, figure, what, factor, limit, unit in promised
        if f"{shape}, {part}" in found and factor == factor
    ] + [
        Goal(
            f"{shape}: {FORESEEN}", 100 * abs(f["planned_bytes"] / f["peak_bytes"] - 1), 15, " %", more_is_better=False
        )
        for shape in shapes
        if (f := found.get(f"{shape}, plan"))
    ]


def notes(peak: tuple[float, float], *, judged: bool) -> list[str]:
    """Reasons why columns are empty, or goals are not judged."""
    found: list[str] = []
    if peak[0] != peak[0] or peak[1] != peak[1]:
        found.append("MFU and MBU need the device's peaks, which are not known: see PEAKS in benchmarks/gpu.py")
    if not judged:
        found.append(f"the goals are for a GPU with {NUM_JOBS} jobs")
    return found


def kernel_names(text: str) -> str:
    """An option's names of kernels, as MARLAAS_TRAINER_KERNELS has them, or none."""
    try:
        return ",".join(TrainerSettings(trainer_kernels="" if text == "none" else text).kernels) or "none"
    except ValidationError as error:
        raise argparse.ArgumentTypeError(explained(error)) from error


def options() -> Any:
    known = parser(__doc__)
    known.add_argument("--device", default="cuda")
    known.add_argument("--shapes", choices=SHAPES_OF_BASES, nargs="+", default=["qwen3-0.6b", "qwen3-8b"])
    known.add_argument("--jobs", type=positive, nargs="+", default=[1, 8, 32], metavar="N")
    known.add_argument("--repetitions", type=positive, default=3, help="default 3")
    known.add_argument("--seconds", type=positive, default=540, help="after which no part begins; default 540")
    kernels = f"to measure; default {' '.join(KERNELS)}"
    known.add_argument("--kernels", type=kernel_names, nargs="*", default=KERNELS, metavar="NAMES", help=kernels)
    known.add_argument("--quick", action="store_true", help="the first shape, one repetition")
    known.add_argument(
        "--backbone", choices=("decoder", "transformers"), default="transformers", help="what trains and samples"
    )
    given = known.parse_args()
    if max(given.jobs) > NUM_JOBS:
        known.error(f"argument --jobs: {NUM_JOBS} at most")
    if given.quick:
        given.shapes, given.repetitions = given.shapes[:1], 1
    return given


def report(given: Any, device: torch.device) -> Report:
    run = Parts(time.monotonic() + given.seconds, given.json)
    for shape in given.shapes:
        try:
            measure_shape(run, shape, given, device)
        except (ImportError, RuntimeError, MemoryError) as error:
            run.failures.append(f"{shape}: failed, {type(error).__name__}: {str(error).partition(chr(10))[0]}")
        give_back_memory()  # for the next base, or the services
    first = given.shapes[0]
    run.run(f"{first}, whole job", lambda: parts.measure_job(first, device))
    peak = peaks(device)
    judged = device.type == "cuda" and NUM_JOBS in given.jobs
    reached = goals(run.found, given.shapes, peak) if judged else []
    said = [*notes(peak, judged=judged), *run.failures, f"torch {torch.__version__} on {name_of(device)}"]
    return Report(tables(run.found, peak), run.figures, reached, said)


def name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def main() -> None:
    given = options()
    if given.device == "cuda" and not torch.cuda.is_available():
        console.print("no GPU here: nothing was measured (--device cpu --shapes tiny tries the benchmark itself)")
        return
    try:
        device = find_device(given.device, "--device")
    except InvalidInput as error:
        sys.exit(f"error: {error}")
    prepare_cpu(1)
    show(report(given, device), given.json)


if __name__ == "__main__":
    main()
