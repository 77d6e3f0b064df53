"""Hands rows of some jobs to a logger's own library: `python -m manager_service.export.writer wandb`, for one order.

    standard input    the order in JSON: `Order` of passes.py
    standard output   for each job a line of JSON: `{"job", "error"}`; no error: the logger surely has all of its rows

Rows come at least once. The logger takes each key once, so each row is there once, whenever a process was killed.
It needs only Python, the logger's package and `wandb_runs`.
"""

import importlib
import json
import os
import re
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

WriterOrder = dict[str, Any]
JobFacts = dict[str, Any]
Write = Callable[[JobFacts], None]
"""Writes a job's rows."""
STATUS = re.compile(r"(?:error|HTTP|status|code):? ([45]\d\d)\b")
"""An HTTP status, where W&B's library names it."""


def main() -> None:
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # what libraries print is no answer
        logger, order = sys.argv[1], json.load(sys.stdin)
        for answer in answered(order, lambda: opened(logger, order)):
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


def opened(logger: str, order: WriterOrder) -> Write:
    """The logger of this name, for an order."""
    if logger == "wandb":
        return importlib.import_module("manager_service.export.wandb_runs").open_runs(order)
    storage: Any = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
    return lambda job: write_trackio(storage, job)


def write_trackio(storage: Any, job: JobFacts) -> None:
    """Writes a job's rows in one transaction, into the project's SQLite file in TRACKIO_DIR, which takes each row's id once."""
    storage.bulk_log(
        job["project"],
        job["name"] or job["job"],
        [row["metrics"] for row in job["rows"]],
        steps=[row["step"] for row in job["rows"]],
        timestamps=[datetime.fromtimestamp(row["at"], UTC).isoformat() for row in job["rows"]],
        config=job["config"],
        log_ids=[f"{job['job']}/{row['sequence']:012d}" for row in job["rows"]],
        run_id=job["job"],
    )


def answered(order: WriterOrder, open_logger: Callable[[], Write]):
    """An answer for each job of an order."""
    write: Write | None = None
    for job in order["jobs"]:
        try:
            write = write or open_logger()
            write(job)
            yield {"job": job["job"], "error": ""}
        except Exception as error:  # the boundary: whatever a logger raises is the job's answer
            yield {"job": job["job"], "error": reason(error, order["key"])[:500]}


def reason(error: Exception, key: str) -> str:
    """Says why a job was not written. With a key, the text may be a server's, and quote the key: only the error's
    kind and HTTP status are passed on."""
    name = type(error).__name__
    if not key:
        return f"{name}: {error}"
    status = STATUS.search(str(error))
    return f"{name}{f', status {status[1]}' if status else ''} (a server's text is not shown: it may quote your key)"


if __name__ == "__main__":
    main()
