"""Object storage over HTTP goes away in the middle of a run, which costs time and nothing else."""

import asyncio
from pathlib import Path

import pytest

from common.store.adapters import AdapterStore
from common.store.objects import Objects
from common.wire.messages import AdapterRef
from harness.proxy import Proxy
from harness.s3_server import BUCKET, S3Server, environment
from tests.support.forked import running
from tests.support.whole import until_whole

pytestmark = pytest.mark.slow

STEPS = 6
ROWS = 2 * 4
OUTAGE_S = 8.0  # four leases, and longer than a call retries by itself: half a minute of a real cluster


async def test_an_outage_of_the_store_costs_time_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = S3Server.start()
    gate = Proxy(server.port)
    await gate.open()
    variables = environment(gate.endpoint) | {"MARLAAS_STORE_URL": f"s3://{BUCKET}/test", "MARLAAS_LEASE_S": "2"}
    try:
        async with running(tmp_path, environment=variables, trainer=2) as (cluster, api):
            jobs = [await api.submit(skill, max_steps=STEPS, batch_size=2, group_size=4) for skill in ("sort", "calc")]
            while not all([await api.steps(job) for job in jobs]):
                await asyncio.sleep(0.05)
            before = sum([len(await api.steps(job)) for job in jobs])
            await gate.shut()
            await asyncio.sleep(OUTAGE_S)
            await gate.open()
            await until_whole(cluster, api, jobs, steps=STEPS, trajectories=STEPS * ROWS)
            assert before < 2 * STEPS, "the outage came too late to matter"
            assert cluster.num_exits == dict.fromkeys(cluster.num_exits, 0)
        for name, value in environment(server.endpoint).items():
            monkeypatch.setenv(name, value)
        store = AdapterStore(Objects.open(f"s3://{BUCKET}/test"))
        for job in jobs:
            for version in range(STEPS + 1):
                assert await store.read(AdapterRef("default", job, version))
    finally:
        await gate.shut()
        server.stop()
