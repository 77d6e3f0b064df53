"""Jobs of four base models on one pool, against workers of their own, and against what the simulator of pools says.

Eight jobs that wait for tools, two of each base model, run on a rollout worker and a trainer of each base model, then on two and two that
serve all. Manager, Redis, env worker, pool workers, handlers and adapters are real; tokens and steps are slept (`_sleeping_service`), and
tools take so long that a base model's own rollout worker idles for 81 % of the time, as PlexRL's trainers of 235B. `simulator.pool`
predicts the second run from the first.

With real engines two cores are too few for eight workers: there each of four jobs runs by itself on one pool of one and one, then all.
"""

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks._report import Goal, Report, make_table
from benchmarks._sleeping_service import SERVICE
from benchmarks._slow_tool import SlowTool
from benchmarks.paper.workloads import Workload
from common.bus.bus import Bus
from common.bus.streams import Cell
from common.settings import TINY
from common.wire.messages import WorkerReport
from common.worker.telemetry import merged
from harness.live import Api, running
from manager_service.launcher.supervisor import LocalCluster, ServiceCommand, service_commands
from simulator.pool.cluster import PoolCluster, Setup
from simulator.pool.places import Costs, PoolSize
from simulator.pool.trace import JobShape, TraceJob

BASES = ("a", "b", "c", "d")
WITH_WEIGHTS = ("rollout", "trainer")
JOBS_A_BASE, POOL, SLOTS = 2, 2, 128
CALLS, TOOL_S = 2, 4
LEAST_SAVED, MOST_SLOWDOWN, MOST_ERROR = 37.58, 1.1, 15
"""Percent of worker-seconds, as PlexRL saves of GPU-hours; the time of a step over that with own workers; percent of the makespan."""


@dataclass(frozen=True, slots=True)
class Job:
    """A job that has run: seconds from the first one's submission."""

    base: str
    id: str
    steps: int
    turns: int
    seconds: float


def workload(calls: int, seconds: float, **hyper: int) -> Workload:
    method = {"environment": {"name": "slow_tool", "args": {"calls": calls, "seconds": seconds}}}
    target = f"{SlowTool.__module__}:{SlowTool.__name__}"
    return Workload(name="", skill=None, method=method, hyper=hyper, entry_points={"slow_tool": target})


def sleeping(counts: Mapping[str, int], environment: Mapping[str, str], *, own: bool) -> list[ServiceCommand]:
    """Workers that sleep; `own`: one of each base model, else those that serve all."""
    found = list[ServiceCommand]()
    for command in service_commands(counts, environment):
        if (service := command.name.partition("-")[0]) not in WITH_WEIGHTS:
            found.append(command)
            continue
        argv = (sys.executable, "-m", "benchmarks._sleeping_service")
        for base in BASES if own else ("",):
            variables = {**command.environment, "MARLAAS_BASE_MODEL": base, SERVICE: service}
            found.append(replace(command, name=f"{command.name}{base}", argv=argv, environment=variables))
    return found


@asynccontextmanager
async def cluster(work: Workload, num: int, **options: Any) -> AsyncGenerator[tuple[LocalCluster, Api]]:
    """A cluster of the four base models, with so many rollout workers and trainers."""
    with tempfile.TemporaryDirectory() as folder:
        served = ",".join(f"{base}={TINY}" for base in BASES)
        environment = {**work.prepare(Path(folder)), "MARLAAS_BASE_MODELS": served, "MARLAAS_POOL_BYTES": "16GB"}
        environment["MARLAAS_ROLLOUT_SLOTS"] = str(SLOTS)
        async with running(environment=environment, rollout=num, trainer=num, **options) as found:
            yield found


async def ran(api: Api, work: Workload, bases: Sequence[str], steps: int, calls: int) -> list[Job]:
    """A job of each of the base models, all at once."""
    bodies = [{**work.body(number, None, steps), "model": base} for number, base in enumerate(bases)]
    since_s = time.monotonic()
    jobs = [job["id"] for job in await asyncio.gather(*(api.post("/fine_tuning/jobs", body) for body in bodies))]

    async def ended(job: str, base: str) -> Job:
        (done,) = await api.until_done(job, seconds=1200)
        assert done["status"] == "succeeded", done["error"]
        return Job(base, job, steps, calls + 1, time.monotonic() - since_s)

    return list(await asyncio.gather(*map(ended, jobs, bases)))


# ---- the simulator --------------------------------------------------------------------------------------------------


async def traced(url: str, jobs: Sequence[Job]) -> list[TraceJob]:
    """The jobs as the simulator takes them: what workers took for them, by their reports; the rest of their time is the tools'."""
    return [await _traced(url, job) for job in jobs]


async def _traced(url: str, job: Job) -> TraceJob:
    bus = Bus.connect(url, Cell(job.base))
    entries = await bus.follow(bus.cell.telemetry, "0", block_ms=None, count=100_000)
    await bus.close()
    spans = [span for _, report in entries if isinstance(report, WorkerReport) for span in report.spans]

    def seconds(service: str) -> float:
        """Of a step."""
        own = merged([span for span in spans if span.job == job.id and span.phase == service], gap_s=0.0)
        return sum(span.end_s - span.start_s for span in own) / job.steps

    rollout_s, train_s = map(seconds, WITH_WEIGHTS)
    return TraceJob(
        at_s=0.0,
        tenant="t",
        base=job.base,
        shape=JobShape(1, 1),
        steps=job.steps,
        rollout_s=rollout_s,
        train_s=train_s,
        tool_s=max(0.0, job.seconds / job.steps - rollout_s - train_s),
        turns=job.turns,
    )


