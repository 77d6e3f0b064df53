"""Deterministic mode of a whole cluster: who may work on its jobs, and what its manifests say."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from common.adapters import AdapterStore
from common.messages import AdapterRef
from common.objects import Objects
from harness.live import Api
from manager_service.local.supervisor import LocalCluster
from tests.support.forked import running

pytestmark = [pytest.mark.exact, pytest.mark.slow, pytest.mark.timeout(240)]
DETERMINISTIC = {"MARLAAS_DETERMINISTIC": "1"}


async def workers(cluster: LocalCluster) -> dict[str, Any]:
    admin = Api(cluster.base_url, cluster.admin_key)
    found = {worker["service"]: worker for worker in (await admin.get("/cluster/workers"))["data"]}
    await admin.close()
    return found


async def fingerprints_of(store: AdapterStore, job: str, steps: Sequence[int]) -> list[Any]:
    manifests = [await store.manifest(AdapterRef("default", job, step)) for step in steps]
    return [manifest and dict(manifest.fingerprints) for manifest in manifests]


async def test_workers_of_default_mode_wait_until_the_jobs_of_deterministic_mode_have_ended(tmp_path: Path) -> None:
    # Given a job that was begun in deterministic mode, and that is not finished
    async with running(tmp_path, environment=DETERMINISTIC) as (cluster, api):
        job = await api.submit("sort", max_steps=1000, batch_size=2, group_size=4)
        while not (steps := await api.steps(job)):
            await asyncio.sleep(0.2)
        announced = {service: worker["fingerprint"] for service, worker in (await workers(cluster)).items()}
    store = AdapterStore(Objects.open((tmp_path / "store").as_uri()))
    fingerprints = {name: f for name, f in announced.items() if f}
    assert await fingerprints_of(store, job, steps) == [fingerprints] * len(steps)
    assert set(fingerprints) == {"rollout", "trainer"}
    # When the cluster is started in default mode, then its workers do not join, and `up` says why
    told: list[str] = []
    async with running(tmp_path, notify=told.append) as (cluster, api):
        assert any("rollout (tiny): this rollout worker runs in default mode" in line for line in told)
        assert {worker["state"] for worker in (await workers(cluster)).values()} == {"refused"}
        # Then, once the job has been cancelled, they join by themselves, and other jobs are trained
        await api.post(f"/fine_tuning/jobs/{job}/cancel")
        other = await api.submit("sort", max_steps=1, batch_size=2, group_size=4)
        (done,) = await api.until_done(other)
        assert done["status"] == "succeeded"
        steps = await api.steps(job)  # one may have been made before the end, and heard of since
    assert await fingerprints_of(store, job, steps) == [fingerprints] * len(steps)
