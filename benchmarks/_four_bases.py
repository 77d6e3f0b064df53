"""Jobs of four base models on one pool, against workers of their own, and against what the simulator of pools says.

Eight jobs that wait for tools, two of each base model, run on a rollout worker and a trainer of each base model, then on two and two for
all. Manager, Redis, env worker, pool workers, handlers and adapters are real; tokens and steps are slept (`_sleeping_service`). Tools
take so long that a base model's own rollout worker idles for 81 % of the time, as PlexRL's trainers of 235B do. `simulator.pool` predicts
the second run from the first one's reports.

With real engines two cores are too few for eight workers: each of four jobs runs by itself on one pool of one and one, then all do.
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

from benchmarks._report import Goal, Report, at_most, make_table
from benchmarks._sleeping_service import SERVICE
from benchmarks.paper.agentic import LATENCY_S, SlowTool
from benchmarks.paper.workloads import Workload
from common.bus.bus import Bus
from common.bus.streams import Cell
from common.pool.pool_worker import LOOK_S
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
LEAST_SAVED, MOST_SLOWDOWN, MOST_ERROR = 37.58, 1.1, 15
"""Percent of GPU-hours that PlexRL saves; times the step of own workers; percent of the makespan."""
ENTRY_POINTS = {"slow_tool": f"{SlowTool.__module__}:{SlowTool.__name__}"}


@dataclass(frozen=True, slots=True)
class Job:
    """A job that has run, in so many seconds from the first one's submission."""

    base: str
    id: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Jobs:
    """The work of each job."""

    steps: int
    calls: int
    tool_s: float
    hyper: Mapping[str, int]

    @property
    def work(self) -> Workload:
        args = {"calls": self.calls, "times": self.tool_s / LATENCY_S}
        method = {"environment": {"name": "slow_tool", "args": args}}
        return Workload(name="", skill=None, method=method, hyper=self.hyper, entry_points=ENTRY_POINTS)

    async def run(self, api: Api, bases: Sequence[str], steps: int = 0) -> list[Job]:
        """Runs one of each of the base models, all at once."""
        bodies = [{**self.work.body(n, None, steps or self.steps), "model": base} for n, base in enumerate(bases)]
        since_s = time.monotonic()
        jobs = [job["id"] for job in await asyncio.gather(*(api.post("/fine_tuning/jobs", body) for body in bodies))]

        async def ended(job: str, base: str) -> Job:
            (done,) = await api.until_done(job, seconds=1200)
            assert done["status"] == "succeeded", done["error"]
            return Job(base, job, time.monotonic() - since_s)

        return list(await asyncio.gather(*map(ended, jobs, bases)))


@asynccontextmanager
async def cluster(jobs: Jobs, num: int, **options: Any) -> AsyncGenerator[tuple[LocalCluster, Api]]:
    """A cluster of the four base models, with so many rollout workers and trainers."""
    served = ",".join(f"{base}={TINY}" for base in BASES)
    settings = {"MARLAAS_BASE_MODELS": served, "MARLAAS_POOL_BYTES": "16GB", "MARLAAS_ROLLOUT_SLOTS": str(SLOTS)}
    with tempfile.TemporaryDirectory() as folder:
        environment = jobs.work.prepare(Path(folder)) | settings
        async with running(environment=environment, rollout=num, trainer=num, **options) as found:
            yield found


def sleeping(counts: Mapping[str, int], environment: Mapping[str, str], *, own: bool) -> list[ServiceCommand]:
    """Workers that sleep; `own`: one of each base model, else those that serve all."""
    found = list[ServiceCommand]()
    for command in service_commands(counts, environment):
        if (service := command.name.partition("-")[0]) in WITH_WEIGHTS:
            argv = (sys.executable, "-m", "benchmarks._sleeping_service")
            for base in BASES if own else ("",):
                variables = {**command.environment, "MARLAAS_BASE_MODEL": base, SERVICE: service}
                found.append(replace(command, name=f"{command.name}{base}", argv=argv, environment=variables))
        else:
            found.append(command)
    return found


# ---- the simulator --------------------------------------------------------------------------------------------------


async def traced(url: str, jobs: Jobs, job: Job) -> TraceJob:
    """A job as the simulator takes it: what workers took, by their reports; the rest of its time is its tools'."""
    bus = Bus.connect(url, Cell(job.base))
    entries = await bus.follow(bus.cell.telemetry, "0", block_ms=None, count=100_000)
    await bus.close()
    spans = [span for _, report in entries if isinstance(report, WorkerReport) for span in report.spans]

    def step_s(service: str) -> float:
        own = merged([span for span in spans if span.job == job.id and span.phase == service], gap_s=0.0)
        return sum(span.end_s - span.start_s for span in own) / jobs.steps

    rollout_s, train_s = map(step_s, WITH_WEIGHTS)
    tool_s = max(0.0, job.seconds / jobs.steps - rollout_s - train_s)
    about: dict[str, Any] = {"at_s": 0.0, "tenant": "t", "base": job.base, "shape": JobShape(1, 1), "steps": jobs.steps}
    return TraceJob(**about, rollout_s=rollout_s, train_s=train_s, tool_s=tool_s, turns=jobs.calls + 1)


