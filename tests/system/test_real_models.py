"""The commands of docs/real-models.md, one after the other, on a base model of Qwen3's family with random weights."""

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, STDOUT
from pathlib import Path

import pytest

from tests.support.forked import running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs" / "real-models.md").read_text()
PROGRAMS = {"python": [sys.executable], "marlaas": [sys.executable, "-m", "manager_service.cli.main"]}


async def follow(line: str, folder: Path, **instead: str) -> str:
    """Does what a line of the guide says, in a folder, with other words `instead` of some of its own; what it prints."""
    assert f"    {line}\n" in GUIDE, "the guide says something else"
    return await printed_by([instead.get(word, word) for word in line.split()], folder)


async def printed_by(words: list[str], folder: Path) -> str:
    command = [*PROGRAMS[words[0]], *words[1:]]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    run = await asyncio.create_subprocess_exec(*command, cwd=folder, env=environment, stdout=PIPE, stderr=STDOUT)
    printed, _ = await asyncio.wait_for(run.communicate(), 200)
    assert run.returncode == 0, printed.decode()
    return printed.decode()


@pytest.fixture
def base(tmp_path: Path) -> Path:
    row = {"question": "Two and 3?", "answer": "2 + 3 = 5\n#### 5"}
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for _ in range(4)))
    return tmp_path / "q"


async def test_from_a_folder_to_a_trained_model_in_two_commands(base: Path) -> None:
    here = {"/tmp/q": str(base)}
    await follow("python -m harness.bases /tmp/q --small", base.parent, **here)
    assert "marlaas up" in await follow("marlaas plan /tmp/q", base.parent, **here)
    short = "python -m examples.gsm8k --base /tmp/q --file train.jsonl --steps 1 --batch 2 --group 4 --tokens 16"
    printed = await follow(short, base.parent, **here)
    up, chat = (line.strip() for line in printed.splitlines() if line.startswith("  "))
    assert up == f"MARLAAS_BASE_MODELS=q={base} marlaas up", "what it was started with"
    async with running(base.parent / ".marlaas", environment={"MARLAAS_BASE_MODELS": f"q={base}"}):
        await printed_by([*chat.split(), "hello", "--max-tokens", "2"], base.parent)


async def test_the_same_in_pieces_on_a_cluster_that_stays(base: Path) -> None:
    assert "    MARLAAS_BASE_MODELS=q=Qwen/Qwen3-0.6B marlaas up\n" in GUIDE
    await follow("python -m harness.bases /tmp/q --small", base.parent, **{"/tmp/q": str(base)})
    async with running(base.parent / ".marlaas", environment={"MARLAAS_BASE_MODELS": f"q={base}"}):
        models = await follow("marlaas models", base.parent)
        assert "2,048" in models and "bfloat16" in models
        await follow("python -m examples.gsm8k --file train.jsonl --prepare items.jsonl", base.parent)
        long = "marlaas submit items.jsonl --grader math:answer --model q --hyper max_steps=100 --hyper max_tokens=512 --watch"
        short = {"max_steps=100": "max_steps=1", "max_tokens=512": "max_tokens=16"}
        printed = await follow(long, base.parent, **short)
        assert "succeeded" in printed
