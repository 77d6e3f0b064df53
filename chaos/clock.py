"""Shifts the wall clock of one Python process, as a step of its machine's clock does; durations stay as they are.

A copy of this file, named `sitecustomize.py` in a folder of the process's PYTHONPATH, makes `time.time` add the seconds that
stand in the file `shift` beside it. Redis' clock, and what asks the kernel without Python, stay true.
"""

import mmap
import shutil
import struct
import time
from pathlib import Path

SHIFT = struct.Struct("d")


class Clock:
    """The clock of one process, seen from the one that shifts it."""

    def __init__(self, folder: Path) -> None:
        """`folder`: for PYTHONPATH; made here."""
        folder.mkdir()
        self.folder = folder
        shutil.copyfile(__file__, folder / "sitecustomize.py")
        (folder / "shift").write_bytes(SHIFT.pack(0.0))

    def shift(self, seconds: float) -> None:
        """Puts the process ahead of the true time by so much from now on."""
        with (self.folder / "shift").open("r+b") as file:
            file.write(SHIFT.pack(seconds))

    def is_of(self, pid: int) -> bool:
        """Does this process tell the time by it?"""
        try:
            return str(self.folder / "shift") in Path(f"/proc/{pid}/maps").read_text()
        except OSError:
            return False


def install(file: Path) -> None:
    """Replaces this process's wall clock."""
    with file.open("rb") as opened:
        shared = mmap.mmap(opened.fileno(), SHIFT.size, access=mmap.ACCESS_READ)
    true_time = time.time

    def shifted() -> float:
        return true_time() + SHIFT.unpack(shared[:])[0]

    time.time = shifted
    time.time_ns = lambda: int(shifted() * 1e9)


if __name__ == "sitecustomize":
    install(Path(__file__).with_name("shift"))
