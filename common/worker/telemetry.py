"""Reports of a worker, one a second: state, busy share, and spans of time by tenant."""

import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from common.wire.messages import Outside, Span, WorkerReport
from common.wire.reported import InPool

KEEP_S = 3600.0
"""Seconds that reports stay in the telemetry stream."""
KEEP_REPORTS = 65_536
"""The most reports that stay there: an hour of 18 workers. So its size depends on neither jobs nor workers."""
WAITED_S = 5.0
"""Seconds for which reports repeat a worker's last wait."""
MAX_WAITING, MAX_REASON = 16, 100
"""Limits of a report: jobs that wait, and characters of each reason."""
MAX_SPANS = 64
"""Most spans in one report: the longest, should a worker have worked for more jobs in that second."""


@dataclass(slots=True)
class Timeline:
    """Busy segments of this worker since the last report; overlapping ones of one job are merged."""

    _open: dict[tuple[str, str, str], tuple[int, float]] = field(default_factory=dict)  # -> (running, since)
    _closed: list[Span] = field(default_factory=list)
    _busy_since: float | None = None
    _busy_s: float = 0.0
    dropped: int = 0
    """Spans beyond MAX_SPANS that no report told."""

    def begin(self, tenant: str, job: str, phase: str) -> None:
        now = time.time()
        running, since = self._open.get((tenant, job, phase), (0, now))
        self._open[tenant, job, phase] = (running + 1, since)
        if self._busy_since is None:
            self._busy_since = now

    def end(self, tenant: str, job: str, phase: str) -> None:
        now = time.time()
        running, since = self._open.pop((tenant, job, phase))
        if running > 1:
            self._open[tenant, job, phase] = (running - 1, since)
        else:
            self._closed.append(Span(since, now, tenant, job, phase))
        if not self._open and self._busy_since is not None:
            self._busy_s += now - self._busy_since
            self._busy_since = None

    def take(self) -> tuple[tuple[Span, ...], float]:
        """At most MAX_SPANS spans, and busy seconds, since the last call; cuts segments that go on."""
        now = time.time()
        for (tenant, job, phase), (running, since) in self._open.items():
            self._closed.append(Span(since, now, tenant, job, phase))
            self._open[tenant, job, phase] = (running, now)
        if self._busy_since is not None:
            self._busy_s += now - self._busy_since
            self._busy_since = now
        longest = sorted(merged(self._closed), key=lambda s: s.start_s - s.end_s)
        self.dropped += max(0, len(longest) - MAX_SPANS)
        spans, busy = tuple(sorted(longest[:MAX_SPANS], key=lambda s: s.start_s)), self._busy_s
        self._closed, self._busy_s = [], 0.0
        return spans, busy


def merged(spans: list[Span], gap_s: float = 0.02) -> list[Span]:
    """Spans of the same tenant, job and phase that touch within `gap_s` become one."""
    result: list[Span] = []
    last: dict[tuple[str, str, str], int] = {}
    for span in sorted(spans, key=lambda s: s.start_s):
        key = (span.tenant, span.job, span.phase)
        at = last.get(key)
        if at is not None and span.start_s <= result[at].end_s + gap_s:
            before = result[at]
            result[at] = Span(before.start_s, max(before.end_s, span.end_s), *key)
        else:
            last[key] = len(result)
            result.append(span)
    return result


class Waiting:
    """Reasons outside of this worker for which jobs' work waits."""

    def __init__(self) -> None:
        self._lately: dict[str, tuple[str, float]] = {}  # job -> reason, when it was noted; the newest last

    def note(self, job: str, reason: str) -> None:
        self._lately.pop(job, None)
        self._lately[job] = reason[:MAX_REASON], time.monotonic()

    def lately(self) -> dict[str, str]:
        """Job -> reason, of the last WAITED_S and at most MAX_WAITING jobs."""
        now = time.monotonic()
        self._lately = {job: noted for job, noted in self._lately.items() if now - noted[1] < WAITED_S}
        return {job: reason for job, (reason, _) in list(self._lately.items())[-MAX_WAITING:]}


@dataclass(frozen=True, slots=True)
class About:
    """The worker's own part of its reports; their fields explain it."""

    slots: int
    kv_tokens: int | None = None
    max_lora_rank: int | None = None
    lora_slots: int | None = None
    outside: Outside | None = None
    dtype: str = ""
    fingerprint: str = ""
    kv_used: Callable[[], int | None] = lambda: None
    resident: Callable[[], list[str]] = field(default=list)
    waiting: Callable[[], dict[str, str]] = field(default=dict)
    lacks_disk: Callable[[], str] = field(default=str)
    counters: Callable[[], dict[str, float]] = field(default=dict)
    """Totals that the service counts itself, such as `busy_s`."""


@dataclass(slots=True)
class Reporter:
    """Builds this worker's reports."""

    worker: str
    service: str
    base_model: str
    about: About
    pool: Callable[[], InPool] | None = None
    """Its place; None: it serves its base model alone."""
    timeline: Timeline = field(default_factory=Timeline)
    counters: dict[str, float] = field(default_factory=dict)
    _last: float = field(default_factory=time.monotonic)
    _waited: tuple[str, float] = ("", float("-inf"))

    def waits_for(self, reason: str) -> None:
        """Lets the next reports say that work waits for something outside of this worker."""
        self._waited = (reason, time.monotonic())

    def count(self, name: str, amount: float = 1.0) -> None:
        self.counters[name] = self.counters.get(name, 0.0) + amount

    def first_read(self, entries: Sequence[str]) -> None:
        """Measures the age of entries at their first read, by the clocks of Redis' host and this one."""
        now = time.time()
        self.count("delivered", len(entries))
        self.count("delivery_s", sum(max(0.0, now - int(entry.partition("-")[0]) / 1000) for entry in entries))

    def report(self, state: str, in_use: int, *, reason: str = "") -> WorkerReport:
        now = time.monotonic()
        spans, busy_s = self.timeline.take()
        lacks_disk, (waited, at_s) = self.about.lacks_disk(), self._waited
        period, self._last = max(now - self._last, 1e-6), now
        return WorkerReport(
            id=self.worker,
            tenant="",
            job="",
            partition=0,
            service=self.service,
            pid=os.getpid(),
            host=socket.gethostname(),
            state=state,
            busy=min(1.0, busy_s / period),
            base_model=self.base_model,
            resident=tuple(self.about.resident()),
            slots=self.about.slots,
            in_use=in_use,
            kv_tokens=self.about.kv_tokens,
            kv_used=self.about.kv_used(),
            max_lora_rank=self.about.max_lora_rank,
            lora_slots=self.about.lora_slots,
            outside=self.about.outside,
            dtype=self.about.dtype,
            fingerprint=self.about.fingerprint,
            reason=reason or lacks_disk or (waited if now - at_s < WAITED_S else ""),
            disk_full=bool(lacks_disk),
            pool=self.pool() if self.pool else None,
            waiting=self.about.waiting(),
            spans=spans,
            counters={
                **self.counters,
                **self.about.counters(),
                "cpu_s": time.process_time(),
                "spans_dropped": float(self.timeline.dropped),
            },
        )
