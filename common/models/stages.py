"""Divides a base model's layers among the stages of a convoy: loaders that serve together before any has the whole."""

import re
from collections import Counter
from collections.abc import Iterable
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

    def parts_of(self, file: StoredFile, tensors: Iterable[StoredTensor]) -> list[int]:
        """The numbers of a file's parts that it needs: those of its tensors, and of the header."""
        step, ends = part_bytes(file.size), [(tensor.start, tensor.num_bytes, tensor.name) for tensor in tensors]
        wanted = set(range(-(-ends[0][0] // step)))
        for start, num_bytes, name in ends:
            wanted |= {*range(start // step, -(-(start + num_bytes) // step))} if self.has(name) else set()
        return sorted(wanted)


def divided(tensors: Iterable[StoredTensor], num_stages: int) -> list[Stage]:
    """Stages of about as many bytes; each layer goes where its middle falls."""
    sizes = Counter[int]()
    for tensor in tensors:
        sizes[_layer_of(tensor.name)] += tensor.num_bytes
    total, before, ends = sizes.total(), sizes.pop(OUTSIDE, 0), [0] * num_stages
    for layer in range(len(sizes)):
        own = min(num_stages - 1, int((before + sizes[layer] / 2) / total * num_stages))
        ends[own:] = [layer + 1] * (num_stages - own)
        before += sizes[layer]
    return [Stage(number, range(*both)) for number, both in enumerate(pairwise([0, *ends]))]


def _layer_of(name: str) -> int:
    found = _LAYER.match(name)
    return int(found[1]) if found else OUTSIDE
