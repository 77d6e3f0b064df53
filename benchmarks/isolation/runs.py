"""Measurements as values and as files: FOLDER/MODE-SHARING-SEED[-JOB].json, one a run, and the settings beside them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from benchmarks._report import read_json, write_json
from common.errors import InvalidInput

Mode = Literal["deterministic", "default", "bfloat16"]
"""`bfloat16`: default mode with the base model in that type, in engine and trainer, as on a GPU: much coarser rounding."""
MODES: tuple[Mode, ...] = get_args(Mode)
Sharing = Literal["alone", "among"]
Metrics = Mapping[str, Any]
"""A step's metrics by their names in the job's events."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings that decide the figures. Runs of different settings do not mix."""

    num_watched: int = 8
    num_jobs: int = 32
    deterministic_steps: int = 10
    default_steps: int = 20
    """Steps of default mode and of bfloat16."""
    num_seeds: int = 5

    def num_steps(self, mode: Mode) -> int:
        return self.deterministic_steps if mode == "deterministic" else self.default_steps

    def seeds(self, mode: Mode) -> range:
        return range(1, 2 if mode == "deterministic" else 1 + self.num_seeds)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRun:
    """A job in one run. Of neighbours only the end is told, and the number of steps until then."""

    name: str
    status: str
    error: str = ""
    num_steps: int = 0
    seconds: float = 0.0
    """Time from its submission to its end, to half a second."""
    steps: list[Metrics] = field(default_factory=list[Metrics])
    held_out: float | None = None
    """Mean sampled reward on held-out items at the end."""
    sha256: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    """Files of each version from 0: name -> sha256."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One job alone, or the watched jobs among all."""

    mode: Mode
    sharing: Sharing
    seed: int
    jobs: list[JobRun]
    others: list[JobRun] = field(default_factory=list[JobRun])
    kills: list[str] = field(default_factory=list[str])
    """Processes that were killed with SIGKILL on the way."""


def file_name(mode: Mode, sharing: Sharing, seed: int, job: str) -> str:
    """`job` counts only where it is alone."""
    return f"{mode}-{sharing}-{seed}{f'-{job}' if sharing == 'alone' else ''}.json"


def write(folder: Path, run: Run) -> None:
    write_json(run, folder / file_name(run.mode, run.sharing, run.seed, run.jobs[0].name))


def read(folder: Path) -> tuple[Settings, list[Run]]:
    """Every run in the folder. Raises InvalidInput if it is no folder of this benchmark."""
    file = folder / "settings.json"
    if not file.exists():
        raise InvalidInput(f"{folder} holds no runs of this benchmark: it has no settings.json")
    return msgspec.json.decode(file.read_bytes(), type=Settings), read_json(folder, "*-a*-*.json", Run)


def open_folder(folder: Path, settings: Settings) -> None:
    """Makes it, or checks that it is of these settings. Raises InvalidInput."""
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "settings.json").exists() and read(folder)[0] != settings:
        raise InvalidInput(f"{folder} holds runs of other settings: remove it, or name another with --out")
    write_json(settings, folder / "settings.json")
