"""Measures how much longer a tenant's small steps take beside another tenant's large ones, through the unmodified `tinker` SDK.

    make tinker                                                   # once: installs the SDK in .tinker
    python -m benchmarks.small_beside_large [--steps 40] [--rounds 2] [--json FILE]

Two tenants of one weight. A step of the first samples 2 times 4 answers of 16 tokens and trains on 496 tokens; one of the second trains on
45,056, and its next step is sent before the last has ended. The first alone and beside the second, in turn, on one service.
"""

import asyncio
import json
import os
import statistics
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks._report import Goal, Report, make_table, run
from harness.live import Api, running

PYTHON, CLIENT = Path(".tinker/bin/python"), Path(__file__).with_name("_tinker_small_and_large.py")
UNCOUNTED = 3
TIMES_ALONE = 2.0


@dataclass(frozen=True, slots=True)
class Figures:
    """Milliseconds of the small steps, and how many of the large ones ended meanwhile."""

    beside: str
    p50_ms: float
    p95_ms: float
    sample_p95_ms: float
    train_p95_ms: float
    large_steps: int


async def client(api: Api, *words: str) -> asyncio.subprocess.Process:
    own = {"TINKER_BASE_URL": api.base_url, "TINKER_API_KEY": f"tml-{api.key}", "TINKER_TELEMETRY": "0"}
    return await asyncio.create_subprocess_exec(
        str(PYTHON), str(CLIENT), *words, env={**os.environ, **own}, stdout=asyncio.subprocess.PIPE
    )


@asynccontextmanager
async def training(api: Api) -> AsyncGenerator[list[bytes]]:
    """Large steps, of which the first has ended. The list grows by a line a step."""
    process = await client(api, "large")
    assert process.stdout is not None
    told = [await process.stdout.readline()]
    reading = asyncio.create_task(read(process.stdout, told))
    try:
        yield told
        if process.returncode is not None:
            raise SystemExit(f"error: the large client ended with {process.returncode}")
    finally:
        reading.cancel()
        if process.returncode is None:
            process.kill()
        await process.wait()


async def read(stream: asyncio.StreamReader, told: list[bytes]) -> None:
    async for line in stream:
        told.append(line)


async def small_steps(api: Api, steps: int) -> list[list[float]]:
    process = await client(api, "small", str(steps), str(UNCOUNTED))
    out, _ = await process.communicate()
    if process.returncode:
        raise SystemExit(f"error: the small client ended with {process.returncode}")
    return json.loads(out.splitlines()[-1])


async def measure(steps: int, rounds: int) -> list[Figures]:
    alone, beside, large_steps = list[list[float]](), list[list[float]](), 0
    async with running() as (cluster, _):
        admin = Api(cluster.base_url, cluster.admin_key)
        small, large = [await admin.tenant(name) for name in ("small", "large")]
        for _ in range(rounds):
            alone += await small_steps(small, steps)
            async with training(large) as told:
                beside += await small_steps(small, steps)
                large_steps += len(told)
        for api in (admin, small, large):
            await api.close()
    return [figures("nobody", alone, 0), figures("large steps", beside, large_steps)]


def figures(beside: str, told: list[list[float]], large_steps: int) -> Figures:
    whole, sample, train = (
        [1000 * (step[end] - step[begin]) for step in told] for begin, end in ((0, 2), (0, 1), (1, 2))
    )
    return Figures(beside, statistics.median(whole), p95(whole), p95(sample), p95(train), large_steps)


def p95(values: list[float]) -> float:
    return sorted(values)[min(len(values) - 1, round(0.95 * len(values)))]


def report(given: Any) -> Report:
    if not PYTHON.exists():
        raise SystemExit("error: the tinker SDK is not installed: make tinker")
    alone, beside = found = asyncio.run(measure(given.steps, given.rounds))
    columns = ("beside", "p50 ms", "p95 ms", "sample p95 ms", "train p95 ms", "large steps")
    table = make_table("Small steps", columns, [tuple(asdict(each).values()) for each in found])
    times = beside.p95_ms / alone.p95_ms
    goal = Goal("p95 of a step beside large ones, times that alone", times, TIMES_ALONE, more_is_better=False)
    return Report([table], [asdict(each) for each in found], [goal])


if __name__ == "__main__":
    run(__doc__, report, steps=40, rounds=2)
