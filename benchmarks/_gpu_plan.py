"""The most memory that a step takes on a GPU, beside what `marlaas plan` says of it."""

from dataclasses import replace

import numpy as np
import torch

from benchmarks._gpu_bases import Shape
from benchmarks._gpu_parts import peak_bytes
from benchmarks.training import LORA, initial_state, step_of
from common.base_shape import BaseShape
from common.footprint import MAX_SCORES, TrainingBytes, training_bytes
from trainer_service.packing import Budget
from trainer_service.selftest import random_rows
from trainer_service.training import Trainer

NUM_ROWS, NUM_PROMPT, NUM_WRITTEN = 8, 3072, 1024
ROW = NUM_PROMPT + NUM_WRITTEN


def measure_plan(trainer: Trainer, shape: Shape) -> dict[str, float]:
    """Trains 8 rows of 4,096 tokens, as many in a micro-batch as fit. Both figures are without what the process takes, and without
    holes between allocations; elsewhere than on a GPU nothing is trained, and the peak is NaN.

    Raises ImportError without transformers.
    """
    from trainer_service.backbone.modules import ModulesBackbone  # here: a lent GPU may lack transformers

    backbone = trainer.backbone
    assert isinstance(backbone, ModulesBackbone), "it is what `marlaas plan --gpu` reckons with"
    trainer = replace(trainer, backbone=replace(backbone, max_scores=MAX_SCORES), share_prefixes=False)
    itemsize, num_checkpointed = backbone.model.dtype.itemsize, backbone.num_checkpointed
    planned = _planned(trainer.budget, shape, itemsize=itemsize, num_checkpointed=num_checkpointed)
    before = torch.cuda.memory_allocated(backbone.device) if backbone.device.type == "cuda" else 0
    taken = peak_bytes(backbone.device, lambda: _train(trainer)) - before
    wanted = planned.total - planned.process - planned.holes
    return {"peak_bytes": planned.weights + taken, "planned_bytes": wanted}


def _planned(budget: Budget, shape: Shape, *, itemsize: int, num_checkpointed: int) -> TrainingBytes:
    most = min(budget.tokens, budget.num_bytes / budget.bytes_per_token if budget.bytes_per_token else budget.tokens)
    tokens = min(NUM_ROWS, max(1, int(most // ROW))) * ROW
    return training_bytes(
        _sizes(shape),
        tokens=tokens,
        longest=ROW,
        itemsize=itemsize,
        rank=LORA.rank,
        gpu=True,
        num_checkpointed=num_checkpointed,
    )


def _sizes(shape: Shape) -> BaseShape:
    c = shape.config
    return BaseShape(
        num_layers=c.num_layers,
        hidden=c.hidden,
        ffn=shape.inner,
        num_heads=c.num_heads,
        num_kv_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        vocab=c.vocab,
        context=c.context,
        tied=c.tied,
        head_norms=True,
    )


def _train(trainer: Trainer) -> None:
    prompts, written = np.full(NUM_ROWS, NUM_PROMPT), np.full(NUM_ROWS, NUM_WRITTEN)
    rows = random_rows(num_prompt=prompts, num_written=written, group_size=4)
    trainer.step(step_of(rows), initial_state(trainer, 0, LORA), lambda: None)