def switch_s(cluster: LocalCluster) -> float:
    """The median of switches by the logs of pool workers, and the time until they look."""
    files = [cluster.log_file(name) for name in cluster.pids if name.startswith(WITH_WEIGHTS)]
    lines = [line for file in files for line in file.read_text().splitlines() if '"event": "opened"' in line]
    return LOOK_S / 2 + statistics.median(json.loads(line)["seconds"] for line in lines)


def simulated_s(jobs: Sequence[TraceJob], workers: int, opening_s: float) -> float:
    """The makespan on so many rollout workers and trainers, which have all four base models in memory."""
    size, costs = PoolSize(workers, device_bases=len(BASES), host_bases=len(BASES)), Costs(*3 * [opening_s])
    found = PoolCluster(Setup("backfill", {0: size}, size._replace(slots=SLOTS), costs, lag=0, sigma=0.0))
    found.run(jobs)
    return max(each.ended_s for each in found.ended)


# ---- what is measured -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Run:
    """Jobs that ran at once on so many rollout workers and trainers."""

    jobs: list[Job]
    steps: int
    workers: int
    simulated_s: float | None = None

    @property
    def makespan_s(self) -> float:
        return max(job.seconds for job in self.jobs)

    @property
    def worker_s(self) -> float:
        return 2 * self.workers * self.makespan_s / (self.steps * len(self.jobs))

    @property
    def step_s(self) -> float:
        return statistics.mean(job.seconds for job in self.jobs) / self.steps

    @property
    def error(self) -> float:
        """The part by which the simulated makespan is off, in percent."""
        return 100 * ((self.simulated_s or 0.0) / self.makespan_s - 1)

    def row(self, name: str) -> tuple[Any, ...]:
        return name, self.makespan_s, self.step_s, self.worker_s, self.simulated_s


async def with_tools() -> tuple[Run, Run]:
    """On own workers, and on a pool of half as many."""
    jobs = Jobs(6, 2, 4.0, {"batch_size": 1, "group_size": 4, "max_tokens": 16})
    bases = BASES * JOBS_A_BASE
    async with cluster(jobs, 1, services=partial(sleeping, own=True)) as (started, api):
        own = await jobs.run(api, bases)
        known = [await traced(started.redis_url, jobs, job) for job in own]
    async with cluster(jobs, POOL, services=partial(sleeping, own=False)) as (started, api):
        await jobs.run(api, BASES, 1)  # loads them
        pooled = await jobs.run(api, bases)
        simulated = simulated_s(known, POOL, switch_s(started))
    return Run(own, jobs.steps, len(BASES)), Run(pooled, jobs.steps, POOL, simulated)


async def computed() -> Run:
    """With real engines."""
    jobs = Jobs(10, 0, 0.0, {"batch_size": 4, "group_size": 8, "max_tokens": 32})
    async with cluster(jobs, 1) as (started, api):
        await jobs.run(api, BASES, 1)  # loads them
        alone = [job for base in BASES for job in await jobs.run(api, [base])]
        known = [await traced(started.redis_url, jobs, job) for job in alone]
        return Run(await jobs.run(api, BASES), jobs.steps, 1, simulated_s(known, 1, switch_s(started)))


def bases_report(_: Any) -> Report:
    (own, pooled), real = asyncio.run(with_tools()), asyncio.run(computed())
    names = ("eight with tools, 4 + 4", "on a pool, 2 + 2", "four that compute, 1 + 1")
    saved, slowdown = 100 * (1 - pooled.worker_s / own.worker_s), pooled.step_s / own.step_s
    goals = [
        Goal("worker-seconds a step saved by half as many workers", saved, LEAST_SAVED, " %"),
        at_most("step over that of own workers", slowdown, MOST_SLOWDOWN, " x"),
        error_goal("eight with tools", pooled),
        error_goal("four that compute", real),
    ]
    head = ("jobs of four base models", "makespan s", "step s", "worker-seconds a step", "simulated s")
    figures = {"saved": saved, "slowdown": slowdown, "error_tools": pooled.error, "error_computed": real.error}
    return Report([make_table("Four base models", head, map(Run.row, (own, pooled, real), names))], figures, goals)


def error_goal(what: str, run: Run) -> Goal:
    told = f"makespan, simulated over measured, of {what}: {run.error:+.0f} %"
    return at_most(told, abs(run.error), MOST_ERROR, " %")
