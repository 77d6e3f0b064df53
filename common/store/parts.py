"""The parts of a stored file, each with its own sha256: what comes from another worker is checked before the whole is there."""

import hashlib
from collections.abc import AsyncIterator

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

    def span(self, part: int) -> tuple[int, int]:
        """The first byte of a part, and its size."""
        most = part_bytes(self.size)
        return part * most, min(most, self.size - part * most)


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
    if first == len(file.parts):
        return
    read, part = bytearray(), first
    async for piece in objects.stream(path, file.span(first)[0], part_bytes(file.size)):
        read += piece
        while part < len(file.parts) and len(read) >= (size := file.span(part)[1]):
            yield bytes(read[:size])
            del read[:size]
            part += 1
    if part < len(file.parts):
        raise CorruptObject(f"{path} is too short")
