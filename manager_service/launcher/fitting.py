"""Says what of base models fits in a memory, a GPU's or the machine's: arithmetic, no measurement.

    each rollout worker: process, weights, scores, a prefill, adapters, keys and values
    each trainer:        process, weights, adapters with their states, a micro-batch

Keys and values, of the same size in all rollout workers, get what trainers leave. Where that is little, trainers
compute layers again. `marlaas plan` prints it; `marlaas up` chooses and refuses by it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from common.models.base_shape import BaseShape
from common.models.footprint import (
    CPU_PROCESS,
    FLOAT32,
    GPU_PROCESS,
    ROWS_PART,
    SCORES_SHARE,
    TrainingBytes,
    training_bytes,
    weights_of_rank,
)
from manager_service.launcher.engines import Device, EngineName, Load

USABLE = 0.95
"""The usable part of a device's memory."""
VLLM_FRACTION = 0.9
"""The part of a GPU of its own that vLLM takes by default."""
OTHERS = 650_000_000
"""Bytes of Redis, the manager, the env worker and the supervisor, in a processor's memory."""
RANK = 16
"""Rank of the adapters unless `marlaas plan` names another."""
STATES = 3
"""States of adapters of RANK that a trainer keeps, and as many gradients of runs."""
LEAST_CACHE, LEAST_KV = 512 << 20, 1 << 30
"""The services' own defaults."""
MICRO_BATCH_TOKENS = 2048
"""The trainer's default on a GPU; a longer row is a micro-batch of its own. On a processor one row is enough."""
FIRST_CONTEXT = 1024
ENOUGH = 4096
"""Tokens of a context that most tasks need."""
GPU_ROWS, CPU_ROWS = 16, 4
"""Rows of the whole context at once that a choice aims for."""


class Copies(NamedTuple):
    """The workers of one base model in a memory."""

    shape: BaseShape
    modules: bool  # transformers' own compute it in the trainer
    rollouts: int = 1
    trainers: int = 1


