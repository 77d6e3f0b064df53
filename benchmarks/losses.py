"""Compares losses as the default of jobs: does any give a better model than `grpo`, from the same seeds?

    python -m benchmarks.losses [--base FOLDER] [--skill NAME] [--seeds 8] [--steps 40] [--groups 16] [--tokens 24] [--json FILE]

A seed's jobs differ in their loss alone: items, their order, the first adapter and the rate, the base's own, are the same. They
train at once on a cluster of one worker of each kind: groups of 8, exact answers get 1; `sum` asks a pretrained base in words.
The figure is the mean reward of 8 sampled answers to each of 32 held-out items, of the last version and of the one halfway;
`steps` is the mean reward over all steps. A difference is to grpo's job of the same seed, with its standard error.
"""

import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._report import Report, make_table, parsed, parser, show
from benchmarks.isolation.statistics import standard_error
from benchmarks.peers.__main__ import items, make_jobs
from benchmarks.peers.settings import SUM
from common.settings import TINY
from common.tasks.skills import SKILLS, Split
from harness.live import GRADER, Api, jsonl, running

LOSSES = ("grpo", "dr_grpo", "dapo")
FIGURES = ("held out", "halfway", "steps")
LIMIT_S = 3600.0
MATH = {key: value for key, value in GRADER.items() if key != "operation"} | {"type": "math"}
SPLITS: dict[Split, int] = {"train": 128, "held_out": 32}


async def of_job(api: Api, job: str) -> list[float]:
    """A job's FIGURES."""
    rows = [event["data"] for event in await api.events(job) if event["type"] == "metrics"]
    evals = [row["eval_reward_mean"] for row in sorted(rows, key=lambda row: row["version"]) if "eval_n" in row]
    return [evals[-1], evals[-2], float(np.mean([row["reward_mean"] or 0.0 for row in rows if "reward_mean" in row]))]


async def upload_sums(api: Api) -> None:
    for split, number in SPLITS.items():
        made = jsonl(items(make_jobs(1, [SUM])[0], number, split))
        api.files[SUM, split, number] = await api.upload(f"{SUM}.jsonl", made)


async def of_seed(api: Api, seed: int, given: Any) -> list[list[float]]:
    """The figures of a seed's jobs, one of each loss."""
    hyper = {"max_steps": given.steps, "eval_interval": given.steps // 2, "eval_samples": 8}
    hyper |= {"batch_size": given.groups, "max_tokens": given.tokens}
    grader = MATH if given.skill == SUM else GRADER
    common: dict[str, Any] = {"grader": grader, "model": "base", "seed": seed, "evaluate": True, **hyper}
    jobs = [await api.submit(given.skill, loss=loss, **common) for loss in LOSSES]
    for job in await api.until_done(*jobs, seconds=LIMIT_S, ask_every_s=2.0):
        assert job["status"] == "succeeded", job["error"]
    return [await of_job(api, job) for job in jobs]


async def measure(given: Any) -> np.ndarray:
    """[seeds, losses, FIGURES]"""
    environment = {"MARLAAS_BASE_MODELS": f"base={given.base.resolve()}"}
    with tempfile.TemporaryDirectory() as folder:
        async with running(Path(folder), environment=environment) as (_, api):
            if given.skill == SUM:
                await upload_sums(api)
            found: list[list[list[float]]] = []
            for seed in range(1, 1 + given.seeds):
                found.append(await of_seed(api, seed, given))
                print(f"seed {seed}: {np.round(found[-1], 4).tolist()}", file=sys.stderr)
            return np.array(found)


def report(given: Any) -> Report:
    found = asyncio.run(measure(given))
    rows: list[tuple[str, ...]] = []
    for place, loss in enumerate(LOSSES):
        apart = found[:, place] - found[:, 0]
        cells = [f"{apart[:, f].mean():+.4f} ± {standard_error(apart[:, f].tolist()):.4f}" for f in range(len(FIGURES))]
        rows.append((loss, *(f"{mean:.4f}" for mean in found[:, place].mean(0)), *(cells if place else ["", "", ""])))
    columns = ("loss", *FIGURES, *(f"{figure}, difference" for figure in FIGURES))
    title = f"{given.base.name}, {given.skill}, {given.seeds} seeds, {given.groups} groups a step"
    return Report([make_table(title, columns, rows)], found.tolist(), [])


if __name__ == "__main__":
    options = parser(__doc__, seeds=8, steps=40, groups=16, tokens=24)
    options.add_argument("--base", type=Path, default=TINY, help="the base model's folder")
    options.add_argument("--skill", choices=[*SKILLS, SUM], default="max")
    chosen = parsed(options, {"seeds": 2, "steps": 2})
    show(report(chosen), chosen.json)
