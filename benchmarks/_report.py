"""The parts that all benchmarks share: one runner, contenders that take turns, and folders of results.

A benchmark is a function from its options to a `Report`; `run` does the rest:

    if __name__ == "__main__":
        run(__doc__, report, {"rounds": 1}, rounds=5)     # the option --rounds, 5 by default, 1 under --quick
"""

import argparse
import logging
import signal
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import structlog

from simulator import report
from simulator.calibration import write as write_json
from simulator.report import Goal, Report, at_most, console, joined, make_table, natural, number, positive, show

__all__ = [
    "Goal", "Report", "at_most", "console", "joined", "make_table", "natural", "number", "positive", "show", "write_json",
]  # fmt: skip

Cost = TypeVar("Cost")
Name = TypeVar("Name")


# ---- the runner -----------------------------------------------------------------------------------------------------


def run(doc: str | None, measure: Callable[[Any], Report], quick: Mapping[str, Any], **numbers: int) -> None:
    """A benchmark's whole program. `numbers`: its whole-numbered options and their defaults. `quick`: others under `--quick`."""
    given = parsed(parser(doc, **numbers), quick)
    show(measure(given), given.json)


def parsed(options: argparse.ArgumentParser, quick: Mapping[str, Any]) -> Any:
    """The options as they are given, `--quick` among them. `quick`: the defaults that it changes."""
    options.add_argument("--quick", action="store_true", help="a short run, whose figures say little")
    if options.parse_known_args()[0].quick:
        options.set_defaults(**quick)
    return options.parse_args()


def parser(doc: str | None, **numbers: int) -> argparse.ArgumentParser:
    """A benchmark's options: its docstring as help, `--json`, and numbers of 1 or more by their names and defaults."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    result = report.parser(doc)
    for name, default in numbers.items():
        result.add_argument(f"--{name}", type=positive, default=default, metavar="N", help=f"default {default}")
    return result


def sweep_parser(doc: str | None, out: Path, quick: str) -> argparse.ArgumentParser:
    """The options of a benchmark of many runs, each of which leaves a file in a folder. `quick` describes the short sweep."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # what runs is ended, as after Ctrl-C
    result = parser(doc)
    result.add_argument("--quick", action="store_true", help=quick)
    result.add_argument("--out", type=Path, metavar="FOLDER", help=f"of the results; default {out}")
    result.add_argument("--show", type=Path, metavar="FOLDER", help="report what is in this folder, run nothing")
    return result


# ---- folders of results ---------------------------------------------------------------------------------------------


def empty(folder: Path, *results: str) -> None:
    """Make a folder for results, without those of an earlier run (file names with `*`). Leaves with a line if it holds more."""
    folder.mkdir(parents=True, exist_ok=True)
    old = [file for pattern in results for file in folder.glob(pattern)]
    others = sorted({file.name for file in folder.iterdir()} - {file.name for file in old})
    if others:
        sys.exit(f"--out {folder}: it holds {others[0]!r}, which is no result of an earlier run; choose another folder")
    for file in old:
        file.unlink()


def read_json(folder: Path, pattern: str, kind: type[Cost]) -> list[Cost]:
    """Every result in the folder that `write_json` wrote, by name."""
    return [msgspec.json.decode(file.read_bytes(), type=kind) for file in sorted(folder.glob(pattern))]


# ---- contenders -----------------------------------------------------------------------------------------------------


def in_turns(
    contenders: Mapping[Name, Callable[[], Cost]], num_turns: int, *, warm_up: int = 1
) -> dict[Name, list[Cost]]:
    """Results of each contender in each turn; they take turns so that a change of the machine's load meets all alike. The first
    `warm_up` turns do not count."""
    turns = [{name: contend() for name, contend in contenders.items()} for _ in range(warm_up + num_turns)]
    return {name: [turn[name] for turn in turns[warm_up:]] for name in contenders}


async def in_turns_async(
    contenders: Mapping[Name, Callable[[], Awaitable[Cost]]], num_turns: int, *, warm_up: int = 1
) -> dict[Name, list[Cost]]:
    """Does the same with coroutines."""
    turns = [{name: await contend() for name, contend in contenders.items()} for _ in range(warm_up + num_turns)]
    return {name: [turn[name] for turn in turns[warm_up:]] for name in contenders}


def timed(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> Callable[[], float]:
    """A contender that returns the seconds its work took."""

    def contend() -> float:
        started = clock()
        work()
        return clock() - started

    return contend


def ratio(values: Sequence[float], to: Sequence[float]) -> float:
    """The median over turns of the ratio within a turn."""
    return statistics.median(a / b for a, b in zip(values, to, strict=True))


def medians(costs: Sequence[Cost]) -> Cost:
    """Medians of dataclasses of numbers, field by field."""
    rows: Any = map(astuple, costs)  # type: ignore[arg-type]
    return type(costs[0])(*map(statistics.median, zip(*rows, strict=True)))
