"""Rows of a training or validation file, and the order in which a job visits them, another each epoch."""

import os
import weakref
from collections.abc import Iterator
from functools import lru_cache
from struct import Struct
from typing import Any, BinaryIO, Protocol

import msgspec
import numpy as np

from common.rng import permutation, permuted
from common.text.examples import with_messages

BOUNDS = Struct("@qq")
BLOCK_BYTES = 1 << 18
"""Bytes of a file that are looked through at once."""
NEWLINE, RETURN = 10, 13
BLANK = np.zeros(256, bool)
BLANK[list(b" \t\n\r\v\f")] = True


class Lines(Protocol):
    """Lines by index; a list of bytes is one."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> bytes: ...


class LinesOnDisk:
    """The lines of a file that are not blank. Reads each on demand; memory holds neither them nor their places."""

    def __init__(self, file: BinaryIO) -> None:
        """Looks for the lines' ends, which takes a while for a large file, and appends them to it.

        `file` is closed when this is gone. Raises OSError if the disk is full.
        """
        self._file = file
        weakref.finalize(self, file.close)
        self._bounds_at = at = file.seek(0, os.SEEK_END)
        for bounds in _bounds(file, at):
            file.seek(at)
            at += file.write(bounds.tobytes())
        file.flush()
        self._num = (at - self._bounds_at) // BOUNDS.size

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, index: int, /) -> bytes:
        if not 0 <= index < self._num:
            raise IndexError(index)
        start, end = BOUNDS.unpack(os.pread(self._file.fileno(), BOUNDS.size, self._bounds_at + index * BOUNDS.size))
        return os.pread(self._file.fileno(), end - start, start)


def _bounds(file: BinaryIO, size: int) -> Iterator[np.ndarray]:
    """Start and end of each line that is not blank, int64 [n, 2], block by block."""
    at, start, has_text = 0, 0, False  # the last two: of the line in which the block begins
    while at < size:
        file.seek(at)
        block = np.frombuffer(file.read(min(BLOCK_BYTES, size - at)), np.uint8)
        if at + len(block) < size and block[-1] == RETURN:  # a newline may follow
            block = block[:-1]
        ends = _line_ends(block, is_last=at + len(block) == size)
        before = np.cumsum(np.concatenate(([has_text], ~BLANK[block])))  # signs that are not blank, before each place
        edges = np.concatenate(([start - at], ends))
        texts = np.diff(before[ends], prepend=0) > 0
        yield np.stack((edges[:-1], edges[1:]), axis=1)[texts] + at
        start, has_text = at + int(edges[-1]), bool(before[-1] > (before[ends[-1]] if len(ends) else 0))
        at += len(block)


def _line_ends(block: np.ndarray, *, is_last: bool) -> np.ndarray:
    """Places behind the lines that end in a block. Some files end lines by only a carriage return."""
    newlines, returns = block == NEWLINE, block == RETURN
    returns[:-1] &= ~newlines[1:]
    ends = np.flatnonzero(newlines | returns) + 1
    return np.append(ends, len(block)) if is_last and not (newlines | returns)[-1] else ends


class Items:
    """Lines of a JSONL file, each parsed on demand; each has `messages`, whatever its form."""

    def __init__(self, lines: Lines = ()) -> None:
        self._lines = lines

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return with_messages(msgspec.json.decode(self._lines[index]))


# ---- their order ----------------------------------------------------------------------------------------------------

SMALL_FILE = 1 << 16
"""Items of a file whose order is drawn as a whole, in some milliseconds."""


class Shuffle:
    """The order in which a job visits its items: group g gets item permutation(seed, epoch)[g mod n].

    A large file's order would take a second and much memory, so its places are computed one by one.
    """

    def __init__(self, seed: int, num_items: int) -> None:
        self._seed, self._n = seed, num_items
        self._order = lru_cache(2)(self._drawn)  # two: groups of one epoch may be issued again after the next has begun

    def place(self, group: int) -> int:
        """The place in the file of a group's item."""
        epoch, at = divmod(group, self._n)
        if self._n > SMALL_FILE:
            return permuted(self._seed, epoch, self._n, at)
        return int(self._order(epoch)[at])

    def _drawn(self, epoch: int) -> np.ndarray:
        return permutation(self._seed, epoch, self._n).astype(np.uint32)
