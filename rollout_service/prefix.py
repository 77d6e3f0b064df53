"""Keys and values of prompts, so that a group's samples share one prefill. Keyed by adapter version and tokens."""

from collections import OrderedDict
from dataclasses import dataclass, field

from torch import Tensor

from common.messages import AdapterRef

Key = tuple[AdapterRef, bytes]


@dataclass(slots=True)
class PrefixCache:
    """The most recently used prefixes, up to `budget_bytes`."""

    budget_bytes: int
    num_bytes: int = 0
    _entries: OrderedDict[Key, Tensor] = field(default_factory=OrderedDict[Key, Tensor])

    def get(self, key: Key) -> Tensor | None:
        """[layers, T, 2K, D]"""
        found = self._entries.get(key)
        if found is not None:
            self._entries.move_to_end(key)
        return found

    def put(self, key: Key, prefix: Tensor) -> None:
        self._entries[key] = prefix
        self.num_bytes += prefix.numel() * prefix.element_size()
        while self.num_bytes > self.budget_bytes:
            self._forget(next(iter(self._entries)))

    def drop(self, adapter: AdapterRef) -> None:
        for key in [key for key in self._entries if key[0] == adapter]:
            self._forget(key)

    def clear(self) -> None:
        self._entries.clear()
        self.num_bytes = 0

    def _forget(self, key: Key) -> None:
        prefix = self._entries.pop(key)
        self.num_bytes -= prefix.numel() * prefix.element_size()
