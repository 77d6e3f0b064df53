"""Rows of a training or validation file."""

from collections.abc import Sequence
from typing import Any

import msgspec


class Items:
    """Lines of a JSONL file; each is parsed when it is asked for."""

    def __init__(self, lines: Sequence[bytes] = ()) -> None:
        self._lines = lines

    @classmethod
    def parse(cls, content: bytes) -> "Items":
        """Takes one item a line, and skips blank lines."""
        return cls([line for line in content.splitlines() if line.strip()])

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return msgspec.json.decode(self._lines[index])
