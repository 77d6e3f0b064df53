"""Divides a base model's layers among the stages of a convoy: loaders that serve together before any has the whole."""

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from common.models.weight_files import StoredTensor
from common.store.parts import StoredFile, part_bytes

OUTSIDE = -1
_LAYER = re.compile(r"(?:model\.)?layers\.(\d+)\.")
_LAST_NORM = ("model.norm.weight", "norm.weight")


class Stage(NamedTuple):
    """A part of a base model that computes by itself."""

    number: int  # 0: the head, which has the embedding and the scores too
    layers: range

    def has(self, name: str) -> bool:
        """Does it need this tensor? All have the last norm, which is small."""
        layer = _layer_of(name)
        return layer in self.layers or (layer == OUTSIDE and (self.number == 0 or name in _LAST_NORM))

    def parts_of(self, file: StoredFile, tensors: Sequence[StoredTensor]) -> list[int]:
        """The numbers of a file's parts that it needs: those of its tensors, and of the header."""
        step, own = part_bytes(file.size), [tensor for tensor in tensors if self.has(tensor.name)]
        ends = [(0, tensors[0].start), *((tensor.start, tensor.start + tensor.num_bytes) for tensor in own)]
        return sorted({part for start, end in ends for part in range(start // step, -(-end // step))})


def divided(tensors: Iterable[StoredTensor], num_stages: int) -> list[Stage]:
    """Stages of about as many bytes; each layer goes where its middle falls."""
    sizes, stage_of = Counter[int](), list[int]()
    for tensor in tensors:
        sizes[_layer_of(tensor.name)] += tensor.num_bytes
    total, before = sizes.total(), sizes.pop(OUTSIDE, 0)
    for layer in range(len(sizes)):
        stage_of.append(min(num_stages - 1, int((before + sizes[layer] / 2) / total * num_stages)))
        before += sizes[layer]
    firsts = [bisect_left(stage_of, number) for number in range(num_stages + 1)]
    return [Stage(number, range(*both)) for number, both in enumerate(pairwise(firsts))]


def _layer_of(name: str) -> int:
    found = _LAYER.match(name)
    return int(found[1]) if found else OUTSIDE
