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
from typing import Any

from manager_service.export.passes import ROOT, Passes
from manager_service.records import LoggerName
from tests.support.installed import THIS, lent, made
from tests.support.standin_exporter import WRITER

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


READ_WANDB = """
import importlib.util, json, sys, types
from pathlib import Path
found = importlib.util.find_spec("wandb")
sys.modules["wandb"] = types.ModuleType("wandb")  # the library itself takes a second
sys.modules["wandb"].__path__ = found.submodule_search_locations
from wandb.proto.wandb_internal_pb2 import Record
from manager_service.export.wandb_runs import _contents
for file in sorted(Path(sys.argv[1]).glob("offline-run-*/run-*.wandb")):
    for content in _contents(file.read_bytes()):
        record = Record.FromString(content)
        if record.WhichOneof("record_type") == "history":
            print(json.dumps({item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}))
"""


def read_wandb(folder: Path, job: str) -> Held:
    argv = [str(environment_with_loggers()), "-c", READ_WANDB, str(folder / job)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, cwd=ROOT)
    rows: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    steps = [row.pop("_step") for row in rows]
    assert steps == sorted(set(steps)), "W&B takes steps in ascending order"
    own = [{name: value for name, value in row.items() if not name.startswith("_")} for row in rows]
    return [(int(row["train/global_step"]), row) for row in own]


def read_trackio(folder: Path, job: str) -> Held:
    found: Held = []
    for file in folder.glob("*.db"):
        with closing(sqlite3.connect(file)) as connection:
            rows = connection.execute("SELECT step, metrics FROM metrics WHERE run_id = ? ORDER BY id", (job,))
            found += [(step, json.loads(metrics)) for step, metrics in rows]
    return found
