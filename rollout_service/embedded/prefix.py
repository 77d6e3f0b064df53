"""Keys and values that are kept: of prompts, so that a group's samples share one prefill, keyed by adapter version and tokens;
of trajectories whose environment works on its reply, so that the next turn computes what is new to it and no more.

Axes: T tokens, K key/value heads, D head size.
"""

from collections import OrderedDict

from torch import Tensor

from common.byte_cache import ByteCache
from common.messages import AdapterRef, TrajectoryRef, TurnRequest

Key = tuple[AdapterRef, bytes]
Place = tuple[AdapterRef, str, TrajectoryRef]
MAX_JOBS = 10_000


class PrefixCache(ByteCache[Key, Tensor]):
    """The most recently used prefixes, [layers, T, 2K, D] each."""

    def __init__(self, budget_bytes: int) -> None:
        super().__init__(budget_bytes, _size)

    def drop(self, adapter: AdapterRef) -> None:
        for key in self:
            if key[0] == adapter:
                self.pop(key)


class TurnCache:
    """The turns that ended last, up to `budget_bytes`. A job's are kept once one of its trajectories came back for another.

    Bits of what was computed piece by piece differ from those of a whole prefill: deterministic mode has a budget of 0.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._turns: ByteCache[Place, tuple[bytes, Tensor]] = ByteCache(budget_bytes, lambda turn: _size(turn[1]))
        self._jobs: OrderedDict[str, None] = OrderedDict()  # with more than one turn

    @property
    def num_bytes(self) -> int:
        return self._turns.num_bytes

    def wants(self, request: TurnRequest) -> bool:
        return request.job in self._jobs and not request.reply_to

    def put(self, request: TurnRequest, tokens: bytes, cache: Tensor) -> None:
        """`tokens`: of the prompt and all turns so far, i4; `cache` [layers, T, 2K, D]: their keys and values."""
        self._turns.put(_place(request), (tokens, cache))

    def take(self, request: TurnRequest) -> Tensor | None:
        """What was kept of this trajectory, if the request goes on from there: [layers, T, 2K, D]. It is the caller's now."""
        if request.reply_to or not request.turn or not self._turns.budget_bytes:
            return None
        self._jobs[request.job] = None
        self._jobs.move_to_end(request.job)
        if len(self._jobs) > MAX_JOBS:
            self._jobs.popitem(last=False)
        tokens, cache = self._turns.pop(_place(request)) or (b"", None)
        return cache if request.tokens.data[:-4].startswith(tokens) else None

    def drop(self, adapter: AdapterRef) -> None:
        for place in self._turns:
            if place[0] == adapter:
                self._turns.pop(place)

    def clear(self) -> None:
        self._turns.clear()


def _place(request: TurnRequest) -> Place:
    return request.adapter, request.job, request.trajectory


def _size(cache: Tensor) -> int:
    return cache.numel() * cache.element_size()
