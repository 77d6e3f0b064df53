"""Measures the most memory that a trainer's process takes in a step, beside what `marlaas plan` says of it, on the CPU.

    python -m benchmarks.planned_memory [--tokens 4096] [--json FILE]

Each shape has random weights, and each way of computing it a process of its own, which loads it as a trainer does, with the settings that
`plan` prints, and trains one step of 8 rows, a quarter of their tokens sampled. Measured is the most memory that was resident (VmHWM),
from the start of the process. Predicted is `common/models/footprint.py` of the longest micro-batch.

    wide    two layers of Qwen3-0.6B with its vocabulary of 151,936; rows of `--tokens`
    deep    eight layers of half that width, a vocabulary of 50,000; rows of half as many

    decoder, transformers     which code computes the base model
    kept, checkpointed        of all layers the activations, or their inputs alone
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from benchmarks._report import Goal, Report, console, make_table, run
from common.models.base_shape import BaseShape
from common.models.footprint import TrainingBytes, training_bytes
from common.text.model_folder import read_json
from harness.bases import QWEN3_06B, make_random_base

LIMIT = 0.15
RANK = 8
NUM_ROWS, GROUP_SIZE = 8, 4
MICRO_BATCH_TOKENS = 2048
"""The trainer's default."""
SHAPES: dict[str, dict[str, Any]] = {
    "wide": QWEN3_06B | {"num_hidden_layers": 2},
    "deep": {
        "num_hidden_layers": 8,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 50_000,
        "max_position_embeddings": 4096,
    },
}
ROW_PARTS = {"wide": 1, "deep": 2}
"""A shape's rows have one part in so many of the tokens."""


class Way(NamedTuple):
    """A way to compute a base model."""

    backbone: Literal["decoder", "transformers"]
    dtype: Literal["float32", "bfloat16"]
    checkpointed: bool

    @property
    def name(self) -> str:
        return f"{self.backbone}, {self.dtype}, {'checkpointed' if self.checkpointed else 'kept'}"


BACKBONES: list[tuple[Literal["decoder", "transformers"], Literal["float32", "bfloat16"]]] = [
    ("decoder", "float32"),
    ("transformers", "float32"),
    ("transformers", "bfloat16"),
]
WAYS = [Way(backbone, dtype, checkpointed) for backbone, dtype in BACKBONES for checkpointed in (False, True)]


def predicted(folder: Path, way: Way, num_tokens: int) -> TrainingBytes:
    """The bytes of a step on rows of so many tokens."""
    shape = BaseShape.of(read_json(folder / "config.json"))
    return training_bytes(
        shape,
        tokens=max(MICRO_BATCH_TOKENS, num_tokens),
        itemsize=2 if way.dtype == "bfloat16" else 4,
        rank=RANK,
        gpu=False,
        modules=way.backbone == "transformers",
        num_checkpointed=shape.num_layers if way.checkpointed else 0,
    )


def measured(folder: Path, way: Way, num_tokens: int) -> float:
    """Bytes, in a process of its own with the settings of a plan."""
    settings = {
        "MARLAAS_BASE_MODELS": f"base={folder}",
        "MARLAAS_TRAINER_BACKBONE": way.backbone,
        "MARLAAS_TRAINER_DTYPE": way.dtype,
        "MARLAAS_TRAINER_CHECKPOINTING": str(way.checkpointed),
        "MARLAAS_TRAINER_MICRO_BATCH_TOKENS": str(max(MICRO_BATCH_TOKENS, num_tokens)),
        "MARLAAS_TRAINER_MEMORY_BYTES": str(int(predicted(folder, way, num_tokens).kept)),
    }
    argv = [sys.executable, "-m", "benchmarks.planned_memory", "--train", str(num_tokens)]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True, env=os.environ | settings)
    return float(done.stdout.split()[-1])


def train(num_tokens: int) -> int:
    """Trains one step; the most bytes that were resident in this process."""
    import numpy as np  # here: the process that measures needs none of it

    from common.wire.messages import AdapterRef, Init, LoraSpec, LossSpec, OptimSpec, TrainStep
    from trainer_service.__main__ import load_trainer
    from trainer_service.selftest import random_rows
    from trainer_service.settings import TrainerSettings

    trainer, _ = load_trainer(TrainerSettings())
    ids: dict[str, Any] = {"id": "", "tenant": "", "job": "", "partition": 0, "adapter": AdapterRef("", "", 0)}
    made: dict[str, Any] = {**ids, "seed": 0, "lora": LoraSpec(rank=RANK)}
    prompts, sampled = (np.full(NUM_ROWS, number) for number in (num_tokens - num_tokens // 4, num_tokens // 4))
    rows = random_rows(num_prompt=prompts, num_written=sampled, group_size=GROUP_SIZE)
    step = TrainStep(**made, loss=LossSpec(), optim=OptimSpec(1e-3), rows=rows, next_group=0)
    trainer.step(step, trainer.init(Init(**made)), lambda: None)
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def compare(num_tokens: int, shapes: Sequence[str], ways: Sequence[Way]) -> Iterator[tuple[str, float, float, float]]:
    """Each case with the megabytes that were measured and predicted, and their difference as a part of the first. Tells each."""
    with tempfile.TemporaryDirectory() as temporary:
        for name in shapes:
            folder = make_random_base(Path(temporary) / name, last_word=300, **SHAPES[name])
            for way in ways:
                tokens = num_tokens // ROW_PARTS[name]
                found, expected = measured(folder, way, tokens), predicted(folder, way, tokens).total
                case, off = f"{name}, {way.name}", expected / found - 1
                console.print(f"{case}: measured {found / 1e6:,.0f} MB, predicted {expected / 1e6:,.0f} MB, {off:+.1%}")
                yield case, found / 1e6, expected / 1e6, off


def report(given: Any) -> Report:
    shapes, ways = (["deep"], WAYS[:1]) if given.quick else (list(SHAPES), WAYS)
    rows = list(compare(given.tokens, shapes, ways))
    table = make_table("Memory of a trainer in a step", ("shape", "measured MB", "predicted MB", "off by"), rows)
    goals = [Goal(f"prediction of {row[0]}", abs(row[3]), LIMIT, more_is_better=False) for row in rows]
    return Report([table], {row[0]: row[1:] for row in rows}, goals)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--train"]:
        sys.stdout.write(f"{train(int(sys.argv[2]))}\n")
    else:
        run(__doc__, report, {"tokens": 512}, tokens=4096)
