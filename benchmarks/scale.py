"""Measures how much one manager can do, and the effect of thousands of jobs, several managers and many rollout workers.

    python -m benchmarks.scale [--quick] [--seconds 5] [--json FILE]

Real manager processes (`python -m manager_service`), a real Redis with the settings of `marlaas up`, the real bus and
worker loops; env, rollout and trainer workers are simulated: they answer after a delay and compute nothing, all in one
process of their own. Those for environments and rollouts do without the worker loop, which costs more than what is
measured, and say the same to Redis, byte for byte (`harness/light`). Steps of 16 groups of 8, trajectories of 64 tokens,
one turn each, ten jobs a tenant and at least ten tenants; the jobs never end. 10 and 1,000 jobs, 1 and 2 managers, 1 to
16 rollout workers; quick: 10 and 50 jobs, 1 manager, 2 workers. Of three windows of each measurement the one counts that
other work on the machine disturbed least, and the table says how much of the time managers and Redis waited for a core.

    jobs       with workers faster than the rest: trajectories a second, of wall time and of the managers' processor
               time (what one core does if it has nothing else to do); then at half of 5,000 a second: how long a message
               takes from its publication to having been read, by workers and by owners
    managers   the same with 1,000 jobs and several managers
    workers    rollout workers of 64 slots and 1 s a trajectory, so that they and nothing else are the limit
    reports    as fast as it goes with 1,000 jobs, beside 10 and 1,000 more rollout workers that report and take nothing
"""

import asyncio
import contextlib
import statistics
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from benchmarks._report import Goal, Report, console, make_table, parsed, parser, show
from benchmarks._scale_cluster import Moment, ScaleCluster, running
from harness.standin_load import Seen, Workers, working

FAST: dict[str, Any] = {"rollout": 8, "rollout_slots": 512, "delay_s": 0.25}
"""16,384 trajectories a second, more than two cores can pass around."""
IDLE = (10, 1000)
"""Rollout workers that report and take nothing."""
GOAL_RATE, WALL_RATE = 5000.0, 8000.0
HALF: dict[str, Any] = {"rollout": 4, "rollout_slots": 512, "delay_s": 4 * 512 / (GOAL_RATE / 2)}
FULL = ((10, 1000), (1, 2), (1, 4, 16))
QUICK = ((10, 50), (1,), (1, 2))
"""Numbers of jobs, of managers, of rollout workers."""
SETTLE = 0.8
"""Part of a window that passes before the first."""
WINDOWS = 3
LOOK_EVERY_S = 0.5
LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one window of time."""

    jobs: int
    managers: int
    rate: float  # trajectories a second
    manager_us: float  # processor time of all managers, of Redis, of the workers, per trajectory
    redis_us: float
    workers_us: float
    manager_cores: float  # busy
    waited: float  # of the time in which managers and Redis could have run: something else had the core
    manager_mb: float  # of the largest
    redis_mb: float
    worker_handover_ms: tuple[float, float]  # median, 99th percentile
    owner_handover_ms: tuple[float, float]

    @property
    def per_core(self) -> float:
        """Trajectories for one second of a manager's processor time."""
        return 1e6 / self.manager_us


async def measure(
    cluster: ScaleCluster, workers: Workers, seconds: float, worse: Callable[[Figures], float]
) -> Figures:
    """Figures of the window, of several, that other work disturbed least."""
    await asyncio.sleep(SETTLE * seconds)
    return min([await window(cluster, workers, seconds) for _ in range(WINDOWS)], key=worse)


def cost(f: Figures) -> float:
    return f.manager_us


def delay(f: Figures) -> float:
    return f.owner_handover_ms[1]


