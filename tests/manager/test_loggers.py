"""Promises of every writer, of the real loggers and of the stand-in: a row is there once, whenever its process is killed."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.cancellation import cancel_all
from manager_service.export.passes import JobRows, Order
from manager_service.export.rows import Row
from tests.support.loggers import Logger, logger
from tests.support.wandb_server import wandb_server

REAL = [pytest.mark.slow, pytest.mark.timeout(600)]
KINDS = ["standin", *(pytest.param(kind, marks=REAL) for kind in ("wandb", "trackio"))]
JOB = "ftjob-1"


@pytest.fixture(params=KINDS)
def under_test(request: pytest.FixtureRequest) -> Logger:
    return logger(request.param)


def order(folder: Path, numbers: range, *, final: str | None = None, job: str = JOB) -> Order:
    rows = [Row(n, 1_000 + n, n, {"train/global_step": n, "train/loss": n / 2}) for n in numbers]
    config = {"batch_size": 4, "lora": {"rank": 8}}
    names: dict[str, Any] = {"project": "mine", "name": "first", "entity": "", "tags": ("a",)}
    return Order(
        folder=str(folder),
        key="",
        base_url="",
        jobs=[JobRows(job=job, **names, config=config, rows=rows, final=final)],
    )


def joined(*orders: Order) -> Order:
    return msgspec.structs.replace(orders[0], jobs=[job for one in orders for job in one.jobs])


async def written(one: Logger, asked: Order) -> str:
    """Returns the reason why it was not; empty: it was."""
    (error,) = {answer.error for answer in (await one.passes.write(one.name, asked)).values()}
    return error


def expected(numbers: range) -> list[tuple[int, dict[str, float]]]:
    return [(n, {"train/global_step": n, "train/loss": n / 2}) for n in numbers]


async def test_rows_that_come_again_or_of_a_killed_writer_are_written_once_and_jobs_kept_apart(
    under_test: Logger, tmp_path: Path
) -> None:
    other = order(tmp_path, range(4, 9), job="ftjob-2")
    first = joined(order(tmp_path, range(1, 4)), other, order(tmp_path, range(1, 6)), order(tmp_path, range(1, 3)))
    await killed(under_test, first, nth_state(tmp_path, 8))
    assert await written(under_test, first) == ""
    assert await written(under_test, order(tmp_path, range(3, 8), final="succeeded")) == ""
    assert under_test.read(tmp_path, JOB) == expected(range(1, 8))
    assert under_test.read(tmp_path, "ftjob-2") == expected(range(4, 9))


async def killed(one: Logger, asked: Order, when: Callable[[], bool]) -> None:
    """Runs a writer until it has ended, or `when` says that it is to be killed."""
    writing = asyncio.create_task(one.passes.write(one.name, asked))
    while not (writing.done() or when()):
        await asyncio.sleep(0.001)
    await cancel_all([writing])


def nth_state(folder: Path, number: int) -> Callable[[], bool]:
    """Says whether the folder's files, and their sizes, have been seen in so many states."""
    states = set[frozenset[tuple[str, int]]]()

    def reached() -> bool:
        with contextlib.suppress(FileNotFoundError):
            states.add(frozenset((str(file), file.stat().st_size) for file in folder.rglob("*")))
        return len(states) >= number

    return reached


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_server_of_wandb_has_each_row_once_though_a_writer_is_killed_and_the_key_is_kept_nowhere(
    tmp_path: Path,
) -> None:
    one, key = logger("wandb"), "0123456789abcdef" * 3
    base_url = "http://wandb.example.org"  # what is there answers as a proxy

    def to_server(numbers: range, final: str | None = None) -> Order:
        return msgspec.structs.replace(order(tmp_path, numbers, final=final), key=key, base_url=base_url)

    with wandb_server() as server:
        one = replace(one, proxy=server.url)
        server.url, server.refuses_rows = base_url, True
        assert (await written(one, to_server(range(1, 4)))).startswith("RowsNotKept ") and server.history == []
        server.refuses_rows = False
        await killed(one, to_server(range(1, 100)), lambda: len(server.history) > 3)
        assert server.exit_codes == []
        assert await written(one, joined(to_server(range(1, 90)), to_server(range(3, 200), "failed"))) == ""
        assert [row["_step"] for row in server.history] == list(range(1, 200))
        assert [row["train/loss"] for row in server.history] == [n / 2 for n in range(1, 200)]
        assert (set(server.exit_codes), len(server.keys - {""})) == ({1}, 1)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
