"""A trainer of two ranks trains a real job. What a killed rank costs: tests/trainer/test_ranks.py, test_e2e.py."""

from pathlib import Path

import pytest

from tests.support.forked import running
from tests.support.whole import until_whole, workers

pytestmark = pytest.mark.slow
COUNTED = {"rank_0_tokens", "rank_1_tokens", "ranks_s"}


async def test_a_job_is_trained_by_two_ranks(tmp_path: Path) -> None:
    async with running(tmp_path, environment={"MARLAAS_TRAINER_RANKS": "2"}) as (cluster, api):
        job = await api.submit("sort", max_steps=2, batch_size=2, group_size=4)
        await until_whole(cluster, api, [job], steps=2, trajectories=2 * 2 * 4)
        (counters,) = [worker["counters"] for worker in await workers(cluster) if worker["service"] == "trainer"]
        assert min(counters[name] for name in COUNTED) > 0
