"""The order of a training file's rows: that of `permutation`, whether it lies in memory or on disk."""

import threading
import tracemalloc
from typing import Any

import pytest

from common.bus.streams import Cell
from common.rng import permutation, permutation_parts
from harness.standin import job_spec
from manager_service.owner.jobs import items as rows
from manager_service.owner.jobs.changes import Changes
from manager_service.owner.jobs.items import Items, Shuffle
from manager_service.owner.jobs.job import Job
from manager_service.records.job_records import JobState

N = 64


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file counts as large."""
    monkeypatch.setattr(rows, "SMALL", 0)


def places(of: Shuffle, epochs: int) -> list[int]:
    return [of.place(group) for group in range(epochs * N)]


def test_a_large_files_order_is_that_of_a_small_one(large: None) -> None:
    order = Shuffle(7, N)
    order.draw(0, 3 * N - 1)
    assert places(order, 3) == [int(n) for epoch in range(3) for n in permutation(7, epoch, N)]


def test_orders_on_disk_hold_no_memory() -> None:
    tracemalloc.start()
    order = Shuffle(7, rows.SMALL + 1)
    order.draw(0, 0)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert order.is_drawn(0) and held < 100_000


def test_a_job_asks_for_its_next_epoch_ahead_and_waits_for_it(large: None, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn_in: list[threading.Thread] = []

    def noted(*arguments: Any) -> Any:
        drawn_in.append(threading.current_thread())
        return permutation_parts(*arguments)

    monkeypatch.setattr(rows, "permutation_parts", noted)
    # Given a job whose first epoch's order was drawn before it entered
    spec = job_spec(batch_size=4 * N, group_size=1, num_steps=1)
    items = Items([b'{"messages": [{"role": "user", "content": "%d"}]}' % n for n in range(N)])
    job = Job(Cell("tiny"), spec, JobState(status="running", version=0), items, Items())
    job.orders.draw(0, 0)
    del drawn_in[:]
    # When it has issued that epoch, then it has asked for the next one once, ahead, and waits for it
    changes = Changes()
    while job.wants_group():
        job.issue_group(changes)
    assert (job.state.next_group, changes.to_draw, drawn_in) == (N, [job.id], [])
    # And it goes on when it is there
    job.orders.draw(0, N)
    assert job.wants_group()
