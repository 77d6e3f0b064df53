"""`python -m examples.three_turns`: `tiny` learns to answer a simulated user in three turns, of which it knows little but the first.

The environment is `examples/simulated_user.py`; it makes its own items, so that there is no training file.
"""

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from common.errors import MarlaasError
from manager_service.launcher.supervisor import LocalCluster
from marlaas_client.cli.output import say

DATA_DIR = Path(".marlaas/three_turns")
ENVIRONMENT: dict[str, Any] = {"name": "simulated_user", "args": {}}
HYPER: dict[str, Any] = {
    "batch_size": 8,
    "group_size": 8,
    "max_steps": 80,
    "max_tokens": 8,
    "learning_rate_multiplier": 2,
    "target_reward": 0.9,
}
PERIOD_S = 0.5


class JobFailed(MarlaasError):
    """The job did not succeed; the message says why."""


def installed(folder: Path, line: str = "simulated_user = examples.simulated_user:SimulatedUser") -> dict[str, str]:
    """Writes what the installation of a package with the environment leaves. Returns the settings by which processes find it.
    `line`: the package's entry point."""
    info = folder / "environment-1.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: environment\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[marlaas.environments]\n{line}\n")
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))}


def client_of(cluster: LocalCluster) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{cluster.base_url}/v1", api_key=cluster.api_key)


async def learn(
    client: AsyncOpenAI,
    *,
    seed: int = 0,
    environment: Mapping[str, Any] = ENVIRONMENT,
    hyper: Mapping[str, Any] = HYPER,
) -> list[float]:
    """Trains one job. Returns the mean reward of each step, of 1. Raises JobFailed."""
    method: Any = {"type": "reinforcement", "reinforcement": {"environment": environment, "hyperparameters": hyper}}
    no_file: Any = None
    job = await client.fine_tuning.jobs.create(model="tiny", training_file=no_file, method=method, seed=seed)
    say(f"{job.id}: {job.model}, {environment['name']}")
    while job.status not in ("succeeded", "failed", "cancelled"):
        await asyncio.sleep(PERIOD_S)
        job = await client.fine_tuning.jobs.retrieve(job.id)
    if job.status != "succeeded":
        raise JobFailed(f"{job.id} {job.status}: {job.error and job.error.message}")
    events: list[Any] = [event.data async for event in client.fine_tuning.jobs.list_events(job.id, limit=100)]
    return [data["reward_mean"] for data in reversed(events) if data and "reward_mean" in data]


async def main() -> None:
    environment = installed(DATA_DIR / "installed")
    options: dict[str, Any] = {"data_dir": DATA_DIR, "port": 0, "notify": say, "environment": environment}
    async with LocalCluster(**options) as cluster, client_of(cluster) as client:
        rewards = await learn(client)
    say("mean reward of the steps: " + " ".join(f"{reward:.2f}" for reward in rewards))


if __name__ == "__main__":
    asyncio.run(main())
