"""Object storage goes away, or its disk is full, in the middle of a run, which costs time and nothing else."""

import asyncio
import os
from pathlib import Path

import pytest

from common.store.adapters import AdapterStore
from common.store.disk_room import free_bytes
from common.store.objects import Objects
from common.wire.messages import AdapterRef
from harness.live import Api
from harness.proxy import Proxy
from harness.s3_server import BUCKET, S3Server, environment
from manager_service.launcher.supervisor import LocalCluster
from tests.common.test_worker import until
from tests.support.forked import running
from tests.support.whole import until_whole, workers

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


async def test_a_full_disk_costs_time_and_nothing_else(tmp_path: Path) -> None:
    """The disk is real, and its reserve so large that a file of 2 GiB takes of it."""
    filler = tmp_path / "filler"
    variables = {"MARLAAS_DISK_RESERVE_BYTES": str(free_bytes(tmp_path) - (1 << 30))}
    async with running(tmp_path / "data", environment=variables) as (cluster, api):
        job = await api.submit("sort", max_steps=40, batch_size=2, group_size=4)
        await until(lambda: _has_steps(api, job))
        with filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 2 << 30)
        await until(lambda: _is_announced(cluster))
        refused = await api.http.post(
            "/files", files={"file": ("a.jsonl", b'{"prompt":"a"}')}, data={"purpose": "fine-tune"}
        )
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "disk_full")
        before = len(await api.steps(job))
        assert before < 40, "the disk was full too late to matter"
        filler.unlink()
        await until_whole(cluster, api, [job], steps=40, trajectories=40 * ROWS)
        assert cluster.num_exits == dict.fromkeys(cluster.num_exits, 0)


async def _has_steps(api: Api, job: str) -> bool:
    return bool(await api.steps(job))


async def _is_announced(cluster: LocalCluster) -> bool:
    found = await workers(cluster)
    return any("MARLAAS_DISK_RESERVE_BYTES" in (worker.get("reason") or "") for worker in found)
