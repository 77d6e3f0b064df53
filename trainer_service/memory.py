"""Measures at a trainer's start how much memory a micro-batch takes on its base model."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from base_model.device import give_back_memory
from common.models.footprint import FLOAT32
from common.wire.messages import AdapterRef, Init, LoraSpec, LossSpec, OptimSpec, TrainStep
from trainer_service.packing import Budget
from trainer_service.selftest import random_rows
from trainer_service.training import Trainer

LEAST_CACHE = 512 << 20
CACHED_STATES, CACHED_RANK, CACHE_SHARE = 4, 32, 8
"""Room by default for so many states of that rank, on every linear layer; at most 1 / CACHE_SHARE of what is free."""
WIDTH = 32  # positions of a probe's sequence: each costs a large base 0.1 s on a CPU
GROUP_SIZE = 2
NUM_WRITTEN = 5
NO_BACKWARD = -1
"""Stands in place of the number of the backward under way."""


def fit(trainer: Trainer, num_bytes: int, *, most_tokens: int = 0) -> None:
    """Bounds the trainer's budget by measured memory, and lets its base model keep no more than the budget needs. `num_bytes` 0:
    half of what is free now. `most_tokens` of a rank: the budget grows to so many, while no layer must be computed twice."""
    probed = _probe(trainer)
    budget = _bounded(trainer, probed, num_bytes)
    kept = trainer.backbone.num_ranks * int(min(most_tokens, budget.num_bytes / budget.bytes_per_token))
    trainer.budget = budget = replace(budget, tokens=max(budget.tokens, kept))
    tokens_of_rank = budget.tokens / trainer.backbone.num_ranks
    trainer.backbone = trainer.backbone.fitting(probed.per_token, budget.num_bytes / tokens_of_rank)
    trainer.budget = _bounded(trainer, probed, num_bytes)


def cache_bytes(shapes: Mapping[str, tuple[int, int]], free: int) -> int:
    """Bytes for adapters with optimiser states by default. `shapes`: (out, in) of linear layers. `free`: bytes."""
    state = 3 * FLOAT32 * CACHED_RANK * sum(out + width for out, width in shapes.values())  # values, two moments
    return max(LEAST_CACHE, min(CACHED_STATES * state, free // CACHE_SHARE))


class Probed(NamedTuple):
    """Bytes kept for the backward if all is kept: of a token, and of a pair of positions in a branched, padded sequence. Of
    several ranks, on the one that computes the token."""

    per_token: float
    per_pair: float


def _probe(trainer: Trainer) -> Probed:
    """A micro-batch keeps its activations; probes of one and two groups a rank tell a token's and a pair's share."""
    num_ranks, base = trainer.backbone.num_ranks, trainer.backbone.keeping_all()
    plain = replace(trainer, backbone=base, budget=Budget(1 << 30), share_prefixes=False)
    numbers = (num_ranks, 2 * num_ranks)
    rows = [_kept(plain, num_groups=n, num_prompt=WIDTH - NUM_WRITTEN + 1) for n in numbers]
    per_token = (rows[1] - rows[0]) / (GROUP_SIZE * WIDTH)
    per_pair = _per_pair(replace(plain, share_prefixes=True), per_token) if base.pads else 0.0
    give_back_memory()
    return Probed(per_token, per_pair)


def _per_pair(trainer: Trainer, per_token: float) -> float:
    tree = WIDTH + GROUP_SIZE * (NUM_WRITTEN - 1)
    trees = [_kept(trainer, num_groups=n, num_prompt=WIDTH) for n in (1, 2)]
    return max(0.0, trees[1] - trees[0] - per_token * tree) / tree**2


def _bounded(trainer: Trainer, probed: Probed, num_bytes: int) -> Budget:
    backbone = trainer.backbone
    sharing = backbone.num_ranks if backbone.device.type == "cpu" else 1
    free = num_bytes or backbone.free_bytes() // (2 * sharing)
    per_token = backbone.kept_per_token(probed.per_token)
    return replace(trainer.budget, num_bytes=float(free), bytes_per_token=per_token, bytes_per_pair=probed.per_pair)


def _kept(trainer: Trainer, *, num_groups: int, num_prompt: int) -> int:
    """Measures the bytes that the one micro-batch of a step on random tokens keeps for its backward."""
    num_rows = num_groups * GROUP_SIZE
    ids: dict[str, Any] = {"id": "", "tenant": "", "job": "", "partition": 0, "adapter": AdapterRef("", "", 0)}
    made: dict[str, Any] = {**ids, "seed": 0, "lora": LoraSpec(rank=3)}
    prompts, answers = np.full(num_rows, num_prompt), np.full(num_rows, NUM_WRITTEN)
    rows = random_rows(num_prompt=prompts, num_written=answers, group_size=GROUP_SIZE)
    message = TrainStep(**made, loss=LossSpec(), optim=OptimSpec(1e-3), rows=rows, next_group=0)
    step = trainer.begin(message, trainer.init(Init(**made)))
    try:
        return kept_bytes(lambda: trainer.micro_batch([step.opened]))
    finally:
        trainer.discard(step.opened)


def kept_bytes(run: Callable[[], None]) -> int:
    """Counts the bytes of all storages that forwards in `run` keep for their backwards, without what is recomputed."""
    kept: dict[int, tuple[torch.UntypedStorage, int]] = {}

    def keep(tensor: Tensor) -> Tensor:
        if torch._C._current_graph_task_id() == NO_BACKWARD:  # pyright: ignore
            storage = tensor.untyped_storage()  # held, or weights gathered for a while would take its address
            kept[storage._cdata] = storage, storage.nbytes()  # pyright: ignore[reportPrivateUsage]
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        run()
    return sum(num_bytes for _, num_bytes in kept.values())
