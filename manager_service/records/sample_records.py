"""Records that people read of a job: events, versions, samples. Bounds their bytes: the oldest go first.

Events are numbered by sequence, from 1; samples, an evaluation's answers among them, by version. Each kind is counted in a few
runs of successive numbers, and the oldest run is dropped as a whole, so a job's state holds a few numbers.
"""

from typing import Any, Literal

import msgspec

from common.wire.messages import Failure


class EventRecord(msgspec.Struct, frozen=True):
    """One line of a job's event log. The API shows it in OpenAI's shape."""

    sequence: int
    created_at: int
    level: Literal["info", "warn", "error"]
    message: str
    type: Literal["message", "metrics"] = "message"
    data: dict[str, Any] = {}


class CheckpointRecord(msgspec.Struct, frozen=True):
    version: int
    created_at: int
    metrics: dict[str, float | None] = {}


class Written(msgspec.Struct, frozen=True):
    """A trajectory as tokens: a prompt, then turns of the model and replies of the environment."""

    tokens: list[int]  # from the first of the prompt on
    lengths: list[int]  # tokens of the prompt, of the model's turn, of the reply, of the model's turn, …
    logprobs: list[float]  # of the model's tokens, when they were sampled; none of a supervised job's
    num_dropped: int = 0  # tokens at the end that are not kept


SampleKind = Literal["samples", "answers"]
"""`samples`: what a step was trained on. `answers`: what an evaluation was answered."""
KeptAs = Literal["first", "best", "worst", "failed", "evaluation"]
"""Reason to keep a sample: a step's first groups, one of the others, or an evaluation's first items."""


class SampleRecord(msgspec.Struct, frozen=True):
    """A trajectory shown to the job's owner; as JSON it is the API's answer."""

    version: int  # that sampled it
    group: int
    sample: int
    text: str
    reward: float | None
    stop_reason: str
    prompt: str = ""
    reward_parts: dict[str, float] = {}
    failure: Failure | None = None  # why it has no reward, and was left out
    written: Written | None = None  # None: not kept
    kept: KeptAs = "first"
    step: int = 0  # that trained on it, or left it out since it failed; the version that an evaluation measures
    item: int | None = None  # of an evaluation: the item's place in the held-out file, from 0
    advantage: float | None = None  # by which it is learned from; None: it is not, or its reward is no matter
    verdicts: list[dict[str, str]] = []  # see ScoredTrajectory
    object: Literal["fine_tuning.job.sample"] = "fine_tuning.job.sample"


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

    @property
    def num_bytes(self) -> int:
        return sum(size for _, size in self.runs)

    def has_dropped(self, number: int) -> bool:
        return bool(self.dropped) and number < self.first

    def add(self, number: int, num_bytes: int, limit: int) -> tuple[int, int] | None:
        """Counts a record whose number is not dropped, in a new run if it is above all and their run is full. Returns the
        numbers to drop: the first, and one past the last."""
        if self.runs and (number <= self.newest or self.runs[-1][1] + num_bytes <= limit // NUM_RUNS):
            self.runs[-1] = (self.runs[-1][0], self.runs[-1][1] + num_bytes)
            self.runs[0] = (min(number, self.runs[0][0]), self.runs[0][1])
        else:
            self.runs.append((number, num_bytes))
        self.newest = max(number, self.newest)
        first = self.runs[0][0]
        while len(self.runs) > 1 and self.num_bytes > limit:
            self.runs.pop(0)
        end = self.runs[0][0]
        self.dropped += end - first
        return (first, end) if end > first else None
