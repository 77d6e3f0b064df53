"""Keys and values that are kept: of prompts, so that a group's samples share one prefill, keyed by adapter version and tokens;
of trajectories whose environment works on its reply, so that the next turn computes what is new to it and no more.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from torch import Tensor

from common.messages import AdapterRef, TrajectoryRef, TurnRequest

Key = tuple[AdapterRef, bytes]
MAX_JOBS = 10_000


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
        if key in self._entries:
            self._forget(key)
        if _size(prefix) > self.budget_bytes:
            return
        self._entries[key] = prefix
        self.num_bytes += _size(prefix)
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
        self.num_bytes -= _size(prefix)


@dataclass(slots=True)
class TurnCache:
    """The turns that ended last, up to `budget_bytes`. A job's are kept once one of its trajectories came back for another.

    Bits of what was computed piece by piece differ from those of a whole prefill: deterministic mode has a budget of 0.
    """

    budget_bytes: int
    num_bytes: int = 0
    _jobs: OrderedDict[str, None] = field(default_factory=OrderedDict[str, None])  # with more than one turn
    _entries: OrderedDict[tuple[AdapterRef, str, TrajectoryRef], tuple[bytes, Tensor]] = field(
        default_factory=OrderedDict[tuple[AdapterRef, str, TrajectoryRef], tuple[bytes, Tensor]]
    )

    def wants(self, request: TurnRequest) -> bool:
        return request.job in self._jobs and not request.reply_to

    def put(self, request: TurnRequest, tokens: bytes, cache: Tensor) -> None:
        """`tokens`: of the prompt and all turns so far, i4; `cache` [layers, T, 2K, D]: their keys and values."""
        place = _place(request)
        if place in self._entries:  # the turn was delivered twice
            self._forget(place)
        if _size(cache) > self.budget_bytes:
            return
        self._entries[place] = tokens, cache
        self.num_bytes += _size(cache)
        while self.num_bytes > self.budget_bytes:
            self._forget(next(iter(self._entries)))

    def take(self, request: TurnRequest) -> Tensor | None:
        """What was kept of this trajectory, if the request goes on from there: [layers, T, 2K, D]. It is the caller's now."""
        if request.reply_to or not request.turn or not self.budget_bytes:
            return None
        self._jobs[request.job] = None
        self._jobs.move_to_end(request.job)
        if len(self._jobs) > MAX_JOBS:
            self._jobs.popitem(last=False)
        place = _place(request)
        if place not in self._entries:
            return None
        tokens, cache = self._forget(place)
        return cache if request.tokens.data[:-4].startswith(tokens) else None

    def drop(self, adapter: AdapterRef) -> None:
        for place in [place for place in self._entries if place[0] == adapter]:
            self._forget(place)

    def clear(self) -> None:
        self._entries.clear()
        self.num_bytes = 0

    def _forget(self, place: tuple[AdapterRef, str, TrajectoryRef]) -> tuple[bytes, Tensor]:
        entry = self._entries.pop(place)
        self.num_bytes -= _size(entry[1])
        return entry


def _place(request: TurnRequest) -> tuple[AdapterRef, str, TrajectoryRef]:
    return request.adapter, request.job, request.trajectory


def _size(cache: Tensor) -> int:
    return cache.numel() * cache.element_size()
