"""Tells how much of files is in memory, and has more of them read: the page cache is a pool worker's host tier."""

import contextlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

PLACES = 64
"""Places of a file that are looked at."""
PAGE = 4096
IN_MEMORY = 0.9
"""The share of those places from which on a base model counts as in memory."""


def weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def are_in_memory(files: Sequence[Path]) -> bool:
    """False also where the file system does not tell."""
    found = [place for file in files for place in _places(file)]
    return sum(found) >= IN_MEMORY * len(found)


def read_ahead(files: Iterable[Path]) -> None:
    """Has the kernel read the files, and does not wait for it."""
    for file in files:
        with contextlib.suppress(OSError), file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


def _places(file: Path) -> Iterable[bool]:
    """Is the page in memory, at each place?"""
    try:
        with file.open("rb") as opened:
            size, byte = os.fstat(opened.fileno()).st_size, bytearray(1)
            for offset in range(0, size, max(PAGE, size // PLACES)):
                try:
                    yield os.preadv(opened.fileno(), [byte], offset, os.RWF_NOWAIT) == 1
                except OSError:  # it would have to wait for the disk, or the file system cannot tell
                    yield False
    except OSError:
        yield False
