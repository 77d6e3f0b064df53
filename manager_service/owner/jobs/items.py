"""Rows of a training or validation file, and the order in which a job visits them: another one each epoch.

What a large file's order takes (a second for four million rows) is done ahead, in a thread, and lies on disk.
"""

import os
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from struct import Struct
from typing import Any, BinaryIO, Protocol

import msgspec
import numpy as np

from common.rng import permutation, permutation_parts
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
    """The lines of a file that are not blank. Each is read when it is asked for; memory holds none, nor where they are."""

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
    """Places behind the lines that end in a block. Some files end lines by a carriage return alone."""
    newlines, returns = block == NEWLINE, block == RETURN
    returns[:-1] &= ~newlines[1:]
    ends = np.flatnonzero(newlines | returns) + 1
    return np.append(ends, len(block)) if is_last and not (newlines | returns)[-1] else ends


class Items:
    """Lines of a JSONL file; each is parsed when it is asked for, and has `messages`, whatever form it was in."""

    def __init__(self, lines: Lines = ()) -> None:
        self._lines = lines

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return with_messages(msgspec.json.decode(self._lines[index]))


# ---- their order ----------------------------------------------------------------------------------------------------

SMALL = 1 << 16
"""Items of a file whose order is drawn, in some milliseconds, when it is asked for."""
AHEAD = 8
"""The next epoch's order is to be drawn when this part of the groups of an epoch is left: an eighth."""
NUMBER = np.dtype(np.uint32)


class NumbersOnDisk:
    """Numbers below 2**32 in a file without a name. Each is read when it is asked for."""

    def __init__(self, parts: Iterable[np.ndarray]) -> None:
        """Raises OSError if the disk is full."""
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as this is
        weakref.finalize(self, self._file.close)
        for numbers in parts:
            self._file.write(numbers.astype(NUMBER).tobytes())
        self._file.flush()

    def __getitem__(self, index: int) -> int:
        read = os.pread(self._file.fileno(), NUMBER.itemsize, index * NUMBER.itemsize)
        return int(np.frombuffer(read, NUMBER)[0])


class Shuffle:
    """The places in the file of the items of a job's groups: permutation(seed, epoch)[group mod n]."""

    def __init__(self, seed: int, num_items: int) -> None:
        self._seed, self._n = seed, num_items
        self._orders: dict[int, np.ndarray | NumbersOnDisk] = {}  # by epoch

    def place(self, group: int) -> int:
        """The place of a group's item. Takes long if the order of a large file is not drawn."""
        epoch, at = divmod(group, self._n)
        if epoch not in self._orders:
            newest = max(self._orders, default=epoch)
            self._orders = {known: order for known, order in self._orders.items() if known == newest}
            self._orders[epoch] = self._drawn(epoch)
        return int(self._orders[epoch][at])

    def is_drawn(self, group: int) -> bool:
        """Is the place of a group's item found at once?"""
        return self._n <= SMALL or group // self._n in self._orders

    def is_due(self, group: int) -> bool:
        """Is this the group at which the next epoch's order is to be drawn? Ask of each group."""
        return self._n > SMALL and (group + self._n // AHEAD) % self._n == 0

    def draw(self, first: int, last: int) -> None:
        """Draws the orders that these groups need, those between them and those soon behind; forgets others. Call it in a thread.

        Raises OSError if the disk is full.
        """
        if self._n > SMALL:
            epochs = range(first // self._n, (last + self._n // AHEAD) // self._n + 1)
            known = self._orders
            self._orders = {epoch: known[epoch] if epoch in known else self._drawn(epoch) for epoch in epochs}

    def _drawn(self, epoch: int) -> np.ndarray | NumbersOnDisk:
        if self._n <= SMALL:
            return permutation(self._seed, epoch, self._n).astype(NUMBER)
        return NumbersOnDisk(permutation_parts(self._seed, epoch, self._n))
