"""A supervised job, and one on rewards that starts from it, on a whole cluster: a new skill. Its bits: `test_same_bits.py`."""

from pathlib import Path

import pytest

from examples import new_skill
from examples.new_skill import client_of, learn
from tests.support.forked import running

pytestmark = pytest.mark.slow

SHORTER = {"NUM_EXAMPLES": 1024, "NUM_ITEMS": 256, "NUM_HELD_OUT": 128}


@pytest.mark.timeout(1800)
async def test_a_new_skill_is_learned_from_examples_and_then_from_rewards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, number in SHORTER.items():
        monkeypatch.setattr(new_skill, name, number)
    monkeypatch.setattr(new_skill, "REINFORCEMENT", new_skill.REINFORCEMENT | {"batch_size": 16, "target_reward": 0.8})
    async with running(tmp_path) as (cluster, _), client_of(cluster) as client:
        shares = await learn(client)
    assert shares.base <= 0.1 and shares.supervised >= 0.4, shares
    assert shares.reinforced >= 0.65 and shares.reinforced > shares.supervised, shares
