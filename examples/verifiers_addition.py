"""`python -m examples.verifiers_addition`: `tiny` learns what a package for `verifiers` rewards, which knows nothing of MARLaaS.

It makes a Python environment with `verifiers` and the package (some minutes, once), and what an operator writes to open it to jobs.
"""

import argparse
import asyncio
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from examples.three_turns import client_of, installed, learn
from manager_service.launcher.supervisor import LocalCluster
from marlaas_client.cli.output import say

DATA_DIR = Path(".marlaas/verifiers")
PACKAGES = Path(__file__).with_name("packages")
NEW, OLD = "addition_v1", "addition_v0"
NEEDS = {NEW: "verifiers==0.4.0", OLD: "verifiers==0.3.1"}
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
WORDS = {
    NEW: {"kind": "taskset", "more": 'env = {"agent": {"runtime": {"type": "subprocess"}}}'},
    OLD: {"kind": "environment", "more": 'job_args = ("num_tasks",)'},
}
"""The runtime is where the harness runs; verifiers' own default is a sandbox of Prime Intellect's."""


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


def opened(folder: Path, pythons: Mapping[str, Path]) -> dict[str, str]:
    """Opens packages to jobs, as an operator does. Returns the settings by which processes find what was written for them.
    `pythons`: each package's name, by which jobs choose it, and where it is installed."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, python in pythons.items():
        (folder / f"operators_{name}.py").write_text(OPERATOR.format(python=str(python), **WORDS[name]))
    return installed(folder, "\n".join(f"{name} = operators_{name}:Addition" for name in pythons))


def environment(name: str) -> dict[str, Any]:
    """A package, as jobs name it."""
    return {"name": name, "args": {}}


async def main(name: str) -> None:
    say(f"a Python environment with {NEEDS[name]}: some minutes, once")
    python = await asyncio.to_thread(make_python, DATA_DIR / name, [NEEDS[name]])
    add_package(python, PACKAGES / name)
    settings = opened(DATA_DIR / "installed", {name: python})
    options: dict[str, Any] = {"data_dir": DATA_DIR, "port": 0, "notify": say, "environment": settings}
    async with LocalCluster(**options) as cluster, client_of(cluster) as client:
        rewards = await learn(client, environment=environment(name), hyper=HYPER)
    say("mean reward of the steps: " + " ".join(f"{reward:.2f}" for reward in rewards))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Trains tiny on a package for verifiers.")
    parser.add_argument("--old", action="store_true", help="that for verifiers up to 0.3, by `load_environment`")
    asyncio.run(main(OLD if parser.parse_args().old else NEW))
