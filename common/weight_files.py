"""What the headers of safetensors files say of the weights in them, which are not read."""

import json
import os
import struct
from collections import Counter
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from common.spelling import quoted

DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}
MAX_HEADER = 100_000_000
"""Bytes, as safetensors itself has it."""


ITEM_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}


class StoredTensor(NamedTuple):
    """A tensor in a safetensors file."""

    start: int  # of its bytes, from the beginning of the file
    num_bytes: int
    name: str
    dtype: str  # as safetensors calls it
    shape: list[int]


class Weights(NamedTuple):
    num: int  # 0: there are no files
    dtype: str  # of most of them; "" if there are none
    linear_layers: frozenset[str]  # leaf names of the layers that an adapter may have


def read_weights(folder: Path) -> Weights:
    """Raises ValueError, naming the file, for one that is no safetensors file."""
    counts, layers = Counter[str](), set[str]()
    for file in sorted(folder.glob("*.safetensors")):
        for tensor in _tensors(file):
            counts[tensor.dtype] += prod(tensor.shape)
            if ".layers." in tensor.name and tensor.name.endswith(".weight") and len(tensor.shape) == 2:
                layers.add(tensor.name.split(".")[-2])
    most = counts.most_common(1)
    return Weights(sum(counts.values()), DTYPES.get(most[0][0], most[0][0]) if most else "", frozenset(layers))


def _tensors(file: Path) -> Iterator[StoredTensor]:
    try:
        with file.open("rb") as handle:
            yield from stored_tensors(handle)
    except ValueError as error:
        raise ValueError(f"{file} is no safetensors file: {error}") from error


def stored_tensors(file: BinaryIO, *, max_header: int = MAX_HEADER) -> list[StoredTensor]:
    """What a safetensors file holds, by place. Reads the header alone; raises ValueError unless it describes the whole file."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    start = file.read(8)
    length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
    if length > min(max_header, size - 8):
        raise ValueError(
            f"its header would have {length} bytes; there are {size}, and a header has at most {max_header}"
        )
    try:
        header: Any = json.loads(file.read(length))
        header.pop("__metadata__", None)
        found = sorted(
            StoredTensor(
                8 + length + t["data_offsets"][0],
                t["data_offsets"][1] - t["data_offsets"][0],
                name,
                t["dtype"],
                t["shape"],
            )
            for name, t in header.items()
        )
        end = 8 + length
        for tensor in found:
            whole = tensor.dtype not in ITEM_BYTES or prod(tensor.shape) * ITEM_BYTES[tensor.dtype] == tensor.num_bytes
            if tensor.start != end or tensor.num_bytes < 0 or not whole or any(n < 0 for n in tensor.shape):
                raise ValueError(f"{quoted(tensor.name)} is not where or as large as its header says")
            end += tensor.num_bytes
    except (KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise ValueError(f"its header is none: {type(error).__name__} {error}") from error
    if end != size:
        raise ValueError(f"it has {size} bytes, and its header describes {end}")
    return found
