"""Shifts the wall clock of one Python process, as a step of its machine's clock does; durations stay as they are.

A copy of this file, named `sitecustomize.py` in a folder of the PYTHONPATH of several processes, makes `time.time` add the seconds that
stand in a file beside it, which has the name of the process's log: `rollout-0` where standard error goes to `rollout-0.log`. So
the children of a prefork server have clocks of their own, too. Redis' clock, and what asks the kernel without Python, stay true.
"""

import contextlib
import mmap
import os
import shutil
import struct
import time
from pathlib import Path

SHIFT = struct.Struct("d")
STDERR = "/proc/self/fd/2"


class Clock:
    """The clock of one process, seen from the one that shifts it."""

    def __init__(self, folder: Path, name: str) -> None:
        """`folder`: for PYTHONPATH, shared by all clocks, and made here; `name`: of the process's log."""
        folder.mkdir(exist_ok=True)
        self.folder = folder
        shutil.copyfile(__file__, folder / "sitecustomize.py")
        self._file = folder / name
        self._file.write_bytes(SHIFT.pack(0.0))

    def shift(self, seconds: float) -> None:
        """Puts the process ahead of the true time by so much from now on."""
        with self._file.open("r+b") as file:
            file.write(SHIFT.pack(seconds))

    def is_of(self, pid: int) -> bool:
        """Does this process tell the time by it?"""
        try:
            return f"{self._file}\n" in Path(f"/proc/{pid}/maps").read_text()
        except OSError:
            return False


def install(folder: Path) -> None:
    """Replaces this process's wall clock, and those of its forks."""
    true_time, shifts = time.time, list[mmap.mmap]()
    os.register_at_fork(after_in_child=shifts.clear)  # it may be given another log

    def shifted() -> float:
        if not shifts:
            with contextlib.suppress(OSError), (folder / Path(os.readlink(STDERR)).stem).open("rb") as file:
                shifts.append(mmap.mmap(file.fileno(), SHIFT.size, access=mmap.ACCESS_READ))
        return true_time() + (SHIFT.unpack(shifts[0][:])[0] if shifts else 0.0)

    time.time = shifted
    time.time_ns = lambda: int(shifted() * 1e9)


if __name__ == "sitecustomize":
    install(Path(__file__).parent)
