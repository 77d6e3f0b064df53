"""Arrays in messages: raw bytes with dtype and shape. Transcripts: tokens with author and likelihood of each."""

import math
from collections.abc import Iterable
from operator import lt
from typing import Any, Literal

import msgspec
import numpy as np

DTYPES = {"i4": np.dtype("<i4"), "f4": np.dtype("<f4"), "u1": np.dtype("u1")}
Tops = list[list[tuple[int, float]]]
"""The alternatives to each of some tokens, best first: token, log-prob."""
SIZE = 4
"""Bytes of a token, and of a log-prob."""


class Array(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A numpy array on the wire: C order, little-endian, without leading zeros, as of a prompt's log-probs."""

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


class Transcript(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """T tokens, of which the model wrote W: T + W numbers of 4 bytes on the wire. Raises ValueError unless the parts fit."""

    ids: bytes = b""  # i4 [T], little-endian
    edges: tuple[int, ...] = ()  # ascending: where each segment of the model begins, and where it ends
    scores: bytes = b""  # f4 [W] log-probs at sampling, temperature applied; empty: all are 0

    def __post_init__(self) -> None:
        edges = self.edges
        ascend = not edges or (edges[0] >= 0 and edges[-1] <= len(self) and all(map(lt, edges, edges[1:])))
        fit = len(self.ids) % SIZE == 0 and len(edges) % 2 == 0 and len(self.scores) in (0, SIZE * self.num_written)
        if not (ascend and fit):
            raise ValueError(f"transcript: {len(self.ids)} and {len(self.scores)} bytes do not fit the edges {edges}")

    def __len__(self) -> int:
        return len(self.ids) // SIZE

    def __add__(self, other: "Transcript") -> "Transcript":
        return joined((self, other))

    @property
    def num_written(self) -> int:
        """Tokens that the model wrote."""
        return sum(self.edges[1::2]) - sum(self.edges[::2])

    @property
    def segments(self) -> list[tuple[int, int]]:
        """The start and the end of each segment of the model."""
        return list(zip(self.edges[::2], self.edges[1::2], strict=True))

    @property
    def tokens(self) -> Array:
        """i4 [T]"""
        return Array("i4", (len(self),), self.ids)

    @property
    def written(self) -> Array:
        """u1 [T] 1: by the model, 0: prompt or environment."""
        return u8(self._mask())

    @property
    def logprobs(self) -> Array:
        """f4 [T] at sampling; 0 where the model did not write."""
        values = np.zeros(len(self), np.float32)
        values[self._mask()] = self.of_written()
        return f32(values)

    def of_written(self) -> np.ndarray:
        """f4 [W] log-probs of the tokens that the model wrote."""
        return np.frombuffer(self._scores(), DTYPES["f4"])

    def first(self, num: int) -> "Transcript":
        """Its first tokens."""
        if num >= len(self):
            return self
        edges = tuple(min(edge, num) for segment in self.segments if segment[0] < num for edge in segment)
        kept = sum(edges[1::2]) - sum(edges[::2])
        return Transcript(self.ids[: SIZE * num], edges, self.scores[: SIZE * kept])

    def going_on(self, ids: bytes, scores: bytes) -> "Transcript":
        """With tokens behind it that the model wrote: i4 [N], and f4 [N] their log-probs."""
        start, end = len(self), len(self) + len(ids) // SIZE
        goes_on = bool(self.edges) and self.edges[-1] == start
        edges = (*self.edges[:-1], end) if goes_on else (*self.edges, start, end)
        return Transcript(self.ids + ids, edges, self._scores() + scores) if ids else self

    def _mask(self) -> np.ndarray:
        mask = np.zeros(len(self), bool)
        for start, end in self.segments:
            mask[start:end] = True
        return mask

    def _scores(self) -> bytes:
        return self.scores or bytes(SIZE * self.num_written)


def shown(tokens: Any) -> Transcript:
    """Tokens [T] that the model did not write."""
    return Transcript(_bytes("i4", tokens))


def wrote(tokens: Any, logprobs: Any) -> Transcript:
    """Tokens [W] that the model wrote, with their log-probs [W]."""
    ids = _bytes("i4", tokens)
    return Transcript(ids, (0, len(ids) // SIZE), _bytes("f4", logprobs)) if ids else EMPTY


def transcript(tokens: Any, logprobs: Any, written: Any) -> Transcript:
    """Tokens [T]; log-probs [T], of which those are kept where `written` [T] is not 0."""
    mask = np.asarray(written, bool)
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False))
    scores = _bytes("f4", np.asarray(logprobs, np.float32)[mask])
    return Transcript(_bytes("i4", tokens), tuple(edges.tolist()), scores if any(scores) else b"")


def joined(parts: Iterable[Transcript]) -> Transcript:
    """All tokens, end to end."""
    known, edges, offset = list(parts), list[int](), 0
    for part in known:
        more = [edge + offset for edge in part.edges]
        if edges and more and edges[-1] == more[0]:
            edges[-1:], more = [], more[1:]
        edges += more
        offset += len(part)
    scored = any(part.scores for part in known)
    scores = b"".join(part._scores() for part in known) if scored else b""  # pyright: ignore[reportPrivateUsage]
    return Transcript(b"".join(part.ids for part in known), tuple(edges), scores)


EMPTY = Transcript()


class Transcribed:
    """A message's transcript, array by array."""

    __slots__ = ()
    transcript: Transcript

    @property
    def tokens(self) -> Array:
        return self.transcript.tokens

    @property
    def logprobs(self) -> Array:
        return self.transcript.logprobs

    @property
    def written(self) -> Array:
        return self.transcript.written


def _bytes(dtype: str, values: Any) -> bytes:
    return np.ascontiguousarray(values, DTYPES[dtype]).tobytes()
