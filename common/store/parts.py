"""The parts of a stored file, each with its own sha256: what comes from another worker is checked before the whole is there."""

import hashlib
from collections.abc import AsyncIterator, Sequence

import msgspec

from common.errors import CorruptObject
from common.store.objects import Objects

PARTED_BYTES = 1 << 20
"""Files above this size have parts."""
NUM_PARTS = 512
LEAST_PART, MOST_PART = 128 << 10, 8 << 20
"""Bytes of a part. Manifests do not say them: another rule needs another field there."""


class StoredFile(msgspec.Struct, frozen=True, omit_defaults=True):
    sha256: str
    size: int  # bytes
    parts: tuple[str, ...] = ()  # sha256 of each part, in order; of a file above PARTED_BYTES that rollout workers load
    at: tuple[int, ...] = ()  # of a section: its parts' numbers in the file; in no manifest

    def span(self, part: int) -> tuple[int, int]:
        """The first byte of a part, and its size."""
        most, number = part_bytes(self.size), self.at[part] if self.at else part
        return number * most, min(most, self.size - number * most)

    def section(self, name: str, at: Sequence[int]) -> "StoredFile":
        """Some parts of this file, which workers pass on apart from the others: their place and `size` are the file's."""
        return StoredFile(f"{self.sha256}.{name}", self.size, tuple(self.parts[number] for number in at), tuple(at))


def part_bytes(size: int) -> int:
    """Bytes of each part but the last of a file of `size` bytes: a 512th of it, from 128 KiB to 8 MiB."""
    return min(max(-(-size // NUM_PARTS), LEAST_PART), MOST_PART)


def stored_file(data: bytes, *, in_parts: bool) -> StoredFile:
    """Hashes without the interpreter's lock, so that it holds nobody up in a thread. `in_parts`: if it is large enough for parts."""
    if not in_parts or len(data) <= PARTED_BYTES:
        return StoredFile(hashlib.sha256(data).hexdigest(), len(data))
    whole, parts, view, step = hashlib.sha256(), list[str](), memoryview(data), part_bytes(len(data))
    for start in range(0, len(data), step):  # both of a part while it is in the processor's cache
        whole.update(view[start : start + step])
        parts.append(hashlib.sha256(view[start : start + step]).hexdigest())
    return StoredFile(whole.hexdigest(), len(data), tuple(parts))


async def read_parts(objects: Objects, path: str, file: StoredFile, first: int) -> AsyncIterator[bytes]:
    """The parts of an object from `first` on, unchecked. Raises NotFound, StoreUnavailable, and CorruptObject if it is too short."""
    spans = [file.span(part) for part in range(first, len(file.parts))]
    while spans:  # once for each run of neighbours: a section's next part may be elsewhere
        at, read = spans[0][0], bytearray()
        async for piece in objects.stream(path, at, part_bytes(file.size)):
            read += piece
            while spans and spans[0][0] == at and len(read) >= (size := spans[0][1]):
                yield bytes(read[:size])
                del read[:size], spans[0]
                at += size
            if not spans or spans[0][0] != at:
                break
        else:
            raise CorruptObject(f"{path} is too short")
