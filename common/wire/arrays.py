"""Arrays in messages: raw bytes with dtype and shape."""

import math
from typing import Any, Literal

import msgspec
import numpy as np

DTYPES = {"i4": np.dtype("<i4"), "f4": np.dtype("<f4"), "u1": np.dtype("u1")}


class Array(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A numpy array on the wire: C order, little-endian. Zeros that it begins with are not sent, as those of a prompt's log-probs."""

    dtype: Literal["i4", "f4", "u1"]
    shape: tuple[int, ...]
    rest: bytes  # without the elements at its beginning that are zero

    def __post_init__(self) -> None:
        size, expected = DTYPES[self.dtype].itemsize, self._num_bytes()
        if len(self.rest) > expected or len(self.rest) % size:
            raise ValueError(f"array of {self.dtype} {self.shape} needs {expected} bytes, got {len(self.rest)}")

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def data(self) -> bytes:
        """The bytes of all elements."""
        missing = self._num_bytes() - len(self.rest)
        return bytes(missing) + self.rest if missing else self.rest

    def _num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def numpy(self) -> np.ndarray:
        """A read-only view of the bytes."""
        return np.frombuffer(self.data, DTYPES[self.dtype]).reshape(self.shape)


def i32(values: Any) -> Array:
    return _array("i4", values)


def f32(values: Any) -> Array:
    return _array("f4", values)


def u8(values: Any) -> Array:
    return _array("u1", values)


def _array(dtype: Literal["i4", "f4", "u1"], values: Any) -> Array:
    array = np.ascontiguousarray(values, DTYPES[dtype])
    data = array.tobytes()
    zeros = len(data) - len(data.lstrip(b"\0"))
    return Array(dtype, array.shape, data[zeros - zeros % array.itemsize :])
