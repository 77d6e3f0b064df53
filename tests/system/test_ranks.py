"""A trainer of two ranks trains real jobs; one of its ranks is killed, which costs time and nothing else."""

import asyncio
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.live import Api, is_balanced
from manager_service.launcher.supervisor import LocalCluster
from tests.support.forked import running

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
        done = await api.until_done(*jobs)

        # Then the trainer has ended too and started again, and each step was made once
        assert [job["status"] for job in done] == ["succeeded"] * 2, [job["error"] for job in done]
        assert cluster.num_exits["trainer-0"] == 1
        said = cluster.log_file("trainer-0").read_text()
        assert said.count("trainer: rank 1 ended with status -9; the trainer ends") == 1
        await check(cluster, api, jobs)


async def check(cluster: LocalCluster, api: Api, jobs: list[str]) -> None:
    for job in jobs:
        ledger = await api.ledger(job)
        assert is_balanced(ledger) and ledger["in_flight"] == ledger["failed"] == 0, ledger
        assert ledger["trained"] == STEPS * 2 * 4, ledger
        assert await api.steps(job) == list(range(1, STEPS + 1))
    admin = Api(cluster.base_url, cluster.admin_key)
    assert (await admin.get("/cluster/dead"))["data"] == []
    workers = (await admin.get("/cluster/workers"))["data"]
    (counters,) = [worker["counters"] for worker in workers if worker["service"] == "trainer"]
    assert min(counters[name] for name in COUNTED) > 0
    await admin.close()
