"""Orders the complete batches for the trainers. Pure functions of state.

    fused     as many as the trainers' slots take, to be computed together: tenants by weighted fair share
    fifo      the batch that was complete first
    drr       deficit round robin over tenants (Shreedhar and Varghese 1995), by tokens and weight
    shortest  the batch with the fewest tokens; may starve the longest one
    hrrn      highest response ratio next (Brinch Hansen 1971): (wait + service) / service

`fused` and `drr` share by the tenants' weights. Among a tenant's own batches, priorities and deadlines decide, but every
fourth time the one that waits longest is next, so that none starves. They also bound what trainers have of one tenant at a time
(`Room`), for what was handed over is before the batches of a tenant that comes later. The other disciplines do not look at tenants.
"""

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Literal, get_args

from common.sharing.fairness import Fairness
from manager_service.scheduling.fairness import is_longest_waiting

Discipline = Literal["fused", "fifo", "drr", "shortest", "hrrn"]
DISCIPLINES: tuple[Discipline, ...] = get_args(Discipline)
Weight = Callable[[str], float]

TOKENS_A_SLOT = 1024
"""Tokens per trainer slot below which a tenant may always hand over one more batch."""
FIRST_RATE = 5000.0
"""Tokens a second that a trainer is assumed to train until its rate is measured."""


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
    """Says which tenants may hand over more.

    A tenant always has a batch for each trainer; if it is alone, another that waits, so that no trainer is idle meanwhile.
    """

    slots: float = math.inf  # of all trainers
    workers: int = 1
    handed: Handed = field(default_factory=Handed)

    def has(self, tenant: str) -> bool:
        if self.handed.tokens[tenant] < TOKENS_A_SLOT * self.slots:
            return True
        alone = self.handed.batches.keys() <= {tenant}
        return self.handed.batches[tenant] < max(1, self.workers) * (2 if alone else 1)


@dataclass(slots=True)
class Deficits:
    """State of deficit round robin: the tokens that each tenant may still use, and the order of turns."""

    tokens: dict[str, float] = field(default_factory=dict)
    ring: list[str] = field(default_factory=list)  # tenants with batches; it is the first one's turn
    began: bool = False  # the first has had its quantum of this round


@dataclass(slots=True)
class TrainingQueue:
    """Complete batches, and the memory of the discipline."""

    discipline: Discipline = "fused"
    batches: dict[str, ReadyBatch] = field(default_factory=dict)  # job -> batch, in order of `since`
    fairness: Fairness = field(default_factory=Fairness)
    turns: Counter[str] = field(default_factory=Counter)  # tenant -> batches handed over
    deficits: Deficits = field(default_factory=Deficits)
    _handed_tokens: float = 0.0
    _train_s: float = 0.0

    def put(self, batch: ReadyBatch) -> None:
        """Adds a complete batch. One that is there keeps its place."""
        self.batches.setdefault(batch.job, batch)

    def remove(self, job: str) -> None:
        self.batches.pop(job, None)

    def measured(self, train_s: float) -> None:
        """Notes how long a trainer was busy with what was handed over."""
        self._train_s += train_s

    def take(self, num: int, now: float, weight: Weight, room: Room | None = None) -> list[str]:
        """Takes at most `num` batches out of the queue for the trainers, and fills `room` with them. Returns their jobs."""
        if num <= 0 or not self.batches:
            return []
        taken = self._chosen(num, now, weight, room or Room())
        for batch in taken:
            self._handed_tokens += batch.tokens
            del self.batches[batch.job]
        return [batch.job for batch in taken]

    def _chosen(self, num: int, now: float, weight: Weight, room: Room) -> list[ReadyBatch]:
        batches = self.batches.values()
        match self.discipline:
            case "fused":
                return take_fair(batches, self.fairness, self.turns, num, weight, room)
            case "drr":
                return take_deficit(batches, self.deficits, self.turns, num, weight, room)
            case "fifo":
                return heapq.nsmallest(num, batches, key=lambda b: (b.since, b.job))
            case "shortest":
                return heapq.nsmallest(num, batches, key=lambda b: (b.tokens, b.since, b.job))
            case "hrrn":
                rate = self._handed_tokens / self._train_s if self._train_s > 0 else FIRST_RATE
                return heapq.nsmallest(num, batches, key=lambda b: (-response_ratio(b, now, rate), b.since, b.job))


