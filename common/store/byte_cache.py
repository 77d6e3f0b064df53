"""A cache of what was used last, up to a number of bytes."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class ByteCache(Generic[K, V]):
    """The most recently used values of at most `budget_bytes` together. Used from one thread."""

    def __init__(self, budget_bytes: int, size_of: Callable[[V], int]) -> None:
        """`size_of`: bytes of a value, always the same."""
        self.budget_bytes = budget_bytes
        self.num_bytes = 0
        self._size_of = size_of
        self._entries: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K) -> V | None:
        found = self._entries.get(key)
        if found is not None:
            self._entries.move_to_end(key)
        return found

    def put(self, key: K, value: V) -> None:
        """Replaces this key's value. Does not keep one above the budget, which would drive out all others."""
        self.pop(key)
        if self.make_room(self._size_of(value)):
            self._entries[key] = value
            self.num_bytes += self._size_of(value)

    def make_room(self, num_bytes: int) -> bool:
        """Drops the least recently used values until so many bytes fit; False: they exceed the budget."""
        if num_bytes > self.budget_bytes:
            return False
        while self.num_bytes + num_bytes > self.budget_bytes:
            self.pop(next(iter(self._entries)))
        return True

    def pop(self, key: K) -> V | None:
        """Removes the value of this key and returns it; None if there is none."""
        value = self._entries.pop(key, None)
        if value is not None:
            self.num_bytes -= self._size_of(value)
        return value

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[K]:
        """The keys as they are now, least recently used first; they may be popped on the way."""
        return iter(list(self._entries))

    def clear(self) -> None:
        self._entries.clear()
        self.num_bytes = 0
