"""The rows of a training or validation file, as a job draws them."""

from collections.abc import Sequence
from typing import Any

import msgspec


class Items:
    """Lines of a JSONL file, parsed when asked for."""

    def __init__(self, lines: Sequence[bytes] = ()) -> None:
        self._lines = lines

    @classmethod
    def parse(cls, content: bytes) -> "Items":
        """One item a line; blank lines are no items."""
        return cls([line for line in content.splitlines() if line.strip()])

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return msgspec.json.decode(self._lines[index])
