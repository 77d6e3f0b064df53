"""Measures the memory of each process of a cluster on one machine, idle and while it trains six jobs.

    python -m benchmarks.memory [--steps 12] [--json FILE]

The cluster of `make demo` (Redis, the manager, one rollout, one env, one trainer, and the process that supervises them,
which is this one) trains one job of each skill of the base model at once, default hyperparameters, evaluations included.

PSS is the proportional set size: a page that n processes share counts 1/n in each, so that a sum counts it once. It is that of a
process and its children (the env's sandboxes). `idle` is some seconds after the start; `training` is
the most seen in one look a second. The goal is about the largest sum of all processes' PSS in one look.
"""

import asyncio
import os
from collections.abc import Mapping
from typing import Any

from benchmarks._report import Goal, Report, make_table, run
from common.tasks.skills import SKILLS
from harness.live import running
from harness.processes import Memory, memory, memory_below
from manager_service.launcher.supervisor import LocalCluster

LIMIT_MB = 3000
IDLE_AFTER_S = 3.0
LOOK_EVERY_S = 1.0

Look = Mapping[str, Memory]
"""Process → its memory at one moment."""


def look(cluster: LocalCluster) -> Look:
    children = {name: memory_below(pid) for name, pid in cluster.pids.items()}
    return {**children, "supervisor": memory(os.getpid())}


async def measure(steps: int) -> tuple[Look, list[Look]]:
    """Idle, and every look while it trained."""
    async with running() as (cluster, api):
        await asyncio.sleep(IDLE_AFTER_S)
        idle, busy = look(cluster), list[Look]()
        jobs = [await api.submit(s, max_steps=steps, evaluate=True, batch_size=16, group_size=8) for s in SKILLS]
        training = asyncio.create_task(api.until_done(*jobs, seconds=900))
        while not training.done():
            busy.append(look(cluster))
            await asyncio.wait([training], timeout=LOOK_EVERY_S)
        assert all(job["status"] == "succeeded" for job in await training)
    return idle, busy


def total(found: Look) -> Memory:
    return sum(found.values(), Memory())


def report(given: Any) -> Report:
    idle, busy = asyncio.run(measure(given.steps))
    peak = {name: max((each[name] for each in busy), key=lambda m: m.pss_mb) for name in idle}
    fullest = max(map(total, busy), key=lambda m: m.pss_mb)
    columns = ("process", "idle PSS MB", "training PSS MB")
    lines = [(name, idle[name].pss_mb, peak[name].pss_mb) for name in idle]
    lines.append(("all together, at one moment", total(idle).pss_mb, fullest.pss_mb))
    figures = {name: {"idle_mb": before, "training_mb": most} for name, before, most in lines}
    goal = Goal("all processes together, training", fullest.pss_mb, LIMIT_MB, " MB", more_is_better=False)
    return Report([make_table("Memory", columns, lines)], figures, [goal])


if __name__ == "__main__":
    run(__doc__, report, {"steps": 1}, steps=12)
