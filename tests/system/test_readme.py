"""The quickstart of a clone; `test_installed.py` does what else the README tells a new user to do."""

import asyncio
import sys
from asyncio.subprocess import PIPE, STDOUT
from pathlib import Path

import pytest

from tests.support.forked import running

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
async def test_the_quickstart_runs_on_any_folder(tmp_path: Path) -> None:
    async with running(tmp_path / "elsewhere"):
        lines = await quickstart(tmp_path / "elsewhere")
    assert lines[-1].startswith("add 37+58 = ")


async def test_the_quickstart_says_where_no_cluster_runs(tmp_path: Path) -> None:
    (line,) = await quickstart(tmp_path, status=1)
    assert line == f"no cluster runs on {tmp_path}: start one with `make up`, or name its folder with --data"


async def quickstart(folder: Path, status: int = 0) -> list[str]:
    """The lines that it prints."""
    command = [sys.executable, "-m", "examples.quickstart", "--data", str(folder), "--steps", "2"]
    run = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=PIPE, stderr=STDOUT)
    printed, _ = await asyncio.wait_for(run.communicate(), 200)
    assert run.returncode == status, printed.decode()
    return printed.decode().splitlines()
