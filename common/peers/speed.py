"""Tells whether a worker should leave the holder that it follows. Pure: the clock is the caller's.

A part on its way is timed, the wait for the next one is not: a holder that waits itself is not slow, whatever makes it wait.
"""

from dataclasses import dataclass

SLOW_SHARE = 0.25
"""The share of what a worker usually gets below which it gets little."""
SLOW_S = 5.0
"""Seconds of little after which a holder is slow. Twice as long behind one that is starved itself: that one moves first."""
LOOK_S = 1.0
ADAPTS = 0.2
FIRST_BYTES_PER_S = 4_000_000.0
"""The usual speed before any: too high a guess costs one move, for a worker then expects what it got."""


@dataclass(slots=True)
class Usual:
    """The speed at which a worker usually gets a file, whoever its holder is."""

    bytes_per_s: float = FIRST_BYTES_PER_S


@dataclass(slots=True)
class HolderSpeed:
    """The speed of one holder."""

    usual: Usual
    looked_s: float
    """Time of the last look; at first, of the connection."""
    got_per_s: float = 0.0
    """Bytes a second before that, waits included."""
    _bytes: int = 0
    _coming_s: float = 0.0
    _slow_s: float = 0.0
    _starved_s: float = 0.0

    @property
    def is_slow(self) -> bool:
        """Has it sent little while it sent?"""
        return self._slow_s >= SLOW_S

    @property
    def is_starved(self) -> bool:
        """Has it given little, waits included?"""
        return self._starved_s >= 2 * SLOW_S

    def came(self, num_bytes: int, coming_s: float, now_s: float) -> bool:
        """Counts what came of a part in `coming_s`, or a wait's end. True about every LOOK_S: the properties may have changed."""
        self._bytes += num_bytes
        self._coming_s += coming_s
        if (elapsed_s := now_s - self.looked_s) < LOOK_S:
            return False
        little, self.got_per_s = SLOW_SHARE * self.usual.bytes_per_s, self._bytes / elapsed_s
        if self._coming_s:
            self._slow_s = self._slow_s + self._coming_s if self._bytes < little * self._coming_s else 0.0
        self._starved_s = self._starved_s + elapsed_s if self.got_per_s < little else 0.0
        if not self._starved_s:
            self.usual.bytes_per_s += ADAPTS * (self.got_per_s - self.usual.bytes_per_s)
        self._bytes, self._coming_s, self.looked_s = 0, 0.0, now_s
        return True

    def leave(self) -> None:
        """Lets the worker expect no more than this one gave, lest it leave one after another."""
        self.usual.bytes_per_s = min(self.usual.bytes_per_s, self.got_per_s)
