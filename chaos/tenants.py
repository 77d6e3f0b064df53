"""The jobs of four tenants: single turns, tools, long answers, and all of these. Each is submitted again when it has ended.

A recipe is one job with a fixed seed, so that in deterministic mode every run of it must give the same bytes.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from chaos.client import Client
from common.skills import WORDS, generate
from harness.live import ALIKE, CALCULATOR, FINAL, GRADER, jsonl

POLL_S = 0.5
STEPS, BATCH, GROUP = 4, 2, 4
SIZE = {"max_steps": STEPS, "batch_size": BATCH, "group_size": GROUP}
OWN_CODE = {
    "type": "python",
    "name": "own code",
    "source": "def grade(sample, item):\n    return float(sample['output_text'].strip() == item['answer'])\n",
}
LONG = "long"
LONG_TOKENS = 160


@dataclass(frozen=True, slots=True)
class Recipe:
    tenant: str
    skill: str
    how: Mapping[str, Any]
    hyper: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def name(self) -> str:
        return f"{self.tenant} {self.skill}"

    @property
    def num_trajectories(self) -> int:
        """Trajectories of each step."""
        return BATCH * GROUP


RECIPES = (
    Recipe("single", "sort", {"grader": GRADER}),
    Recipe("single", "add", {"grader": OWN_CODE}, {"loss": "rloo", "lora_rank": 4}),
    Recipe("tool", "calc", {"environment": CALCULATOR}),
    Recipe("long", LONG, {"grader": ALIKE}, {"max_tokens": LONG_TOKENS}),
    Recipe("all", "max", {"grader": {"type": "math"}}, {"loss": "dapo"}),
    Recipe("all", "calc", {"environment": CALCULATOR}, {"max_staleness": 0, "lora_rank": 16}),
    Recipe("all", LONG, {"grader": ALIKE}, {"max_tokens": LONG_TOKENS, "loss": "cispo"}),
)
FEW = (RECIPES[0], RECIPES[2], RECIPES[4])
"""Short ones, of three tenants."""


@dataclass
class Run:
    """One job of a recipe."""

    recipe: Recipe
    id: str
    job: Any = None  # as the API showed it last
    forgotten: bool = False  # a replica that took Redis' place had never heard of it


def items(skill: str) -> list[dict[str, Any]]:
    """Rows of a training file; the model never ends its answers to those of `long` soon."""
    if skill != LONG:
        return generate(skill, 1, 64)
    words = ["".join(WORDS[n : n + 8]) for n in range(64)]
    return [{"messages": [{"role": "user", "content": f"reverse {word}"}], "answer": word[::-1]} for word in words]


class Tenant:
    """Keeps its recipes' jobs coming until `stop` is set."""

    def __init__(self, name: str, client: Client, recipes: Sequence[Recipe]) -> None:
        self.name = name
        self.client = client
        self.recipes = recipes
        self.runs: list[Run] = []
        self._files: dict[str, str] = {}

    async def prepare(self) -> None:
        """Uploads its files."""
        for recipe in self.recipes:
            self._files[recipe.skill] = await self.client.upload(f"{recipe.skill}.jsonl", jsonl(items(recipe.skill)))

    async def work(self, stop: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as group:
            for recipe in self.recipes:
                group.create_task(self._repeat(recipe, stop))

    async def _repeat(self, recipe: Recipe, stop: asyncio.Event) -> None:
        number = 0
        while not stop.is_set():
            number += 1
            run = await self._submit(recipe, number)
            await self.follow(run)

    async def _submit(self, recipe: Recipe, number: int) -> Run:
        body = {
            "model": "tiny",
            "seed": 7,
            "suffix": recipe.skill,
            "training_file": self._files[recipe.skill],
            "method": {
                "type": "reinforcement",
                "reinforcement": {**recipe.how, "hyperparameters": {**SIZE, **recipe.hyper}},
            },
        }
        key = {"Idempotency-Key": f"{recipe.name} {number}"}
        run = Run(recipe, (await self.client.post("/fine_tuning/jobs", body, **key))["id"])
        self.runs.append(run)
        return run

    async def follow(self, run: Run) -> None:
        """Returns once the job has ended, or is forgotten."""
        while True:
            found = await self.client.get(f"/fine_tuning/jobs/{run.id}")
            run.forgotten = found is None
            run.job = found or run.job
            if found is None or found["status"] in FINAL:
                return
            await asyncio.sleep(POLL_S)

    async def settle(self) -> None:
        """Follows all jobs once more: a replica may have forgotten that one had ended."""
        for run in self.runs:
            await self.follow(run)
