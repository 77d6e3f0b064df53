"""Holds what every system is given: a job's settings, folder and reward. Imports only the standard library, because this module is
also imported inside the peers' own virtual environments.

    FOLDER/settings.json             the settings, the same for every job
    FOLDER/NAME/job.json             name, skill, seed
    FOLDER/NAME/items.jsonl          the training file
    FOLDER/NAME/drawn.jsonl          its items in the order in which training draws them, `batch_size` a step
    FOLDER/NAME/held_out.jsonl       items that nobody trains on
    FOLDER/NAME/SYSTEM/              the adapter that a system trained, in PEFT's layout
    FOLDER/NAME/ends.json            seconds of the wall clock at which its steps ended, of TRL and MARLaaS
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]
"""`{"messages": [{"role": "user", "content": "add 37+58"}], "answer": "95"}`"""

MODEL = Path(__file__).resolve().parents[2] / "models" / "tiny"
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that decides what is learned, or what it costs. Where the systems differ in what they can do, the value is one that
    all of them have. The advantage is (R − mean) / std of the group; the loss GRPO's, without a KL term; the rate constant; there is
    no weight decay, no dropout and no clipping of gradients."""

    model: str = str(MODEL)
    batch_size: int = 16  # groups in a step
    group_size: int = 8
    num_steps: int = 20
    learning_rate: float = 5e-4
    lora_rank: int = 8
    lora_alpha: int = 32  # SkyRL has no other
    lora_targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    clip: float = 0.2
    temperature: float = 1.0
    max_tokens: int = 32
    operation: str = (
        "eq"  # by which an answer is right, as of OpenAI's `string_check`: it is, or contains, the expected one
    )
    adam_betas: tuple[float, float] = (0.9, 0.95)
    adam_eps: float = 1e-8
    threads: int = 1  # of each process that computes
    num_items: int = 512
    num_held_out: int = 64
    eval_samples: int = 4

    @property
    def rows(self) -> int:
        """Trajectories in a step."""
        return self.batch_size * self.group_size


SUM = "sum"  # the skill of a pretrained base: `What is 14 + 33? Answer with the number only.`


def of_base(model: str) -> Settings:
    """The settings for a pretrained base: 48 answers of at most 16 tokens a step."""
    small: dict[str, Any] = {"batch_size": 6, "num_steps": 10, "max_tokens": 16, "num_held_out": 32}
    return Settings(model=model, learning_rate=3e-4, operation="like", **small)


@dataclass(frozen=True, slots=True)
class Job:
    """One training run: which skill, and the seed of its data order and of its adapter."""

    name: str
    skill: str
    seed: int


def reward(answer: str, expected: str, settings: Settings) -> float:
    """1 for the right answer, else 0. `answer`: the completion without special tokens."""
    return float(answer == expected if settings.operation == "eq" else expected in answer)


def advantages(rewards: list[float]) -> list[float]:
    """(R − mean) / std of one group: the sample's std plus 1e-4, as MARLaaS and TRL have it; 0 if all are equal."""
    mean = sum(rewards) / len(rewards)
    std = (sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1)) ** 0.5
    return [(r - mean) / (std + 1e-4) for r in rewards] if std else [0.0] * len(rewards)


def write_json(file: Path, value: Settings | Job) -> None:
    file.write_text(json.dumps(asdict(value)))


def read_settings(folder: Path) -> Settings:
    values: dict[str, Any] = json.loads((folder / "settings.json").read_text())
    tuples: dict[str, Any] = {name: tuple(values[name]) for name in ("lora_targets", "adam_betas")}
    return Settings(**{**values, **tuples})


def read_job(folder: Path, name: str) -> Job:
    return Job(**json.loads((folder / name / "job.json").read_text()))


def write_ends(folder: Path, job: Job, ends: list[float]) -> None:
    (folder / job.name / "ends.json").write_text(json.dumps(ends))


def write_rows(file: Path, rows: Iterable[Row]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_rows(file: Path) -> list[Row]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def batches(folder: Path, job: Job, settings: Settings) -> Iterator[list[Row]]:
    """The items of each step."""
    rows = read_rows(folder / job.name / "drawn.jsonl")
    for start in range(0, settings.num_steps * settings.batch_size, settings.batch_size):
        yield rows[start : start + settings.batch_size]
