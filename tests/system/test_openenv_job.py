"""An OpenEnv server through all services, on a cluster of real processes."""

import sys
from functools import partial
from pathlib import Path
from statistics import fmean

import pytest

from examples import openenv_job
from examples.openenv_job import serving, train
from examples.three_turns import HYPER
from manager_service.local.supervisor import LocalCluster
from tests.support import forked

STANDIN = Path(__file__).parents[1] / "support" / "openenv_standin"
pytestmark = pytest.mark.slow


@pytest.mark.timeout(1800)
async def test_answers_to_an_openenv_server_are_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openenv_job, "LocalCluster", partial(LocalCluster, start=forked.start))
    async with serving(sys.executable, {"PYTHONPATH": str(STANDIN)}) as url:
        rewards = await train(url, tmp_path / "data", HYPER | {"target_reward": 0.6})
    assert fmean(rewards[:3]) < 0.5 and max(fmean(rewards[at : at + 5]) for at in range(len(rewards) - 4)) >= 0.6, (
        rewards
    )
