"""Shares one memory, a GPU's or the machine's, between the copies of base models in it. Arithmetic alone, as in `plan.py`.

    each rollout worker: what its engine takes, keys and values | each trainer: what a micro-batch takes, states of adapters

All rollout workers have keys and values of the same size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from common.base_shape import BaseShape
from common.footprint import (
    CPU_PROCESS,
    FLOAT32,
    GPU_PROCESS,
    SCORES_SHARE,
    TrainingBytes,
    training_bytes,
    weights_of_rank,
)
from common.served_context import ROWS_PART
from manager_service.local.engines import Device, Load, PlannedEngine
from manager_service.local.plan import MICRO_BATCH_TOKENS, OTHERS, USABLE, WANTED_ROWS

RANK = 16
"""Rank of the adapters that are reckoned with."""
STATES = 3
"""States of such adapters that a trainer keeps, and as many gradients of runs."""
LEAST_CACHE, LEAST_KV = 512 << 20, 1 << 30
"""The services' own defaults."""
ENOUGH = 4096
"""Tokens of a context that most tasks need."""
CPU_ROWS = 4
"""Rows of the whole context at once that a choice aims for on a processor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The settings of the workers that count for memory."""

    device: Device
    engine: PlannedEngine
    rollout_itemsize: int  # bytes of a weight
    trainer_itemsize: int
    parallel: int = 1  # devices of a rollout worker
    ranks: int = 1  # of a trainer
    share: float | None = None  # of the memory, for rollouts
    kv: int | None = None  # bytes that somebody has chosen

    @property
    def wanted_rows(self) -> int:
        """Rows of the whole context at once that a choice aims for."""
        if self.kv is not None:
            return 1
        return WANTED_ROWS if self.device.gpu else CPU_ROWS

    @property
    def most_rows(self) -> int:
        """Memory for more is of no use; on a processor vLLM takes all of it at once."""
        if self.device.gpu:
            return 2 * self.engine.slots
        return CPU_ROWS if self.engine.name == "vllm" else 2 * CPU_ROWS


class Copies(NamedTuple):
    """The workers of one base model in the memory."""

    shape: BaseShape
    modules: bool  # transformers' own compute it in the trainer
    rollouts: int
    trainers: int


class WorkerBytes(NamedTuple):
    """Bytes that each worker has."""

    context: int
    checkpointed: bool  # all layers keep their inputs alone
    rollout: float  # keys and values included
    kv: int
    trainer: float
    activations: int  # of a trainer, for MARLAAS_TRAINER_MEMORY_BYTES
    cache: int  # of a trainer, for MARLAAS_TRAINER_CACHE_BYTES
    rows: int  # of the whole context at once, on each rollout worker


def least_bytes(copies: Sequence[Copies], setup: Setup) -> float:
    """Bytes of the processes and the weights alone."""
    process = GPU_PROCESS if setup.device.gpu else CPU_PROCESS
    return sum(
        copy.rollouts * (copy.shape.num_weights * setup.rollout_itemsize / setup.parallel + process)
        + copy.trainers * (weights_of_rank(copy.shape, setup.ranks) * setup.trainer_itemsize + process)
        for copy in copies
    )


def fit(copies: Sequence[Copies], setup: Setup, contexts: Sequence[int]) -> WorkerBytes | None:
    """The longest context of which enough rows fit at once, else the shortest that fits at all; None if none does.

    On a processor layers are computed again, all of them in each step, only for contexts up to ENOUGH: a third of training's time is
    too much for a longer one.
    """
    tried = [_fit(copies, setup, context, checkpointed=again) for again in (False, True) for context in contexts]
    enough = [each for each in tried if each.rows >= setup.wanted_rows]
    if not setup.device.gpu:
        most = max(ENOUGH, contexts[0])
        enough = [each for each in enough if not each.checkpointed or each.context <= most]
    if enough:
        return max(enough, key=lambda each: (each.context, not each.checkpointed))
    return min((each for each in tried if each.rows), key=lambda each: (each.context, -each.rows), default=None)


def _fit(copies: Sequence[Copies], setup: Setup, context: int, *, checkpointed: bool) -> WorkerBytes:
    training = [_training(copy, setup, context, checkpointed=checkpointed) for copy in copies]
    caches = [_cache(copy.shape) for copy in copies]
    scores = setup.device.memory / SCORES_SHARE if setup.device.gpu else 0
    trainers = [each.total + 2 * cache + scores for each, cache in zip(training, caches, strict=True)]
    loads = [_load(copy.shape, setup, context) for copy in copies]
    of_trainers = sum(copy.trainers * each for copy, each in zip(copies, trainers, strict=True))
    beside_kv = sum(copy.rollouts * load.beside_kv for copy, load in zip(copies, loads, strict=True))
    usable = USABLE * setup.device.memory - (0 if setup.device.gpu else OTHERS)
    of_rollouts = usable - of_trainers if setup.share is None else setup.share * setup.device.memory
    left = of_rollouts - beside_kv
    number = sum(copy.rollouts for copy in copies)
    most = max(_most_kv(load, setup) for load in loads)
    kv = (int(min(left / number, most) if setup.kv is None else setup.kv) >> 20 << 20) if number else 0
    holds = left >= number * kv >= 0 and (setup.share is None or usable - of_rollouts >= of_trainers)
    rows = min(
        (load.rows(kv) for copy, load in zip(copies, loads, strict=True) if copy.rollouts), default=setup.wanted_rows
    )
    return WorkerBytes(
        context=context,
        checkpointed=checkpointed,
        rollout=max(load.beside_kv for load in loads) + kv,
        kv=kv,
        trainer=max(trainers),
        activations=int(max(each.kept for each in training)),
        cache=max(caches),
        rows=rows if holds else 0,
    )


def _training(copy: Copies, setup: Setup, context: int, *, checkpointed: bool) -> TrainingBytes:
    """Bytes of one rank, whose fullest micro-batch may have a row more than the first one's. On a processor one row is as good as more."""
    longest = min(context, copy.shape.context)
    tokens = max(MICRO_BATCH_TOKENS, longest) if setup.device.gpu else longest
    return training_bytes(
        copy.shape,
        tokens=tokens + (longest if setup.ranks > 1 else 0),
        longest=longest,
        itemsize=setup.trainer_itemsize,
        rank=RANK,
        gpu=setup.device.gpu,
        modules=copy.modules,
        num_checkpointed=copy.shape.num_layers if checkpointed else 0,
        num_ranks=setup.ranks,
    )


def _load(shape: BaseShape, setup: Setup, context: int) -> Load:
    longest = min(context, shape.context)
    return Load(shape, setup.device, setup.engine, setup.rollout_itemsize, RANK, longest, setup.parallel)


def _most_kv(load: Load, setup: Setup) -> float:
    tokens = setup.most_rows * load.context * load.shape.kv_bytes(load.itemsize, load.parallel)
    return max(LEAST_KV, tokens if load.engine.name == "vllm" else tokens / ROWS_PART)


def _cache(shape: BaseShape) -> int:
    """MARLAAS_TRAINER_CACHE_BYTES: states of values and two moments."""
    return max(LEAST_CACHE, STATES * 3 * FLOAT32 * shape.adapter_weights(RANK))
