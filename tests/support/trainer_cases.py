"""Batches and messages for the trainer's tests."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from base_model.decoder import Decoder
from common.errors import Unavailable
from common.store.objects import Objects
from common.wire.messages import AdapterRef, Init, LoraSpec, LossSpec, OptimSpec, Rows, TrainStep, f32, i32, u8
from common.wire.transcript import EMPTY, transcript
from trainer_service import memory
from trainer_service.packing import Budget
from trainer_service.training import Trainer

TINY = Path(__file__).resolve().parents[2] / "models" / "tiny"
LORA = LoraSpec(rank=4, alpha=8.0)


class FullDisk(Objects):
    """Storage whose next `num_failures` writes fail as on a full disk."""

    num_failures = 0

    async def create(self, path: str, data: bytes) -> None:
        if self.num_failures > 0:
            self.num_failures -= 1
            raise Unavailable("no space left on device")
        await super().create(path, data)


def load_tiny() -> Decoder:
    torch.set_num_threads(1)
    return Decoder.load(TINY)


def load_shallow(num_layers: int = 2) -> Decoder:
    """The first layers of `tiny` alone, for tests of what no number of layers changes: they take a part of the time."""
    whole = load_tiny()
    late = tuple(f"layers.{layer}." for layer in range(num_layers, whole.config.num_layers))
    kept = {name: weight for name, weight in whole.weights.items() if not name.startswith(late)}
    return Decoder(replace(whole.config, num_layers=num_layers), kept)


def nothing() -> None:
    """A beat that nobody hears."""


def measured(trainer: Trainer, num_bytes: int) -> Budget:
    """The trainer's budget, bounded by so many bytes of memory too."""
    return memory._bounded(trainer, memory._probe(trainer), num_bytes)  # pyright: ignore[reportPrivateUsage]


def make_rows(seed: int = 0, *, num_groups: int = 4, group_size: int = 4, version: int = 0, **changes: Any) -> Rows:
    """Random prompts (one a group), answers in two turns with a tool's tokens between, rewards 0, 0.5 or 1."""
    rng = np.random.default_rng(seed)
    tokens: list[int] = []
    written: list[int] = []
    lengths: list[int] = []
    for _ in range(num_groups):
        prompt = rng.integers(0, 250, rng.integers(5, 30))
        for _ in range(group_size):
            first, tool, second = rng.integers(1, 12), rng.integers(0, 5), rng.integers(1, 6)
            length = int(first + tool + second)
            tokens += [*prompt, *rng.integers(0, 250, length)]
            written += [0] * len(prompt) + [1] * int(first) + [0] * int(tool) + [1] * int(second)
            lengths.append(len(prompt) + length)
    num_rows = num_groups * group_size
    fields: dict[str, Any] = {
        "transcript": transcript(tokens, -5.0 * rng.random(len(tokens)) * np.array(written), written),
        "lengths": i32(lengths),
        "groups": i32(np.repeat(np.arange(num_groups), group_size)),
        "samples": i32(list(range(group_size)) * num_groups),
        "rewards": f32([0.0, 1.0, *rng.choice([0.0, 0.5, 1.0], num_rows)][:num_rows]),
        "versions": i32([version] * num_rows),
        "truncated": u8([0] * num_rows),
    }
    return Rows(**(fields | changes))


NO_ROWS = Rows(EMPTY, i32([]), i32([]), i32([]), f32([]), i32([]), u8([]))


def make_init(job: str = "j", lora: LoraSpec = LORA) -> Init:
    return Init(id=f"{job}/0", tenant="t", job=job, partition=3, adapter=AdapterRef("t", job, 0), seed=11, lora=lora)


def make_step(version: int, rows: Rows, job: str = "j", **changes: Any) -> TrainStep:
    """The step that trains `version` of a job into the next."""
    fields: dict[str, Any] = {
        "id": f"{job}/{version + 1}",
        "tenant": "t",
        "job": job,
        "partition": 3,
        "adapter": AdapterRef("t", job, version),
        "seed": 11,
        "lora": LORA,
        "loss": LossSpec(),
        "optim": OptimSpec(1e-3),
        "rows": rows,
        "trajectories": ("j/0/0",),
        "next_group": 4 * (version + 1),
    }
    return TrainStep(**(fields | changes))


def steps(count: int, job: str = "j", make: Callable[[int], Rows] | None = None, **changes: Any) -> list[TrainStep]:
    """The first steps of a job; `make` gives the rows that train a version."""
    return [make_step(v, make(v) if make else make_rows(v, version=v), job, **changes) for v in range(count)]
