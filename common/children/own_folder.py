"""A temporary folder that its process locks while it lives, so that a new process can remove the folders of killed ones."""

import contextlib
import fcntl
import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import IO

LOCK = "lock"
SHARED_MEMORY = Path("/dev/shm")


def roomy(num_bytes: int, memory: Path = SHARED_MEMORY) -> Path:
    """The folder for so many bytes of files: shared memory if it has that room twice, else that of temporary files."""
    has_room = os.access(memory, os.W_OK) and shutil.disk_usage(memory).free >= 2 * num_bytes
    return memory if has_room else Path(tempfile.gettempdir())


class OwnFolder:
    """A folder that is gone with `remove`, with this object, or else with the next process that makes one with the same prefix."""

    def __init__(self, prefix: str, parent: Path | None = None) -> None:
        """`parent`: the folder around it; without one, where the system keeps temporary files."""
        parent = parent or Path(tempfile.gettempdir())
        for left in parent.glob(f"{prefix}*/{LOCK}"):
            with contextlib.suppress(OSError), left.open() as lock:  # it is locked, or somebody else's, or gone
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left.parent, ignore_errors=True)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        fresh = self.path / f"{LOCK}.new"
        lock = fresh.open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        fresh.rename(self.path / LOCK)  # only now do others look at it
        self.remove = weakref.finalize(self, _remove, self.path, lock)
        """Removes the folder. Harmless if that was done before."""


def _remove(path: Path, lock: IO[str]) -> None:
    shutil.rmtree(path, ignore_errors=True)
    lock.close()
