"""Measures one run: a cluster of real processes under one policy, and N tenants who each submit a job at once.

One rollout worker, one env worker and one trainer, of one thread each. A small job goes first, so that no run pays for what
happens only once; then the workers report that they are idle, and the counters' growth from there is the run's.
"""

import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.paper.results import JobFigures, Measured, measured
from benchmarks.paper.workloads import Workload
from common.bus.bus import Bus
from common.bus.streams import Cell
from common.store.adapters import AdapterStore
from common.store.objects import Objects
from common.wire.messages import AdapterRef
from harness.live import Api
from harness.processes import cpu_s
from manager_service.launcher.supervisor import LocalCluster, ServiceCommand, service_commands
from simulator.fit import Recording, record

LIMIT_S = 1800.0
REPORTED_S = 1.5
"""Time after which an idle worker has told all that it did."""
IDLE_S = 3.0
"""Time for which nothing happens before a run: what the processes use then, they use in the run too, whatever its work is."""
ASK_EVERY_S = 3.0
"""Time between two questions about a job: makespans are those of the versions, and asking costs a tenth of a core with 32 jobs."""


@dataclass(frozen=True, slots=True)
class Tenant:
    name: str
    api: Api
    file: str | None


@dataclass(frozen=True, slots=True)
class Seen:
    """Totals of each service's worker and of each process."""

    counters: Mapping[str, Mapping[str, float]]
    cpu_s: Mapping[str, float]

    def growth(self, later: "Seen") -> dict[str, dict[str, float]]:
        return {
            service: {name: value - self.counters[service].get(name, 0.0) for name, value in after.items()}
            for service, after in later.counters.items()
        }


async def measure(workload: Workload, policy: str, n: int, steps: int) -> tuple[Measured, Recording]:
    """The run's figures, and its telemetry. Raises AssertionError if a job fails."""
    async with running(workload, policy) as cluster:
        admin = Api(cluster.base_url, cluster.admin_key)
        tenants = [await make_tenant(admin, f"tenant-{number}", workload) for number in range(n)]
        await train(tenants[0], workload.body(n, tenants[0].file, 1, batch_size=1, group_size=2))
        await asyncio.sleep(REPORTED_S)
        resting = await seen(cluster, admin)
        await asyncio.sleep(IDLE_S)
        before = await seen(cluster, admin)
        start = time.time()
        bodies = [workload.body(number, tenant.file, steps) for number, tenant in enumerate(tenants)]
        trained = await asyncio.gather(*map(train, tenants, bodies))
        await asyncio.sleep(REPORTED_S)
        after = await seen(cluster, admin)
        spans = (await admin.get("/cluster/timeline", since=start))["data"]
        jobs = [
            await job_figures(cluster, tenant, job, at - start, spans, start, steps)
            for tenant, (job, at) in zip(tenants, trained, strict=True)
        ]
        recording = await recorded(cluster, workload, start - REPORTED_S)
        for each in (admin, *(tenant.api for tenant in tenants)):
            await each.close()
    cpu_s = {name: seconds - before.cpu_s[name] for name, seconds in after.cpu_s.items()}
    idle = {name: (seconds - resting.cpu_s[name]) / IDLE_S for name, seconds in before.cpu_s.items()}
    return measured(policy, workload.name, jobs, before.growth(after), cpu_s, idle), recording


# ---- the cluster ----------------------------------------------------------------------------------------------------


@asynccontextmanager
async def running(
    workload: Workload, policy: str, settings: Mapping[str, str] = {}, *, rollout: int = 1
) -> AsyncGenerator[LocalCluster]:
    def services(counts: Mapping[str, int], environment: Mapping[str, str]) -> list[ServiceCommand]:
        own = (sys.executable, "-m", workload.env_module)
        made = service_commands(counts, environment)
        return [ServiceCommand(s.name, own if s.name == "env-0" else s.argv, s.environment) for s in made]

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = {**workload.prepare(folder), "MARLAAS_POLICY": policy, **settings}
        options: dict[str, Any] = {"environment": environment, "services": services, "rollout": rollout}
        async with LocalCluster(data_dir=folder / "data", **options) as cluster:
            yield cluster


async def seen(cluster: LocalCluster, admin: Api) -> Seen:
    workers = (await admin.get("/cluster/workers"))["data"]
    return Seen(
        counters={worker["service"]: worker["counters"] for worker in workers},
        cpu_s={name: cpu_s(pid) for name, pid in cluster.pids.items()},
    )


async def recorded(cluster: LocalCluster, workload: Workload, since_s: float) -> Recording:
    bus = Bus.connect(cluster.redis_url, Cell(workload.base_model))
    try:
        return await record(bus, since_s)
    finally:
        await bus.close()


# ---- tenants and jobs -----------------------------------------------------------------------------------------------


async def make_tenant(admin: Api, name: str, workload: Workload) -> Tenant:
    api, items = await admin.tenant(name), workload.items()
    return Tenant(name, api, None if items is None else await api.upload("items.jsonl", items))


async def train(tenant: Tenant, body: Mapping[str, Any]) -> tuple[str, float]:
    """Submits a job and waits until it has succeeded. Returns its id, and when it was submitted."""
    submitted = time.time()
    job = (await tenant.api.post("/fine_tuning/jobs", body))["id"]
    (found,) = await tenant.api.until_done(job, seconds=LIMIT_S, ask_every_s=ASK_EVERY_S)
    assert found["status"] == "succeeded", found
    return job, submitted


async def job_figures(
    cluster: LocalCluster, tenant: Tenant, job: str, submitted_s: float, spans: list[Any], start: float, steps: int
) -> JobFigures:
    """Figures of a job. `start`: of the run, in seconds since 1970."""
    store = AdapterStore(Objects.open((cluster.data_dir / "store").as_uri()))
    found = [await store.manifest(AdapterRef(tenant.name, job, version)) for version in range(1, steps + 1)]
    manifests = [manifest for manifest in found if manifest is not None]
    assert len(manifests) == steps, f"{job} has not all of its versions"
    first = min(span["start"] for span in spans if span["job"] == job and span["service"] == "rollout")
    return JobFigures(
        submitted_s=submitted_s,
        versions_s=[at - start for at in (first, *(manifest.created_at for manifest in manifests))],
        tokens=round(sum(manifest.metrics.get("trained_tokens") or 0.0 for manifest in manifests)),
        written=round(sum(manifest.metrics.get("written_tokens") or 0.0 for manifest in manifests)),
    )
