"""A rollout worker's start with a base model from object storage, and its next one on the same machine: the part of `benchmarks.elastic`
about bases.

The store is an S3 server behind a proxy that lets STORE_BYTES_PER_S pass. Each start is a process of the service; its first report
says the seconds of each phase. Imports are left out of the bar: they are the same both times.
"""

import asyncio
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path

import msgspec

from benchmarks._report import Goal, Report, make_table
from common.bus.bus import Bus
from common.bus.streams import Cell
from common.store.bases import push_base
from common.store.objects import Objects
from common.wire.messages import WorkerReport
from common.worker.service import PHASES
from harness.bases import make_random_base
from harness.proxy import Proxy
from harness.redis_server import embedded_redis
from harness.s3_server import BUCKET, S3Server, environment

CELL = Cell("bench")
STORE_BYTES_PER_S = 80_000_000
STORE = f"s3://{BUCKET}/bases"
WIDTH, FFN = 768, 3072
LAYER_BYTES = 2 * (4 * WIDTH * WIDTH + 3 * WIDTH * FFN)
TRIES = 2
"""Starts of either kind; the fastest counts, for a machine may be busy."""


class Start(msgspec.Struct, frozen=True):
    whole_s: float  # from the process's begin until it takes turns
    phases: dict[str, float]

    @property
    def base_s(self) -> float:
        return sum(seconds for phase, seconds in self.phases.items() if phase != "import")


async def started(redis_url: str, variables: Mapping[str, str]) -> Start:
    bus, since_s = Bus.connect(redis_url, CELL), time.monotonic()
    worker = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rollout_service", env={**os.environ, **variables}
    )
    try:
        async with asyncio.timeout(600):
            while True:
                for _, report in await bus.follow(CELL.telemetry, "0", block_ms=None):
                    if isinstance(report, WorkerReport) and report.pid == worker.pid and report.state == "idle":
                        seconds = {phase: report.counters[f"start_{phase}_s"] for phase in PHASES}
                        return Start(time.monotonic() - since_s, seconds)
                if worker.returncode is not None:
                    raise EOFError("the worker ended")
                await asyncio.sleep(0.05)
    finally:
        if worker.returncode is None:
            worker.kill()
        await worker.wait()
        await bus.close()


def make_base(folder: Path, num_bytes: int) -> Path:
    """Makes one whose weights are of about this size."""
    layers = max(1, num_bytes // LAYER_BYTES)
    sizes = {
        "hidden_size": WIDTH,
        "intermediate_size": FFN,
        "num_hidden_layers": layers,
        "max_position_embeddings": 512,
        "vocab_size": max(1024, (num_bytes - layers * LAYER_BYTES) // (2 * WIDTH)),
    }
    heads = {"num_attention_heads": 12, "num_key_value_heads": 12, "head_dim": 64}
    return make_random_base(folder, last_word=300, **sizes, **heads)


@contextlib.asynccontextmanager
async def slow_store(folder: Path, num_bytes: int) -> AsyncGenerator[tuple[str, dict[str, str]]]:
    """A store with a base model of so many bytes: where it is, and the variables by which services find it. `folder`: for the base."""
    base = await asyncio.to_thread(make_base, folder / "base", num_bytes)
    server = S3Server.start()
    proxy = Proxy(server.port, bytes_per_s=STORE_BYTES_PER_S)
    await proxy.open()
    os.environ |= environment(server.endpoint)
    try:
        where = await push_base(Objects.open(STORE), "bench", base, lambda _: None)
        yield where, environment(proxy.endpoint) | {"MARLAAS_STORE_URL": STORE}
    finally:
        await proxy.shut()
        server.stop()


async def measure(folder: Path, num_bytes: int) -> tuple[Start, Start]:
    """The fastest start from the store, and from the node folder."""
    starts = list[tuple[Start, Start]]()
    async with slow_store(folder, num_bytes) as (where, store):
        with embedded_redis() as redis:
            for number in range(TRIES):
                variables = store | {
                    "MARLAAS_REDIS_URL": redis.url,
                    "MARLAAS_BASE_MODELS": f"bench={where}",
                    "MARLAAS_CACHE_DIR": str(folder / str(number)),
                    "MARLAAS_ROLLOUT_KV_BYTES": "100MB",
                    "MARLAAS_ROLLOUT_SLOTS": "4",
                }
                starts.append((await started(redis.url, variables), await started(redis.url, variables)))
    first, second = zip(*starts, strict=True)
    return min(first, key=lambda each: each.base_s), min(second, key=lambda each: each.base_s)


def bases_report(num_bytes: int) -> Report:
    with tempfile.TemporaryDirectory() as folder:
        first, second = asyncio.run(measure(Path(folder), num_bytes))
    rows = [
        *((f"{phase}, s", first.phases[phase], second.phases[phase]) for phase in PHASES),
        ("until it takes turns, s", first.whole_s, second.whole_s),
    ]
    table = make_table(
        f"A start with a base model of {num_bytes / 1e6:.0f} MB", ("", "from the store", "the next one"), rows
    )
    goal = Goal(
        "a node's next start against the store", second.base_s / first.base_s, 1 / 3, " x", more_is_better=False
    )
    figures = {"first": msgspec.structs.asdict(first), "second": msgspec.structs.asdict(second)}
    return Report([table], {"bases": figures}, [goal])
