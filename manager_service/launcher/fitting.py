"""Says what of base models fits in a memory, a GPU's or the machine's: arithmetic, no measurement.

    each rollout worker: process, weights, scores, a prefill, adapters, keys and values
    each trainer:        process, weights, adapters with their states, a micro-batch

Keys and values, of the same size in all rollout workers, get what trainers leave. Where that is little, trainers have
smaller micro-batches, or compute layers again. `marlaas plan` prints it; `marlaas up` chooses and refuses by it.
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
    kept_per_token,
    training_bytes,
    weights_of_rank,
)
from manager_service.launcher.engines import Device, EngineName, Load, training_s

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
MICRO_BATCHES = (16_384, 8192, 4096, 2048)
"""Tokens of the trainer's micro-batch on a GPU, by its memory; a longer row is one of its own. On a processor one row is enough."""
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
    tokens: int  # of a trainer's micro-batch
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
    def measures(self) -> bool:
        """Has the engine the memory for itself, so that it measures what keys and values may have?"""
        alone = self.rollouts == 1 and not self.trainers
        return self.engine == "vllm" and self.device.gpu and alone and self.kv is None

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
        """Layers are computed again only up to a context of ENOUGH: it takes a third of training's time."""
        return fit.rows >= self.wanted_rows and not (fit.again and fit.context > ENOUGH)

    def at(self, context: int) -> Fit:
        """The micro-batch that has a token sampled and trained soonest, and leaves enough rows; else the one that leaves most."""
        least = max(MICRO_BATCHES[-1], context) if self.device.gpu else context
        sizes = [size for size in MICRO_BATCHES if size > least and self.device.gpu and self.trainers]
        tried = [self._fit(context, tokens, again=again) for again in (False, True) for tokens in (*sizes, least)]
        most = max(tried, key=lambda fit: (fit.rows, fit.again))
        return min(filter(self.enough, tried), key=self._seconds, default=most)

    def _seconds(self, fit: Fit) -> float:
        """The time of a token that is sampled and trained. On a processor none: it keeps what it can."""
        if not self.device.gpu:
            return 0.0
        sampled = [self.load(c.shape, fit.context).expected_tokens_per_s(fit.rows) for c in self.copies if c.rollouts]
        return sum(
            1 / each for each in [*sampled, *(self.trained_per_s(c.shape, fit) for c in self.copies if c.trainers)]
        )

    def trained_per_s(self, shape: BaseShape, fit: Fit) -> float:
        """The tokens that a trainer is expected to train in a second, with the device to itself."""
        kept = kept_per_token(shape, itemsize=self.itemsizes[1], rank=self.rank, modules=True)
        taken = training_s(shape, self.device, fit.tokens, fit.context, again=fit.again, kept=kept)
        return self.ranks * fit.tokens / taken

    def _fit(self, context: int, tokens: int, *, again: bool) -> Fit:
        number = self.rollouts
        training = [self._training(copy, context, tokens, again=again) for copy in self.copies]
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
        return Fit(
            context=context,
            tokens=tokens,
            again=again,
            training=max(training, key=lambda each: each.total),
            rollout=max(load.beside_kv for load in loads) + kv,
            kv=kv,
            activations=int(max(each.kept for each in training) * tokens / self._fullest(context, tokens)),
            trainer=max(trainers),
            cache=max(caches),
            rows=min(rows, default=self.wanted_rows) if holds else 0,
        )

    @property
    def _usable(self) -> float:
        """Bytes that all workers may take together."""
        return (VLLM_FRACTION if self.measures else USABLE) * self.device.memory - (0 if self.device.gpu else OTHERS)

    def _fullest(self, context: int, tokens: int) -> int:
        """Tokens of the fullest micro-batch: another rank's may have a row more."""
        return tokens + (context if self.ranks > 1 else 0)

    def _training(self, copy: Copies, context: int, tokens: int, *, again: bool) -> TrainingBytes:
        longest = min(context, copy.shape.context)
        return training_bytes(
            copy.shape,
            tokens=self._fullest(longest, tokens),
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
    trained = [(memory, fit) for memory, fit in fits if memory.trainers]
    found: dict[str, str] = {}
    shared = [(memory, fit) for memory, fit in trained if memory.rollouts]
    if rollouts and all(memory.measures for memory, _ in rollouts):
        found["MARLAAS_VLLM_MEMORY_FRACTION"] = f"{min(fit.rollout / memory.whole for memory, fit in rollouts):.3g}"
    elif rollouts:
        found["MARLAAS_ROLLOUT_KV_BYTES"] = str(min(fit.kv for _, fit in rollouts))
    if budgets := [fit.activations for memory, fit in trained if memory.rollouts or memory.device.gpu]:
        found["MARLAAS_TRAINER_MEMORY_BYTES"] = str(min(budgets))
    if shared:  # a trainer with a memory of its own keeps more
        found["MARLAAS_TRAINER_CACHE_BYTES"] = str(min(fit.cache for _, fit in shared))
    if sizes := [fit.tokens for memory, fit in trained if memory.device.gpu]:
        found["MARLAAS_TRAINER_MICRO_BATCH_TOKENS"] = str(min(sizes))
    if parts := [fit.trainer / memory.whole for memory, fit in shared if memory.device.gpu]:
        found["MARLAAS_TRAINER_MEMORY_FRACTION"] = f"{max(parts):.3g}"
    if any(fit.again and memory.trainers and not memory.device.gpu for memory, fit in fits):
        found["MARLAAS_TRAINER_CHECKPOINTING"] = "true"
    return found
