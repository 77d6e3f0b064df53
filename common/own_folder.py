"""A temporary folder that its process locks while it lives, so that a new process can remove the folders of killed ones."""

import contextlib
import fcntl
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import IO

LOCK = "lock"


class OwnFolder:
    """Gone with `remove`, with this object, or else with the next process that makes one with the same prefix."""

    def __init__(self, prefix: str) -> None:
        for left in Path(tempfile.gettempdir()).glob(f"{prefix}*/{LOCK}"):
            with contextlib.suppress(OSError), left.open() as lock:  # it is locked, or somebody else's, or gone
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left.parent, ignore_errors=True)
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        fresh = self.path / f"{LOCK}.new"
        lock = fresh.open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        fresh.rename(self.path / LOCK)  # only now do others look at it
        self.remove = weakref.finalize(self, _remove, self.path, lock)
        """Removes the folder. Harmless if that was done before."""


def _remove(path: Path, lock: IO[str]) -> None:
    shutil.rmtree(path, ignore_errors=True)
    lock.close()
