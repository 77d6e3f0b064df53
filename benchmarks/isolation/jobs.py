"""The jobs: eight that are watched, those that train beside them, and three that go wrong. Data alone.

Each watched job has a tenant of its own, and they differ in all that a job may choose: skill, reward, turns, loss, rank,
targets, rate, temperature, batch. Those beside them belong to other tenants, three jobs each, and go on until the last
watched job has ended, so that it is among N from its first step to its last.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from harness.live import ALIKE, GRADER

Reward = Literal["exact", "similar", "calculator", "raises"]
"""`exact` is 0 or 1, `similar` lies between; `calculator` is the environment with a tool, in several turns; `raises` fails."""

GRADERS: Mapping[Reward, Mapping[str, Any]] = {
    "exact": GRADER,
    "similar": ALIKE,
    "raises": {"type": "python", "source": "def grade(sample, item):\n    raise ValueError('broken')"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A tenant's order. `hyper`: its hyperparameters by the names of the job API."""

    name: str
    tenant: str
    skill: str
    reward: Reward = "exact"
    hyper: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def method(self, **more: Any) -> dict[str, Any]:
        """The `method` of the job API, with more hyperparameters."""
        if self.reward == "calculator":
            how: dict[str, Any] = {"environment": {"name": "calculator", "args": {}}}
        else:
            how = {"grader": dict(GRADERS[self.reward])}
        return {"type": "reinforcement", "reinforcement": {**how, "hyperparameters": {**self.hyper, **more}}}


def _watched(name: str, skill: str, reward: Reward, batch_size: int, group_size: int, **hyper: Any) -> Job:
    sizes = {"batch_size": batch_size, "group_size": group_size}
    return Job(name=name, tenant=f"{name}-inc", skill=skill, reward=reward, hyper={**sizes, **hyper})


QV = ["q_proj", "v_proj"]
WATCHED = (
    _watched("sort", "sort", "exact", 8, 8, max_tokens=24),
    _watched("tools", "calc", "calculator", 4, 8, loss="ppo", lora_rank=4, kl_coef=0.02, max_tokens=32),
    _watched("add", "add", "exact", 8, 8, loss="dr_grpo", lora_rank=4, max_tokens=24),
    _watched("reverse", "reverse", "exact", 6, 10, loss="dapo", lora_rank=16, dynamic_sampling=True, max_tokens=32),
    _watched("max", "max", "exact", 10, 6, loss="rloo", learning_rate_multiplier=0.5, max_tokens=24),
    _watched("count", "count", "exact", 8, 8, loss="cispo", lora_rank=2, lora_targets=QV, max_tokens=24),
    _watched("near", "reverse", "similar", 8, 6, loss="gspo", temperature=1.2, max_tokens=32),
    _watched("tools2", "calc", "calculator", 4, 8, temperature=0.8, weight_decay=0.1, grad_clip=0.3, max_tokens=64),
)


def background(number: int) -> tuple[Job, ...]:
    """Jobs that train next to the watched ones, three a tenant."""
    return tuple(map(_neighbour, range(number)))


def _neighbour(index: int) -> Job:
    skill = ("add", "sort", "reverse", "max", "count", "calc")[index % 6]
    hyper = {
        "batch_size": 2 + index % 5,
        "group_size": 4 + 2 * (index % 3),
        "lora_rank": (4, 8, 16, 3)[index % 4],
        "learning_rate_multiplier": 0.5 + index % 3,
        "loss": ("grpo", "dapo", "rloo", "cispo", "gspo", "ppo", "dr_grpo")[index % 7],
        "temperature": 0.8 + 0.1 * (index % 4),
        "max_tokens": 24 + 8 * (index % 4),
    }
    reward: Reward = "calculator" if skill == "calc" else "exact"
    return Job(name=f"beside-{index:02d}", tenant=f"beside-{index // 3}", skill=skill, reward=reward, hyper=hyper)


SMALL = {"batch_size": 4, "group_size": 4}
ABSURD = {**SMALL, "learning_rate": 1.0, "lora_alpha": 4096, "grad_clip": 1e6}
BROKEN = (
    Job(name="grader raises", tenant="broken", skill="add", reward="raises", hyper=SMALL),
    Job(name="rate a thousand times too high", tenant="broken", skill="sort", hyper=ABSURD),
    Job(name="is cancelled", tenant="broken", skill="max", hyper=SMALL),
)
"""Neighbours that go wrong, each in its own way. They come on top of the N jobs, since they do not last."""
