"""CSV as lines of items: the first row names the fields, each other row is an item. Row 1 is the first below the names.

Every value is a text, except `messages` and `tools`: JSON. Pure functions, which raise InvalidInput with row and column.
"""

import csv
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from common.errors import InvalidInput
from common.suggestions import cut, quoted
from manager_service.http.reading.json_values import parse_json

JSON_COLUMNS = frozenset({"messages", "tools"})
ASKING = ("prompt", "messages")
MAX_COLUMNS, MAX_NAME = 1000, 128
MAX_MADE = 4 << 20
"""Bytes of lines that are made at once: short rows under long names become many times as long."""
csv.field_size_limit((1 << 31) - 1)  # rows are bounded by the parts in which they come


class Converted(msgspec.Struct, frozen=True):
    """Lines of items, made of the beginning of a part."""

    lines: bytes
    num_bytes: int  # of the beginning; the rest comes again, in the next part
    num_rows: int
    columns: list[str]


def convert_csv(part: bytes, *, columns: Sequence[str], before: int, is_last: bool, max_line_bytes: int) -> Converted:
    """`columns`: empty for a file's first part, which begins with them. `before`: the number of rows above these."""
    names, made, num_rows, done = list(columns), bytearray(), 0, 0
    lines = _Lines(part if is_last else part[: part.rfind(b"\n") + 1])
    try:
        for row in csv.reader(lines, strict=True):
            if not names:
                names = _checked(row)
            elif row:
                num_rows += 1
                made += _line(names, row, before + num_rows, max_line_bytes)
            done = lines.num_bytes
            if len(made) > MAX_MADE:
                break
    except csv.Error as error:
        if is_last or not lines.ended:
            raise _wrong(f"row {before + num_rows + 1}: {error}") from error
    except UnicodeDecodeError as error:
        raise _wrong(f"row {before + num_rows + 1}: not UTF-8: save the table as CSV in UTF-8") from error
    if not done and not is_last:
        raise _wrong(f"row {before + 1} does not end within {len(part)} bytes: is a quotation mark missing?")
    return Converted(bytes(made), done, num_rows, names)


class _Lines:
    """The lines of a part as texts, and how many bytes were read so far."""

    def __init__(self, part: bytes) -> None:
        self._part = part
        self.num_bytes = 0
        self.ended = False

    def __iter__(self) -> Iterator[str]:
        for line in self._part.splitlines(keepends=True):
            self.num_bytes += len(line)
            yield line.decode()
        self.ended = True


def _checked(names: Sequence[str]) -> list[str]:
    """The names of columns. Raises InvalidInput."""
    found = [name.strip() for name in names]
    if twice := [name for name in found if found.count(name) > 1][:1] if len(found) <= MAX_COLUMNS else []:
        raise _wrong(f"two columns have the name {quoted(twice[0])}")
    if len(found) > MAX_COLUMNS or any(len(name) > MAX_NAME for name in found):
        raise _wrong(f"a table has at most {MAX_COLUMNS} columns, whose names have at most {MAX_NAME} characters")
    if not set(found) & set(ASKING):
        there = cut(", ".join(map(quoted, found[:20]))) or "none"
        raise _wrong(
            f"the first row names the columns: one must be 'prompt' (what is asked) or 'messages', and there are {there}."
            " Rename one, or let `marlaas submit FILE --prompt COLUMN` do it; a comma separates columns"
        )
    return found


def _line(names: Sequence[str], row: Sequence[str], number: int, max_line_bytes: int) -> bytes:
    if len(row) != len(names):
        raise _wrong(f"row {number} has {len(row)} values, and there are {len(names)} columns")
    item = {name: _value(name, text, number) for name, text in zip(names, row, strict=True)}
    line = msgspec.json.encode(item) + b"\n"
    if len(line) > max_line_bytes:
        raise _wrong(f"row {number}: {len(line)} bytes as JSON; a row has at most {max_line_bytes}")
    return line


def _value(name: str, text: str, number: int) -> Any:
    if name not in JSON_COLUMNS:
        return text
    try:
        return parse_json(text.encode()) if text else None
    except (ValueError, RecursionError) as error:
        raise _wrong(f"row {number}, column {name!r}: {error}") from error


def _wrong(message: str) -> InvalidInput:
    return InvalidInput(message, param="file", code="invalid_file")
