"""Who is served next: weighted fair sharing between tenants, as pure functions of state.

Start-time fair queueing (Goyal et al. 1996): each tenant has a virtual time, tokens charged over weight; the tenant with
the smallest is served next, and one that comes back from idleness starts at the smallest of the busy ones, so that it
can neither hoard service nor be starved. What is under way is charged by estimate, what settled by what it used.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

OVERSUBSCRIPTION = 1.5
"""Open work per live slot: enough that no slot waits for the manager, little enough that fairness acts at once."""
MAX_MEMORY_USED = 0.6
"""Of Redis' limit; above it nothing new is issued."""


@dataclass(slots=True)
class Fairness:
    """Virtual time of each tenant, in tokens over weight."""

    _virtual: dict[str, float] = field(default_factory=dict)
    _busy: set[str] = field(default_factory=set)

    def busy(self, tenants: Iterable[str]) -> None:
        """These tenants have work. Newcomers start level with the least served of the others."""
        now = set(tenants)
        if now == self._busy:
            return
        level = min((self._virtual[t] for t in self._busy & now), default=None)
        if level is None:
            level = max(self._virtual.values(), default=0.0)
        for tenant in now - self._busy:
            self._virtual[tenant] = max(self._virtual.get(tenant, 0.0), level)
        self._busy = now

    def charge(self, tenant: str, tokens: float, weight: float) -> None:
        self._virtual[tenant] = self._virtual.get(tenant, 0.0) + tokens / weight

    def virtual_time(self, tenant: str) -> float:
        return self._virtual.get(tenant, 0.0)


def serve(virtual: Mapping[str, float], grant: Callable[[str], tuple[float, int] | None], room: int) -> None:
    """Grant work to the least served tenant, again and again, while `room` lasts.

    `virtual`: tenants that want something, with what they were charged and what is under way, in tokens over weight.
    `grant` gives a tenant its most urgent piece and returns what that adds to its virtual time and takes of the room,
    or None when the tenant wants nothing more.
    """
    heap = [(time, tenant) for tenant, time in virtual.items()]
    heapq.heapify(heap)
    left = room
    while left > 0 and heap:
        time, tenant = heap[0]
        granted = grant(tenant)
        if granted is None:
            heapq.heappop(heap)
            continue
        added, taken = granted
        left -= taken
        heapq.heapreplace(heap, (time + added, tenant))


def room(*, slots: int, open_work: int, share: float, memory_used: float) -> int:
    """How many trajectories may be issued now. `share`: of the cell's capacity that is this owner's, 0 to 1.

    `memory_used`: Redis' memory over its limit, 0 to 1.
    """
    if memory_used > MAX_MEMORY_USED:
        return 0
    return max(0, int(OVERSUBSCRIPTION * slots * share) - open_work)


def step_order(ready: Mapping[str, str], fairness: Fairness) -> Iterator[str]:
    """Jobs whose batch is complete (-> tenant), in the order in which their batches go to the trainers."""
    return iter(sorted(ready, key=lambda job: (fairness.virtual_time(ready[job]), job)))
