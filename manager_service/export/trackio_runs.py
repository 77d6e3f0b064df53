"""trackio, through its own library: one SQLite file a project, in the folder that TRACKIO_DIR names.

Each row has an id, the job's and the event's sequence number, which the file takes once; one transaction writes them all.
"""

import importlib
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from manager_service.export.writer import JobFacts


def open_runs(order: dict[str, Any]) -> Callable[[JobFacts], None]:
    storage: Any = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
    return lambda job: write(storage, job)


def write(storage: Any, job: JobFacts) -> None:
    """Writes a job's rows in one transaction."""
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
