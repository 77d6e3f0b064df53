"""Compares a fused step of 32 jobs with 32 separate steps, and with one step of one adapter over the same tokens; one thread.

    python -m benchmarks.fused [--repetitions 9] [--json FILE]      # about a minute and a half on a quiet core

Contenders take turns. A ratio is the median over turns of the ratio within one turn, of processor seconds of this process
(it has one thread; wall time would count the others that want its core). Every job has a batch and an adapter of its own;
a step is all of it: checking the batch, forward, backward, clipping and AdamW, the new state. Prompts are not shared, so that all
contenders put the same tokens through the base model. `mixed` jobs differ in rank (4, 8, 16), targets and length of rows.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec.structs import replace

from base_model.decoder import Decoder
from base_model.device import prepare_cpu
from benchmarks._report import Goal, Report, in_turns, make_table, ratio, run, timed
from benchmarks.training import LORA, Workload, initial_state, make_step
from common.settings import TINY
from common.wire.messages import LoraSpec, TrainStep, f32
from trainer_service.backbone.sequences import DecoderBackbone
from trainer_service.open_step import Trained, TrainState
from trainer_service.training import Trainer

NUM_JOBS = 32
MIXED = (LoraSpec(rank=4), LORA, LoraSpec(rank=16), LoraSpec(rank=8, targets=("q_proj", "v_proj")))
Job = tuple[TrainStep, TrainState]


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of every job's batch."""

    name: str
    num_rows: int
    num_tokens: tuple[int, int]  # of a row's prompt and answer: from, to (exclusive), half of it each
    loras: tuple[LoraSpec, ...] = (LORA,)

    def workload(self, num_jobs: int = 1) -> Workload:
        """Workload of the rows of `num_jobs` jobs."""
        half = (self.num_tokens[0] // 2, (self.num_tokens[1] - 1) // 2 + 1)
        group = min(self.num_rows, 8)
        return Workload(self.name, num_jobs * self.num_rows // group, group, half, half)


SHAPES = (
    Shape("2 rows of 16 tokens", 2, (16, 17)),
    Shape("16 rows of 32 tokens", 16, (32, 33)),
    Shape("mixed", 8, (12, 65), MIXED),
)


def fused(trainer: Trainer, jobs: list[Job]) -> list[Trained]:
    """Runs all jobs' steps at once."""
    opened = [trainer.begin(*job) for job in jobs]
    while open_steps := [step for step in opened if not step.done]:
        trainer.micro_batch([step.opened for step in open_steps])
    return [trainer.finish(step) for step in opened]


def all_active(step: TrainStep) -> TrainStep:
    """The step with rewards that give every row an advantage: others need no forward."""
    return replace(step, rows=replace(step.rows, rewards=f32(np.arange(len(step.rows.lengths)) % 2)))


def make_jobs(trainer: Trainer, shape: Shape, num_jobs: int = NUM_JOBS) -> list[Job]:
    jobs: list[Job] = []
    for number in range(num_jobs):
        spec = shape.loras[number % len(shape.loras)]
        step = replace(all_active(make_step(shape.workload(), number)), lora=spec)
        jobs.append((step, initial_state(trainer, number, spec)))
    return jobs


def measure(shape: Shape, repetitions: int) -> dict[str, Any]:
    """Median tokens/s of each contender, and the fused step's ratios to the others."""
    trainer = Trainer(DecoderBackbone(Decoder.load(TINY)), share_prefixes=False)
    jobs = make_jobs(trainer, shape)
    everything = all_active(make_step(shape.workload(NUM_JOBS), 0))
    state = jobs[1 % len(shape.loras)][1]
    runs: dict[str, Callable[[], object]] = {
        "separate steps": lambda: [trainer.step(*job, lambda: None) for job in jobs],
        "fused step": lambda: fused(trainer, jobs),
        "one adapter": lambda: trainer.step(everything, state, lambda: None),
    }
    num_tokens = {name: sum(len(step.rows.tokens) for step, _ in jobs) for name in runs}
    num_tokens["one adapter"] = len(everything.rows.tokens)
    took = in_turns({name: timed(work, time.process_time) for name, work in runs.items()}, repetitions, warm_up=2)
    seconds = {name: [s / num_tokens[name] for s in times] for name, times in took.items()}  # a token
    return {
        "shape": shape.name,
        "tokens": num_tokens["fused step"],
        "tokens_per_s": {name: 1 / statistics.median(times) for name, times in seconds.items()},
        "fused_to_separate": ratio(seconds["separate steps"], seconds["fused step"]),
        "time_to_one_adapter": 1 / ratio(seconds["one adapter"], seconds["fused step"]),
    }


def goals(results: list[dict[str, Any]]) -> list[Goal]:
    small, large, _ = results
    found = [
        Goal("fused to separate steps, 2 rows of 16 tokens", small["fused_to_separate"], 3.0, " x"),
        Goal("fused to separate steps, 16 rows of 32 tokens", large["fused_to_separate"], 1.0, " x"),
    ]
    for result in results:
        name = f"time of the fused step to one of one adapter, {result['shape']}"
        found.append(Goal(name, result["time_to_one_adapter"], 1.2, " x", more_is_better=False))
    return found


def report(given: Any) -> Report:
    prepare_cpu(1)
    results = [measure(shape, given.repetitions) for shape in SHAPES]
    tables = [
        make_table(
            f"{NUM_JOBS} jobs, {result['shape']} each ({result['tokens']:,} tokens)",
            ("", "tokens/s"),
            list(result["tokens_per_s"].items()),
        )
        for result in results
    ]
    return Report(tables, results, goals(results))


if __name__ == "__main__":
    run(__doc__, report, {"repetitions": 1}, repetitions=9)