def response_ratio(batch: ReadyBatch, now: float, tokens_per_s: float) -> float:
    """(wait + service) / service, at least 1."""
    service_s = max(1, batch.tokens) / tokens_per_s
    return (max(0.0, now - batch.since) + service_s) / service_s


def take_fair(
    batches: Iterable[ReadyBatch], fairness: Fairness, turns: Counter[str], num: int, weight: Weight, room: Room
) -> list[ReadyBatch]:
    """Takes a batch of the tenant that was charged least and has room, again and again. Each batch is charged as it is taken."""
    waiting = _by_tenant(batches)
    heap = [(fairness.virtual_time(tenant), tenant) for tenant in waiting]
    heapq.heapify(heap)
    taken: list[ReadyBatch] = []
    while heap and len(taken) < num:
        _, tenant = heap[0]
        if not room.has(tenant):
            heapq.heappop(heap)
            continue
        batch = _next_of(waiting[tenant], turns)
        assert batch is not None, "without a limit there is always one"
        taken.append(batch)
        room.handed.add(tenant, batch.tokens)
        fairness.charge(tenant, batch.tokens, weight(tenant))
        if waiting[tenant]:
            heapq.heapreplace(heap, (fairness.virtual_time(tenant), tenant))
        else:
            heapq.heappop(heap)
    return taken


def take_deficit(
    batches: Iterable[ReadyBatch], deficits: Deficits, turns: Counter[str], num: int, weight: Weight, room: Room
) -> list[ReadyBatch]:
    """Lets each tenant in turn use a quantum of tokens times its weight, plus what it saved while it waited.

    The quantum is the largest batch over the smallest weight, so each turn serves a batch (the O(1) of the paper). A tenant
    without a batch, or without room, leaves the ring and loses its savings.
    """
    waiting = {tenant: own for tenant, own in _by_tenant(batches).items() if room.has(tenant)}
    _enter(deficits, waiting)
    if not waiting:
        return []
    weights = {tenant: weight(tenant) for tenant in waiting}
    quantum = max(1, *(b.tokens for each in waiting.values() for b in each)) / min(weights.values())
    taken: list[ReadyBatch] = []
    while deficits.ring and len(taken) < num:
        tenant = deficits.ring[0]
        if not deficits.began:
            deficits.tokens[tenant] += quantum * weights[tenant]
            deficits.began = True
        goes_on = waiting[tenant] and room.has(tenant)
        batch = _next_of(waiting[tenant], turns, limit=deficits.tokens[tenant]) if goes_on else None
        if batch is not None:
            deficits.tokens[tenant] -= batch.tokens
            room.handed.add(tenant, batch.tokens)
            taken.append(batch)
            continue
        deficits.ring.pop(0)
        deficits.began = False
        if goes_on:
            deficits.ring.append(tenant)
        else:
            del deficits.tokens[tenant]
    return taken


def _enter(deficits: Deficits, waiting: Collection[str]) -> None:
    """Appends newcomers to the ring, and removes tenants without batches."""
    if deficits.ring and deficits.ring[0] not in waiting:
        deficits.began = False
    deficits.ring = [tenant for tenant in deficits.ring if tenant in waiting]
    deficits.tokens = {tenant: deficits.tokens[tenant] for tenant in deficits.ring}
    for tenant in waiting:
        if tenant not in deficits.tokens:
            deficits.ring.append(tenant)
            deficits.tokens[tenant] = 0.0


def _by_tenant(batches: Iterable[ReadyBatch]) -> dict[str, list[ReadyBatch]]:
    found: defaultdict[str, list[ReadyBatch]] = defaultdict(list)
    for batch in batches:
        found[batch.tenant].append(batch)
    return dict(found)


def _next_of(mine: list[ReadyBatch], turns: Counter[str], limit: float = math.inf) -> ReadyBatch | None:
    """Takes a tenant's next batch out of `mine`; None: it is larger than `limit`."""
    tenant = mine[0].tenant
    if is_longest_waiting(turns[tenant]):
        batch = min(mine, key=lambda b: (b.since, b.job))
    else:
        batch = min(mine, key=lambda b: (b.urgency, b.since, b.job))
    if batch.tokens > limit:
        return None
    mine.remove(batch)
    turns[tenant] += 1
    return batch
