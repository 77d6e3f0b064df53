"""Measures the share of a step's wall time that is neither engine nor trainer, with one job and with eight at once.

    python -m benchmarks.step_share [--steps 12] [--json FILE]

A default cluster (one rollout, one env, one trainer worker) and default jobs: the skill `sort`, 16 groups of 8, strict
versions. Measured from the first turn of version 0 to the end of the last step, so every step is in it. Three measures:

    nobody computes     looks at the processes' threads 200 times a second: the share of looks in which no thread that
                        computes, of the rollout worker or the trainer, is running or wants to. It answers the question
                        as it is asked, for any number of jobs, and is the one held against the goal
    nobody holds work   from the workers' timeline: neither of the two has anything in hand. Smaller, because it counts
                        as work what they do beside computing: reading and writing adapters, messages, the store
    the busier waits    from the engine's and the trainer's own stopwatches (`rollout_s`, `train_s` of /v1/usage). With
                        one job the two take turns: 1 - (rollout_s + train_s) / wall, which should be near the first
                        measure. With several, 1 - max(rollout_s, train_s) / wall: how far the bottleneck is from never
                        waiting, for its core too

All is wall time: on a machine with fewer free cores than busy processes, the manager, the env and Redis take theirs from
the engine and the trainer. The second table says how busy each process was.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks._report import Goal, Report, make_table, run
from harness.live import Api, running
from harness.processes import computes, cpu_s
from manager_service.local.supervisor import LocalCluster

GOALS = {1: 0.20, 8: 0.10}
"""Number of jobs → share at most."""
COMPUTING = ("rollout", "trainer")
LOOK_EVERY_S = 0.005

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Shares:
    jobs: int
    wall_s: float
    step_s: float
    """Wall time over steps of all jobs."""
    not_computing: float
    """Share in which neither computes."""
    held: float
    """Share in which neither holds work."""
    waits: float
    """Share in which the busier of the two does not compute."""
    rollout: float
    """Engine seconds over wall time; so for the trainer."""
    train: float
    cpu: dict[str, float]
    """Processor seconds of each process over wall time."""


async def measure(num_jobs: int, steps: int) -> Shares:
    async with running() as (cluster, api):
        before = processor_s(cluster)
        looks = Looks([cluster.pids["rollout-0"], cluster.pids["trainer-0"]])
        async with looks.taken():
            same: dict[str, Any] = {"max_steps": steps, "batch_size": 16, "group_size": 8}
            jobs = [await api.submit("sort", seed=n, **same) for n in range(num_jobs)]
            ended = await api.until_done(*jobs, seconds=600)
        assert all(job["status"] == "succeeded" for job in ended), ended
        after = processor_s(cluster)
        await asyncio.sleep(2.5)  # the last report of each worker
        spans = (await Api(cluster.base_url, cluster.admin_key).get("/cluster/timeline"))["data"]
        usage = (await api.get("/usage"))["total"]
    used_s = {name: after[name] - before[name] for name in after}
    return shares(num_jobs, steps, spans, usage, looks, used_s)


def shares(
    num_jobs: int, steps: int, spans: Sequence[Any], usage: Any, looks: "Looks", used_s: dict[str, float]
) -> Shares:
    busy = {service: [(s["start"], s["end"]) for s in spans if s["service"] == service] for service in COMPUTING}
    start, end = min(s for s, _ in busy["rollout"]), max(e for _, e in busy["trainer"])
    wall_s = end - start
    held_s = covered_s([(max(s, start), e) for each in busy.values() for s, e in each if e > start])
    rollout, train = usage["rollout_s"] / wall_s, usage["train_s"] / wall_s
    return Shares(
        jobs=num_jobs,
        wall_s=wall_s,
        step_s=wall_s / (steps * num_jobs),
        not_computing=looks.idle_share(start, end),
        held=1 - held_s / wall_s,
        waits=1 - (rollout + train if num_jobs == 1 else max(rollout, train)),
        rollout=rollout,
        train=train,
        cpu={name: seconds / wall_s for name, seconds in used_s.items()},
    )


@dataclass
class Looks:
    """Tells at many moments whether a computing thread of these processes ran, or waited for a core."""

    pids: Sequence[int]
    _found: list[tuple[float, bool]] = field(default_factory=list)

    @contextlib.asynccontextmanager
    async def taken(self) -> AsyncGenerator[None]:
        """Takes looks while the context is open."""
        task = asyncio.create_task(self._look())
        try:
            yield
        finally:
            task.cancel()

    def idle_share(self, start: float, end: float) -> float:
        found = [busy for at, busy in self._found if start <= at <= end]
        return found.count(False) / len(found)

    async def _look(self) -> None:
        while True:
            self._found.append((time.time(), any(map(computes, self.pids))))
            await asyncio.sleep(LOOK_EVERY_S)


def covered_s(intervals: Iterable[Interval]) -> float:
    """Length of their union."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def processor_s(cluster: LocalCluster) -> dict[str, float]:
    return {name: cpu_s(pid) for name, pid in cluster.pids.items()}


def report(given: Any) -> Report:
    found = [asyncio.run(measure(num_jobs, given.steps)) for num_jobs in GOALS]
    columns = ("jobs", "s a step", "nobody computes", "nobody holds work", "the busier waits", "engine", "trainer")
    lines = [
        (str(f.jobs), f.step_s, *map(percent, (f.not_computing, f.held, f.waits, f.rollout, f.train))) for f in found
    ]
    processes = make_table(
        "Processor seconds a second", ("jobs", *found[0].cpu), [(str(f.jobs), *f.cpu.values()) for f in found]
    )
    goals = [
        Goal(f"neither computes, {f.jobs} jobs", 100 * f.not_computing, 100 * GOALS[f.jobs], " %", more_is_better=False)
        for f in found
    ]
    tables = [make_table("Shares of the wall time", columns, lines), processes]
    return Report(tables, [asdict(f) for f in found], goals)


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


if __name__ == "__main__":
    run(__doc__, report, steps=12)
