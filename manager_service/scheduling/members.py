"""Members of a partition, jobs and runs, as decisions see them; their table; the lengths of trajectories.

Other tables of members are derived from it: see `MemberTable.take_changed`.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Generic, Protocol, TypeVar

import msgspec

from common.wire.messages import ScoredTrajectory

Urgency = tuple[float, ...]
"""Smaller first within a tenant: priority, deadline, training before evaluation, the batch's missing groups."""
SMOOTHING = 0.05
"""Weight of the newest trajectory in the moving averages."""


class View(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about one member. What a field says of trajectories concerns only jobs."""

    tenant: str
    queued: bool = False
    active: bool = False  # counts towards the tenant's concurrent jobs
    running: bool = False
    behind: bool = False  # samples what it must train next
    waiting: int = 0  # trajectories under way, without examples of a supervised job's steps
    tokens: float = 0.0  # that the waiting trajectories will use, estimated
    kv_tokens: float = 0.0  # keys and values that they need, in tokens, estimated
    missing: int = 0  # what would be issued besides `waiting` if there were slots without limit
    training: bool = False  # a trainer has a message of it
    training_tokens: int = 0  # of that message
    ready: bool = False  # a TrainStep could be published
    urgency: Urgency | None = None  # None: wants nothing issued that rollout workers compute
    examples: int = 0  # of a supervised job's steps, under way: only env workers see them
    example_urgency: Urgency | None = None  # None: wants no example issued
    fresh: bool = False  # wants its first group


class HasId(Protocol):
    @property
    def id(self) -> str: ...


M = TypeVar("M", bound=HasId)


class MemberTable(Mapping[str, M], Generic[M]):
    """The unfinished members of a partition, by id."""

    def __init__(self) -> None:
        self._members: dict[str, M] = {}
        self._changed: dict[str, None] = {}  # in order of the last change

    def __getitem__(self, name: str) -> M:
        return self._members[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def add(self, member: M) -> None:
        self._members[member.id] = member
        self.touch(member.id)

    def touch(self, name: str) -> None:
        """Marks the member as changed."""
        self._changed.pop(name, None)
        self._changed[name] = None

    def remove(self, name: str) -> None:
        del self._members[name]
        self.touch(name)

    def take_changed(self) -> list[tuple[str, M | None]]:
        """Members added or touched since the last call; None stands for those removed."""
        changed, self._changed = self._changed, {}
        return [(name, self._members.get(name)) for name in changed]


class Lengths:
    """Moving averages over a job's settled trajectories, in tokens. They begin with one turn of full length."""

    def __init__(self, max_tokens: int, max_context: int | None = None) -> None:
        """`max_tokens`: the longest answer of one turn. `max_context`: the longest trajectory; None: what is served."""
        self._max_tokens = max_tokens
        self._max_context = max_context or math.inf
        self.tokens = float(max_tokens)
        """Tokens that a trajectory prefills and samples, the prompt in every turn. Fairness charges these."""
        self._before_turn = 0.0

    @property
    def kv_tokens(self) -> float:
        """Keys and values that an engine sets aside for a turn: the tokens before it, and its longest answer."""
        return min(self._before_turn + self._max_tokens, self._max_context)

    def learn_example(self, message: ScoredTrajectory) -> None:
        """Takes in an example's length; a rollout worker prefills all of one that it measures. A failed one has none."""
        if length := len(message.transcript):
            self._before_turn += (SMOOTHING if self._before_turn else 1.0) * (length - self._before_turn)
            self.tokens = self.kv_tokens

    def learn(self, message: ScoredTrajectory) -> None:
        usage = message.usage
        self.tokens += SMOOTHING * (usage.prompt_tokens + usage.sampled_tokens - self.tokens)
        before = message.num_prompt if message.num_turns <= 1 else len(message.transcript)
        self._before_turn += SMOOTHING * (before - self._before_turn)
