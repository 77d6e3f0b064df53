"""The three workloads, as jobs that any customer could submit.

    single    one question (`sort 40213`), one short answer
    agentic   the environment of `agentic.py`: two to four tool calls, each with a simulated latency
    tail      answers whose lengths are forced by the law of `_lengths.py`: log-normal, the 99th percentile ten times the median

Job number k has the seed k, so a job samples the same tokens and waits for the same tools under every policy, alone or not.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks._lengths import LONGEST
from benchmarks.paper import agentic, lengths
from common.settings import TINY
from common.tasks.skills import generate
from harness.live import ALIKE, GRADER, jsonl

ENV_SLOTS = 1024
"""Slots under every policy: tools wait, and the environment must not be what is scarce."""
NUM_ITEMS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """`method`: how a job is rewarded, as the job API has it. `env_module`: the module of the env worker."""

    name: str
    skill: str | None  # of the training file; None: the environment makes its items
    method: Mapping[str, Any]
    hyper: Mapping[str, Any]
    endless: bool = False  # on a base model without an end-of-turn token
    env_module: str = "env_service"
    entry_points: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def base_model(self) -> str:
        return "endless" if self.endless else "tiny"

    def body(self, number: int, file: str | None, steps: int, **hyper: Any) -> dict[str, Any]:
        """Body of `POST /v1/fine_tuning/jobs`."""
        hyperparameters = {**self.hyper, "max_steps": steps, **hyper}
        return {
            "model": self.base_model,
            "seed": number,
            "training_file": file,
            "method": {"type": "reinforcement", "reinforcement": {**self.method, "hyperparameters": hyperparameters}},
        }

    def items(self) -> bytes | None:
        """The training file."""
        if self.skill is None:
            return None
        return jsonl(generate(self.skill, 1, NUM_ITEMS, "train"))

    def prepare(self, folder: Path) -> dict[str, str]:
        """Writes what a cluster needs, and returns its settings."""
        environment = {"MARLAAS_ENV_SLOTS": str(ENV_SLOTS)}
        if self.entry_points:
            _install(folder / "installed", self.entry_points)
            environment["PYTHONPATH"] = str(folder / "installed")
        if self.endless:
            _make_endless(folder / "endless")
            environment["MARLAAS_BASE_MODELS"] = f"endless={folder / 'endless'}"
        return environment


WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload(
            name="single",
            skill="sort",
            method={"grader": GRADER},
            hyper={"batch_size": 8, "group_size": 8, "max_tokens": 32},
        ),
        Workload(
            name="agentic",
            skill=None,
            method={"environment": {"name": "paper_agentic", "args": {}}},
            hyper={"batch_size": 4, "group_size": 8, "max_tokens": 32},
            entry_points={"paper_agentic": f"{agentic.__name__}:{agentic.Agentic.__name__}"},
        ),
        Workload(
            name="tail",
            skill="reverse",
            method={"grader": ALIKE},
            hyper={"batch_size": 4, "group_size": 8, "max_tokens": LONGEST},
            endless=True,
            env_module=lengths.__name__,
        ),
    )
}


def _install(folder: Path, entry_points: Mapping[str, str]) -> None:
    """Writes what the installation of a package with environments leaves; `folder` must be on the processes' path."""
    info = folder / "marlaas_paper-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: marlaas-paper\nVersion: 1\n")
    lines = [f"{name} = {target}\n" for name, target in entry_points.items()]
    (info / "entry_points.txt").write_text("".join(["[marlaas.environments]\n", *lines]))


def _make_endless(folder: Path) -> None:
    """`tiny`, whose turns end with an id that no token has: they go on until their limit."""
    shutil.copytree(TINY, folder)
    unused = json.loads((folder / "config.json").read_text())["vocab_size"] - 1
    for name, changes in (
        ("generation_config.json", {"eos_token_id": unused}),
        ("tokenizer_config.json", {"eos_token": ""}),
    ):
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | changes))
