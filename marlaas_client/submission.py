"""Makes the parts of a job: the request that creates it, files of items, and short forms of graders."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from marlaas_client.dataset import TABLES, Columns, as_jsonl, rows_of_file
from marlaas_client.errors import InvalidInput
from marlaas_client.records import Record

Method = Literal["reinforcement", "supervised"]
GivenItems = Path | str | Iterable[Mapping[str, Any]]
"""A file of JSONL, CSV or Parquet, or its rows."""
SHORT_GRADERS: dict[str, Record] = {
    "string_check": {"operation": "eq"},
    "math": {},
    "text_similarity": {"evaluation_metric": "fuzzy_match"},
}
"""Graders that compare the answer with one field of the item, with their other fields."""

LOGGERS = ("wandb", "trackio")


def request_of(
    method: Method, how: Record, *, training_file: str | None, log: Sequence[str] = (), **chosen: Any
) -> Record:
    """The request that creates a job: `how`, its grader, environment, hyperparameters; of all, those that are given. Raises
    InvalidInput."""
    given = {name: value for name, value in chosen.items() if value is not None}
    if log:
        given["integrations"] = [integration_of(text) for text in log]
    method_given = {name: value for name, value in how.items() if value}
    return {"method": {"type": method, method: method_given}, "training_file": training_file, **given}


def grader_of(text: str) -> Record:
    """`string_check:answer` as a whole grader. Raises InvalidInput."""
    kind, colon, field = text.partition(":")
    if not colon or kind not in SHORT_GRADERS or not field.isidentifier():
        raise InvalidInput(f"the grader {text}: write {':FIELD, '.join(SHORT_GRADERS)}:FIELD, or a whole one as JSON")
    templates = {"input": "{{sample.output_text}}", "reference": f"{{{{item.{field}}}}}"}
    return {"type": kind, "name": kind, **templates, **SHORT_GRADERS[kind]}


def integration_of(text: str) -> Record:
    """`wandb:project` as a whole integration. Raises InvalidInput."""
    logger, _, project = text.partition(":")
    if not project or logger not in LOGGERS:
        raise InvalidInput(f"the logger {text}: write {' or '.join(f'{name}:PROJECT' for name in LOGGERS)}")
    return {"type": logger, logger: {"project": project}}


def content_of(items: GivenItems) -> tuple[str, bytes]:
    """(name, JSONL) of a file to upload. Raises InvalidInput if it cannot be read."""
    if not isinstance(items, str | Path):
        return "items.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in items).encode()
    file = Path(items)
    if file.suffix.lower() in TABLES:
        with as_jsonl(rows_of_file(file), Columns()) as lines:
            return f"{file.stem}.jsonl", lines.read()
    try:
        return file.name, file.read_bytes()
    except OSError as error:
        raise InvalidInput(f"{items}: {error.strerror}") from None
