"""Measures at a trainer's start how much memory a micro-batch takes on its base model."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from base_model.device import give_back_memory
from base_model.free_memory import free_bytes
from common.messages import AdapterRef, Init, LoraSpec, LossSpec, OptimSpec, TrainStep
from trainer_service.packing import Budget
from trainer_service.selftest import random_rows
from trainer_service.training import Trainer

WIDTH = 32  # positions of a probe's sequence: few, for each costs a large base a tenth of a second on a CPU
GROUP_SIZE = 2
NUM_WRITTEN = 5


def measured(trainer: Trainer, num_bytes: int) -> Budget:
    """Measures the trainer's budget, bounded by memory too. `num_bytes` 0: half of what is free now.

    A micro-batch keeps its activations for the backward; probes of one group and of two tell what a token adds, and in a
    branched sequence a pair of positions. With checkpointing only one layer at a time keeps them, and the others their input.
    """
    base = trainer.backbone
    plain = replace(trainer, backbone=base.keeping_all(), budget=Budget(1 << 30), share_prefixes=False)
    shared = replace(plain, share_prefixes=True)
    tree = WIDTH + GROUP_SIZE * (NUM_WRITTEN - 1)
    rows = [_kept(plain, num_groups=n, num_prompt=WIDTH - NUM_WRITTEN + 1) for n in (1, 2)]
    trees = [_kept(shared, num_groups=n, num_prompt=WIDTH) for n in (1, 2)]
    per_token = (rows[1] - rows[0]) / (GROUP_SIZE * WIDTH)
    per_pair = max(0.0, trees[1] - trees[0] - per_token * tree) / tree**2
    per_token = base.kept_per_token(per_token)
    give_back_memory()
    free = num_bytes or free_bytes(base.device) // 2
    return replace(trainer.budget, num_bytes=float(free), bytes_per_token=per_token, bytes_per_pair=per_pair)


def _kept(trainer: Trainer, *, num_groups: int, num_prompt: int) -> int:
    """Measures the bytes that the one micro-batch of a step on random tokens keeps for its backward."""
    num_rows = num_groups * GROUP_SIZE
    ids: dict[str, Any] = {"id": "", "tenant": "", "job": "", "partition": 0, "adapter": AdapterRef("", "", 0)}
    made: dict[str, Any] = {**ids, "seed": 0, "lora": LoraSpec(rank=3)}
    prompts, answers = np.full(num_rows, num_prompt), np.full(num_rows, NUM_WRITTEN)
    rows = random_rows(num_prompt=prompts, num_written=answers, group_size=GROUP_SIZE)
    message = TrainStep(**made, loss=LossSpec(), optim=OptimSpec(1e-3), rows=rows, next_group=0)
    step = trainer.begin(message, trainer.init(Init(**made)))
    return kept_bytes(lambda: trainer.micro_batch([step.opened]))


def kept_bytes(run: Callable[[], None]) -> int:
    """Counts the bytes of all storages that the forwards in `run` keep for their backwards."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        run()
    return sum(kept.values())