async def window(cluster: ScaleCluster, workers: Workers, seconds: float) -> Figures:
    await workers.seen()
    before, owner_ms = await cluster.moment(), list[float]()
    async with asyncio.timeout(LIMIT_S + 10 * seconds):
        for _ in range(int(seconds / LOOK_EVERY_S)):
            await asyncio.sleep(LOOK_EVERY_S)
            owner_ms += await cluster.owner_handover_ms()
    seen, after = await workers.seen(), await cluster.moment()
    return figures(cluster, before, after, seen, owner_ms)


def figures(cluster: ScaleCluster, before: Moment, after: Moment, seen: Seen, owner_ms: Sequence[float]) -> Figures:
    wall_s, num = after.at_s - before.at_s, max(1, seen.trajectories)
    managers_s = sum(b.cpu_s - a.cpu_s for a, b in zip(before.managers, after.managers, strict=True))
    both = list(zip((*before.managers, before.redis), (*after.managers, after.redis), strict=True))
    ran_s, waited_s = sum(b.ran_s - a.ran_s for a, b in both), sum(b.waited_s - a.waited_s for a, b in both)
    return Figures(
        jobs=len(cluster.jobs),
        managers=len(cluster.managers),
        rate=num / wall_s,
        manager_us=1e6 * managers_s / num,
        redis_us=1e6 * (after.redis.cpu_s - before.redis.cpu_s) / num,
        workers_us=1e6 * seen.cpu_s / num,
        manager_cores=managers_s / wall_s,
        waited=waited_s / (ran_s + waited_s),
        manager_mb=max(manager.memory_mb for manager in after.managers),
        redis_mb=after.redis.memory_mb,
        worker_handover_ms=quantiles(seen.handover_ms),
        owner_handover_ms=quantiles(owner_ms),
    )


def quantiles(values: Sequence[float]) -> tuple[float, float]:
    """Median and 99th percentile; not a number if there are none."""
    if len(values) < 2:
        return float("nan"), float("nan")
    return statistics.median(values), statistics.quantiles(values, n=100)[98]


# ---- what is measured -----------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def started(num_jobs: int, num_managers: int = 1) -> AsyncGenerator[ScaleCluster]:
    """Starts a cluster with jobs that have their first version, and for which nobody works now."""
    async with running() as cluster:
        await cluster.start_managers(num_managers)
        async with working(cluster.load(**FAST)):
            await cluster.create_jobs(num_jobs)
        yield cluster


async def with_jobs(num_jobs: int, num_managers: int, seconds: float) -> tuple[Figures, Figures]:
    """Figures at full speed, and at half of the goal's rate."""
    async with started(num_jobs, num_managers) as cluster:
        async with working(cluster.load(**FAST)) as workers:
            fast = await measure(cluster, workers, seconds, cost)
        async with working(cluster.load(**HALF)) as workers:
            return fast, await measure(cluster, workers, seconds, delay)


async def with_rollout_workers(numbers: Sequence[int], seconds: float) -> dict[int, Figures]:
    found: dict[int, Figures] = {}
    async with started(200) as cluster:
        for number in numbers:
            async with working(cluster.load(rollout=number, rollout_slots=64, delay_s=1.0)) as workers:
                await asyncio.sleep(4)  # until what the workers before gave back is done, and reports are heard
                found[number] = await measure(cluster, workers, seconds, lambda f: -f.rate)
    return found


async def with_idle_workers(num_jobs: int, seconds: float) -> dict[int, Figures]:
    found: dict[int, Figures] = {}
    async with started(num_jobs) as cluster:
        for number in IDLE:
            async with working(cluster.load(**FAST, idle=number)) as workers:
                found[number] = await measure(cluster, workers, seconds, cost)
    return found


# ---- what is shown --------------------------------------------------------------------------------------------------

COLUMNS: Mapping[str, Callable[[Figures], float]] = {
    "trajectories/s": lambda f: f.rate,
    "per manager CPU s": lambda f: f.per_core,
    "manager µs": lambda f: f.manager_us,
    "Redis µs": lambda f: f.redis_us,
    "workers µs": lambda f: f.workers_us,
    "cores": lambda f: f.manager_cores,
    "waited": lambda f: f.waited,
    "manager MB": lambda f: f.manager_mb,
    "Redis MB": lambda f: f.redis_mb,
}


