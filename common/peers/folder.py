"""Keeps files by their sha256 in a folder that all workers of a machine share, and that outlives them.

    <folder>/<sha256>     the file, or its first parts: whole ones, each checked by whoever wrote it

One process at a time writes a file: it has locked it. Beyond the folder's size the least recently used files go; whoever uses one goes
on with what it has open. All calls block, and raise OSError if the folder is full, read-only, or not this user's alone.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
from io import BufferedRandom
from pathlib import Path

from common.errors import MarlaasError
from common.store.parts import StoredFile


class WrongPart(MarlaasError):
    """A part's sha256 is not the manifest's."""


class NodeFolder:
    """The folder of one machine."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        """`path`: the first `open` makes it, for this user alone, if it is not there."""
        self.path = path
        self._max_bytes = max_bytes

    def open(self, file: StoredFile) -> BufferedRandom | None:
        """Opens and locks a file, which is there or begins, and makes room for it. None: another has locked it."""
        make_own_folder(self.path)
        path = self.path / file.sha256
        handle = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.utime(path)
            self._make_room(file)
        except OSError as error:
            handle.close()
            if isinstance(error, BlockingIOError):
                return None
            raise
        return handle

    def remove(self, handle: BufferedRandom, file: StoredFile) -> None:
        """Removes what is not right, but no bytes: another process may find the same, and write it again by now."""
        path = self.path / file.sha256
        if path.exists() and os.path.samestat(path.stat(), os.fstat(handle.fileno())):
            path.unlink(missing_ok=True)

    def _make_room(self, file: StoredFile) -> None:
        if file.size > self._max_bytes:
            raise OSError(errno.EFBIG, f"a file of {file.size:,} bytes is larger than MARLAAS_CACHE_BYTES")
        others = list[tuple[int, int, Path]]()
        for path in self.path.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another worker makes room too
                found = path.stat()
                others += [(found.st_mtime_ns, found.st_size, path)] if path.name != file.sha256 else []
        too_many = file.size + sum(num_bytes for _, num_bytes, _ in others) - self._max_bytes
        for _, num_bytes, path in sorted(others):
            if too_many > 0:
                path.unlink(missing_ok=True)
                too_many -= num_bytes


def make_own_folder(path: Path) -> None:
    """Raises OSError unless it is this user's alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.stat()
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(errno.EPERM, f"{path} must be this user's alone (mode 0700)")


def keep_right_parts(handle: BufferedRandom, file: StoredFile) -> int:
    """Cuts off what is not right of what an earlier process left; nothing of a file's sections. Returns the number of first parts that
    are right."""
    for part, sha256 in enumerate(file.parts):
        start, size = file.span(part)
        handle.seek(start)
        if hashlib.sha256(handle.read(size)).hexdigest() != sha256:
            if not file.at:
                handle.truncate(start)
            return part
    return len(file.parts)


def write_part(handle: BufferedRandom, file: StoredFile, part: int, data: bytes | memoryview) -> None:
    """Raises WrongPart."""
    if hashlib.sha256(data).hexdigest() != file.parts[part]:
        raise WrongPart(f"part {part} of {file.sha256} does not match its sha256")
    handle.seek(file.span(part)[0])
    handle.write(data)
    handle.flush()


def read_whole(handle: BufferedRandom) -> bytes:
    """The content of a file all of whose parts this process has just checked and written."""
    handle.seek(0)
    return handle.read()


def read_right(handle: BufferedRandom, file: StoredFile) -> bytes | None:
    """The whole content; None if it is not right."""
    data = read_whole(handle)
    return data if hashlib.sha256(data).hexdigest() == file.sha256 else None
