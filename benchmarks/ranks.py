"""Compares a trainer of one rank with trainers of several: the gradient, the base model's memory, the speed.

    python -m benchmarks.ranks [--steps 3] [--json FILE]

A base of 42 M weights in float32 (8 layers of 512, a vocabulary of 32,000), on the CPU, one thread a rank, by gloo. Each number of
ranks runs in processes of its own, one number after the other, on the same step of 4 groups of 8 rows.

    gradient   distance of the step's gradient from one rank's, over the norm of that
    base       the base model's bytes that a rank holds between two passes, the most of all ranks
    RSS        resident memory of a rank between two passes, the most of all ranks, with what Python, torch and transformers take
    tokens/s   through the base, prompts once a group, of all ranks and of the slowest: its tokens over the seconds of all passes

Ranks that share cores are no faster than one.
"""

import os
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from base_model.device import give_back_memory, prepare_cpu
from benchmarks._report import Goal, Report, make_table, run, timed
from benchmarks.training import LORA, Workload, initial_state, make_step
from harness.bases import make_random_base
from harness.processes import memory
from trainer_service.backbone.choice import load_backbone
from trainer_service.backbone.modules import ModulesBackbone
from trainer_service.backbone.sharding import bytes_held
from trainer_service.packing import Budget
from trainer_service.ranks.backbone import RankedBackbone, load_ranks
from trainer_service.settings import TrainerSettings
from trainer_service.training import Trainer

NUMBERS = (1, 2, 4)
WORK = Workload("ranks", 4, 8, (100, 200), (30, 90))
SIZES: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32_000,
}
CLOSE, SPARE = 1e-5, 1.01


@dataclass(frozen=True, slots=True)
class Figures:
    ranks: int
    base_mb: float
    rss_mb: float
    tokens_per_s: float
    of_ranks: list[float]
    gradient: float = 0.0


def measure(folder: Path, number: int, steps: int) -> tuple[Figures, np.ndarray]:
    """The figures, and the gradient. Runs in a process of its own."""
    prepare_cpu(1)
    settings = TrainerSettings(trainer_ranks=number, trainer_backbone="transformers")
    backbone = (load_ranks if number > 1 else load_backbone)(settings, folder)
    give_back_memory()
    ranked = backbone if isinstance(backbone, RankedBackbone) else None
    own = ranked.own if ranked else backbone
    assert isinstance(own, ModulesBackbone)
    held = ranked.ranks.bytes_held if ranked else [bytes_held(own)]
    others = [process.pid for process in ranked.ranks.processes] if ranked else []
    rss_mb = [memory(pid).rss_mb for pid in (os.getpid(), *others)]
    trainer = Trainer(backbone, Budget(settings.trainer_micro_batch_tokens * number))
    step, state = make_step(WORK), initial_state(Trainer(backbone), 0, LORA)
    opened = trainer.begin(step, state).opened
    num_tokens = sum(map(len, opened.queue))
    while not opened.done:
        trainer.micro_batch([opened])
    gradient = trainer.gradient(opened).numpy().copy()
    trainer.discard(opened)
    before = backbone.counters()
    seconds = [timed(lambda: trainer.step(step, state, lambda: None))() for _ in range(steps)]
    made = {name: amount - before[name] for name, amount in backbone.counters().items()}
    speed = num_tokens / statistics.median(seconds)
    of_ranks = [made[f"rank_{rank}_tokens"] / made["ranks_s"] for rank in range(number)] if made else [speed]
    if ranked:
        ranked.ranks.close()
    return Figures(number, max(held) / 1e6, max(rss_mb), speed, of_ranks), gradient


def report(given: Any) -> Report:
    found: list[Figures] = []
    alone = np.zeros(0)
    with tempfile.TemporaryDirectory() as temporary:
        folder = make_random_base(Path(temporary) / "base", last_word=20_000, **SIZES)
        for number in NUMBERS[:2] if given.quick else NUMBERS:
            with ProcessPoolExecutor(1, get_context("spawn")) as apart:
                figures, gradient = apart.submit(measure, folder, number, given.steps).result()
            alone = gradient if number == 1 else alone
            difference = float(np.linalg.norm(gradient - alone) / np.linalg.norm(alone))
            found.append(replace(figures, gradient=difference))
    rows = [(str(f.ranks), f"{f.gradient:.1e}", f.base_mb, f.rss_mb, f.tokens_per_s, min(f.of_ranks)) for f in found]
    columns = ("ranks", "gradient", "base MB", "RSS MB", "tokens/s", "of the slowest rank")
    goals = [
        goal
        for f in found[1:]
        for goal in (
            Goal(f"gradient of {f.ranks} ranks, x 1e-5", f.gradient / CLOSE, 1.0, more_is_better=False),
            Goal(
                f"base of {f.ranks} ranks, x 1/{f.ranks}",
                f.ranks * f.base_mb / found[0].base_mb,
                SPARE,
                more_is_better=False,
            ),
        )
    ]
    return Report([make_table("Ranks of one trainer", columns, rows)], [asdict(f) for f in found], goals)


if __name__ == "__main__":
    run(__doc__, report, {"steps": 1}, steps=3)
