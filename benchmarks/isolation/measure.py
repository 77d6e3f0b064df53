"""Runs the jobs on a cluster of real processes, through the HTTP API, and gathers what the API tells about each.

Alone: one after another, nothing else on the cluster. Among: all submitted at once; the other jobs are cancelled when the
last watched one has ended. In deterministic mode the jobs run alone on one worker of each kind, and among others on
several, some of which are killed on the way.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.isolation.jobs import BROKEN, Job
from benchmarks.isolation.runs import JobRun, Mode, Neighbour, Run, Sample, Settings
from common.skills import Split, generate
from harness.live import FINAL, Api, adapter_hashes, jsonl, running
from manager_service.local.supervisor import LocalCluster

JOBS = "/fine_tuning/jobs"
ENDLESS = 100_000  # steps of a job that is cancelled in the end
POLL_S = 0.5
LIMIT_S = 1800.0

ONE_EACH = {"rollout": 1, "env": 1, "trainer": 1}
SEVERAL = {"rollout": 3, "env": 2, "trainer": 2}
KILLS = ("rollout-0", "trainer-1", "env-1", "rollout-2", "trainer-0")
KILL_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class Scene:
    """A cluster's workers, and those of them that are killed."""

    environment: Mapping[str, str]
    workers: Mapping[str, int]
    kills: Sequence[str] = ()


ENVIRONMENTS: Mapping[Mode, Mapping[str, str]] = {
    "deterministic": {"MARLAAS_DETERMINISTIC": "1", "MARLAAS_LEASE_S": "2"},
    "default": {},
    "bfloat16": {"MARLAAS_ROLLOUT_DTYPE": "bfloat16", "MARLAAS_TRAINER_DTYPE": "bfloat16"},
}


def scene(mode: Mode, *, alone: bool) -> Scene:
    """Several workers, and kills, only where bytes must not depend on them: otherwise a run lasts as long as it must."""
    if alone or mode != "deterministic":
        return Scene(ENVIRONMENTS[mode], ONE_EACH)
    return Scene(ENVIRONMENTS[mode], SEVERAL, KILLS)


@contextlib.asynccontextmanager
async def tenants(chosen: Scene) -> AsyncGenerator["Tenants"]:
    """Starts a cluster, and gives its tenants."""
    options: dict[str, Any] = {**chosen.workers, "environment": chosen.environment}
    async with running(**options) as (cluster, _):
        theirs = Tenants(cluster)
        try:
            yield theirs
        finally:
            await theirs.close()


