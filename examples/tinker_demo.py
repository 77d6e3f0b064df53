"""`make tinker`: starts the service, and lets a recipe of tinker-cookbook train on it through the Tinker protocol, unmodified.

    python -m examples.tinker_demo            `math_rl env=arithmetic`: the share of right answers must rise by 0.2 in 20 steps
    python -m examples.tinker_demo --loop     the loop of `tinker_loop.py` instead
    python -m examples.tinker_demo NAME=VALUE ...        more of the recipe's own options: max_steps_off_policy=2, compute_post_kl=True

Exit status: 0; 1 if the share did not rise; the client's own if it fails.
"""

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.errors import MarlaasError
from examples.demo import say
from manager_service.launcher.supervisor import LocalCluster

DATA_DIR = Path(".marlaas/tinker")
PYTHON = Path(".tinker/bin/python")
LOOP = Path(__file__).with_name("tinker_loop.py")
MODEL = Path(__file__).resolve().parents[1] / "models" / "tiny"
RECIPE = "tinker_cookbook.recipes.math_rl.train"
OPTIONS = {
    "model_name": str(MODEL),  # the SDK reads the tokenizer there
    "renderer_name": "role_colon",
    "env": "arithmetic",
    "loss_fn": "importance_sampling",
    "max_tokens": "16",
    "max_steps": "20",
    "group_size": "8",
    "groups_per_batch": "16",
    "learning_rate": "1e-3",
    "lora_rank": "8",
    "behavior_if_log_dir_exists": "delete",
}
RISES_BY = 0.2
"""The least gain of the share of right answers from the first two steps to the last two."""


async def run(arguments: list[str]) -> int:
    """The exit status."""
    say(f"starting Redis, the manager and the workers in {DATA_DIR} …")
    async with LocalCluster(data_dir=DATA_DIR, notify=say) as cluster:
        own = {"TINKER_BASE_URL": cluster.base_url, "TINKER_API_KEY": f"tml-{cluster.api_key}", "TINKER_TELEMETRY": "0"}
        if "--loop" in arguments:
            say(f"ready at {cluster.base_url}; the SDK trains an adapter of `tiny`:\n")
            command = [str(LOOP), *(argument for argument in arguments if argument != "--loop")]
            return await finish(await start(command, own))
        say(f"ready at {cluster.base_url}; the cookbook's `math_rl env=arithmetic` trains an adapter of `tiny`:\n")
        return await run_recipe(arguments, own)


async def run_recipe(arguments: list[str], own: Mapping[str, str]) -> int:
    folder = DATA_DIR / "math_rl"
    folder.mkdir(parents=True, exist_ok=True)
    given = [f"{name}={value}" for name, value in {**OPTIONS, "log_path": str(folder.resolve())}.items()]
    metrics, log = folder / "metrics.jsonl", DATA_DIR / "math_rl.log"
    metrics.unlink(missing_ok=True)
    with log.open("wb") as output:
        recipe = await start(["-m", RECIPE, *given, *arguments], own, output)
    watching = asyncio.create_task(watch(metrics))
    try:
        status = await finish(recipe)
    finally:
        watching.cancel()
    shares = read_shares(metrics)
    if status or len(shares) < 4:
        say(f"the recipe ended with {status}; its log is {log}")
        return status or 1
    first, last = sum(shares[:2]) / 2, sum(shares[-2:]) / 2
    say(
        f"\nright answers: {first:.2f} at first, {last:.2f} at the end; metrics in {metrics}, the recipe's log in {log}"
    )
    return 0 if last >= first + RISES_BY else 1


async def start(command: list[str], own: Mapping[str, str], output: Any = None) -> asyncio.subprocess.Process:
    told = {**os.environ, "OMP_NUM_THREADS": "1", **own}
    return await asyncio.create_subprocess_exec(PYTHON, *command, env=told, stdout=output, stderr=output)


async def finish(process: asyncio.subprocess.Process) -> int:
    try:
        return await process.wait()
    finally:
        if process.returncode is None:
            process.kill()


async def watch(metrics: Path) -> None:
    """Prints a line a step, as the recipe writes them."""
    shown = 0
    while True:
        for share in read_shares(metrics)[shown:]:
            say(f"step {shown:>3}   right {share:.2f}   {'█' * round(40 * share)}")
            shown += 1
        await asyncio.sleep(0.3)


def read_shares(metrics: Path) -> list[float]:
    """The share of right answers of each step so far; a line that is half written is left for later."""
    text = metrics.read_text() if metrics.exists() else ""
    rows = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    return [row["env/all/correct"] for row in rows if "env/all/correct" in row]


def main() -> None:
    """Exit status 130 after Ctrl-C."""
    try:
        sys.exit(asyncio.run(run(sys.argv[1:])))
    except KeyboardInterrupt:
        sys.exit(130)
    except MarlaasError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
