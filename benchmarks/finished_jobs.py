"""Measures what finished jobs leave behind in Redis and in the manager, and that each is still answered for.

    python -m benchmarks.finished_jobs [--first 1000] [--last 10000] [--archive_after_s 5] [--json FILE]

A real manager and a real Redis; stand-in workers that compute nothing. Short jobs (one step of two groups of two) come and
go, 64 at a time. Memory is looked at after the first and after the last of them, once the cell is idle and the records of
all jobs have moved to object storage. Then a sample of all jobs is asked for over HTTP by six routes each.
"""

import asyncio
import os
import random
import time
from collections.abc import Mapping
from typing import Any

import httpx
import msgspec

from benchmarks._report import Goal, Report, make_table, run
from benchmarks._scale_cluster import ScaleCluster, running
from common.streams import partition_of
from harness.processes import memory
from harness.standin import create_job, job_spec
from harness.standin_load import working
from manager_service.records import JobSpec

OPEN_JOBS = 64
TENANT = "default"
ASKED = 200
GIVE_UP_S = 1800.0
MAX_GROWTH = 0.1
ROUTES = ("", "/ledger", "/usage", "/samples", "/checkpoints", "/events")


def spec(number: int) -> JobSpec:
    plain = job_spec(f"ftjob-{number:06d}", TENANT, batch_size=2, group_size=2, num_steps=1)
    return msgspec.structs.replace(plain, method={"type": "reinforcement", "reinforcement": {"hyperparameters": {}}})


async def come_and_go(cluster: ScaleCluster, numbers: range) -> None:
    """Runs the jobs, and returns once all of them are in the archive."""
    bus, cell = cluster.bus, cluster.bus.cell
    for number in numbers:
        while number % 8 == 0 and await bus.client.scard(active(cluster)) >= OPEN_JOBS:
            await asyncio.sleep(0.02)
        made, now = spec(number), time.time()
        await bus.client.zadd(cell.tenant_jobs(TENANT), {made.id: now})
        await bus.client.zadd(cell.jobs_all, {made.id: now})
        await create_job(bus, made)
    async with asyncio.timeout(GIVE_UP_S):
        while await bus.client.zcard(cell.jobs_all):
            await asyncio.sleep(0.2)


def active(cluster: ScaleCluster) -> str:
    return cluster.bus.cell.active(partition_of(TENANT))


async def look(cluster: ScaleCluster) -> dict[str, float]:
    """Memory of Redis' data, without the workers' reports of the last hour, which time trims; its keys; the manager's memory."""
    info = await cluster.bus.client.info("memory")
    reports = await cluster.bus.client.memory_usage(cluster.bus.cell.telemetry, samples=0) or 0
    return {
        "redis_kb": (info["used_memory_dataset"] - reports) / 1e3,
        "keys": await cluster.bus.client.dbsize(),
        "manager_mb": memory(cluster.managers[0].pid).rss_mb,
    }


async def wrong_answers(cluster: ScaleCluster, count: int) -> list[str]:
    """Routes of some jobs that do not answer as they should, and jobs that the list lacks."""
    key = (cluster.folder / "api_key").read_text().strip()
    url, headers = f"http://127.0.0.1:{cluster.port}/v1/fine_tuning/jobs", {"Authorization": f"Bearer {key}"}
    wrong: list[str] = []
    async with httpx.AsyncClient(
        base_url=url, headers=headers, trust_env=False, timeout=60, follow_redirects=True
    ) as http:
        for number in random.Random(1).sample(range(count), min(count, ASKED)):
            job = spec(number).id
            answers = [await http.get(f"/{job}{route}") for route in ROUTES]
            wrong += [str(a.url) for a, route in zip(answers, ROUTES, strict=True) if not right(a, job, route)]
        wrong += sorted({spec(number).id for number in range(count)} - await listed(http))
    return wrong


def right(answer: httpx.Response, job: str, route: str) -> bool:
    body: Mapping[str, Any] = answer.json() if answer.status_code == 200 else {}
    expected: dict[str, bool] = {
        "": body.get("status") == "succeeded" and body.get("id") == job,
        "/ledger": body.get("issued") == body.get("trained") == 4,
        "/usage": body.get("trained_tokens") == 10,
        "/samples": len(body.get("data", [])) == 4,
        "/checkpoints": len(body.get("data", [])) == 1,
        "/events": len(body.get("data", [])) == 4,
    }
    return expected[route]


async def listed(http: httpx.AsyncClient) -> set[str]:
    """Ids of all jobs, page by page."""
    found: set[str] = set()
    more, after = True, {}
    while more:
        page = (await http.get("", params={"limit": 100, **after})).raise_for_status().json()
        found |= {job["id"] for job in page["data"]}
        more, after = page["has_more"], {"after": page["last_id"]}
    return found


async def measure(first: int, last: int) -> tuple[list[dict[str, float]], list[str], float]:
    async with running() as cluster:
        await cluster.start_managers(1)
        async with working(cluster.load(delay_s=0.0)):
            await come_and_go(cluster, range(first))
            looks, since = [await look(cluster)], time.monotonic()
            await come_and_go(cluster, range(first, last))
            looks.append(await look(cluster))
            jobs_a_s = (last - first) / (time.monotonic() - since)
        return looks, await wrong_answers(cluster, last), jobs_a_s


def report(given: Any) -> Report:
    os.environ["MARLAAS_ARCHIVE_AFTER_S"] = str(given.archive_after_s)
    (before, after), wrong, jobs_a_s = asyncio.run(measure(given.first, given.last))
    rows = [(name, before[name], after[name], after[name] / before[name]) for name in before]
    table = make_table(
        f"Finished jobs, {jobs_a_s:.0f} a second",
        ("", f"after {given.first:,}", f"after {given.last:,}", "ratio"),
        rows,
    )
    figures = {"before": before, "after": after, "wrong": wrong, "jobs_a_s": jobs_a_s}
    growth = 100 * (after["redis_kb"] / before["redis_kb"] - 1)
    goals = [
        Goal("growth of Redis' data", growth, 100 * MAX_GROWTH, " %", more_is_better=False),
        Goal("wrong answers", float(len(wrong)), 0, "", more_is_better=False),
    ]
    return Report([table], figures, goals)


if __name__ == "__main__":
    run(__doc__, report, first=1000, last=10000, archive_after_s=5)
