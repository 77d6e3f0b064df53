"""Keeps keys and values of prompts, so that a group's samples share one prefill, and of trajectories and chats between turns, so
that the next turn computes only its new tokens.

Axes: T tokens, K key/value heads, D head size.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from common.store.byte_cache import ByteCache
from common.wire.messages import AdapterRef, TrajectoryRef, TurnRequest

PrefixKey = tuple[AdapterRef, bytes, str]
"""Adapter, the prefix: all tokens but the last, i4, and the tenant: how soon an answer comes tells nobody what others asked the base."""
TurnKey = tuple[AdapterRef, str, TrajectoryRef | bytes]
"""Adapter, job, and trajectory; of a chat adapter, tenant, and all tokens, i4."""
LEAST_SHARED = 0.5
"""The part of a chat's prompt that must be kept: several answers to one prompt would each compute the rest."""
MAX_JOBS = 10_000
K = TypeVar("K", bound=tuple[Any, ...])
V = TypeVar("V")


class CacheByAdapter(ByteCache[K, V]):
    """A cache whose keys begin with an adapter."""

    def drop(self, adapter: AdapterRef) -> None:
        for key in self:
            if key[0] == adapter:
                self.pop(key)


class TurnCache(CacheByAdapter[TurnKey, tuple[bytes, Tensor]]):
    """The last ended turns, up to `budget_bytes`: of chats, and of jobs once one of their trajectories had a second turn.

    Keys and values computed piece by piece differ in their bits from those of a whole prefill: deterministic mode has budget 0.
    """

    def __init__(self, budget_bytes: int) -> None:
        super().__init__(budget_bytes, lambda turn: turn[1].nbytes)
        self._jobs: OrderedDict[str, None] = OrderedDict()  # with more than one turn
        # Tokens in order, by adapter and tenant. None begins another.
        self._chats: dict[tuple[AdapterRef, str], list[bytes]] = {}

    def wants(self, request: TurnRequest) -> bool:
        return request.chat or (request.job in self._jobs and not request.reply_to)

    def knows(self, request: TurnRequest) -> bool:
        return _turn_key(request) in self

    def keep(self, request: TurnRequest, tokens: bytes, cache: Tensor) -> None:
        """`tokens`: of the prompt and all turns so far, i4; `cache` [layers, T, 2K, D]: keys and values."""
        if not request.chat:
            return self.put(_turn_key(request), (tokens, cache))
        of = request.adapter, request.tenant
        chats = self._chats.get(of, [])
        at = bisect_left(chats, tokens)
        if at < len(chats) and chats[at].startswith(tokens):  # it has all of the new one
            self.get((*of, chats[at]))
            return None
        if at and tokens.startswith(chats[at - 1]):
            self.pop((*of, chats[at - 1]))
        self.put((*of, tokens), (tokens, cache))
        if (*of, tokens) in self:
            insort(self._chats.setdefault(of, []), tokens)
        return None

    def pop(self, key: TurnKey) -> tuple[bytes, Tensor] | None:
        if isinstance(key[2], bytes) and key in self:
            chats = self._chats[key[0], key[1]]
            del chats[bisect_left(chats, key[2])]
            if not chats:
                del self._chats[key[0], key[1]]
        return super().pop(key)

    def clear(self) -> None:
        super().clear()
        self._chats.clear()

    def take(self, request: TurnRequest) -> Tensor | None:
        """Gives the caller what was kept of this trajectory, [layers, T, 2K, D], if the request continues it; of a chat's tokens so many as
        the tenant's chats began with."""
        if request.chat:
            return self._begun(request)
        if request.reply_to or not request.turn or not self.budget_bytes:
            return None
        self._jobs[request.job] = None
        self._jobs.move_to_end(request.job)
        if len(self._jobs) > MAX_JOBS:
            self._jobs.popitem(last=False)
        # The environment may have changed the conversation: keys and values are good only for a sequence that begins with their very
        # tokens. They go to the caller: nobody else continues this trajectory.
        tokens, cache = self.pop(_turn_key(request)) or (b"", None)
        return cache if request.transcript.ids[:-4].startswith(tokens) else None

    def _begun(self, request: TurnRequest) -> Tensor | None:
        # A template may show an answer otherwise than it was sampled, or leave out its thoughts: what comes before is the same.
        prompt, of = request.transcript.ids[:-4], (request.adapter, request.tenant)
        chats = self._chats.get(of, [])
        at = bisect_left(chats, prompt)  # one of the two beside it begins most like it
        shared = {key: _num_shared(prompt, key) for key in chats[max(0, at - 1) : at + 1]}
        if not shared or shared[longest := max(shared, key=shared.__getitem__)] < LEAST_SHARED * len(prompt) // 4:
            return None
        found = self.get((*of, longest))
        return found and found[1][:, : shared[longest]]


def _num_shared(one: bytes, other: bytes) -> int:
    """The number of tokens, i4, in which both begin alike."""
    num = min(len(one), len(other)) // 4
    differ = np.frombuffer(one, "<i4", num) != np.frombuffer(other, "<i4", num)
    return int(differ.argmax()) if differ.any() else num


def _turn_key(request: TurnRequest) -> TurnKey:
    return request.adapter, request.job, request.trajectory
