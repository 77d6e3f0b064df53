"""The parts of a stored file, each with its own sha256: what comes from another worker is checked before the whole is there."""

import hashlib

import msgspec

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
