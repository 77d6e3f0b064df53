"""Says what of a base model fits on one device or several: memory by context, rows at once, speed. Arithmetic alone.

On one device a rollout worker and a trainer share it, each with its own copy of the weights:

    rollout: process, weights, scores, a prefill, adapters, keys and values | trainer: process, weights, adapters, a micro-batch

The keys and values get what the trainer leaves. Where that is little, the trainer computes layers again instead of keeping them.
On several devices each belongs to rollouts or to the trainer, whose ranks have a part of the base model each:

    worker 0 | worker 1 | worker 2, over two devices | rank 0 of the trainer | rank 1
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from common.base_shape import BaseShape
from common.errors import InvalidInput
from common.footprint import SCORES_SHARE, TrainingBytes, training_bytes
from manager_service.local.engines import TRAINING_REACHED, Device, Load, PlannedEngine, trained_flops

USABLE = 0.95
"""The usable part of a device's memory."""
VLLM_FRACTION = 0.9
"""The part of a device of its own that vLLM takes by default."""
OTHERS = 650_000_000
"""Bytes of Redis, the manager, the env worker and the supervisor, beside which a CPU's workers live."""
TRAINER_CACHE = 2 * (512 << 20)
"""Adapters with their optimiser states, and gradients of runs: at most."""
WANTED_ROWS = 16
"""Rows of a whole context at once that a plan aims for."""
MICRO_BATCH_TOKENS = 2048
"""The trainer's default; a longer row is a micro-batch of its own."""
FIRST_CONTEXT = 1024


class DeviceSplit(NamedTuple):
    """The owners of the devices: rollout workers, each on `parallel` of them, then the trainer's ranks."""

    workers: int = 1
    parallel: int = 1
    ranks: int = 1
    shared: bool = True  # all of them on the one device

    @property
    def for_rollouts(self) -> int:
        return self.workers * self.parallel


class Case(NamedTuple):
    """The case that is planned for."""

    shape: BaseShape
    device: Device
    engine: PlannedEngine
    itemsize: int
    rank: int  # of the adapters
    modules: bool  # transformers' own compute the base model in the trainer
    windows: Sequence[int | None] = ()  # of each layer's attention, in tokens; nothing where no layer has one


@dataclass(frozen=True, slots=True)
class Fit:
    """One context with the memory that it takes and leaves, in bytes."""

    context: int
    split: DeviceSplit
    training: TrainingBytes  # of a device
    micro_batch_tokens: int  # on each rank, and the bytes that they keep for the backward
    micro_batch_bytes: int
    num_checkpointed: int  # layers that are computed again in the backward
    fraction: float  # of a device's memory that rollouts take
    kv: int  # of a device; 0: nothing is left
    rows: int  # of the whole context at once, in all workers
    # Speeds have the devices to themselves: sampled, no matter how good the engine is, and as many as are expected of it; trained
    most_tokens_per_s: float
    tokens_per_s: float
    most_trained_per_s: float
    trained_per_s: float

    @property
    def fits(self) -> bool:
        return self.rows > 0

    @property
    def sampling_share(self) -> float:
        """The part of the time that sampling takes of a device that does both in turn, for a job that trains each token that it samples."""
        return self.trained_per_s / (self.trained_per_s + self.tokens_per_s)

    @property
    def merit(self) -> tuple[bool, float, float, float, float]:
        """The best of several splits has the largest: enough rows, then the slower of sampling and training as fast as can be."""
        sampled, trained = self.most_tokens_per_s, self.most_trained_per_s
        return self.rows >= WANTED_ROWS, min(sampled, trained), sampled, trained * self.fits, -self.training.total


@dataclass(frozen=True, slots=True)
class Plan:
    case: Case
    fits: list[Fit]  # by context, ascending

    @property
    def chosen(self) -> Fit | None:
        """The longest context of which enough rows fit at once, else the longest that fits at all; None if none does."""
        some = [fit for fit in self.fits if fit.fits]
        return next((fit for fit in reversed(some) if fit.rows >= WANTED_ROWS), some[-1] if some else None)

    @property
    def in_turn(self) -> bool:
        """Says whether one device samples and trains in turn. On a CPU each has a core of its own."""
        return self.case.device.gpu and self.fits[0].split.shared

    @property
    def weights(self) -> float:
        """Bytes of one copy."""
        return self.case.shape.num_weights * self.case.itemsize


