"""The seam between a trainer's policy maths and the base model under it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from trainer_service.batch import Bools, Ints
from trainer_service.lora import AdapterLayout, AdapterStack
from trainer_service.packing import Cost, Tree

AdapterPlace = tuple[AdapterStack, int]
"""An adapter: its stack and its place there."""


@dataclass(frozen=True, slots=True)
class Sequences:
    """The rows of one pass through the base model, sequence by sequence."""

    trees: Sequence[Tree]
    targets: Sequence[Ints]  # of each row [its M], token ids
    temperatures: Sequence[float]  # of each row
    learned: Sequence[Bools] = ()  # of each row [its M], targets that may have a gradient; empty: all
    multiple: int = 1  # sequences are padded to a multiple of it, where they are padded

    @property
    def width(self) -> int:
        """The padded length of the longest sequence."""
        return -(-max(map(len, self.trees)) // self.multiple) * self.multiple

    def about_targets(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
        """The targets [M], their temperatures [M], and those that may have a gradient (None: all)."""
        counts_R = [len(row_M) for row_M in self.targets]
        temperatures_M = np.repeat(np.array(self.temperatures, np.float32), counts_R)
        some = not all(row_M.all() for row_M in self.learned)
        learned_M = torch.from_numpy(np.flatnonzero(np.concatenate(self.learned))).to(device) if some else None
        targets_M = torch.from_numpy(np.concatenate(self.targets)).to(device)
        return targets_M, torch.from_numpy(temperatures_M).to(device), learned_M


class Backbone(Protocol):
    """A frozen base model on a device, without state of a job. One call at a time unless `concurrent`."""

    @property
    def vocab(self) -> int: ...

    @property
    def context(self) -> int:
        """Tokens of a sequence at most."""
        ...

    @property
    def device(self) -> torch.device: ...

    @property
    def pads(self) -> bool:
        """Says whether the sequences of a pass are padded to one length."""
        ...

    @property
    def num_ranks(self) -> int:
        """Processes that share the sequences of a pass."""
        ...

    @property
    def concurrent(self) -> bool:
        """Says whether several threads may compute at once."""
        ...

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """Module name -> (out, in), for every layer that an adapter may target."""
        ...

    def cost(self) -> Cost:
        """The cost of sequences. It only decides how rows are packed."""
        ...

    def stack(self, layout: AdapterLayout) -> AdapterStack:
        """Makes an empty stack for adapters of one shape, which may go through this base model."""
        ...

    def logprobs(self, sequences: Sequences, adapters: Sequence[AdapterPlace] | None) -> Tensor:
        """float32 log_softmax(logits / temperature) of each target, [M]. `adapters`: each sequence's; None: the bare base model.
        The backward adds each adapter's gradient to its place in its stack."""
        ...

    def keeping_all(self) -> "Backbone":
        """The same base model, with all activations kept for the backward."""
        ...

    def kept_per_token(self, keeping_all: float) -> float:
        """Bytes that a token keeps for the backward, given those of `keeping_all`."""
        ...

    def fitting(self, keeping_all: float, wanted: float) -> "Backbone":
        """The same base model, keeping at most `wanted` bytes a token for the backward, where it can choose."""
        ...

    def free_bytes(self) -> int:
        """Bytes of the device that nobody uses now; of several ranks' devices, the least."""
        ...

    def counters(self) -> dict[str, float]:
        """Totals since the start that only it can count."""
        ...
