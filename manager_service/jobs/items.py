"""Rows of a training or validation file."""

import os
import weakref
from array import array
from typing import Any, BinaryIO, Protocol

import msgspec


class Lines(Protocol):
    """Lines by index; a list of bytes is one."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> bytes: ...


class LinesOnDisk:
    """The lines of a file that are not blank. Each is read when it is asked for: memory holds 16 bytes a line."""

    def __init__(self, file: BinaryIO) -> None:
        """Looks for the lines' ends, which takes a while for a large file. `file` is closed when this is gone."""
        self._file = file
        weakref.finalize(self, file.close)
        self._starts, self._ends = array("q"), array("q")
        end = file.seek(0)
        for piece in file:
            for line in piece.splitlines(keepends=True):  # some files end lines by a carriage return alone
                end += len(line)
                if line.strip():
                    self._starts.append(end - len(line))
                    self._ends.append(end)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int, /) -> bytes:
        start = self._starts[index]
        return os.pread(self._file.fileno(), self._ends[index] - start, start)


class Items:
    """Lines of a JSONL file; each is parsed when it is asked for."""

    def __init__(self, lines: Lines = ()) -> None:
        self._lines = lines

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return msgspec.json.decode(self._lines[index])
