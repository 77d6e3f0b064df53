"""Decides which base model a pool worker opens next: the highest response ratio, with the cost of the switch.

1. While anything waits or runs for the open base, it stays; where another base waits, for at most `longest_slice_s`.
2. Then it lingers for a quarter of the other's opening time, at most MAX_LINGER_S: its client may be thinking, unless work came later
   than that when it was last closed. What lets one base follow lets all of rule 3 follow: else bases that open fast would keep a slow
   one waiting for ever.
3. A base may follow once it has waited for as long as its opening takes, so that a worker which has it warmer comes first. One
   whose process runs here may follow at once.
4. Of these the largest 1 + w·W / (S + C) wins (W: its wait, S: one of its operations, C: its opening, w: its weight). A base that
   was not served for as long as a slice of each base lasts comes before all others, the longest unserved one first.

All times are in seconds. The functions are pure: the simulator calls them too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

LINGER_SHARE, MAX_LINGER_S = 0.25, 1.0
OPENINGS_A_SLICE = 20
"""A slice may last so many times as long as its opening took: switches then cost at most 5 % of the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingBase:
    """A base model other than the open one, with work that nobody has read."""

    base: str
    waited_s: float
    """Age of its oldest unread entry."""
    operation_s: float
    """Time of one operation, a moving average."""
    opening_s: float
    """Time to open it here, in the tier that it is in."""
    is_loaded: bool = False
    """Its process runs here, closed."""
    weight: float = 1.0
    """Weights of its active tenants, over the mean of all bases."""
    since_closed_s: float = inf
    """Time since it was last closed here. Old entries of a base that is often open do not keep others from their turn."""

    @property
    def ratio(self) -> float:
        return 1 + self.weight * self.waited_s / (self.operation_s + self.opening_s)

    @property
    def unserved_s(self) -> float:
        return min(self.waited_s, self.since_closed_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSlice:
    """The open base model."""

    base: str
    is_busy: bool
    """Something waits or runs for it."""
    lasted_s: float
    """Time since it was opened."""
    idle_s: float
    """Time since it was last busy."""
    opening_s: float
    """Time that its opening took."""
    pause_s: float = 0.0
    """Time from when it was last closed until work came."""


def longest_slice_s(opening_s: float, slice_max_s: float) -> float:
    """The longest slice of a base while another waits. `slice_max_s`: the setting."""
    return max(slice_max_s, OPENINGS_A_SLICE * opening_s)


def linger_s(opening_s: float, pause_s: float) -> float:
    """Time for which the idle open base, whose work came after that pause, stays before another, which opens in `opening_s`, follows."""
    longest_s = min(LINGER_SHARE * opening_s, MAX_LINGER_S)
    return longest_s if pause_s <= longest_s else 0.0


def choose(
    current: OpenSlice | None, waiting: Sequence[WaitingBase], *, num_bases: int, slice_max_s: float
) -> list[WaitingBase]:
    """The bases that may follow now, best first: the first that others do not open already is opened. None: the slice goes on.

    `current`: None where nothing is open. `num_bases`: of the pool.
    """
    if current and current.is_busy and current.lasted_s < longest_slice_s(current.opening_s, slice_max_s):
        return []
    able = [base for base in waiting if base.is_loaded or base.waited_s >= base.opening_s]
    if (
        current
        and not current.is_busy
        and not any(current.idle_s >= linger_s(base.opening_s, current.pause_s) for base in able)
    ):
        return []
    return ranked(able, num_bases=num_bases, slice_max_s=slice_max_s)


def ranked(waiting: Sequence[WaitingBase], *, num_bases: int, slice_max_s: float) -> list[WaitingBase]:
    """The bases by rule 4, best first; of equals the first by name."""

    def urgency(base: WaitingBase) -> tuple[float, float, str]:
        unserved_s = base.unserved_s
        overdue = unserved_s > num_bases * longest_slice_s(base.opening_s, slice_max_s)
        return -unserved_s if overdue else 0.0, -base.ratio, base.base

    return sorted(waiting, key=urgency)
