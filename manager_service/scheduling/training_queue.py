"""Chooses which complete batches the trainers get next. No input or output, no clock: it changes only its own state.

Tenants share the trainers by weight, in tokens. Among a tenant's batches priorities and deadlines decide, but every fourth time
the longest waiting is next, so that none starves. As many batches are handed over as the trainers' slots take: they train
together. `Room` bounds a tenant's part, because handed-over batches come before those of a tenant that arrives later.
"""

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from common.sharing.fairness import Fairness
from manager_service.scheduling.fairness import is_longest_waiting

Weight = Callable[[str], float]

TOKENS_A_SLOT = 1024
"""Tokens per trainer slot below which a tenant may always hand over one more batch."""


@dataclass(frozen=True, slots=True)
class ReadyBatch:
    """The complete batch of a job."""

    job: str
    tenant: str
    since: float  # when it was complete, seconds
    tokens: int  # of all its rows, prompts included
    urgency: tuple[float, ...] = ()  # smaller first among a tenant's own


@dataclass(slots=True)
class Handed:
    """The batches that trainers have and have not answered, by tenant."""

    batches: Counter[str] = field(default_factory=Counter)  # how many; of tenants that have some
    tokens: Counter[str] = field(default_factory=Counter)

    def add(self, tenant: str, tokens: int) -> None:
        self.batches[tenant] += 1
        self.tokens[tenant] += tokens

    def remove(self, tenant: str, tokens: int) -> None:
        self.batches[tenant] -= 1
        self.tokens[tenant] -= tokens
        if not self.batches[tenant]:
            del self.batches[tenant], self.tokens[tenant]

    def copy(self) -> "Handed":
        return Handed(self.batches.copy(), self.tokens.copy())


@dataclass(slots=True)
class Room:
    """Decides which tenants may hand over more.

    A tenant may always have one batch with each trainer, and another that waits if no other tenant has any there, so that no
    trainer is idle.
    """

    slots: float = math.inf  # of all trainers
    workers: int = 1
    handed: Handed = field(default_factory=Handed)

    def has(self, tenant: str) -> bool:
        if self.handed.tokens[tenant] < TOKENS_A_SLOT * self.slots:
            return True
        is_only_one = self.handed.batches.keys() <= {tenant}
        return self.handed.batches[tenant] < max(1, self.workers) * (2 if is_only_one else 1)


@dataclass(slots=True)
class TrainingQueue:
    """Complete batches, and what each tenant was served."""

    batches: dict[str, ReadyBatch] = field(default_factory=dict)  # job -> batch, in order of `since`
    fairness: Fairness = field(default_factory=Fairness)
    turns: Counter[str] = field(default_factory=Counter)  # tenant -> batches handed over

    def put(self, batch: ReadyBatch) -> None:
        """Adds a complete batch. One that is there keeps its place."""
        self.batches.setdefault(batch.job, batch)

    def remove(self, job: str) -> None:
        self.batches.pop(job, None)

    def take(self, num: int, weight: Weight, room: Room | None = None) -> list[str]:
        """Takes at most `num` batches out of the queue for the trainers, and fills `room` with them. Returns their jobs.

        Tenants go in order of virtual time, in tokens. One with a full share waits for the trainers' answers.
        """
        room = room or Room()
        waiting: defaultdict[str, list[ReadyBatch]] = defaultdict(list)
        for batch in self.batches.values():
            waiting[batch.tenant].append(batch)
        heap = [(self.fairness.virtual_time(tenant), tenant) for tenant in waiting]
        heapq.heapify(heap)
        taken: list[str] = []
        while heap and len(taken) < num:
            tenant = heap[0][1]
            if not room.has(tenant):
                heapq.heappop(heap)
                continue
            batch = self._next_of(waiting[tenant])
            taken.append(batch.job)
            room.handed.add(tenant, batch.tokens)
            self.fairness.charge(tenant, batch.tokens, weight(tenant))
            if waiting[tenant]:
                heapq.heapreplace(heap, (self.fairness.virtual_time(tenant), tenant))
            else:
                heapq.heappop(heap)
        return taken

    def _next_of(self, batches: list[ReadyBatch]) -> ReadyBatch:
        """Takes a tenant's next batch out of the queue and out of `batches`."""
        tenant = batches[0].tenant
        if is_longest_waiting(self.turns[tenant]):
            batch = min(batches, key=lambda b: (b.since, b.job))
        else:
            batch = min(batches, key=lambda b: (b.urgency, b.since, b.job))
        batches.remove(batch)
        del self.batches[batch.job]
        self.turns[tenant] += 1
        return batch
