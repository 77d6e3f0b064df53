"""Shows figures: options, tables, goals, and the state of the machine with them."""

import argparse
import json
import math
import os
import platform
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from marlaas_client.cli.output import table

console = Console(highlight=False)
if not console.is_terminal:
    console = Console(highlight=False, width=140)


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure that was promised. `limit` is the least good value; `more_is_better` says on which side."""

    what: str
    measured: float
    limit: float
    unit: str = ""
    more_is_better: bool = True

    @property
    def reached(self) -> bool:
        return self.measured >= self.limit if self.more_is_better else self.measured <= self.limit

    def __str__(self) -> str:
        side = "at least" if self.more_is_better else "at most"
        verdict = "[green]reached[/]" if self.reached else "[red]missed[/]"
        shown = f"{number(self.measured)}{self.unit} ({side} {number(self.limit)}{self.unit})"
        return f"{self.what}: {shown} {verdict}"


@dataclass(frozen=True, slots=True)
class Report:
    """Output of a program. `figures`: the same for machines; `notes`: lines between tables and goals."""

    tables: Sequence[Table]
    figures: Any
    goals: Sequence[Goal] = ()
    notes: Sequence[str] = ()


def at_most(what: str, measured: float, limit: float, unit: str = "") -> Goal:
    return Goal(what, measured, limit, unit, more_is_better=False)


def joined(reports: Sequence[Report]) -> Report:
    """Joins those of a program's parts, each of which has its figures by name."""
    tables = [table for each in reports for table in each.tables]
    figures = {name: found for each in reports for name, found in each.figures.items()}
    return Report(tables, figures, [goal for each in reports for goal in each.goals])


# ---- options --------------------------------------------------------------------------------------------------------


def parser(doc: str | None) -> argparse.ArgumentParser:
    """A program's options: its docstring as help, and `--json`."""
    result = argparse.ArgumentParser(
        prog=program(), description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("--json", type=writable, metavar="FILE", help="write the figures there too")
    return result


def program() -> str:
    """The command that runs this program: `python -m benchmarks.paper`."""
    spec = sys.modules["__main__"].__spec__
    return f"python -m {spec.name.removesuffix('.__main__')}" if spec else sys.argv[0]


def positive(text: str) -> int:
    """An option's whole number, 1 or more."""
    return _at_least(1, text)


def natural(text: str) -> int:
    """An option's whole number, 0 or more."""
    return _at_least(0, text)


def writable(text: str) -> Path:
    """An option's file, which is written at the end: its folder must be there from the start."""
    file = Path(text)
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} is no file that can be written")
    return file


def _at_least(least: int, text: str) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of {least} or more")
    return int(text)


# ---- tables ---------------------------------------------------------------------------------------------------------


def make_table(title: str, columns: Sequence[str], values: Iterable[Sequence[Any]]) -> Table:
    """A table whose first column is text and whose others are numbers."""
    result = table(*columns, right=columns[1:])
    result.title, result.title_justify, result.title_style = title, "left", "bold"
    for row in values:
        result.add_row(*(value if isinstance(value, str) else number(value) for value in row))
    return result


def show(report: Report, to: Path | None) -> None:
    """Print it, and write the figures to a file if one is given."""
    load = os.getloadavg()
    for each in report.tables:
        title, each.title = each.title, None  # a table folds its title to its own width
        if title:
            console.print(title, style="bold")
        console.print(each)
    for note in report.notes:
        console.print(note)
    for goal in report.goals:
        console.print(f"goal  {goal}")
    console.print(f"{os.cpu_count()} cores, load average {load[0]:.1f} over the last minute, {load[1]:.1f} over five\n")
    if to:
        machine = {"cores": os.cpu_count(), "load_average": load, "python": platform.python_version()}
        goals = [{**asdict(goal), "reached": goal.reached} for goal in report.goals]
        to.write_text(json.dumps({"figures": report.figures, "goals": goals, "machine": machine}, indent=2) + "\n")


def number(value: float | None) -> str:
    """Three digits that count, thousands apart."""
    if value is None or math.isnan(value):
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"
