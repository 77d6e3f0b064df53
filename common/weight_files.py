"""What the headers of a base model's safetensors files say of its weights, which are not read."""

import json
import struct
from collections import Counter
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}
MAX_HEADER = 100_000_000
"""Bytes, as safetensors itself has it."""


class Weights(NamedTuple):
    num: int  # 0: there are no files
    dtype: str  # of most of them; "" if there are none
    linear_layers: frozenset[str]  # leaf names of the layers that an adapter may have


def read_weights(folder: Path) -> Weights:
    """Raises ValueError, naming the file, for one that is no safetensors file."""
    counts, layers = Counter[str](), set[str]()
    for file in sorted(folder.glob("*.safetensors")):
        for name, dtype, shape in _tensors(file):
            counts[dtype] += prod(shape)
            if ".layers." in name and name.endswith(".weight") and len(shape) == 2:
                layers.add(name.split(".")[-2])
    most = counts.most_common(1)
    return Weights(sum(counts.values()), DTYPES.get(most[0][0], most[0][0]) if most else "", frozenset(layers))


def _tensors(file: Path) -> Iterator[tuple[str, str, list[int]]]:
    """(name, dtype, shape) of each tensor."""
    try:
        with file.open("rb") as handle:
            (length,) = struct.unpack("<Q", handle.read(8))
            header: dict[str, Any] = json.loads(handle.read(min(length, MAX_HEADER)))
        yield from [(name, t["dtype"], t["shape"]) for name, t in header.items() if name != "__metadata__"]
    except (struct.error, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is no safetensors file: {error}") from error
