"""Bounds what is kept for people to read, by bytes: of each job its events and its samples. The oldest go first.

Events are numbered by their sequence, from 1; samples by their version, an evaluation's answers among them. Each kind is counted in a
few runs of successive numbers, and the oldest run is dropped as a whole, so a job's state holds a few numbers however much was written.
"""

import msgspec

NUM_RUNS = 16
"""Runs that together have the bytes of the limit."""


class Limits(msgspec.Struct, frozen=True):
    """Limits of the records that are kept."""

    events: int = 8 << 20  # bytes of one job
    samples: int = 64 << 20  # bytes of one job, nearly all of them in object storage
    dead: int = 64 << 20  # bytes of a cell's dead letters
    telemetry: int = 64 << 20  # bytes of a cell's reports
    sample_groups: int = 2  # groups of each step that are kept whole
    sample_items: int = 4  # held-out items of which every evaluation keeps an answer
    other_samples: int = 4  # trajectories of each step that are kept: so many of its best, its worst and its failed

    @classmethod
    def of(cls, num_bytes: int) -> "Limits":
        """Limits of so many bytes for each kind, and of an eighth for events, which stand in Redis."""
        return cls(num_bytes // 8, num_bytes, num_bytes, num_bytes)


LIMITS = Limits()


class Kept(msgspec.Struct):
    """The kept records of one kind."""

    runs: list[tuple[int, int]] = []  # first number, bytes; oldest first
    dropped: int = 0  # records that are gone
    newest: int = 0  # the highest number

    @property
    def first(self) -> int:
        """The oldest that is kept; all below are dropped."""
        return self.runs[0][0] if self.runs else 0

    def has_dropped(self, number: int) -> bool:
        return bool(self.dropped) and number < self.first

    def add(self, number: int, num_bytes: int, limit: int) -> tuple[int, int] | None:
        """Counts a record of a number that is not dropped: a new run's, if it is above all before and their run is full. Returns the
        numbers to drop: the first, and one past the last."""
        if self.runs and (number <= self.newest or self.runs[-1][1] + num_bytes <= limit // NUM_RUNS):
            self.runs[-1] = (self.runs[-1][0], self.runs[-1][1] + num_bytes)
            self.runs[0] = (min(number, self.runs[0][0]), self.runs[0][1])
        else:
            self.runs.append((number, num_bytes))
        self.newest = max(number, self.newest)
        first = self.runs[0][0]
        while len(self.runs) > 1 and sum(size for _, size in self.runs) > limit:
            self.runs.pop(0)
        end = self.runs[0][0]
        self.dropped += end - first
        return (first, end) if end > first else None