def costs(cluster: LocalCluster) -> Costs:
    """Seconds of a switch, and of loading, by the logs of pool workers: the medians."""
    found: dict[str, list[float]] = {"opened": [], "loaded": []}
    for name in cluster.pids:
        for line in cluster.log_file(name).read_text().splitlines() if name.startswith(WITH_WEIGHTS) else ():
            row: dict[str, Any] = json.loads(line) if line.startswith("{") else {}
            if row.get("event") in found:
                found[row["event"]].append(row["seconds"])
    opened_s, loaded_s = (statistics.median(seconds) for seconds in found.values())
    return Costs(opened_s, loaded_s, loaded_s)


def simulated_s(jobs: Sequence[TraceJob], workers: int, costs: Costs) -> float:
    """The makespan on so many rollout workers and trainers, which hold all four base models."""
    size = PoolSize(workers, device_bases=len(BASES), host_bases=len(BASES))
    found = PoolCluster(Setup("backfill", {0: size}, size._replace(slots=SLOTS), costs, lag=0, sigma=0.0))
    found.run(jobs)
    return max(each.ended_s for each in found.ended)


# ---- what is measured -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Compared:
    own: list[Job]
    pooled: list[Job]
    simulated_s: float

    @property
    def makespan_s(self) -> float:
        return makespan_s(self.pooled)

    @property
    def error(self) -> float:
        """Of the simulated makespan, in percent."""
        return 100 * (self.simulated_s / self.makespan_s - 1)


def makespan_s(jobs: Sequence[Job]) -> float:
    return max(job.seconds for job in jobs)


def worker_s(jobs: Sequence[Job], workers: int) -> float:
    """Seconds of rollout workers and trainers, so many of each, for a step."""
    return 2 * workers * makespan_s(jobs) / sum(job.steps for job in jobs)


def step_s(jobs: Sequence[Job]) -> float:
    return statistics.mean(job.seconds / job.steps for job in jobs)


async def with_tools(steps: int, seconds: float) -> Compared:
    work, bases = workload(CALLS, seconds, batch_size=1, group_size=4, max_tokens=16), BASES * JOBS_A_BASE
    async with cluster(work, 1, services=partial(sleeping, own=True)) as (own_cluster, api):
        own = await ran(api, work, bases, steps, CALLS)
        jobs = await traced(own_cluster.redis_url, own)
    async with cluster(work, POOL, services=partial(sleeping, own=False)) as (pool, api):
        pooled = await ran(api, work, bases, steps, CALLS)
        return Compared(own, pooled, simulated_s(jobs, POOL, costs(pool)))


async def computed(steps: int) -> Compared:
    """With real engines, and without tools."""
    work = workload(0, 0.0, batch_size=4, group_size=8, max_tokens=32)
    async with cluster(work, 1) as (pool, api):
        await ran(api, work, BASES, 1, 0)  # loads them
        alone = [job for base in BASES for job in await ran(api, work, [base], steps, 0)]
        jobs = await traced(pool.redis_url, alone)
        together = await ran(api, work, BASES, steps, 0)
        return Compared(alone, together, simulated_s(jobs, 1, Costs(*3 * [costs(pool).device_s])))


def bases_report(steps: int, tool_s: float, real_steps: int) -> Report:
    tools, real = asyncio.run(with_tools(steps, tool_s)), asyncio.run(computed(real_steps))
    saved = 100 * (1 - worker_s(tools.pooled, POOL) / worker_s(tools.own, len(BASES)))
    slowdown = step_s(tools.pooled) / step_s(tools.own)
    rows = [
        (
            "eight with tools, own workers",
            makespan_s(tools.own),
            step_s(tools.own),
            worker_s(tools.own, len(BASES)),
            None,
        ),
        ("on a pool of 2 + 2", tools.makespan_s, step_s(tools.pooled), worker_s(tools.pooled, POOL), tools.simulated_s),
        (
            "four that compute, on 1 + 1",
            real.makespan_s,
            step_s(real.pooled),
            worker_s(real.pooled, 1),
            real.simulated_s,
        ),
    ]
    head = ("jobs of four base models", "makespan s", "step s", "worker-seconds a step", "simulated s")
    goals = [
        Goal("worker-seconds a step saved by a pool of half as many workers", saved, LEAST_SAVED, " %"),
        Goal("step over that with own workers", slowdown, MOST_SLOWDOWN, " x", more_is_better=False),
        *(
            Goal(
                f"simulated makespan of {what}, off by {each.error:+.1f} %",
                abs(each.error),
                MOST_ERROR,
                " %",
                more_is_better=False,
            )
            for what, each in (("eight jobs with tools", tools), ("four jobs that compute", real))
        ),
    ]
    figures = {"saved": saved, "slowdown": slowdown, "error_tools": tools.error, "error_computed": real.error}
    return Report([make_table("Four base models", head, rows)], figures, goals)
