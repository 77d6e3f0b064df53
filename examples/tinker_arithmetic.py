"""`make tinker`: tinker-cookbook's own `math_rl` trains an adapter of `tiny` through the Tinker protocol, shown live.

    start the service ─► the cookbook, in an environment of its own (.tinker) ─ HTTP ─► manager ─► trainer, rollout
                              └─ metrics.jsonl, followed here

The loop, its loss and its rewards are the cookbook's, unmodified; the service samples and trains. `--url` and `--key` use a service
that runs already.
"""

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import MarlaasError
from manager_service.cli.output import console
from manager_service.local.supervisor import LocalCluster

FOLDER = Path(".marlaas/tinker")
PYTHON = Path(".tinker/bin/python")
STEPS = 20
RECIPE = {
    "model_name": str(Path("models/tiny").resolve()),
    "renderer_name": "role_colon",
    "env": "arithmetic",
    "group_size": 8,
    "groups_per_batch": 16,
    "max_tokens": 16,
    "learning_rate": 1e-3,
    "lora_rank": 8,
    "loss_fn": "importance_sampling",
    "eval_every": 0,
    "behavior_if_log_dir_exists": "delete",
}
CORRECT = "env/all/correct"
RISES_BY = 0.2
"""What the share of right answers must gain from the first step to the mean of the last three."""


class RewardDidNotRise(MarlaasError):
    """The cookbook failed, or its share of right answers stayed where it was."""


@dataclass(frozen=True, slots=True)
class Service:
    url: str
    key: str


@contextlib.asynccontextmanager
async def serving(given: argparse.Namespace) -> AsyncGenerator[Service]:
    if given.url:
        yield Service(given.url, given.key)
        return
    say(f"starting Redis, the manager and the workers in {FOLDER} …")
    async with LocalCluster(data_dir=FOLDER, notify=say) as cluster:
        say(f"ready at {cluster.base_url}")
        yield Service(cluster.base_url, cluster.api_key)


async def train(service: Service, recipe: dict[str, Any], log_path: Path) -> list[float]:
    """Runs the cookbook's recipe. Returns the share of right answers of each step. Raises RewardDidNotRise."""
    arguments = [f"{name}={value}" for name, value in recipe.items()]
    shutil.rmtree(log_path, ignore_errors=True)
    log_path.parent.mkdir(parents=True, exist_ok=True)
    output = log_path.with_suffix(".log")
    with output.open("wb") as written:
        process = await asyncio.create_subprocess_exec(
            str(PYTHON),
            "-m",
            "tinker_cookbook.recipes.math_rl.train",
            f"base_url={service.url}",
            f"log_path={log_path.resolve()}",
            *arguments,
            env=environment(service),
            stdout=written,
            stderr=written,
        )
        try:
            shares = [share async for share in followed(log_path / "metrics.jsonl", process)]
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()
    if process.returncode:
        raise RewardDidNotRise(f"the cookbook ended with {process.returncode}; its last lines are in {output}")
    return shares


def environment(service: Service) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LANG", "TMPDIR")}
    own = {"TINKER_API_KEY": f"tml-{service.key}", "TINKER_BASE_URL": service.url, "TINKER_TELEMETRY": "0"}
    return {**kept, **own, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


async def followed(metrics: Path, process: asyncio.subprocess.Process) -> AsyncIterator[float]:
    """Shows each step as it is written."""
    seen = 0
    while True:
        over = process.returncode is not None
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        for line in lines[seen:]:
            step = json.loads(line)
            say(f"step {step.get('step', seen):>3}   right {step[CORRECT]:.2f}   {'█' * round(40 * step[CORRECT])}")
            yield step[CORRECT]
        seen = len(lines)
        if over:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await process.wait()


def check(shares: list[float]) -> None:
    """Raises RewardDidNotRise."""
    if len(shares) < 4:
        raise RewardDidNotRise(f"only {len(shares)} steps were made")
    last = sum(shares[-3:]) / 3
    say(f"\nright answers: {shares[0]:.2f} at first, {last:.2f} in the last three steps")
    if last < shares[0] + RISES_BY:
        raise RewardDidNotRise(f"the share of right answers rose by less than {RISES_BY}")


def say(line: str) -> None:
    console.print(line, markup=False, soft_wrap=True)


def options() -> argparse.Namespace:
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("--url", default="", help="of a service that runs, for example http://127.0.0.1:8000")
    given.add_argument(
        "--key", default=os.environ.get("MARLAAS_API_KEY", ""), help="a tenant's; default $MARLAAS_API_KEY"
    )
    given.add_argument("--steps", type=int, default=STEPS)
    given.add_argument("recipe", nargs="*", metavar="NAME=VALUE", help="more arguments of the recipe")
    return given.parse_args()


async def run(given: argparse.Namespace) -> None:
    more = dict(argument.split("=", 1) for argument in given.recipe)
    async with serving(given) as service:
        check(await train(service, {**RECIPE, "max_steps": given.steps, **more}, FOLDER / "math_rl"))


def main() -> None:
    """Exit status: 0; 1 if the reward did not rise; 130 after Ctrl-C."""
    try:
        asyncio.run(run(options()))
    except KeyboardInterrupt:
        sys.exit(130)
    except MarlaasError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
