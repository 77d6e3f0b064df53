"""Measures on a GPU training and decoding in the shapes of larger models, and how much of the device they use for what.

    python -m benchmarks.gpu [--shapes qwen3-0.6b qwen3-8b] [--jobs 8 32] [--repetitions 3] [--seconds 540] [--json FILE]
    python -m benchmarks.gpu --quick                                  # one shape, one repetition: a minute or two
    python -m benchmarks.gpu --device cpu --shapes tiny --jobs 1 2    # tries the benchmark itself

Weights are random, in bfloat16; adapters have rank 8 on all linear layers. Answers that are trained on have lengths log-normal with
median 16 and 99th percentile 160 tokens. Of each shape:

    ceilings   what the device does at most: a copy, products of the step's shapes, grouped products
    training   a fused step of N jobs, 4 groups of 8 rows each: the time of its phases; kernels, and for how much of the time the device is
               busy; the most memory, weights included. MFU: operations of computed tokens over what the device can do. A beginning
               that rows share is computed once, and counts once
    decoding   a step of 64 rows of N adapters on the embedded engine, with our decoder. MBU: bytes that a step must read (weights,
               adapters at work, keys and values) over what the device can read
    modules    the same with transformers' modules
    gap        between the log-probs of tokens that the engine sampled with our decoder and those of the trainer, both in bfloat16
    peft       of the first shape, the fused step of the fewest jobs in turn with a plain loop of transformers + PEFT, a step for each job
    plan       the most memory of a step of 8 rows of 4,096 tokens, and what `marlaas plan` says of it, both without the process and without
               holes between allocations
    kernels    the fused step of the fewest jobs with each of `--kernels` (MARLAAS_TRAINER_KERNELS; none: the plain path)

And of the first shape a whole job, through all services on the one device. A part that fails says why, and the others go on; parts that
would begin after `--seconds` are left out, and said so. Without a GPU nothing is measured. What a bare machine needs is in
docs/benchmarks.md.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from base_model.decoder import Decoder
from base_model.device import find_device, give_back_memory, prepare_cpu
from benchmarks import _gpu_parts as parts
from benchmarks._gpu_bases import SHAPES_OF_BASES, random_decoder, sampling_backbone, training_modules
from benchmarks._report import Goal, Report, console, make_table, parser, positive, show
from benchmarks.fused import NUM_JOBS, Job
from common.errors import InvalidInput
from common.settings import explained
from trainer_service.memory import fit
from trainer_service.packing import Budget
from trainer_service.settings import AUTO, TrainerSettings
from trainer_service.training import Trainer

UNKNOWN = float("nan")
PEAKS = {"H100": (989e12, 3.35e12), "H200": (989e12, 4.8e12), "A100": (312e12, 2.04e12)}
"""Data sheets (SXM) promise these: bfloat16 operations a second without sparsity, bytes a second."""
PROMISED = {"qwen3-0.6b": (20.0, 14.0), "qwen3-8b": (40.0, 50.0)}
"""Least MFU of a fused step and MBU of decoding, in percent, with GOAL_JOBS jobs."""
GOAL_JOBS = 8
MICRO_BATCH_TOKENS = 16_384
"""Tokens of a micro-batch, if memory allows."""
PARTS = ("ceilings", "training", "decoding", "modules", "gap", "peft", "plan", "kernels", "whole job")
KERNELS = ("varlen", "varlen,lora,compile")
FORESEEN = "memory that `marlaas plan` foresees, off the peak by"


@dataclass(slots=True)
class Parts:
    """Runs the parts one after the other: what each measured, by its name, and why others have measured nothing."""

    until: float  # by the monotonic clock
    to: Path | None
    chosen: Sequence[str]
    found: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    failures: list[str] = field(default_factory=list[str])

    def run(self, name: str, measure: Callable[[], dict[str, Any]]) -> None:
        since = time.monotonic()
        if name.split(", ")[1] not in self.chosen:
            return
        if since > self.until:
            self.failures.append(f"{name}: left out, the time is up")
            return
        try:
            self.found[name] = measure()
        except (Exception, SystemExit) as error:  # one part's trouble costs no other
            reason = str(error).partition("\n")[0][:200]
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
    """NaN for a device that is not known."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak for known, peak in PEAKS.items() if known in name), (UNKNOWN, UNKNOWN))


