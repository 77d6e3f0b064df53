"""A user who goes on talking: an installed environment through all services, on a cluster of real processes."""

import json
from pathlib import Path
from statistics import fmean

import pytest

from examples.simulated_user import NUM_TURNS
from examples.three_turns import HYPER, client_of, installed, learn
from harness.live import is_balanced
from tests.support.forked import running

pytestmark = pytest.mark.slow


@pytest.mark.timeout(1800)
async def test_answers_to_a_user_of_three_turns_are_learned(tmp_path: Path) -> None:
    environment = installed(tmp_path / "installed")
    async with running(tmp_path / "data", environment=environment) as (cluster, api), client_of(cluster) as client:
        rewards = await learn(client, hyper=HYPER | {"target_reward": 0.65})
        (job,) = (await api.get("/fine_tuning/jobs"))["data"]
        ledger = await api.ledger(job["id"])
        path = f"/fine_tuning/jobs/{job['id']}/samples"
        lines = (await api.http.get(path, params={"format": "jsonl", "newest": 1})).text.splitlines()
    assert fmean(rewards[:3]) < 0.5 and fmean(rewards[-5:]) > 0.6, rewards
    assert is_balanced(ledger) and not ledger["failed"] and ledger["trained"] == ledger["issued"]
    talks = [turns for line in lines if (turns := json.loads(line)["turns"])]  # not every sample's tokens are kept
    assert talks and {sum(turn["by"] == "model" for turn in turns) for turns in talks} == {NUM_TURNS}, talks
