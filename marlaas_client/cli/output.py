"""Output of the commands: JSON for scripts, tables and lines for people.

What people and models wrote reaches a terminal only through here: as it is, without markup, and with every character shown
that would command the terminal or turn the line around.
"""

import json
import shlex
import shutil
import sys
import unicodedata
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text


def _console(width: int | None = None) -> Console:
    return Console(width=width, highlight=False, markup=False, emoji=False)


console = _console()
UNLIMITED = console.options.update(max_width=10_000)
FOLDED_WIDTH = 30
"""Width of columns that may be wrapped, in a narrow terminal."""

COPIED = ("id", "job", "tuned model", "from")
"""Columns whose values are copied to other commands: they are never cut or wrapped."""
UNSEEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode's categories of control, format (such as bidirectional) and surrogate characters, and of its own line ends."""
STATUS_STYLES = {
    "succeeded": "green",
    "failed": "red",
    "cancelled": "yellow",
    "paused": "yellow",
    "running": "cyan",
}


def visible(text: str, keep: str = "") -> str:
    """The text with each unseen character, except those to `keep`, as the escape of JSON: `\\u001b`."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c in keep or unicodedata.category(c) not in UNSEEN else json.dumps(c)[1:-1] for c in text)


def say(text: str, *, keep: str = "", end: str = "\n", err: bool = False) -> None:
    """Prints text that somebody else may have written."""
    typer.echo(visible(text, keep) + end, nl=False, err=err)


def typed(program: str = "marlaas") -> str:
    """A program of this environment, as a shell finds it that was started here."""
    own, here = Path(sys.executable).with_name(program), Path.cwd()
    found = Path(shutil.which(program) or "")
    if not own.exists() or own == found or (found.is_symlink() and own == found.readlink()):  # pipx links to it
        return program
    return shlex.quote(str(own.relative_to(here) if own.is_relative_to(here) else own))


def print_json(value: Any) -> None:
    """One line, so that each line of a stream is a document."""
    say(json.dumps(value, ensure_ascii=False))


def print_table(shown: Table) -> None:
    """Prints a table as wide as its ids and names need, however narrow the terminal is: a terminal wraps a line without cutting it."""
    needed = sum(_width(column) + 2 for column in shown.columns)
    _console(max(console.width, needed)).print(shown)


def width_of(shown: Table) -> int:
    """Characters that a table needs, if nothing is wrapped."""
    return Measurement.get(console, UNLIMITED, shown).maximum


def _width(column: Column) -> int:
    """Characters that a column needs."""
    shown = (column.header, *column.cells)
    widest = max(Measurement.get(console, UNLIMITED, cell).maximum for cell in shown)
    return widest if column.no_wrap else min(widest, FOLDED_WIDTH)


def table(*columns: str, right: Iterable[str] = ()) -> Table:
    """A table without a frame. Columns in `right` are numbers."""
    result = Table(box=box.SIMPLE_HEAD, show_edge=False, collapse_padding=True, pad_edge=False, header_style="bold")
    for column in columns:
        numbers = column in set(right)
        unwrapped = numbers or column in COPIED
        result.add_column(column, justify="right" if numbers else "left", no_wrap=unwrapped, overflow="fold")
    return result


def cells(*values: Any) -> list[Text]:
    """Text for a row; None is empty, numbers are short."""
    return [Text(visible(_text(value))) for value in values]


def cut(text: str, most: int) -> str:
    """At most so many characters, and how many more there are."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text) - most:,} more characters)"


def status(name: str) -> Text:
    return Text(visible(name), STATUS_STYLES.get(name, ""))


def clock(seconds: float | None) -> str:
    """Seconds since 1970 as local time of day, with the date if that is not today."""
    if seconds is None:
        return ""
    moment = datetime.fromtimestamp(seconds)
    today = moment.date() == datetime.now().date()
    return moment.strftime("%H:%M:%S" if today else "%Y-%m-%d %H:%M")


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else str(value)
