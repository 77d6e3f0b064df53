"""Reads the headers of safetensors files; the weights stay unread."""

import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from common.suggestions import quoted

DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}
MAX_HEADER = 100_000_000
"""Bytes, as safetensors itself has it."""
MAX_DIMS = 64
"""Dimensions of a tensor, as numpy has it."""
NUM_KEYS = 3
"""Keys of what a header says about a tensor."""

LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LINEAR_MODULES = (*(f"self_attn.{name}" for name in LINEAR_LAYERS[:4]), *(f"mlp.{name}" for name in LINEAR_LAYERS[4:]))
"""Linear layers that an adapter may target, where every layer has them: experts have none."""
IN_LAYER = re.compile(r"(?:model\.)?layers\.(\d+)\.(.+)\.weight")

METADATA = "__metadata__"
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
    shapes: Mapping[str, tuple[int, int]] = {}
    """(out, in) of each linear layer that an adapter may target, as `layers.3.mlp.up_proj`; empty: unknown."""

    @property
    def linear_layers(self) -> frozenset[str]:
        """Leaf names of the layers that an adapter may target; empty: not known."""
        return frozenset(name.rpartition(".")[2] for name in self.shapes)


def read_weights(folder: Path) -> Weights:
    """Raises ValueError, naming the file, for one that is no safetensors file."""
    counts, shapes = Counter[str](), dict[str, list[int]]()
    for file in sorted(folder.glob("*.safetensors")):
        for tensor in _tensors(file):
            counts[tensor.dtype] += prod(tensor.shape)
            shapes[tensor.name] = tensor.shape
    most = counts.most_common(1)
    dtype = DTYPES.get(most[0][0], most[0][0]) if most else ""
    return Weights(sum(counts.values()), dtype, _linear_shapes(shapes))


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors in a folder. Raises ValueError, naming the file, unless all are safetensors."""
    return {
        tensor.name: tuple(tensor.shape) for file in sorted(folder.glob("*.safetensors")) for tensor in _tensors(file)
    }


def _linear_shapes(shapes: Mapping[str, list[int]]) -> dict[str, tuple[int, int]]:
    """The linear layers that every layer has, in one shape. `shapes`: of all weights."""
    found = defaultdict[str, dict[str, list[int]]](dict)
    for match, shape in ((IN_LAYER.fullmatch(name), shape) for name, shape in shapes.items()):
        if match:
            found[match[2]][match[1]] = shape
    num_layers = max(map(len, found.values()), default=0)
    return {
        f"layers.{number}.{module}": (shape[0], shape[1])
        for module in LINEAR_MODULES
        if len(of := found.get(module, {})) == num_layers and len({*map(tuple, of.values())}) == 1
        for number, shape in of.items()
        if len(shape) == 2
    }


def _tensors(file: Path) -> Iterator[StoredTensor]:
    try:
        with file.open("rb") as handle:
            yield from stored_tensors(handle)
    except ValueError as error:
        raise ValueError(f"{file} is no safetensors file: {error}") from error


def stored_tensors(file: BinaryIO) -> list[StoredTensor]:
    """The tensors of a safetensors file, by place. Reads the header. Raises ValueError unless it describes the whole file."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(size - 8, MAX_HEADER):
        raise ValueError(f"its header would have {length} bytes, and it has {size}")
    return parse_header(file.read(length), size)


def parse_header(header: bytes, size: int) -> list[StoredTensor]:
    """The tensors of a file of `size` bytes, by place. Raises ValueError unless the header describes all of it."""
    start = 8 + len(header)
    try:
        described: Any = json.loads(
            header.decode(),
            object_pairs_hook=_unique,
            parse_int=_natural,
            parse_float=_refused,
            parse_constant=_refused,
        )
        if not isinstance(described, dict):
            raise TypeError("it is no JSON object")
        noted = described.pop(METADATA, None)
        if noted is not None and not _all_are(str, noted.values()):
            raise TypeError(f"{METADATA} holds more than texts")
        tensors = [(name, t["dtype"], t["shape"], *t["data_offsets"]) for name, t in described.items()]
        _check_texts([*described, *(noted or {}), *(noted or {}).values()])
        if odd := [name for name, t in described.items() if len(t) > NUM_KEYS]:
            raise TypeError(f"there is more about {quoted(odd[0])} than its dtype, shape and data_offsets")
        for name, dtype, shape, begin, end in tensors:
            if not _all_are(str, [dtype]) or not _all_are(int, [*shape, begin, end]):
                raise TypeError(f"the dtype of {quoted(name)} is no text, or a number no integer")
        found = sorted(
            StoredTensor(start + begin, end - begin, name, dtype, shape) for name, dtype, shape, begin, end in tensors
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError(f"its header is none: {type(error).__name__} {str(error)[:200]}") from error
    for tensor in found:
        if tensor.start != start or not _is_whole(tensor, size):
            raise ValueError(f"{quoted(tensor.name)} is not where or as large as its header says")
        start += tensor.num_bytes
    if start != size:
        raise ValueError(f"it has {size} bytes, and its header describes {start}")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("a name is there twice")
    return found


def _natural(text: str) -> int:
    if text.startswith("-"):
        raise ValueError(f"{text[:20]} is negative")
    return int(text)


def _refused(text: str) -> None:
    raise ValueError(f"{text[:20]} is no integer")


def _check_texts(texts: Iterable[str]) -> None:
    """Raises ValueError for half of a surrogate pair."""
    for text in texts:
        text.encode()


def _all_are(kind: type, values: Iterable[object]) -> bool:
    """Is each value of exactly this type? (True is an int otherwise.)"""
    return all(type(value) is kind for value in values)


def _is_whole(tensor: StoredTensor, size: int) -> bool:
    """Does its shape have as many bytes as it says? `size`: of the file; bounds each number before they multiply."""
    if len(tensor.shape) > MAX_DIMS or not all(0 <= number <= size for number in (tensor.num_bytes, *tensor.shape)):
        return False
    item_bytes = ITEM_BYTES.get(tensor.dtype)
    return item_bytes is None or prod(tensor.shape) * item_bytes == tensor.num_bytes
