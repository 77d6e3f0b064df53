"""Rows of tables and datasets, which become the lines of a training file on the user's machine.

    FILE.jsonl, FILE.csv, FILE.parquet, a dataset's folder, a dataset of the hub ─► rows ─► columns become fields ─► JSONL

What is wrong is said by row and column; row 1 is the first.
"""

import csv
import difflib
import json
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO, NamedTuple

from marlaas_client.errors import InvalidInput

DatasetRow = dict[str, Any]
BATCH = 256
"""Rows of a Parquet file in memory at once."""
JSON_COLUMNS = frozenset({"messages", "tools"})
"""Columns of CSV; the others hold texts."""
ASKING = {"prompt", "messages"}
"""Fields of which an item needs one."""
TALK = {"prompt": "user", "completion": "assistant"}
"""Fields of an example to learn, and who says them."""
csv.field_size_limit((1 << 31) - 1)  # the service bounds an item
SAVED = ("dataset_dict.json", "state.json")
"""Files of a folder that `Dataset.save_to_disk` has written."""


class Columns(NamedTuple):
    """The column that becomes each field."""

    fields: Mapping[str, str] = {}  # field -> the column that becomes it
    kept: frozenset[str] | None = None  # of the other columns, which stay as they are; None: all
    talks: bool = False  # texts of a prompt and a completion become messages, which a chat template shows

    def item(self, row: DatasetRow, number: int) -> DatasetRow:
        """Raises InvalidInput for a column that is not there. A value that is null is left out."""
        if absent := [column for column in (*self.fields.values(), *(self.kept or ())) if column not in row]:
            near = difflib.get_close_matches(absent[0], row, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(map(repr, row))}"
            raise InvalidInput(f"row {number}: there is no column {absent[0]!r}; {hint}")
        taken = set(self.fields.values()) | self.fields.keys()
        rest = {name: row[name] for name in row if name not in taken and (self.kept is None or name in self.kept)}
        item = rest | {field: row[column] for field, column in self.fields.items()}
        given = {name: value for name, value in item.items() if value is not None}
        if self.talks and given.get("completion"):
            given |= {
                name: _message(role, given[name]) for name, role in TALK.items() if isinstance(given.get(name), str)
            }
        if not ASKING & given.keys():
            columns = ", ".join(map(repr, row))
            raise InvalidInput(
                f"row {number}: there is no `prompt`, and no `messages`; the columns are {columns}: name the one that asks, --prompt COLUMN"
            )
        return given


def _message(role: str, text: str) -> list[DatasetRow]:
    return [{"role": role, "content": text}]


@contextmanager
def as_jsonl(rows: Iterable[DatasetRow], columns: Columns) -> Generator[BinaryIO]:
    """A temporary file with a line for each row. Raises InvalidInput."""
    with TemporaryFile() as file:
        for number, row in enumerate(rows, 1):
            file.write(_line(columns.item(row, number), number))
        if not file.tell():
            raise InvalidInput("there are no rows: each is an item")
        file.seek(0)
        yield file


def _line(item: DatasetRow, number: int) -> bytes:
    line = bytearray()
    for name, value in item.items():
        try:
            line += f",{json.dumps(name)}:{json.dumps(value, allow_nan=False)}".encode()
        except (TypeError, ValueError) as error:
            raise InvalidInput(
                f"row {number}, column {name!r}: {error}: name the columns that you need by --columns"
            ) from error
    return b"{" + line[1:] + b"}\n"


# ---- files ----------------------------------------------------------------------------------------------------------


def rows_of_file(file: Path) -> Iterator[DatasetRow]:
    """Rows of JSONL, or of CSV or Parquet by the name's end. Raises InvalidInput."""
    try:
        yield from TABLES.get(file.suffix.lower(), _of_jsonl)(file)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{file}: {getattr(error, 'strerror', None) or error}") from error


