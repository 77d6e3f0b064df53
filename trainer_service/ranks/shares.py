"""Splits a micro-batch's sequences over ranks, about as many tokens each. Every rank splits alike, so none needs to be told."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np

from trainer_service.backbone.interface import Sequences
from trainer_service.batch import Ints
from trainer_service.packing import spread

A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class Share(Generic[A]):
    """One rank's part of a micro-batch."""

    sequences: Sequences
    adapters: Sequence[A] | None  # of each sequence
    places: Ints  # of its targets among all of the micro-batch; empty if nobody wants the share's results
    num_tokens: int  # 0 in the same case

    @property
    def num_targets(self) -> int:
        return sum(map(len, self.sequences.targets))


def split(sequences: Sequences, adapters: Sequence[A] | None, num_ranks: int) -> list[Share[A]]:
    """Splits as `spread` says; a share keeps the micro-batch's order.

    A rank for which none is left computes the shortest sequence too, and its result counts nowhere: each layer's weights are
    gathered by all ranks.
    """
    lengths = [*map(len, sequences.trees)]
    shortest = lengths.index(min(lengths))
    ends = np.cumsum([0, *map(len, sequences.targets)])
    rows = np.cumsum([0, *(len(tree.rows) for tree in sequences.trees)])

    def share(numbers: list[int]) -> Share[A]:
        own = [row for number in numbers or [shortest] for row in range(rows[number], rows[number + 1])]
        places = [np.arange(ends[row], ends[row + 1]) for row in own if numbers]
        return Share(
            replace(
                sequences,
                trees=[sequences.trees[number] for number in numbers or [shortest]],
                targets=[sequences.targets[row] for row in own],
                temperatures=[sequences.temperatures[row] for row in own],
                learned=[sequences.learned[row] for row in own] if sequences.learned else (),
            ),
            None if adapters is None else [adapters[number] for number in numbers or [shortest]],
            np.concatenate([np.zeros(0, np.int64), *places]),
            sum(lengths[number] for number in numbers),
        )

    return [share(sorted(numbers)) for numbers in spread(lengths, num_ranks)]
