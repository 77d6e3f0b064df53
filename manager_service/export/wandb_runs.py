"""W&B, through its own library. A run's id is the job's, and W&B's step is the event's sequence number: W&B takes only
ascending steps, and an evaluation may end after a later training step. It draws over `train/global_step`.

With a key, the run is on a server, which says at opening which step it has last; W&B drops steps up to that one.
Without one, it is a folder of offline fragments, each named by its last event, up to which nothing is written again:

    <folder>/<job>/offline-run-000000042/run-<job>.wandb

A fragment is written aside, closed and only then moved to its name: it is there whole or not at all.
`wandb beta sync --id <job> <folder>/<job>` sends them to a server, in order.
"""

import importlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from manager_service.export.writer import JobFacts

STEP = "train/global_step"
FRAGMENT = "offline-run-"
"""W&B tells offline runs by this beginning of their folders' names."""
DRAFT = ".writing-"


class RowsNotKept(Exception):
    """The server does not have rows that were sent to it."""


def open_runs(order: dict[str, Any]) -> Callable[[JobFacts], None]:
    runs = WandbRuns(Path(order["folder"]), key=order["key"], base_url=order["base_url"])
    return runs.write_online if order["key"] else runs.write_offline


class WandbRuns:
    """Runs of one tenant."""

    def __init__(self, folder: Path, *, key: str, base_url: str) -> None:
        self._wandb: Any = importlib.import_module("wandb")
        self._folder = folder
        self._server = {"api_key": key, "base_url": base_url} if key else {}

    def write_offline(self, job: JobFacts) -> None:
        """Writes a fragment."""
        folder = self._folder / job["job"]
        folder.mkdir(parents=True, exist_ok=True)
        clear(folder)
        held = max((int(path.name.removeprefix(FRAGMENT)) for path in folder.glob(f"{FRAGMENT}*")), default=0)
        rows = [row for row in job["rows"] if row["sequence"] > held]
        if not rows:
            return
        draft = Path(tempfile.mkdtemp(prefix=DRAFT, dir=folder))
        self._log(job, rows, self._init(job, draft, "offline"))
        self._wandb.teardown()  # W&B's own process writes the file, and has ended then
        (file,) = draft.glob("wandb/offline-run-*/run-*.wandb")
        sync(file)
        file.parent.rename(folder / f"{FRAGMENT}{rows[-1]['sequence']:09d}")
        sync(folder)
        shutil.rmtree(draft)

    def write_online(self, job: JobFacts) -> None:
        """Sends rows, and asks the server what it has: W&B's library gives up in silence. Raises RowsNotKept."""
        last = job["rows"][-1]["sequence"] if job["rows"] else 0
        if self._send(job, job["rows"]) < last and self._send(job, []) < last:
            raise RowsNotKept

    def _send(self, job: JobFacts, rows: list[dict[str, Any]]) -> int:
        """The last event whose row the server had before."""
        clear(self._folder)
        draft = Path(tempfile.mkdtemp(prefix=DRAFT, dir=self._folder))
        try:
            run = self._init(job, draft, "online")
            held = max(0, run.starting_step - 1)
            self._log(job, rows, run)
            self._wandb.teardown()
            return held
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    def _init(self, job: JobFacts, folder: Path, mode: Any) -> Any:
        settings = self._wandb.Settings(
            **self._server,
            mode=mode,
            silent=True,
            console="off",
            disable_git=True,
            disable_code=True,
            disable_job_creation=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_disable_machine_info=True,
            x_save_requirements=False,
            x_update_finish_state=job["final"] is not None,
            init_timeout=30,
        )
        run = self._wandb.init(
            project=job["project"],
            entity=job["entity"] or None,
            name=job["name"] or job["job"],
            tags=job["tags"],
            config=job["config"],
            id=job["job"],
            resume="allow" if mode == "online" else None,
            dir=folder,
            settings=settings,
        )
        run.define_metric(STEP)
        run.define_metric("*", step_metric=STEP)
        return run

    def _log(self, job: JobFacts, rows: list[dict[str, Any]], run: Any) -> None:
        for row in rows:
            run.log({**row["metrics"], "_timestamp": row["at"]}, step=row["sequence"])
        run.finish(exit_code=1 if job["final"] == "failed" else 0)


def clear(folder: Path) -> None:
    """Deletes what writers that were killed have left. One writes at a time."""
    for draft in folder.glob(f"{DRAFT}*"):
        shutil.rmtree(draft)


def sync(path: Path) -> None:
    """Has the disk keep a file's content, or a folder's names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
