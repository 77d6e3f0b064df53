"""Measures the most memory that a trainer's process takes in a step, beside what `marlaas plan` says of it, on the CPU in float32.

    python -m benchmarks.planned_memory [--json FILE]

Each shape has random weights and a process of its own, which loads it as a trainer does and trains one step. Measured is the most
memory that was resident (VmHWM), from the start of the process. Predicted is `common/footprint.py` of the longest micro-batch.

    wide    two layers of Qwen3-0.6B with its vocabulary of 151,936; 8 rows of 4,096 tokens, 1,024 of them sampled
    deep    eight layers of half that width, a vocabulary of 50,000; 8 rows of 2,048 tokens, 512 of them sampled
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks._report import Goal, Report, make_table, run
from common.base_shape import BaseShape
from common.footprint import training_bytes
from common.text.model_folder import read_json
from harness.bases import QWEN3_06B, make_random_base

LIMIT = 0.15
RANK = 8
MICRO_BATCH_TOKENS = 2048
"""The trainer's default."""
FLOAT32 = 4


class Case(NamedTuple):
    sizes: dict[str, Any]
    num_rows: int
    num_prompt: int
    num_sampled: int


CASES = {
    "wide": Case(
        QWEN3_06B | {"num_hidden_layers": 2},
        num_rows=8,
        num_prompt=3072,
        num_sampled=1024,
    ),
    "deep": Case(
        {
            "num_hidden_layers": 8,
            "hidden_size": 512,
            "intermediate_size": 1536,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "vocab_size": 50_000,
            "max_position_embeddings": 4096,
        },
        num_rows=8,
        num_prompt=1536,
        num_sampled=512,
    ),
}


def predicted(folder: Path, case: Case) -> float:
    """Bytes."""
    shape = BaseShape.of(read_json(folder / "config.json"))
    tokens = max(MICRO_BATCH_TOKENS, case.num_prompt + case.num_sampled)
    return training_bytes(shape, tokens=tokens, itemsize=FLOAT32, rank=RANK, gpu=False).total


def measured(folder: Path, name: str) -> float:
    """Bytes, in a process of its own."""
    argv = [sys.executable, "-m", "benchmarks.planned_memory", "--train", str(folder), name]
    return float(subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True).stdout.split()[-1])


def train(folder: str, name: str) -> int:
    """Trains one step; the most bytes that were resident in this process."""
    import numpy as np  # here: the process that measures needs none of it

    from common.messages import AdapterRef, Init, LoraSpec, LossSpec, OptimSpec, TrainStep
    from trainer_service.__main__ import load_trainer
    from trainer_service.selftest import random_rows
    from trainer_service.settings import TrainerSettings

    case = CASES[name]
    trainer, _ = load_trainer(TrainerSettings(base_models=f"base={folder}"))
    ids: dict[str, Any] = {"id": "", "tenant": "", "job": "", "partition": 0, "adapter": AdapterRef("", "", 0)}
    made: dict[str, Any] = {**ids, "seed": 0, "lora": LoraSpec(rank=RANK)}
    prompts, sampled = (np.full(case.num_rows, number) for number in case[2:])
    rows = random_rows(num_prompt=prompts, num_written=sampled, group_size=4)
    step = TrainStep(**made, loss=LossSpec(), optim=OptimSpec(1e-3), rows=rows, next_group=0)
    trainer.step(step, trainer.init(Init(**made)), lambda: None)
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def report(_: Any) -> Report:
    rows: list[tuple[Any, ...]] = []
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as temporary:
            folder = make_random_base(Path(temporary) / "base", last_word=300, **case.sizes)
            expected, found = predicted(folder, case), measured(folder, name)
        rows.append((name, found / 1e6, expected / 1e6, expected / found - 1))
    table = make_table("Memory of a trainer in a step", ("shape", "measured MB", "predicted MB", "off by"), rows)
    goals = [Goal(f"prediction of {row[0]}", abs(row[3]), LIMIT, more_is_better=False) for row in rows]
    return Report([table], {str(row[0]): row[1:] for row in rows}, goals)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--train"]:
        sys.stdout.write(f"{train(*sys.argv[2:])}\n")
    else:
        run(__doc__, report)
