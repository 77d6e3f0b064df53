"""The identity of a base model: a digest of its files, whatever its name and its folder are.

    <configuration and tokenizer>-<weights>

A worker that has no weights, as env workers, knows the first half alone.
"""

import hashlib
import os
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import InvalidInput
from common.models.weight_files import MAX_HEADER

TEXTS = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
NUM_SAMPLES, SAMPLE_BYTES = 64, 4096
"""Samples of a file of weights, evenly spaced: of a model of 16 GB in four files 1 MB is read, and the headers."""
DIGEST_FIELD = "base_model_digest"
"""A field of our `adapter_config.json`; those who read only PEFT's fields skip it."""
DIGITS = 32
SHOWN_DIGITS = 8
"""Digits of a half that an error shows."""


class BaseIdentity(NamedTuple):
    """A cell's base model; empty: not known."""

    name: str = ""
    digest: str = ""

    def check(self, what: str, other: "BaseIdentity") -> None:
        """Raises InvalidInput unless `what`, trained on `other`, is of this base model: by digests, or by names if one has none."""
        if self.digest and other.digest:
            if differ(self.digest, other.digest):
                raise InvalidInput(
                    f"{what} was trained on other files{f' of {other.name!r}' if other.name else ''} (digest "
                    f"{shown(other.digest)}) than those of {self.name!r} here ({shown(self.digest)}): use it with the base model "
                    "that it was trained on, or train this one from the start"
                )
        elif self.name and other.name and self.name != other.name:
            raise InvalidInput(
                f"{what} was trained on {other.name!r}, not on {self.name!r}: use it with that base model"
            )


NO_BASE = BaseIdentity()


def base_digest(folder: Path, *, with_weights: bool = True) -> str:
    """The digest of a base model's folder; a missing file counts as empty. Raises InvalidInput for one that cannot be read."""
    texts, weights = hashlib.sha256(), hashlib.sha256()
    try:
        for file in (folder / name for name in TEXTS):
            content = file.read_bytes() if file.exists() else b""
            texts.update(f"{file.name} {len(content)}\n".encode() + content)
        for file in sorted(folder.glob("*.safetensors")) if with_weights else ():
            _sample(file, weights)
    except OSError as error:
        raise InvalidInput(f"the base model at {folder} cannot be read: {error}") from error
    halves = (texts, weights) if with_weights else (texts,)
    return "-".join(half.hexdigest()[:DIGITS] for half in halves)


def differ(one: str, other: str) -> bool:
    """Are two digests of different base models? Those of which one half is unknown are compared by the other."""
    known = min(len(one), len(other))
    return one[:known] != other[:known]


def shown(digest: str) -> str:
    """A digest in few digits, for people."""
    return "-".join(half[:SHOWN_DIGITS] for half in digest.split("-"))


def _sample(file: Path, into: Any) -> None:
    """Hashes name, size, header and samples of a file of weights. All of a small file is read."""
    with file.open("rb", buffering=0) as handle:
        size = handle.seek(0, os.SEEK_END)
        into.update(f"{file.name} {size}\n".encode())
        first = os.pread(handle.fileno(), 8, 0)
        start = min(8 + int.from_bytes(first, "little"), size, MAX_HEADER)
        step = max((size - start) // NUM_SAMPLES, 1)
        into.update(os.pread(handle.fileno(), start, 0))
        for at in range(start, size, step):
            into.update(os.pread(handle.fileno(), min(SAMPLE_BYTES, step), at))
