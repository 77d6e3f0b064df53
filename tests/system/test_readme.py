"""Does what the README tells a new user to do."""

import asyncio
import re
import sys
from asyncio.subprocess import PIPE, STDOUT
from pathlib import Path

import pytest

from harness.live import running

ROOT = Path(__file__).resolve().parents[2]


def code() -> str:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    return block


def test_the_code_is_ten_lines() -> None:
    assert len(code().strip().splitlines()) <= 11


@pytest.mark.slow
async def test_the_code_trains_an_adapter_and_chats_with_it(tmp_path: Path) -> None:
    async with running(tmp_path / ".marlaas") as (cluster, api):
        script = code().replace("http://127.0.0.1:8000", cluster.base_url)
        command = [sys.executable, "-u", "-c", script]
        run = await asyncio.create_subprocess_exec(*command, cwd=tmp_path, stdout=PIPE, stderr=PIPE)
        assert run.stdout is not None
        first = await run.stdout.readline()
        (job,) = (await api.get("/fine_tuning/jobs"))["data"]
        assert job["status"] in ("validating_files", "queued", "running"), "its lines come as they are sent"
        rest, errors = await asyncio.wait_for(run.communicate(), 200)
    assert run.returncode == 0, errors.decode()
    lines = (first + rest).decode().splitlines()
    assert any(line.startswith("Step 15/15: reward") for line in lines)
    assert lines[-2] == "The job has successfully completed"
    assert lines[-1].isdigit(), "an answer to a sum; which one is the model's business"


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
    command = [sys.executable, "-m", "examples.quickstart", "--data", str(folder)]
    run = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=PIPE, stderr=STDOUT)
    printed, _ = await asyncio.wait_for(run.communicate(), 200)
    assert run.returncode == status, printed.decode()
    return printed.decode().splitlines()
