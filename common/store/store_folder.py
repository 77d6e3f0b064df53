"""The folder of a local store, and the file by which it is told from another that lies in its place."""

import contextlib
import os
import re
import secrets
import stat
from pathlib import Path
from urllib.parse import unquote, urlparse

from common.errors import StoreUnavailable

IDENTITY = "identity"
"""The file with a store's random name, in hex. It is made with the store, and stays in its folder."""
SMALL_BYTES = 64 << 10
"""Objects up to this size are read at once: the way to a thread and back takes longer."""
PLAIN_PATH = re.compile(r"(?:[\w@-][\w.@-]*/)*[\w@-][\w.@-]*", re.ASCII)
"""A path that names the same file in a store's folder."""


class StoreFolder:
    """A local store's folder. If it is moved or unmounted, before a service starts or while it runs, all objects seem to be
    missing, and a write would begin another store in its place."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._opened: tuple[int, int] | None = None
        self.opened_identity = ""
        """The identity that the folder had when it was opened; empty: none."""

    @classmethod
    def of(cls, url: str) -> "StoreFolder | None":
        """None for a store that is no folder."""
        parts = urlparse(url)
        return cls(Path(unquote(parts.path))) if parts.scheme == "file" else None

    def open(self) -> None:
        """Makes it, only for this user, if it is not there. From now on it must be this one."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._opened, self.opened_identity = self._place(), self.identity()

    def check(self) -> None:
        """Raises StoreUnavailable unless the folder is the one that was opened, on any disk."""
        place = self._place()
        if place == self._opened:
            return
        if place is None or not self.opened_identity or self.identity() != self.opened_identity:
            raise StoreUnavailable(f"object storage: {self.path} is no longer the folder that was opened; put it back")
        self._opened = place

    def read(self, path: str, most_bytes: int) -> bytes | None:
        """An object of at most `most_bytes`; None if it is missing or unreadable: the storage then says why."""
        if not PLAIN_PATH.fullmatch(path):
            return None
        name = os.path.join(self.path, path)
        try:
            found = os.lstat(name)
            if not stat.S_ISREG(found.st_mode) or found.st_size > most_bytes:
                return None
            with open(name, "rb") as file:
                return file.read()
        except OSError:
            return None

    def identity(self) -> str:
        """Reads its file; empty: there is none. Raises OSError."""
        try:
            return (self.path / IDENTITY).read_text().strip()
        except (FileNotFoundError, NotADirectoryError):
            return ""

    def identified(self) -> str:
        """Reads its identity, or makes it, with the folder; the same for all who ask at once. Raises OSError."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not self.identity():
            self._make_identity()
        return self.identity()

    def _make_identity(self) -> None:
        """It appears whole, or not at all."""
        draft = self.path / f".{IDENTITY}.{secrets.token_hex(8)}"
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(16) + "\n")
            file.flush()
            os.fsync(file.fileno())
        try:
            with contextlib.suppress(FileExistsError):  # another service was first
                os.link(draft, self.path / IDENTITY)
        finally:
            draft.unlink()

    def _place(self) -> tuple[int, int] | None:
        """Device and inode; None: there is no folder."""
        try:
            found = self.path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return found.st_dev, found.st_ino
