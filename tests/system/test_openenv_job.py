"""An OpenEnv server through all services, on a cluster of real processes."""

import sys
from pathlib import Path
from statistics import fmean

import pytest

from examples.openenv_job import serving, train
from examples.three_turns import HYPER

STANDIN = Path(__file__).parents[1] / "support" / "openenv_standin"
pytestmark = pytest.mark.slow


@pytest.mark.timeout(1800)
async def test_answers_to_an_openenv_server_are_learned(tmp_path: Path) -> None:
    async with serving(sys.executable, {"PYTHONPATH": str(STANDIN)}) as url:
        rewards = await train(url, tmp_path / "data", HYPER | {"target_reward": 0.65})
    assert fmean(rewards[:3]) < 0.5 and max(fmean(rewards[at : at + 5]) for at in range(len(rewards) - 4)) >= 0.65, (
        rewards
    )