def measure_shape(run: Parts, shape: str, given: Any, device: torch.device) -> None:
    """All parts of one shape."""
    decoder = random_decoder(SHAPES_OF_BASES[shape], device, torch.bfloat16)
    times, (flops, bandwidth) = given.repetitions, peaks(device)
    trainer = Trainer(training_modules(decoder), Budget(MICRO_BATCH_TOKENS))
    fit(trainer, 0)
    jobs_of = {n: parts.heavy_tailed(trainer, n) for n in given.jobs}
    adapters = parts.random_adapters(decoder, max(given.jobs))

    def train(kernels: str, jobs: list[Job]) -> dict[str, Any]:
        other = trainer if kernels == AUTO else with_kernels(trainer, decoder, kernels)
        return parts.measure_training(other, decoder, jobs, times, flops)

    run.run(f"{shape}, ceilings", lambda: parts.measure_ceilings(SHAPES_OF_BASES[shape], device))
    for n, jobs in jobs_of.items():
        run.run(f"{shape}, training, N = {n}", partial(train, AUTO, jobs))
    for part, kind in (("decoding", "decoder"), ("modules", "transformers")):
        sampling = sampling_backbone(decoder, kind)
        for n in given.jobs:
            decoding = partial(parts.measure_decoding, sampling, adapters[:n], times, bandwidth)
            run.run(f"{shape}, {part}, N = {n}", decoding)
    run.run(f"{shape}, gap", lambda: parts.measure_gap(trainer, sampling_backbone(decoder, "decoder")))
    fewest, jobs = min(jobs_of.items())
    if shape == given.shapes[0]:
        run.run(f"{shape}, peft, N = {fewest}", lambda: parts.measure_against_peft(trainer, decoder, jobs))
    run.run(f"{shape}, plan", lambda: parts.measure_plan(trainer, SHAPES_OF_BASES[shape]))
    for names in given.kernels:
        run.run(f"{shape}, kernels, {names or 'none'}, N = {fewest}", partial(train, names, jobs))


def with_kernels(default: Trainer, decoder: Decoder, names: str) -> Trainer:
    """A trainer over the same weights that keeps as much for the backward. Raises InvalidInput for kernels that cannot run here."""
    own: Any = default.backbone
    other: Any = training_modules(decoder, names)
    alike = replace(other, num_checkpointed=own.num_checkpointed, max_scores=own.max_scores)
    return Trainer(alike, default.budget)


DEVICE = {"step ms": "step_ms", "kernels": "kernels", "busy %": "busy_percent"}
PHASES = {"begin": "begin_ms", "batches": "batches_ms", "finish": "finish_ms"}
COMPUTED = {"computed": "computed", "/ s": "tokens_per_s", "MFU %": "mfu_percent", "peak GiB": "peak_gib"}
READ = {"x one adapter": "to_one_adapter", "GB/s": "read_gb_per_s", "MBU %": "mbu_percent"}
"""Columns, and the figures in them."""


def tables(found: dict[str, dict[str, Any]]) -> list[Any]:
    def of(*kinds: str) -> list[tuple[str, dict[str, Any]]]:
        return [(name, f) for name, f in found.items() if name.split(", ")[1] in kinds]

    def table(title: str, kinds: Sequence[str], columns: dict[str, str]) -> Any:
        return make_table(
            title, ("", *columns), [(name, *(f[each] for each in columns.values())) for name, f in of(*kinds)]
        )

    rest = of("ceilings", "plan", "peft", "gap", "whole job")
    others = [(f"{name}: {figure}", value) for name, f in rest for figure, value in f.items()]
    return [
        table("Fused training", ("training", "kernels"), DEVICE | PHASES | COMPUTED),
        table(f"Decoding {parts.ROWS} rows", ("decoding", "modules"), DEVICE | READ),
        make_table("Ceilings, and both ends", ("", ""), others),
        *(
            make_table(name, ("", "busy %"), f["busiest"])
            for name, f in of("training", "kernels", "decoding", "modules")
        ),
    ]