class Tenants:
    """The tenants of one cluster, each made when its first job comes."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self._admin = Api(cluster.base_url, cluster.admin_key)
        self._apis: dict[str, Api] = {}

    async def api(self, tenant: str) -> Api:
        if tenant not in self._apis:
            self._apis[tenant] = await self._admin.tenant(tenant)
        return self._apis[tenant]

    async def submit(self, job: Job, settings: Settings, *, seed: int, steps: int, watched: bool) -> str:
        """Submits a job and returns its id. Its items, order and adapter depend on `seed` alone."""
        api = await self.api(job.tenant)
        more: dict[str, Any] = {"max_steps": steps}
        body: dict[str, Any] = {"model": "tiny", "seed": seed}
        body["training_file"] = await upload(api, job.skill, seed, settings.num_items, "train")
        if watched:
            more["eval_samples"] = settings.eval_samples
            body["validation_file"] = await upload(api, job.skill, seed, settings.num_held_out, "held_out")
        return (await api.post(JOBS, body | {"method": job.method(**more)}))["id"]

    async def until_ended(self, job: Job, id: str) -> dict[str, Any]:
        api = await self.api(job.tenant)
        (found,) = await api.until_done(id, seconds=LIMIT_S, ask_every_s=POLL_S)
        return found

    async def cancel(self, job: Job, id: str) -> None:
        """A job that has ended stays as it is."""
        api = await self.api(job.tenant)
        answer = await api.http.post(f"{JOBS}/{id}/cancel")
        assert answer.status_code == 200 or (await self.until_ended(job, id))["status"] in FINAL, answer.text

    async def accompanied(self, watched: Sequence[Job], since: float) -> dict[str, float]:
        """See `Run.accompanied`. `since`: seconds since 1970."""
        spans = (await self._admin.get("/cluster/timeline", since=since))["data"]
        return {
            service: together(spans, service, [job.tenant for job in watched]) for service in ("rollout", "trainer")
        }

    async def close(self) -> None:
        for api in (self._admin, *self._apis.values()):
            await api.close()


async def upload(api: Api, skill: str, seed: int, number: int, split: Split) -> str:
    return await api.upload(f"{skill}.jsonl", jsonl(generate(skill, seed, number, split)))


def together(spans: Sequence[Any], service: str, tenants: Sequence[str]) -> float:
    """Share of the tenants' busy time in a service's workers in which the same worker was busy for others too."""
    total_s = shared_s = 0.0
    for worker in {span["worker"] for span in spans if span["service"] == service}:
        here = [span for span in spans if span["worker"] == worker]
        for tenant in tenants:
            own = [(s["start"], s["end"]) for s in here if s["tenant"] == tenant]
            others = [(s["start"], s["end"]) for s in here if s["tenant"] != tenant]
            total_s += covered_s(own)
            shared_s += covered_s(own) + covered_s(others) - covered_s(own + others)
    return shared_s / total_s if total_s else 0.0


def covered_s(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of their union."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


# ---- runs -----------------------------------------------------------------------------------------------------------


def job_seed(run_seed: int, place: int) -> int:
    """Seed of the job at `place` of its list; the same alone and among others."""
    return 1000 * run_seed + place


async def alone(theirs: Tenants, mode: Mode, seed: int, place: int, job: Job, settings: Settings) -> Run:
    """One job with nothing beside it."""
    began = time.monotonic()
    found = await _watched(theirs, job, settings, mode, job_seed(seed, place))
    wall_s = time.monotonic() - began
    return Run(
        mode=mode, sharing="alone", seed=seed, workers=ONE_EACH, jobs=[found], wall_s=wall_s, load=os.getloadavg()[0]
    )


async def among(
    theirs: Tenants, mode: Mode, seed: int, watched: Sequence[Job], beside: Sequence[Job], settings: Settings
) -> Run:
    """The watched jobs, those beside them, and the broken ones, at once."""
    chosen = scene(mode, alone=False)
    async with asyncio.TaskGroup() as group:
        others = [
            (job, await theirs.submit(job, settings, seed=job_seed(seed, 100 + n), steps=ENDLESS, watched=False))
            for n, job in enumerate((*beside, *BROKEN))
        ]
        started, started_at = time.monotonic(), time.time()
        tasks = [
            group.create_task(_watched(theirs, job, settings, mode, job_seed(seed, place)))
            for place, job in enumerate(watched)
        ]
        disturbers = [
            group.create_task(_cancel_after_a_step(theirs, *others[-1])),
            group.create_task(_kill(theirs.cluster, chosen.kills)),
        ]
        found = await asyncio.gather(*tasks)
        wall_s = time.monotonic() - started
        for task in disturbers:
            task.cancel()
        accompanied = await theirs.accompanied(watched, started_at)
        neighbours = [await _neighbour(theirs, job, id) for job, id in others]
        killed = [name for name, times in theirs.cluster.num_exits.items() for _ in range(times)]
    return Run(
        mode=mode,
        sharing="among",
        seed=seed,
        workers=dict(chosen.workers),
        jobs=list(found),
        others=neighbours,
        kills=killed,
        accompanied=accompanied,
        wall_s=wall_s,
        load=os.getloadavg()[0],
    )


async def _cancel_after_a_step(theirs: Tenants, job: Job, id: str) -> None:
    api = await theirs.api(job.tenant)
    while not await api.steps(id):
        await asyncio.sleep(POLL_S)
    await theirs.cancel(job, id)


async def _kill(cluster: LocalCluster, names: Sequence[str]) -> None:
    """Kills each once; those that are left when the watched jobs have ended are spared."""
    for name in names:
        await asyncio.sleep(KILL_EVERY_S)
        cluster.kill(name, signal.SIGKILL)


async def _neighbour(theirs: Tenants, job: Job, id: str) -> Neighbour:
    """Reports how the job ended, or that it was still running; then cancels it."""
    api = await theirs.api(job.tenant)
    found = await api.get(f"{JOBS}/{id}")
    await theirs.cancel(job, id)
    error = (found["error"] or {}).get("message") or ""
    steps = len(await api.steps(id))
    return Neighbour(name=job.name, tenant=job.tenant, status=found["status"], error=error, steps=steps)


# ---- results of a watched job ----------------------------------------------------------------------------------------


async def _watched(theirs: Tenants, job: Job, settings: Settings, mode: Mode, seed: int) -> JobRun:
    steps, began = settings.num_steps(mode), time.monotonic()
    id = await theirs.submit(job, settings, seed=seed, steps=steps, watched=True)
    ended = await theirs.until_ended(job, id)
    seconds = time.monotonic() - began
    api = await theirs.api(job.tenant)
    data = [event["data"] for event in await api.events(id) if event["type"] == "metrics"]
    trained = [metrics for metrics in data if "loss" in metrics]
    versions = range(len(trained) + 1)
    return JobRun(
        name=job.name,
        status=ended["status"],
        error=(ended["error"] or {}).get("message") or "",
        seconds=seconds,
        steps=trained,
        evals={str(metrics["version"]): metrics for metrics in data if "eval_reward_mean" in metrics},
        samples=[sample for version in versions[1:] for sample in await kept_samples(api, id, version)],
        sha256=[await adapter_hashes(theirs.cluster, job.tenant, id, version) for version in versions],
    )


async def kept_samples(api: Api, id: str, step: int) -> list[Sample]:
    rows = (await api.get(f"{JOBS}/{id}/samples", version=step))["data"]
    return [Sample(step, row["group"], row["sample"], row["reward"], row["text"]) for row in rows]
