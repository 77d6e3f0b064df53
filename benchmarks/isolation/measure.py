"""Runs the jobs on a cluster of real processes, through the HTTP API, and gathers what the API tells about each.

Alone: one after another, nothing else on the cluster. Among: all submitted at once; the other jobs are cancelled when the last
watched one has ended. In deterministic mode the jobs run alone on one worker of each kind, and among others on several, some of
which are killed on the way.
"""

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.isolation.jobs import BROKEN, Job
from benchmarks.isolation.runs import JobRun, Mode, Run
from common.tasks.skills import Split, generate
from harness.live import FINAL, Api, adapter_hashes, jsonl, running
from manager_service.launcher.supervisor import LocalCluster

JOBS = "/fine_tuning/jobs"
ENDLESS = 100_000  # steps of a job that is cancelled in the end
NUM_ITEMS, NUM_HELD_OUT, EVAL_SAMPLES = 256, 32, 4
POLL_S = 0.5
LIMIT_S = 1800.0
SEVERAL = {"rollout": 3, "env": 2, "trainer": 2}
KILLS = ("rollout-0", "trainer-1", "env-1", "rollout-2", "trainer-0")
KILL_EVERY_S = 5.0
ENVIRONMENTS: dict[Mode, dict[str, str]] = {
    "deterministic": {"MARLAAS_DETERMINISTIC": "1", "MARLAAS_LEASE_S": "2"},
    "default": {},
    "bfloat16": {"MARLAAS_ROLLOUT_DTYPE": "bfloat16", "MARLAAS_TRAINER_DTYPE": "bfloat16"},
}


@dataclass(frozen=True, slots=True)
class Tenants:
    """The tenants of one cluster, each made when its first job comes."""

    cluster: LocalCluster
    admin: Api
    apis: dict[str, Api] = field(default_factory=dict[str, Api])

    async def api(self, tenant: str) -> Api:
        if tenant not in self.apis:
            self.apis[tenant] = await self.admin.tenant(tenant)
        return self.apis[tenant]

    async def submit(self, job: Job, *, seed: int, steps: int, watched: bool) -> str:
        """Submits a job and returns its id. Its items, order and adapter depend on `seed` alone."""
        api = await self.api(job.tenant)

        async def upload(number: int, split: Split) -> str:
            return await api.upload(f"{job.skill}.jsonl", jsonl(generate(job.skill, seed, number, split)))

        body = {"model": "tiny", "seed": seed, "training_file": await upload(NUM_ITEMS, "train")}
        if watched:
            body["validation_file"] = await upload(NUM_HELD_OUT, "held_out")
        method = job.method(max_steps=steps, **({"eval_samples": EVAL_SAMPLES} if watched else {}))
        return (await api.post(JOBS, body | {"method": method}))["id"]


@contextlib.asynccontextmanager
async def tenants(mode: Mode, *, alone: bool) -> AsyncGenerator[Tenants]:
    """Starts a cluster: of several workers only where bytes must not depend on them, since otherwise a run lasts as long as it must."""
    workers: dict[str, Any] = SEVERAL if mode == "deterministic" and not alone else {}
    async with running(environment=ENVIRONMENTS[mode], **workers) as (cluster, _):
        theirs = Tenants(cluster, Api(cluster.base_url, cluster.admin_key))
        yield theirs
        for api in (theirs.admin, *theirs.apis.values()):
            await api.close()


def job_seed(run_seed: int, place: int) -> int:
    """Seed of the job at `place` of its list; the same alone and among others."""
    return 1000 * run_seed + place


async def alone(theirs: Tenants, mode: Mode, seed: int, place: int, job: Job, steps: int) -> Run:
    """One job with nothing beside it."""
    return Run(mode=mode, sharing="alone", seed=seed, jobs=[await watch(theirs, job, steps, job_seed(seed, place))])


async def among(
    theirs: Tenants, mode: Mode, seed: int, watched: Sequence[Job], beside: Sequence[Job], steps: int
) -> Run:
    """The watched jobs, those beside them, and the broken ones, at once."""
    others = [
        (job, await theirs.submit(job, seed=job_seed(seed, 100 + n), steps=ENDLESS, watched=False))
        for n, job in enumerate((*beside, *BROKEN))
    ]
    disturbing = [asyncio.create_task(cancel_after_a_step(theirs, *others[-1]))]
    if mode == "deterministic":
        disturbing.append(asyncio.create_task(kill(theirs.cluster)))
    found = await asyncio.gather(
        *(watch(theirs, job, steps, job_seed(seed, place)) for place, job in enumerate(watched))
    )
    for task in disturbing:
        task.cancel()
    await asyncio.wait(disturbing)
    return Run(
        mode=mode,
        sharing="among",
        seed=seed,
        jobs=found,
        others=[await end(theirs, job, id) for job, id in others],
        kills=[name for name, times in theirs.cluster.num_exits.items() for _ in range(times)],
    )


async def watch(theirs: Tenants, job: Job, num_steps: int, seed: int) -> JobRun:
    """A watched job from its submission to its end."""
    began = time.monotonic()
    id = await theirs.submit(job, seed=seed, steps=num_steps, watched=True)
    api = await theirs.api(job.tenant)
    (ended,) = await api.until_done(id, seconds=LIMIT_S, ask_every_s=POLL_S)
    seconds = time.monotonic() - began
    metrics = [event["data"] for event in await api.events(id) if event["type"] == "metrics"]
    steps = [each for each in metrics if "loss" in each]
    evals = [each["eval_reward_mean"] for each in metrics if "eval_reward_mean" in each]
    return JobRun(
        name=job.name,
        status=ended["status"],
        error=(ended["error"] or {}).get("message") or "",
        num_steps=len(steps),
        seconds=seconds,
        steps=steps,
        held_out=evals[-1] if evals else None,
        sha256=[await adapter_hashes(theirs.cluster, job.tenant, id, v) for v in range(len(steps) + 1)],
    )


async def end(theirs: Tenants, job: Job, id: str) -> JobRun:
    """Reports how a neighbour ended, or that it was still running; then cancels it."""
    api = await theirs.api(job.tenant)
    found = await api.get(f"{JOBS}/{id}")
    await cancel(api, id)
    error = (found["error"] or {}).get("message") or ""
    return JobRun(name=job.name, status=found["status"], error=error, num_steps=len(await api.steps(id)))


async def cancel(api: Api, id: str) -> None:
    """A job that has ended stays as it is."""
    answer = await api.http.post(f"{JOBS}/{id}/cancel")
    assert answer.status_code == 200 or (await api.get(f"{JOBS}/{id}"))["status"] in FINAL, answer.text


async def cancel_after_a_step(theirs: Tenants, job: Job, id: str) -> None:
    api = await theirs.api(job.tenant)
    while not await api.steps(id):
        await asyncio.sleep(POLL_S)
    await cancel(api, id)


async def kill(cluster: LocalCluster) -> None:
    """Kills each once; those that are left when the watched jobs have ended are spared."""
    for name in KILLS:
        await asyncio.sleep(KILL_EVERY_S)
        cluster.kill(name, signal.SIGKILL)
