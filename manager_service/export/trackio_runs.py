"""trackio, through its own library: one SQLite file a project, in the folder that TRACKIO_DIR names.

Each row has an id, the job's and the event's sequence number, which the file takes once; one transaction writes them all.
"""

import importlib
import sqlite3
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from typing import Any

from manager_service.export.writer import JobFacts


def open_runs(order: dict[str, Any]) -> Callable[[JobFacts], int]:
    storage: Any = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
    return lambda job: write(storage, job)


def write(storage: Any, job: JobFacts) -> int:
    """Writes a job's rows in one transaction."""
    held = held_by(storage, job["project"], job["job"])
    rows = [row for row in job["rows"] if row["sequence"] > held]
    if held < job["held"] or not rows:
        return held
    storage.bulk_log(
        job["project"],
        job["name"] or job["job"],
        [row["metrics"] for row in rows],
        steps=[row["step"] for row in rows],
        timestamps=[datetime.fromtimestamp(row["at"], UTC).isoformat() for row in rows],
        config=None if held else job["config"],
        log_ids=[f"{job['job']}/{row['sequence']:012d}" for row in rows],
        run_id=job["job"],
    )
    return rows[-1]["sequence"]


def held_by(storage: Any, project: str, job: str) -> int:
    """The sequence number of the job's last row in the file; 0 if there is none."""
    file = storage.get_project_db_path(project)
    if not file.exists():
        return 0
    storage.init_db(project)  # a process may have died while it made the tables
    with closing(sqlite3.connect(file)) as connection:
        ((last,),) = connection.execute("SELECT MAX(log_id) FROM metrics WHERE run_id = ?", (job,))
    return 0 if last is None else int(last.rpartition("/")[2])
