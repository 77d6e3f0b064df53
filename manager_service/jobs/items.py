"""Rows of a training or validation file."""

import os
import weakref
from array import array
from struct import Struct
from typing import Any, BinaryIO, Protocol

import msgspec

from common.text.prompts import with_messages

BOUNDS = Struct("@qq")


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
        bounds, end = array("q"), file.seek(0)  # start and end of each line
        for piece in file:
            for line in piece.splitlines(keepends=True):  # some files end lines by a carriage return alone
                end += len(line)
                if line.strip():
                    bounds.extend((end - len(line), end))
        self._num, self._bounds_at = len(bounds) // 2, file.seek(0, os.SEEK_END)
        file.write(memoryview(bounds))
        file.flush()

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, index: int, /) -> bytes:
        if not 0 <= index < self._num:
            raise IndexError(index)
        start, end = BOUNDS.unpack(os.pread(self._file.fileno(), BOUNDS.size, self._bounds_at + index * BOUNDS.size))
        return os.pread(self._file.fileno(), end - start, start)


class Items:
    """Lines of a JSONL file; each is parsed when it is asked for, and has `messages`, whatever form it was in."""

    def __init__(self, lines: Lines = ()) -> None:
        self._lines = lines

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return with_messages(msgspec.json.decode(self._lines[index]))
