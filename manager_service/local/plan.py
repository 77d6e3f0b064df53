"""Plans a base model for one device: memory by context, rows at once, and a bound on their speed. Arithmetic alone.

One rollout worker with the embedded engine and one trainer share the device, each with its own copy of the weights:

    rollout: process, weights, scores, a prefill, adapters, keys and values | trainer: process, weights, adapters, a micro-batch

The keys and values get what the trainer leaves. Where that is little, the trainer computes layers again instead of keeping them.
"""

import re
from dataclasses import dataclass
from typing import NamedTuple

from common.base_shape import BaseShape
from common.errors import InvalidInput
from common.footprint import BYTES_OF_SCORE, CPU_PROCESS, GPU_PROCESS, SCORES_SHARE, TrainingBytes, training_bytes
from common.served_context import GRAIN, ROWS_PART, cache_room

USABLE = 0.95
"""Of a device's memory."""
OTHERS = 650_000_000
"""Bytes of Redis, the manager, the env worker and the supervisor, beside which a CPU's workers live."""
IDLE_ADAPTERS = 64 << 20
TRAINER_CACHE = 2 * (512 << 20)
"""Adapters with their optimiser states, and gradients of runs: at most."""
SLOTS = 64
"""Turns at once, by default."""
WANTED_ROWS = 16
"""Rows of a whole context at once, of which a plan is content."""
MICRO_BATCH_TOKENS = 2048
"""The trainer's default; a longer row is a micro-batch of its own."""
FIRST_CONTEXT = 1024


class Device(NamedTuple):
    """Memory in bytes, and what bounds speed: bytes and floating-point operations a second."""

    memory: float
    bandwidth: float
    flops: float
    gpu: bool = True


GPUS = {
    "l4": Device(24e9, 300e9, 121e12),
    "a10": Device(24e9, 600e9, 125e12),
    "rtx3090": Device(24e9, 936e9, 71e12),
    "rtx4090": Device(24e9, 1008e9, 165e12),
    "l40s": Device(48e9, 864e9, 362e12),
    "a100": Device(80e9, 2039e9, 312e12),
    "h100": Device(80e9, 3350e9, 989e12),
    "h200": Device(141e9, 4800e9, 989e12),
}
"""Figures of their makers' data sheets: dense bfloat16."""
CORE = Device(0, 10e9, 60e9, gpu=False)
"""One core of a server's processor in float32, as measured here."""


@dataclass(frozen=True, slots=True)
class Fit:
    """One context with the memory that it takes and leaves, in bytes."""

    context: int
    training: TrainingBytes
    num_checkpointed: int  # layers that are computed again in the backward
    kv: int  # for MARLAAS_ROLLOUT_KV_BYTES; 0: nothing is left
    rows: int  # of the whole context at once
    most_tokens_per_s: float  # sampled, no matter how good the engine is

    @property
    def fits(self) -> bool:
        return self.rows > 0


@dataclass(frozen=True, slots=True)
class Plan:
    shape: BaseShape
    device: Device
    itemsize: int
    fits: list[Fit]  # by context, ascending

    @property
    def chosen(self) -> Fit | None:
        """The longest context of which enough rows fit at once, else the longest that fits at all; None if none does."""
        some = [fit for fit in self.fits if fit.fits]
        return next((fit for fit in reversed(some) if fit.rows >= WANTED_ROWS), some[-1] if some else None)

    @property
    def weights(self) -> float:
        """Bytes of one copy."""
        return self.shape.num_weights * self.itemsize


def parse_gpu(text: str) -> Device:
    """`24GB`, `80GiB`, or a name in GPUS. A size has the speed of the slowest GPU known with so much memory. Raises InvalidInput."""
    if text.lower() in GPUS:
        return GPUS[text.lower()]
    memory = parse_bytes(text)
    if memory is None:
        raise InvalidInput(f"--gpu {text!r}: a size such as 24GB, or one of {', '.join(GPUS)}")
    known = [gpu for gpu in GPUS.values() if gpu.memory >= memory] or [max(GPUS.values())]
    slowest = min(known, key=lambda gpu: gpu.bandwidth)
    return slowest._replace(memory=memory)


def parse_bytes(text: str) -> float | None:
    """`24GB` (of a thousand million bytes), `24GiB` (2^30); None for what is no size."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(GB|GIB|G)", text.strip(), re.IGNORECASE)
    return float(found[1]) * (1 << 30 if found[2].upper() == "GIB" else 1e9) if found else None


def make_plan(shape: BaseShape, device: Device, *, itemsize: int, rank: int, context: int | None = None) -> Plan:
    """`context`: that one alone; else powers of two up to the model's own."""
    contexts = [context] if context else _contexts(shape.context)
    return Plan(shape, device, itemsize, [_fit(shape, device, each, itemsize=itemsize, rank=rank) for each in contexts])


def _contexts(own: int) -> list[int]:
    """1,024, 2,048, … and the model's own."""
    doubled = [FIRST_CONTEXT << power for power in range(20)]
    return [*(each for each in doubled if each < own), own]


def _fit(shape: BaseShape, device: Device, context: int, *, itemsize: int, rank: int) -> Fit:
    """Keeps all activations if enough rows fit beside them, else only the inputs of layers."""
    tried = [
        _with_checkpoints(shape, device, context, number, itemsize=itemsize, rank=rank)
        for number in (0, shape.num_layers)
    ]
    return next(
        (fit for fit in tried if fit.rows >= WANTED_ROWS), max(tried, key=lambda fit: (fit.rows, fit.num_checkpointed))
    )


def _with_checkpoints(shape: BaseShape, device: Device, context: int, number: int, *, itemsize: int, rank: int) -> Fit:
    tokens = max(MICRO_BATCH_TOKENS, context)
    training = training_bytes(
        shape, tokens=tokens, itemsize=itemsize, rank=rank, gpu=device.gpu, num_checkpointed=number
    )
    left = USABLE * device.memory - training.total - _beside(shape, device, context, itemsize=itemsize)
    kv = max(0, int(left)) // (1 << 20) * (1 << 20)
    rows = _rows(shape, kv, context, itemsize=itemsize)
    return Fit(context, training, number, kv, rows, _tokens_per_s(shape, device, context, min(rows, SLOTS), itemsize))


def _beside(shape: BaseShape, device: Device, context: int, *, itemsize: int) -> float:
    """Bytes beside the trainer's pass, and beside keys and values."""
    process = GPU_PROCESS + device.memory / SCORES_SHARE if device.gpu else CPU_PROCESS + OTHERS
    scores = SLOTS * shape.vocab * BYTES_OF_SCORE
    prefill = 4 * context * (shape.hidden + shape.ffn) * itemsize
    return shape.num_weights * itemsize + process + scores + prefill + IDLE_ADAPTERS + TRAINER_CACHE


def _rows(shape: BaseShape, kv: int, context: int, *, itemsize: int) -> int:
    whole = -(-context // GRAIN) * GRAIN
    return cache_room(int(ROWS_PART * kv), shape.num_layers) // (shape.kv_bytes(itemsize) * whole)


def _tokens_per_s(shape: BaseShape, device: Device, context: int, rows: int, itemsize: int) -> float:
    """A step reads the weights and the rows' keys and values once, half of the context on average, and multiplies all weights."""
    if not rows:
        return 0.0
    read = shape.num_weights * itemsize + rows * context / 2 * shape.kv_bytes(itemsize)
    return rows / max(read / device.bandwidth, 2 * shape.num_weights * rows / device.flops)
