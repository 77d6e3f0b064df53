"""Says what of a base model fits on one device or several: memory by context, rows at once, speed. Arithmetic only.

A rollout worker and a trainer share one device, each with its own copy of the weights. Of several, each belongs to
rollouts or to the trainer, whose ranks have a part of the base model each:

    worker 0 | worker 1 | worker 2, over two devices | rank 0 of the trainer | rank 1
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from common.errors import InvalidInput
from common.models.base_shape import BaseShape
from manager_service.launcher.engines import Device, EngineName
from manager_service.launcher.fitting import FIRST_CONTEXT, Copies, Fit, SharedMemory

NAMED_RUN, NAMED_TOKENS = "100 steps of 128 answers of 512 tokens", 100 * 128 * 512
"""The run whose hours are told: `examples.gsm8k`."""


class DeviceSplit(NamedTuple):
    """The owners of the devices: rollout workers, each on `parallel` of them, then the trainer's ranks."""

    workers: int = 1
    parallel: int = 1
    ranks: int = 1
    shared: bool = True  # all of them on the one device

    @property
    def for_rollouts(self) -> int:
        return self.workers * self.parallel


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """One context on a split of the devices."""

    context: int
    split: DeviceSplit
    # Of a device for rollouts, and of one for training; one where they share it
    memories: list[tuple[SharedMemory, Fit]]
    # As expected, with the devices to themselves
    tokens_per_s: float
    trained_per_s: float

    @property
    def rollout(self) -> Fit:
        return self.memories[0][1]

    @property
    def trainer(self) -> Fit:
        return self.memories[-1][1]

    @property
    def rows(self) -> int:
        """Rows of the whole context at once, in all workers; 0: it does not fit."""
        return self.split.workers * self.rollout.rows if self.trainer.rows else 0

    @property
    def enough(self) -> bool:
        return all(memory.enough(fit) for memory, fit in self.memories)

    @property
    def sampling_share(self) -> float:
        """The part of a device's time that sampling takes, for a job that trains each token that it samples."""
        return self.trained_per_s / (self.trained_per_s + self.tokens_per_s)

    def hours(self, num_tokens: int = NAMED_TOKENS) -> float:
        """The hours of a run of answers of so many tokens in all, by itself: each step is sampled, then trained."""
        return num_tokens * (1 / self.tokens_per_s + 1 / self.trained_per_s) / 3600

    @property
    def merit(self) -> tuple[bool, float, float, float, float]:
        """The best split has the largest: enough rows, then the fastest slower one of sampling and training."""
        sampled, trained = (each * (self.rows > 0) for each in (self.tokens_per_s, self.trained_per_s))
        return self.enough, min(sampled, trained), sampled, trained, -self.trainer.training.total


@dataclass(frozen=True, slots=True)
class Plan:
    memory: SharedMemory  # of one device that rollouts and training share
    num_devices: int
    rows: list[PlannedRow]  # by context, ascending

    @property
    def shape(self) -> BaseShape:
        return self.memory.copies[0].shape

    @property
    def device(self) -> Device:
        return self.memory.device

    @property
    def chosen(self) -> PlannedRow | None:
        """The longest context of which enough rows fit at once, else the shortest that fits; None if none does."""
        found = [row for row in self.rows if row.rows]
        return next((row for row in reversed(found) if row.enough), found[0] if found else None)

    @property
    def in_turn(self) -> bool:
        """Says whether one device samples and trains in turn. On a CPU each has a core of its own."""
        return self.device.gpu and self.num_devices == 1

    @property
    def weights(self) -> float:
        """Bytes of one copy."""
        return self.shape.num_weights * self.memory.itemsizes[0]


def make_plan(
    shape: BaseShape,
    device: Device,
    *,
    rank: int,
    engine: EngineName = "torch",
    num_devices: int = 1,
    context: int | None = None,
    modules: bool | None = None,
) -> Plan:
    """`context`: that one only; else powers of two up to the model's own. `modules`: transformers' own compute it.

    Raises InvalidInput for several devices of a CPU.
    """
    if num_devices > 1 and not device.gpu:
        raise InvalidInput("--gpus: a CPU is one device; name the GPUs with --gpu")
    memory = SharedMemory(
        device=device,
        engine=engine,
        copies=[Copies(shape, device.gpu if modules is None else modules)],
        itemsizes=(2, 2) if device.gpu else (4, 4),
        rank=rank,
        whole=device.memory,
    )
    contexts = [context] if context else _contexts(shape.context)
    return Plan(memory, num_devices, [_best(memory, num_devices, each) for each in contexts])


def _contexts(own: int) -> list[int]:
    """1,024, 2,048, … and the model's own."""
    doubled = [FIRST_CONTEXT << power for power in range(20)]
    return [*(each for each in doubled if each < own), own]


def _best(memory: SharedMemory, num_devices: int, context: int) -> PlannedRow:
    rows = [_row(memory, split, context) for split in _splits(memory, num_devices)]
    return max(rows, key=lambda row: row.merit)


def _splits(memory: SharedMemory, num_devices: int) -> Iterator[DeviceSplit]:
    """All ways to use the devices. The embedded engine has one for each worker; vLLM may spread heads over several."""
    if num_devices == 1:
        yield DeviceSplit()
        return
    shape = memory.copies[0].shape
    for ranks, parallel in itertools.product(range(1, num_devices), range(1, num_devices)):
        spreads = not shape.num_heads % parallel and (
            not shape.num_kv_heads % parallel or not parallel % shape.num_kv_heads
        )
        if (parallel == 1 or memory.engine == "vllm") and spreads and parallel <= num_devices - ranks:
            yield DeviceSplit((num_devices - ranks) // parallel, parallel, ranks, shared=False)


def _row(memory: SharedMemory, split: DeviceSplit, context: int) -> PlannedRow:
    (both,) = memory.copies
    parts = [both] if split.shared else [both._replace(trainers=0), both._replace(rollouts=0)]
    memories = [replace(memory, copies=[part], parallel=split.parallel, ranks=split.ranks) for part in parts]
    found = [(each, each.at(context)) for each in memories]
    load, rows = memories[0].load(both.shape, context), found[0][1].rows
    return PlannedRow(
        context=context,
        split=split,
        memories=found,
        tokens_per_s=split.workers * load.expected_tokens_per_s(rows),
        trained_per_s=memories[-1].trained_per_s(both.shape, found[-1][1]),
    )