def goals(found: dict[str, dict[str, Any]], shapes: Sequence[str]) -> list[Goal]:
    """A part that failed has no goal: its failure is told beside them."""
    reached: list[Goal] = []
    for shape in shapes:
        mfu, mbu = PROMISED.get(shape, (0.0, 0.0))
        promised = [
            ("training", "mfu_percent", "MFU of a fused step", mfu, " %"),
            ("peft", "to_peft", "steps/s to transformers + PEFT", 10.0, " x"),
            ("decoding", "mbu_percent", "bandwidth used in decoding", mbu, " %"),
            ("decoding", "to_one_adapter", "decoding to one adapter", 0.9, " x"),
        ]
        for part, figure, what, limit, unit in promised:
            if measured := found.get(f"{shape}, {part}, N = {GOAL_JOBS}"):
                reached.append(Goal(f"{shape}: {what}, {GOAL_JOBS} jobs", measured[figure], limit, unit))
        if f := found.get(f"{shape}, plan"):
            off = 100 * abs(f["planned_bytes"] / f["peak_bytes"] - 1)
            reached.append(Goal(f"{shape}: {FORESEEN}", off, 15, " %", more_is_better=False))
    return reached


def kernel_names(text: str) -> str:
    """An option's names of kernels, as MARLAAS_TRAINER_KERNELS has them; `none`: none."""
    try:
        return ",".join(TrainerSettings(trainer_kernels="" if text == "none" else text).kernels)
    except ValidationError as error:
        raise argparse.ArgumentTypeError(explained(error)) from error


def options() -> Any:
    known = parser(__doc__)
    known.add_argument("--device", default="cuda")
    known.add_argument("--shapes", choices=SHAPES_OF_BASES, nargs="+", default=["qwen3-0.6b", "qwen3-8b"])
    known.add_argument("--jobs", type=positive, nargs="+", default=[8, 32], metavar="N")
    known.add_argument("--repetitions", type=positive, default=3, help="default 3")
    known.add_argument("--seconds", type=positive, default=540, help="after which no part begins; default 540")
    kernels = f"to measure beside those of a trainer; default {' '.join(name or 'none' for name in KERNELS)}"
    known.add_argument("--kernels", type=kernel_names, nargs="*", default=KERNELS, metavar="NAMES", help=kernels)
    known.add_argument(
        "--parts", choices=PARTS, nargs="+", default=PARTS, metavar="PART", help="to measure; default all"
    )
    known.add_argument("--quick", action="store_true", help="the first shape, one repetition")
    given = known.parse_args()
    if max(given.jobs) > NUM_JOBS:
        known.error(f"argument --jobs: {NUM_JOBS} at most")
    if given.quick:
        given.shapes, given.repetitions = given.shapes[:1], 1
    return given


def report(given: Any, device: torch.device) -> Report:
    run = Parts(time.monotonic() + given.seconds, given.json, given.parts)
    for shape in given.shapes:
        try:
            measure_shape(run, shape, given, device)
        except (ImportError, RuntimeError, MemoryError) as error:
            run.failures.append(f"{shape}: failed, {type(error).__name__}: {str(error).partition(chr(10))[0]}")
        give_back_memory()  # for the next base, or the services
    first = given.shapes[0]
    run.run(f"{first}, whole job", lambda: parts.measure_job(first, device))
    judged = peaks(device)[0] > 0 and GOAL_JOBS in given.jobs
    reached = goals(run.found, given.shapes) if judged else []
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    said = [f"torch {torch.__version__} on {name}", *run.failures]
    if not judged:
        said.append(f"MFU and MBU are for GPUs in PEAKS of benchmarks/gpu.py, the goals for {GOAL_JOBS} jobs on them")
    return Report(tables(run.found), run.figures, reached, said)


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
