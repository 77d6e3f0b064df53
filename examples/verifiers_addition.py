"""`python -m examples.verifiers_addition`: `tiny` learns what a package for `verifiers` rewards, which knows nothing of MARLaaS.

    --old     the package for verifiers up to 0.3 (`load_environment`) instead of that for `verifiers.v1`

It makes a Python environment with `verifiers` and the package (some minutes, once), and what an operator writes to open it to jobs.
"""

import argparse
import asyncio
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples.three_turns import client_of, installed, learn
from manager_service.local.supervisor import LocalCluster
from marlaas_client.cli.output import say

DATA_DIR = Path(".marlaas/verifiers")
PACKAGES = Path(__file__).with_name("packages")
NEW, OLD = "verifiers==0.4.0", "verifiers==0.3.1"
ENVIRONMENT: dict[str, Any] = {"name": "addition", "args": {}}
HYPER: dict[str, Any] = {
    "batch_size": 16,
    "group_size": 8,
    "max_steps": 60,
    "max_tokens": 8,
    "learning_rate_multiplier": 2,
    "target_reward": 0.9,
}

OPERATOR = '''"""What the operator opens to jobs."""

from env_service.verifiers.environment import Verifiers


class Addition(Verifiers):
    python = {python!r}
    {kind} = "addition"
    {more}
'''
NEW_WORDS = {"kind": "taskset", "more": 'env = {"agent": {"runtime": {"type": "subprocess"}}}'}
"""The runtime is where the harness runs; verifiers' own default is a sandbox of Prime Intellect's."""
OLD_WORDS = {"kind": "environment", "more": 'job_args = ("num_tasks",)'}


def make_python(folder: Path, needs: Sequence[str]) -> Path:
    """A Python environment with these needs, which is made once. It is filled by this Python's pip: one of its own takes seconds."""
    ready = folder / ".ready"
    if not ready.exists():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
        pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", "--python", str(folder)]
        subprocess.run([*pip, "install", *needs], check=True)
        ready.touch()
    return folder.resolve()


def add_package(python: Path, package: Path) -> None:
    """The files that `pip install -e` leaves."""
    (site,) = python.glob("lib/python*/site-packages")
    (site / "examples.pth").write_text(f"{package.resolve()}\n")


def opened(folder: Path, python: Path, *, old: bool = False) -> dict[str, str]:
    """Opens the package to jobs, as an operator does. Returns the settings by which processes find what was written for it."""
    folder.mkdir(parents=True, exist_ok=True)
    words = OLD_WORDS if old else NEW_WORDS
    (folder / "operators_environments.py").write_text(OPERATOR.format(python=str(python), **words))
    return installed(folder, "addition = operators_environments:Addition")


async def main(*, old: bool) -> None:
    name, needs = ("addition_v0", OLD) if old else ("addition_v1", NEW)
    say(f"a Python environment with {needs}: some minutes, once")
    python = await asyncio.to_thread(make_python, DATA_DIR / name, [needs])
    add_package(python, PACKAGES / name)
    environment = opened(DATA_DIR / "installed", python, old=old)
    options: dict[str, Any] = {"data_dir": DATA_DIR, "port": 0, "notify": say, "environment": environment}
    async with LocalCluster(**options) as cluster, client_of(cluster) as client:
        rewards = await learn(client, environment=ENVIRONMENT, hyper=HYPER)
    say("mean reward of the steps: " + " ".join(f"{reward:.2f}" for reward in rewards))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Trains tiny on a package for verifiers.")
    parser.add_argument("--old", action="store_true", help="the package for verifiers up to 0.3")
    asyncio.run(main(old=parser.parse_args().old))
