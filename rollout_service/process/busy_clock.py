"""Splits an engine's time among the turns under way."""

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class BusyClock:
    """Splits the engine's time evenly among the turns running at each moment, from their beginnings and ends.

    Processor sharing: a virtual clock runs at 1 / n while n turns are under way, and a turn's share is the clock's advance during
    it. All shares add up to the busy time. Generalised processor sharing: Parekh and Gallager 1993, doi 10.1109/90.234856.
    """

    now: Callable[[], float] = time.monotonic
    num_under_way: int = 0
    busy_s: float = 0.0  # with anything under way, since the start
    _share_s: float = 0.0
    _last_s: float = 0.0

    def enter(self) -> float:
        """Begins a turn; its result is what `share_s` and `leave` take."""
        self._advance()
        self.num_under_way += 1
        return self._share_s

    def share_s(self, entered: float) -> float:
        """Seconds so far of a turn under way."""
        self._advance()
        return self._share_s - entered

    def leave(self, entered: float) -> float:
        """Ends a turn; returns its seconds."""
        seconds = self.share_s(entered)
        self.num_under_way -= 1
        return seconds

    def _advance(self) -> None:
        now = self.now()
        if self.num_under_way:
            self.busy_s += now - self._last_s
            self._share_s += (now - self._last_s) / self.num_under_way
        self._last_s = now