def row(name: str, f: Figures) -> tuple[str, *tuple[float, ...]]:
    return (name, *(value(f) for value in COLUMNS.values()))


def handovers(name: str, f: Figures) -> tuple[str, *tuple[float, ...]]:
    return (name, f.rate, *f.worker_handover_ms, *f.owner_handover_ms, f.waited)


async def every(given: Any) -> Report:
    job_numbers, manager_numbers, worker_numbers = QUICK if given.quick else FULL
    few, most = job_numbers
    cases = [(few, 1), *((most, number) for number in manager_numbers)]
    found = {case: await _said(case, with_jobs(*case, given.seconds)) for case in cases}
    scaling = await _said("rollout workers", with_rollout_workers(worker_numbers, given.seconds))
    idle = await _said("idle rollout workers", with_idle_workers(most, given.seconds))
    names = {case: f"{case[0]} jobs, {case[1]} managers" for case in cases}
    fast = [row(names[case], figures) for case, (figures, _) in found.items()]
    fast += [row(f"{most} jobs, {number} idle workers", figures) for number, figures in idle.items()]
    workers = [(str(n), f.rate, f.rate / (64 * n), f.manager_cores, f.waited) for n, f in scaling.items()]
    shown = [
        make_table("As fast as it goes", ("", *COLUMNS), fast),
        make_table(
            "Hand-overs at half of 5,000/s, ms from being published to having been read",
            ("", "trajectories/s", "workers: median", "99 %", "owners: median", "99 %", "waited"),
            [handovers(names[case], half) for case, (_, half) in found.items()],
        ),
        make_table(
            "Rollout workers of 64 slots, 1 s a trajectory, 200 jobs",
            ("workers", "trajectories/s", "of what they can do", "manager cores", "waited"),
            workers,
        ),
    ]
    data = {
        "jobs": {names[case]: {"fast": fast, "half": half} for case, (fast, half) in found.items()},
        "workers": {str(n): f for n, f in scaling.items()},
        "idle": {str(n): f for n, f in idle.items()},
    }
    most_found: tuple[Figures, Figures] = found[most, 1]
    growth = most_found[0].manager_us / found[few, 1][0].manager_us
    grown = Goal("a trajectory's cost to the manager, most jobs against 10", growth, 1.3, " x", more_is_better=False)
    return Report(shown, msgspec.to_builtins(data), [*goals(*most_found, scaling, idle), grown])


async def _said(name: object, run: Awaitable[Any]) -> Any:
    found = await run
    console.print(str(name), found)
    return found


def goals(fast: Figures, half: Figures, scaling: Mapping[int, Figures], idle: Mapping[int, Figures]) -> list[Goal]:
    linear = scaling[max(scaling)].rate / (max(scaling) * scaling[1].rate)
    few, many = (idle[number].manager_us for number in IDLE)
    handovers_ms = {"a worker": half.worker_handover_ms[1], "the owner": half.owner_handover_ms[1]}
    beside = "a trajectory's cost to the manager beside 1,000 workers against 10"
    return [
        Goal("trajectories a second", fast.rate, WALL_RATE),
        Goal(beside, many / few, 1.3, " x", more_is_better=False),
        Goal(f"1 to {max(scaling)} rollout workers, of linear", linear, 0.9, " x"),
        Goal("trajectories for a second of the manager's processor time", fast.per_core, GOAL_RATE),
        *(Goal(f"hand-over to {who}, 99 %", ms, 50, " ms", more_is_better=False) for who, ms in handovers_ms.items()),
    ]


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("--seconds", type=float, default=5.0, help="of each window of measurement; default 5")
    asked = parsed(options, {"seconds": 1.0})
    show(asyncio.run(every(asked)), asked.json)