@dataclass(frozen=True, slots=True)
class Fit:
    """One context, with the bytes that each worker has."""

    context: int
    again: bool  # the backward computes all layers again
    training: TrainingBytes  # of the trainer that takes most
    rollout: float  # keys and values included
    kv: int
    trainer: float  # states of adapters included
    activations: int  # of a trainer, for MARLAAS_TRAINER_MEMORY_BYTES
    cache: int  # of a trainer, for MARLAAS_TRAINER_CACHE_BYTES
    rows: int  # of the whole context at once, on each rollout worker; 0: it does not fit


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedMemory:
    """A memory, the workers in it, and their settings that count for memory."""

    device: Device  # of whose memory nobody holds anything
    engine: EngineName
    copies: Sequence[Copies]
    itemsizes: tuple[int, int]  # bytes of a weight, for rollouts and for training
    rank: int = RANK  # of the adapters
    parallel: int = 1  # devices of a rollout worker
    ranks: int = 1  # of a trainer
    share: float | None = None  # of the memory, for rollouts
    kv: int | None = None  # bytes that somebody has chosen, and answers for
    name: str = ""  # "GPU 0", "this machine"
    whole: float = 0  # bytes, with what others hold

    @property
    def rollouts(self) -> int:
        return sum(copy.rollouts for copy in self.copies)

    @property
    def trainers(self) -> int:
        return sum(copy.trainers for copy in self.copies)

    @property
    def by_fraction(self) -> bool:
        """Does the engine take a part of the memory, whatever it needs?"""
        return self.engine == "vllm" and self.device.gpu

    @property
    def wanted_rows(self) -> int:
        if self.kv is not None:
            return 1
        return GPU_ROWS if self.device.gpu else CPU_ROWS

    @property
    def weights(self) -> float:
        """Bytes of all copies."""
        rollout, trainer = self.itemsizes
        return sum(
            copy.rollouts * copy.shape.num_weights * rollout / self.parallel
            + copy.trainers * weights_of_rank(copy.shape, self.ranks) * trainer
            for copy in self.copies
        )

    @property
    def least(self) -> float:
        """Bytes of the processes and the weights."""
        return self.weights + (self.rollouts + self.trainers) * (GPU_PROCESS if self.device.gpu else CPU_PROCESS)

    def longest(self, contexts: Sequence[int]) -> Fit | None:
        """The longest context of which enough rows fit at once, else the shortest that fits; None if none does."""
        found = [fit for context in contexts if (fit := self.at(context)).rows]
        return next(filter(self.enough, reversed(found)), found[0] if found else None)

    def enough(self, fit: Fit) -> bool:
        """On a processor layers are computed again only up to a context of ENOUGH: it takes a third of training's time."""
        too_slow = fit.again and fit.context > ENOUGH and not self.device.gpu
        return fit.rows >= self.wanted_rows and not too_slow

    def at(self, context: int) -> Fit:
        """Keeps all activations if enough rows fit next to them, else only the inputs of layers."""
        tried = [self._fit(context, again=again) for again in (False, True)]
        return next(filter(self.enough, tried), max(tried, key=lambda fit: (fit.rows, fit.again)))

    def _fit(self, context: int, *, again: bool) -> Fit:
        number = self.rollouts
        training = [self._training(copy, context, again=again) for copy in self.copies]
        caches = [self._cache(copy.shape) for copy in self.copies]
        scores = self.device.memory / SCORES_SHARE if self.device.gpu else 0
        trainers = [each.total + 2 * cache + scores for each, cache in zip(training, caches, strict=True)]
        of_trainers = sum(copy.trainers * each for copy, each in zip(self.copies, trainers, strict=True))
        loads = [self.load(copy.shape, context) for copy in self.copies]
        beside_kv = sum(copy.rollouts * load.beside_kv for copy, load in zip(self.copies, loads, strict=True))
        of_rollouts = self._usable - of_trainers if self.share is None else self.share * self.device.memory
        left = of_rollouts - beside_kv
        kv = self.kv or int(max(0, min(left / max(1, number), self._most_kv(loads)))) >> 20 << 20
        holds = left >= number * kv and (self.share is None or self._usable - of_rollouts >= of_trainers)
        rows = [load.rows(kv) for copy, load in zip(self.copies, loads, strict=True) if copy.rollouts]
        tokens, most = self._tokens(context)
        return Fit(
            context=context,
            again=again,
            training=max(training, key=lambda each: each.total),
            rollout=max(load.beside_kv for load in loads) + kv,
            kv=kv,
            activations=int(max(each.kept for each in training) * tokens / most),
            trainer=max(trainers),
            cache=max(caches),
            rows=min(rows, default=self.wanted_rows) if holds else 0,
        )

    @property
    def _usable(self) -> float:
        """Bytes that all workers may take together."""
        alone = self.by_fraction and self.rollouts == 1 and not self.trainers
        return (VLLM_FRACTION if alone else USABLE) * self.device.memory - (0 if self.device.gpu else OTHERS)

    def _tokens(self, longest: int) -> tuple[int, int]:
        """Tokens of a micro-batch, and of the fullest one: another rank's may have a row more."""
        tokens = max(MICRO_BATCH_TOKENS, longest) if self.device.gpu else longest
        return tokens, tokens + (longest if self.ranks > 1 else 0)

    def _training(self, copy: Copies, context: int, *, again: bool) -> TrainingBytes:
        longest = min(context, copy.shape.context)
        return training_bytes(
            copy.shape,
            tokens=self._tokens(longest)[1],
            longest=longest,
            itemsize=self.itemsizes[1],
            rank=self.rank,
            gpu=self.device.gpu,
            modules=copy.modules,
            num_checkpointed=copy.shape.num_layers if again else 0,
            num_ranks=self.ranks,
        )

    def load(self, shape: BaseShape, context: int) -> Load:
        """The work of an engine in it."""
        longest = min(context, shape.context)
        return Load(shape, self.device, self.engine, self.itemsizes[0], self.rank, longest, self.parallel)

    def _most_kv(self, loads: Sequence[Load]) -> float:
        """On a processor more rows are of no use, and vLLM takes all of the memory at once."""
        if self.device.gpu:
            return math.inf
        rows = CPU_ROWS if self.engine == "vllm" else 2 * CPU_ROWS / ROWS_PART
        return max(LEAST_KV, *(rows * load.context * load.shape.kv_bytes(load.itemsize) for load in loads))

    def _cache(self, shape: BaseShape) -> int:
        """MARLAAS_TRAINER_CACHE_BYTES: states of values and two moments. A trainer with its own memory takes more."""
        return max(LEAST_CACHE, STATES * 3 * FLOAT32 * shape.adapter_weights(RANK) if self.rollouts else 0)


def settings_for(fits: Sequence[tuple[SharedMemory, Fit]]) -> dict[str, str]:
    """The settings by which services take what fits in every memory, the context apart."""
    rollouts = [(memory, fit) for memory, fit in fits if memory.rollouts]
    shared = [fit for memory, fit in rollouts if memory.trainers]
    found: dict[str, str] = {}
    if parts := [fit.rollout / memory.whole for memory, fit in rollouts if memory.by_fraction]:
        found["MARLAAS_VLLM_MEMORY_FRACTION"] = f"{math.ceil(1000 * min(parts)) / 1000:g}"
    elif rollouts:
        found["MARLAAS_ROLLOUT_KV_BYTES"] = str(min(fit.kv for _, fit in rollouts))
    if shared:  # a trainer with a memory of its own takes half of what it finds free
        found["MARLAAS_TRAINER_MEMORY_BYTES"] = str(min(fit.activations for fit in shared))
        found["MARLAAS_TRAINER_CACHE_BYTES"] = str(min(fit.cache for fit in shared))
    if any(memory.device.gpu and memory.trainers for memory, _ in rollouts):
        found["MARLAAS_TRAINER_MICRO_BATCH_TOKENS"] = str(max(MICRO_BATCH_TOKENS, *(fit.context for fit in shared)))
    if any(fit.again and memory.trainers and not memory.device.gpu for memory, fit in fits):
        found["MARLAAS_TRAINER_CHECKPOINTING"] = "true"
    return found
