"""Tells whether a disk has its reserve free: what is under way needs it, and a full disk stops everybody."""

import contextlib
import os
from pathlib import Path

from common.store.store_folder import StoreFolder


def free_bytes(folder: Path) -> int:
    """Bytes of a folder's disk that may still be written. Raises OSError."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


class DiskRoom:
    """The disk of a local store. Any other store has room."""

    def __init__(self, url: str, reserve_bytes: int) -> None:
        self._folder = StoreFolder.of(url)
        self._reserve_bytes = reserve_bytes

    def lacks(self, num_bytes: int = 0) -> str:
        """The reason for which these bytes are not to be written; empty: there is room."""
        with contextlib.suppress(OSError):  # a folder that is away has errors of its own
            if self._folder and free_bytes(self._folder.path) - num_bytes < self._reserve_bytes:
                return (
                    f"the store's disk has less than {self._reserve_bytes >> 20} MiB free (MARLAAS_DISK_RESERVE_BYTES):"
                    " delete models and files, or have the operator make room; jobs then go on by themselves"
                )
        return ""
