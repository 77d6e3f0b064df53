"""Output of the commands: JSON for scripts, tables for people."""

import json
from collections.abc import Iterable
from datetime import datetime
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

console = Console(highlight=False)

IDS = ("id", "job")
STATUS_STYLES = {
    "succeeded": "green",
    "failed": "red",
    "cancelled": "yellow",
    "paused": "yellow",
    "running": "cyan",
}


def print_json(value: Any) -> None:
    """One line, so that each line of a stream is a document."""
    typer.echo(json.dumps(value, ensure_ascii=False))


def table(*columns: str, right: Iterable[str] = ()) -> Table:
    """A table without a frame. Columns in `right` are numbers. Ids are never cut, so that they can be copied."""
    result = Table(box=box.SIMPLE_HEAD, show_edge=False, collapse_padding=True, pad_edge=False, header_style="bold")
    for column in columns:
        numbers = column in set(right)
        result.add_column(
            column, justify="right" if numbers else "left", no_wrap=numbers or column in IDS, overflow="fold"
        )
    return result


def cells(*values: Any) -> list[str]:
    """Text for a row; None is empty, numbers are short, nothing is taken for markup."""
    return [escape(_text(value)) for value in values]


def status(name: str) -> str:
    style = STATUS_STYLES.get(name)
    return f"[{style}]{escape(name)}[/]" if style else escape(name)


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
