"""Computes room and order for the allocator, by the virtual times of `common/sharing/fairness.py`. Pure functions.

Work under way is charged by estimate, settled work by what it used.
"""

import heapq
import math
from collections.abc import Callable, Mapping

from common.bus.fullness import MAX_MEMORY_USED

OVERSUBSCRIPTION = 1.5
"""Open trajectories per live slot: so many that no slot waits for the manager, so few that fairness acts at once."""
FIRST_GROUPS = 4.0
"""The same for jobs' first groups, so that a job begins soon even if many are submitted at once."""
LONGEST_WAITING_EVERY = 4
"""After this many turns a tenant's longest-waiting job is served once, instead of its most urgent."""


def serve(virtual: Mapping[str, float], grant: Callable[[str], tuple[float, int] | None], room: int) -> None:
    """Grants work to the least served tenant, again and again, while `room` lasts.

    `virtual`: virtual time of each tenant with wants, its work under way included. `grant` issues its most urgent piece and
    returns what that adds to the virtual time and takes of the room, or None if the tenant wants nothing.
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


def room(
    *,
    slots: int,
    open_work: int,
    share: float,
    memory_used: float,
    in_env: float = 0,
    holds_slots: bool = False,
    oversubscription: float = OVERSUBSCRIPTION,
) -> int:
    """Trajectories that may be issued now. `share`: this owner's part of the cell's capacity, 0 to 1.

    `open_work`: trajectories issued and not back. `in_env`: those at a tool or grader, which need no slot. `holds_slots`: a
    trajectory needs its slot until it is scored. `memory_used`: Redis' memory over its limit, 0 to 1. An owner with nothing
    open may issue, however small its share is.
    """
    if memory_used > MAX_MEMORY_USED or not slots:
        return 0
    capacity = slots * share if holds_slots else oversubscription * slots * share + in_env
    return max(0 if open_work else 1, int(capacity) - open_work)


def examples_room(*, slots: int, open_examples: int, others: int, share: float, memory_used: float) -> int:
    """Examples of supervised jobs that env workers may be given now. `slots`: of all env workers.

    `others`: all other entries for env workers. `share`: of the tenants with examples among all, by weight. Examples have that
    share of the slots, and what the others leave idle.
    """
    if memory_used > MAX_MEMORY_USED or not slots:
        return 0
    capacity = OVERSUBSCRIPTION * slots
    return max(0 if open_examples else 1, int(max(capacity * share, capacity - others)) - open_examples)


def kv_room(*, kv_tokens: int | None, open_tokens: float, share: float) -> float:
    """Tokens of keys and values with room. `kv_tokens`: of the engines; None: unknown. `open_tokens`: issued, not in env."""
    return math.inf if kv_tokens is None else OVERSUBSCRIPTION * kv_tokens * share - open_tokens


def largest_group(least_kv_tokens: int | None) -> float:
    """Tokens of the largest group that may be issued. `least_kv_tokens`: of the smallest engine; None: unknown. So it does not
    depend on how many engines live, and each can hold what was promised."""
    return math.inf if least_kv_tokens is None else OVERSUBSCRIPTION * least_kv_tokens


def is_longest_waiting(num_turns: int) -> bool:
    """Does a tenant's next turn, after so many, go to the longest waiting instead of the most urgent?"""
    return num_turns % LONGEST_WAITING_EVERY == LONGEST_WAITING_EVERY - 1