def _of_jsonl(file: Path) -> Iterator[DatasetRow]:
    with file.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row: Any = json.loads(line) if line.strip() else None
            except ValueError as error:
                raise InvalidInput(f"{file}, line {number}: not JSON: {error}") from error
            if row is not None and not isinstance(row, dict):
                raise InvalidInput(f"{file}, line {number}: must be a JSON object")
            if row is not None:
                yield row


def _of_csv(file: Path) -> Iterator[DatasetRow]:
    with file.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines, strict=True)
        try:
            names = reader.fieldnames = [name.strip() for name in reader.fieldnames or ()]
            if len(names) > len(set(names)):
                raise InvalidInput(f"{file}: two columns have one name")
            for number, row in enumerate(reader, 1):
                if None in row or None in row.values():
                    raise InvalidInput(f"{file}, row {number}: its values are not as many as the columns")
                yield {name: _of_cell(name, value, f"{file}, row {number}") for name, value in row.items()}
        except csv.Error as error:
            raise InvalidInput(f"{file}, line {reader.reader.line_num}: {error}") from error


def _of_cell(name: str, value: str, where: str) -> Any:
    if name not in JSON_COLUMNS:
        return value
    try:
        return json.loads(value) if value else None
    except ValueError as error:
        raise InvalidInput(f"{where}, column {name!r}: not JSON: {error}") from error


def _of_parquet(file: Path) -> Iterator[DatasetRow]:
    try:
        import pyarrow.parquet as parquet  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise _needs_extra("Parquet files") from error
    with file.open("rb") as content:
        try:
            for batch in parquet.ParquetFile(content).iter_batches(BATCH):
                yield from batch.to_pylist()
        except ValueError as error:  # pyarrow's ArrowInvalid is one
            raise InvalidInput(f"{file}: {error}") from error


TABLES = {".csv": _of_csv, ".parquet": _of_parquet}
"""Kinds of files that become JSONL here, with what reads them."""


# ---- datasets -------------------------------------------------------------------------------------------------------


def rows_of_dataset(name: str, split: str) -> Iterator[DatasetRow]:
    """Rows of a folder, or of a dataset of the hub: `owner/name`, `owner/name:configuration@revision`. Raises InvalidInput."""
    try:
        import datasets  # pyright: ignore[reportMissingImports]
        from datasets.exceptions import DatasetsError  # pyright: ignore[reportMissingImports]
        from huggingface_hub import errors
    except ImportError as error:
        raise _needs_extra("datasets") from error
    plain, _, revision = name.partition("@")
    repo, _, configuration = plain.partition(":")
    try:
        if Path(name).is_dir():
            return iter(_of_folder(datasets, Path(name), split))
        if name.startswith((".", "/", "~")):
            raise InvalidInput(f"--dataset {name}: there is no such folder")
        found: Any = datasets.load_dataset(repo, configuration or None, split=split, revision=revision or None)
        return iter(found)
    except (OSError, ValueError, DatasetsError, errors.HTTPError) as error:  # pyright: ignore[reportPrivateImportUsage]
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise InvalidInput(f"--dataset {name}, split {split!r}: {reason}") from error


def _of_folder(datasets: Any, folder: Path, split: str) -> Iterable[DatasetRow]:
    """Raises ValueError for a split that is not there."""
    if not any((folder / name).is_file() for name in SAVED):
        return datasets.load_dataset(str(folder), split=split)
    found = datasets.load_from_disk(str(folder))
    if not isinstance(found, datasets.DatasetDict):
        return found
    if split not in found:
        raise ValueError(f"there is no such split; there are {', '.join(map(str, found))}")
    return found[split]


def _needs_extra(what: str) -> InvalidInput:
    return InvalidInput(
        f"{what} are read by packages that are not installed, the extra `data` of marlaas and of marlaas-client:"
        " pip install datasets (with pipx: pipx inject marlaas datasets)"
    )
