"""A trainer of two ranks trains real jobs; one of its ranks is killed, which costs time and nothing else."""

import asyncio
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.forked import running
from tests.support.whole import until_whole, workers

pytestmark = pytest.mark.slow

STEPS = 3
HYPER: dict[str, Any] = {"max_steps": STEPS, "batch_size": 2, "group_size": 4}
COUNTED = {"rank_0_tokens", "rank_1_tokens", "ranks_s"}


async def test_a_job_outlives_a_killed_rank(tmp_path: Path) -> None:
    # Given two jobs that a trainer of two ranks has begun to train
    variables = {"MARLAAS_TRAINER_RANKS": "2", "MARLAAS_LEASE_S": "2"}
    async with running(tmp_path, environment=variables) as (cluster, api):
        jobs = [await api.submit(skill, **HYPER) for skill in ("sort", "calc")]
        while not all([await api.steps(job) for job in jobs]):
            await asyncio.sleep(0.1)

        # When the rank that is not on the bus is killed
        (other,) = psutil.Process(cluster.pids["trainer-0"]).children()
        other.kill()

        # Then the trainer has ended too and started again, and each step was made once
        await until_whole(cluster, api, jobs, steps=STEPS, trajectories=STEPS * 2 * 4)
        assert cluster.num_exits["trainer-0"] == 1
        said = cluster.log_file("trainer-0").read_text()
        assert said.count("trainer: rank 1 ended with status -9; the trainer ends") == 1
        (counters,) = [worker["counters"] for worker in await workers(cluster) if worker["service"] == "trainer"]
        assert min(counters[name] for name in COUNTED) > 0
