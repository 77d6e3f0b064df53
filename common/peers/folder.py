"""Keeps files by their sha256 in a folder that all workers of a machine share, and that outlives them.

    <folder>/<sha256>     the file, or its first parts: whole ones, each checked by whoever wrote it

One process at a time writes a file: it has locked it. A name is deleted under that lock only, so whoever has the lock of what the
name says has the file. What is beyond the folder's size goes, least recently used first. All calls block, and raise FolderUnusable.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
from collections.abc import Generator
from dataclasses import dataclass
from io import BufferedRandom
from pathlib import Path

from common.errors import MarlaasError
from common.store.parts import StoredFile


class FolderUnusable(MarlaasError):
    """The folder is full, read-only, or not this user's alone."""


class WrongPart(MarlaasError):
    """A part's sha256 is not the manifest's."""


@contextlib.contextmanager
def _explained(path: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise FolderUnusable(f"{path}: {error.strerror or error}; see MARLAAS_CACHE_DIR") from error


@dataclass(slots=True)
class CachedFile:
    """An open file, locked until `unlock`. Used by one thread at a time."""

    file: StoredFile
    path: Path
    handle: BufferedRandom
    num_parts: int = 0
    """Parts that this process has checked."""

    @property
    def is_checked(self) -> bool:
        return self.num_parts == len(self.file.parts)

    @property
    def is_long_enough(self) -> bool:
        """Did somebody write all of it?"""
        with _explained(self.path):
            return os.fstat(self.handle.fileno()).st_size == self.file.size

    def check_parts(self) -> None:
        """Keeps the first parts, which an earlier process left, as far as they are right."""
        with _explained(self.path):
            self.handle.seek(0)
            for part in range(len(self.file.parts)):
                data = self.handle.read(self.file.span(part)[1])
                if hashlib.sha256(data).hexdigest() != self.file.parts[part]:
                    self.handle.truncate(self.file.span(part)[0])
                    return
                self.num_parts = part + 1

    def append(self, data: bytes | bytearray) -> None:
        """Adds the next part. Raises WrongPart."""
        if hashlib.sha256(data).hexdigest() != self.file.parts[self.num_parts]:
            raise WrongPart(f"part {self.num_parts} of {self.file.sha256} does not match its sha256")
        with _explained(self.path):
            self.handle.seek(self.file.span(self.num_parts)[0])
            self.handle.write(data)
            self.handle.flush()
        self.num_parts += 1

    def read(self) -> bytes | None:
        """The whole content; None if it is not right any more."""
        with _explained(self.path):
            self.handle.seek(0)
            data = self.handle.read()
        return data if hashlib.sha256(data).hexdigest() == self.file.sha256 else None

    def is_right(self) -> bool:
        """Does what `read` does, without the content in memory."""
        with _explained(self.path):
            self.handle.seek(0)
            return hashlib.file_digest(self.handle, "sha256").hexdigest() == self.file.sha256

    def unlock(self) -> None:
        """Lets others read it at the same time, once it is whole."""
        fcntl.flock(self.handle, fcntl.LOCK_UN)

    def discard(self) -> None:
        """Deletes its name while it is locked."""
        with contextlib.suppress(OSError):
            self.path.unlink()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what a full disk refused, `append` has told
            self.handle.close()


class NodeFolder:
    """The folder of one machine."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        """`path`: the first `open` makes it, for this user alone, if it is not there."""
        self._path = path
        self._max_bytes = max_bytes

    def open(self, file: StoredFile) -> CachedFile | None:
        """Locks a file, which is there or begins, and makes room for it. None: another has locked it."""
        path = self._path / file.sha256
        with _explained(self._path):
            self._make_folder()
            while (handle := _locked(path)) is not None:
                if _is_named(handle, path):
                    os.utime(path)
                    self._make_room(file, path)
                    return CachedFile(file, path, handle)
                handle.close()  # its name was deleted before it was locked
        return None

    def size(self, file: StoredFile) -> int:
        """Bytes that are there of a file, by which one sees whether its writer goes on."""
        with _explained(self._path), contextlib.suppress(FileNotFoundError):
            return (self._path / file.sha256).stat().st_size
        return 0

    def delete(self, file: StoredFile) -> None:
        """Deletes a file, unless it is locked."""
        with _explained(self._path):
            _delete(self._path / file.sha256)

    def _make_folder(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.mkdir(mode=0o700, exist_ok=True)
        found = self._path.stat()
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise PermissionError(errno.EPERM, "it must be this user's alone (mode 0700)")

    def _make_room(self, file: StoredFile, own: Path) -> None:
        """Deletes the least recently used of the others until this one fits; not those that are being written."""
        if file.size > self._max_bytes:
            raise OSError(errno.EFBIG, f"a file of {file.size:,} bytes is larger than MARLAAS_CACHE_BYTES")
        found = [(path.stat(), path) for path in self._path.iterdir() if path != own]
        too_many = file.size + sum(stat.st_size for stat, _ in found) - self._max_bytes
        for stat, path in sorted(found, key=lambda each: each[0].st_mtime_ns):
            if too_many > 0 and _delete(path):
                too_many -= stat.st_size


def _locked(path: Path) -> BufferedRandom | None:
    """Opens a file, which begins empty, for this user alone. None: another has locked it."""
    handle = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        handle.close()
        if isinstance(error, BlockingIOError):
            return None
        raise
    return handle


def _is_named(handle: BufferedRandom, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _delete(path: Path) -> bool:
    """Deletes a file and its name. False: it is locked."""
    if (handle := _locked(path)) is None:
        return False
    with handle:
        path.unlink(missing_ok=True)
    return True
