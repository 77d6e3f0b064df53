"""Reports of a worker: spans, busy seconds, counters."""

import time
from pathlib import Path

import pytest

from common.store.disk_room import DiskRoom
from common.wire.messages import Span
from common.worker.telemetry import MAX_SPANS, About, Reporter, Timeline, merged


class Clock:
    """Wall and monotonic time that stand still until they are moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "time", clock)
    monkeypatch.setattr(time, "monotonic", clock)
    return clock


def test_a_worker_announces_a_disk_without_its_reserve(tmp_path: Path) -> None:
    rooms = [DiskRoom(tmp_path.as_uri(), reserve) for reserve in (0, 1 << 60)]
    reports = [
        Reporter("w", "trainer", "tiny", About(slots=1, lacks_disk=room.lacks)).report("idle", 0) for room in rooms
    ]
    assert [report.disk_full for report in reports] == [False, True]
    assert [report.reason.partition(" has ")[0] for report in reports] == ["", "the store's disk"]
    assert rooms[0].lacks(1 << 60), "a file that would leave less"
    assert not DiskRoom("s3://bucket", 1 << 60).lacks()


def span(start: float, end: float, job: str = "a") -> Span:
    return Span(start, end, "tenant", job, "rollout")


@pytest.mark.parametrize(
    ("spans", "merges_to"),
    [
        ([span(1, 2), span(2.01, 3), span(2.5, 2.6)], [span(1, 3)]),
        ([span(1, 2), span(2.1, 3), span(1.5, 2.5, "b")], [span(1, 2), span(1.5, 2.5, "b"), span(2.1, 3)]),
        ([span(2, 3), span(0, 1), span(0.9, 2)], [span(0, 3)]),
    ],
    ids=["touching", "with a gap, or of another job", "in another order"],
)
def test_spans_of_one_job_that_touch_are_one(spans: list[Span], merges_to: list[Span]) -> None:
    assert merged(spans) == merges_to


def test_a_job_that_works_twice_at_once_is_busy_once(clock: Clock) -> None:
    timeline = Timeline()
    timeline.begin("t", "a", "rollout")
    clock.now += 1
    timeline.begin("t", "a", "rollout")
    clock.now += 1
    timeline.end("t", "a", "rollout")
    clock.now += 1
    timeline.end("t", "a", "rollout")
    assert timeline.take() == ((Span(1000, 1003, "t", "a", "rollout"),), 3.0)


def test_two_jobs_at_once_have_two_spans_and_busy_time_counts_once(clock: Clock) -> None:
    timeline = Timeline()
    timeline.begin("t", "a", "rollout")
    timeline.begin("u", "b", "rollout")
    clock.now += 2
    timeline.end("t", "a", "rollout")
    timeline.end("u", "b", "rollout")
    spans, busy_s = timeline.take()
    assert {(s.job, s.end_s - s.start_s) for s in spans} == {("a", 2.0), ("b", 2.0)}
    assert busy_s == 2.0


def test_a_segment_that_goes_on_is_cut_at_each_report_and_nothing_is_told_twice(clock: Clock) -> None:
    timeline = Timeline()
    timeline.begin("t", "a", "train")
    clock.now += 1
    first = timeline.take()
    clock.now += 0.5
    timeline.end("t", "a", "train")
    assert first == ((Span(1000, 1001, "t", "a", "train"),), 1.0)
    assert timeline.take() == ((Span(1001, 1001.5, "t", "a", "train"),), 0.5)
    assert timeline.take() == ((), 0.0)


def test_a_report_tells_the_busy_share_since_the_last_one_and_counters_since_the_start(clock: Clock) -> None:
    reporter = Reporter("w1", "env", "tiny", About(slots=4, resident=lambda: ["a@1"]))
    reporter.report("idle", in_use=0)
    reporter.count("turns")
    reporter.timeline.begin("t", "a", "env")
    clock.now += 1
    reporter.timeline.end("t", "a", "env")
    clock.now += 3
    report = reporter.report("busy", in_use=2)
    assert (report.busy, report.in_use, report.slots, report.resident) == (0.25, 2, 4, ("a@1",))
    reporter.count("turns", 2)
    clock.now += 1
    later = reporter.report("idle", in_use=0)
    assert (later.busy, later.counters["turns"]) == (0.0, 3.0)


def test_a_report_is_of_bounded_size_however_many_jobs_a_worker_serves(clock: Clock) -> None:
    # Given a worker that worked for a thousand jobs within a second, for one of them all the time
    timeline = Timeline()
    timeline.begin("t", "long", "rollout")
    for job in range(1000):
        timeline.begin("t", f"j{job}", "rollout")
        clock.now += 0.001
        timeline.end("t", f"j{job}", "rollout")
    timeline.end("t", "long", "rollout")
    # Then its report names some of them, the longest among them, and its busy seconds are all there
    spans, busy_s = timeline.take()
    assert len(spans) == MAX_SPANS and busy_s == pytest.approx(1.0)
    assert spans[0].job == "long"
