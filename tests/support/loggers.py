"""Loggers under test: the real ones in a Python environment of their own, and a stand-in; and what each holds of a job."""

import json
import sqlite3
import subprocess
import tomllib
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from manager_service.export.passes import ROOT, Passes
from manager_service.records.receivers import LoggerName
from tests.support.installed import THIS, lent, made
from tests.support.standin_exporter import WRITER
from tests.support.wandb_server import wandb_server

Held = list[tuple[int, dict[str, float]]]
"""The steps of a job's rows with their metrics, in the order in which the logger has them."""


@dataclass(frozen=True, slots=True)
class Logger:
    name: LoggerName
    command: Sequence[str]  # of its writer
    read: Callable[[Path, str], Held]  # of the writer's folder and a job
    proxy: str = ""

    def amount(self, folder: Path, job: str) -> int:
        """Grows with what it has of a job; quick to find out."""
        if self.read is read_wandb:
            return len(list(folder.glob(f"{job}/offline-run-*")))
        try:
            return len(self.read(folder, job))
        except sqlite3.OperationalError:  # the file has no tables yet
            return 0

    @property
    def passes(self) -> Passes:
        return Passes(self.command, proxy=self.proxy)


def logger(kind: str) -> Logger:
    """`standin`, `wandb` or `trackio`."""
    if kind == "standin":
        return Logger("wandb", WRITER, read_standin)
    command = (str(environment_with_loggers()), "-m", "manager_service.export.writer")
    return Logger("wandb", command, read_wandb) if kind == "wandb" else Logger("trackio", command, read_trackio)


@cache
def environment_with_loggers() -> Path:
    """The Python of an environment that has the packages of the extras `wandb` and `trackio`, and what this one has. Made once a
    machine, from the package index."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = [*extras["wandb"], *extras["trackio"]]
    return made(f"loggers-{lent()}", wanted, lender=THIS) / "bin" / "python"


def read_standin(folder: Path, job: str) -> Held:
    file = folder / f"{job}.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [(row["step"], row["metrics"]) for row in rows]


def read_wandb(folder: Path, job: str) -> Held:
    """Reads what W&B's own command sends of an offline run to a server; it marks the fragments, and sends none twice."""
    with TemporaryDirectory() as home, wandb_server() as server:
        argv = [str(environment_with_loggers()), *["-m", "wandb", "beta", "sync", "--id"], job, str(folder / job)]
        key = {"WANDB_API_KEY": "0123456789abcdef" * 3, "WANDB_BASE_URL": server.url}
        subprocess.run(argv, capture_output=True, check=True, cwd=home, env={"HOME": home, **key})
    steps = [row.pop("_step") for row in server.history]
    assert steps == sorted(set(steps)), "W&B takes steps in ascending order"
    own = [{name: value for name, value in row.items() if not name.startswith("_")} for row in server.history]
    return [(int(row["train/global_step"]), row) for row in own]


def read_trackio(folder: Path, job: str) -> Held:
    found: Held = []
    for file in folder.glob("*.db"):
        with closing(sqlite3.connect(file)) as connection:
            rows = connection.execute("SELECT step, metrics FROM metrics WHERE run_id = ? ORDER BY id", (job,))
            found += [(step, json.loads(metrics)) for step, metrics in rows]
    return found