def make_plan(
    shape: BaseShape,
    device: Device,
    *,
    rank: int,
    engine: PlannedEngine | None = None,
    num_devices: int = 1,
    context: int | None = None,
    modules: bool | None = None,
    windows: Sequence[int | None] = (),
) -> Plan:
    """`context`: that one alone; else powers of two up to the model's own. `engine`: the embedded one, if it is left out. `windows`: see
    `Case`.

    Raises InvalidInput for several devices of a CPU.
    """
    if num_devices > 1 and not device.gpu:
        raise InvalidInput("--gpus: a CPU is one device; name the GPUs with --gpu")
    case = Case(
        shape,
        device,
        engine or PlannedEngine.of("torch", device),
        itemsize=2 if device.gpu else 4,
        rank=rank,
        modules=device.gpu if modules is None else modules,
        windows=windows,
    )
    contexts = [context] if context else _contexts(shape.context)
    splits = list(_splits(case, num_devices))
    return Plan(
        case, [max((_fit(case, each, split) for split in splits), key=lambda fit: fit.merit) for each in contexts]
    )


def fits(case: Case, num_devices: int, context: int) -> bool:
    """Says whether a row of this context fits on so many devices."""
    return any(_fit(case, context, split).fits for split in _splits(case, num_devices))


def _contexts(own: int) -> list[int]:
    """1,024, 2,048, … and the model's own."""
    doubled = [FIRST_CONTEXT << power for power in range(20)]
    return [*(each for each in doubled if each < own), own]


def _splits(case: Case, num_devices: int) -> Iterator[DeviceSplit]:
    """All ways to use the devices. The embedded engine has a device for each worker; vLLM may spread the heads of one over several."""
    if num_devices == 1:
        yield DeviceSplit()
        return
    shape = case.shape
    for ranks, parallel in itertools.product(range(1, num_devices), range(1, num_devices)):
        spreads = not shape.num_heads % parallel and (
            not shape.num_kv_heads % parallel or not parallel % shape.num_kv_heads
        )
        if (parallel == 1 or case.engine.name == "vllm") and spreads and parallel <= num_devices - ranks:
            yield DeviceSplit((num_devices - ranks) // parallel, parallel, ranks, shared=False)


def _fit(case: Case, context: int, split: DeviceSplit) -> Fit:
    """Keeps all activations if enough rows fit beside them, else only the inputs of layers."""
    tried = [_with_checkpoints(case, context, split, number) for number in (0, case.shape.num_layers)]
    return next(
        (fit for fit in tried if fit.rows >= WANTED_ROWS), max(tried, key=lambda fit: (fit.rows, fit.num_checkpointed))
    )


def _with_checkpoints(case: Case, context: int, split: DeviceSplit, number: int) -> Fit:
    shape, device = case.shape, case.device
    micro_batch = max(MICRO_BATCH_TOKENS, context)
    tokens = micro_batch if split.ranks == 1 else micro_batch + context  # the fullest rank may have a row more
    training = training_bytes(
        shape,
        tokens=tokens,
        longest=micro_batch,
        itemsize=case.itemsize,
        rank=case.rank,
        gpu=device.gpu,
        modules=case.modules,
        num_checkpointed=number,
        num_ranks=split.ranks,
    )
    load = Load(shape, device, case.engine, case.itemsize, case.rank, context, split.parallel)
    fraction = _fraction(case, training.total, split)
    kv = max(0, int(fraction * device.memory - load.beside_kv)) // (1 << 20) * (1 << 20)
    rows = load.rows(kv)
    work = trained_flops(shape, context, again=number / shape.num_layers, windows=case.windows)
    most_trained = split.ranks * device.flops / work
    return Fit(
        context,
        split,
        training,
        micro_batch,
        int(training.kept * micro_batch / tokens),
        number,
        fraction,
        kv,
        split.workers * rows,
        split.workers * load.tokens_per_s(rows),
        split.workers * load.expected_tokens_per_s(rows),
        most_trained,
        most_trained * TRAINING_REACHED[device.gpu],
    )


def _fraction(case: Case, trainer: float, split: DeviceSplit) -> float:
    """The part of a device's memory that rollouts may take: 0 if the trainer does not fit. `trainer`: bytes that it takes in a pass."""
    memory = case.device.memory
    others = memory / SCORES_SHARE if case.device.gpu else OTHERS
    left = USABLE * memory - trainer - TRAINER_CACHE - others
    if left <= 0:
        return 0.0
    if split.shared:
        return int(1000 * left / memory) / 1000
    return VLLM_FRACTION if case.engine.name == "vllm" else USABLE
