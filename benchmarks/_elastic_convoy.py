"""The first token of workers that load one base model at the same time, alone and as a convoy: the part of `benchmarks.elastic` about
executing while loading.

    python -m benchmarks.elastic --parts convoy

Each worker reads the store through a link of its own, of BYTES_PER_S, and sends as much to the others. Turns wait before they
start. Measured is the time until the first turn of TOKENS tokens is answered: of a convoy from when its last worker's imports have
ended, else from when the first's have. Processes yield to each other on a machine of few cores, so their imports end apart. The load is
what the quickest of the workers that are each by itself says that its fetch, its check and its load took.
"""

import asyncio
import contextlib
import os
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from benchmarks._elastic_bases import CELL, settings, slow_store
from benchmarks._report import Report, at_most, make_table
from benchmarks.rollout import request
from common.bus.bus import Bus
from common.bus.streams import GROUP_ROLLOUT
from common.wire.messages import BASE, WorkerReport
from common.worker.service import PHASES
from harness.proxy import Proxy
from harness.redis_server import embedded_redis
from harness.s3_server import S3Server, environment

TOKENS, BYTES_PER_S = 8, 5_000_000


class First(msgspec.Struct, frozen=True):
    token_s: float  # until the first answer
    whole_s: float  # until the first worker takes turns with the whole base model
    load_s: float  # of the quickest worker, without its imports


async def measure(folder: Path, where: str, server: S3Server, num: int, *, convoys: int) -> First:
    async with contextlib.AsyncExitStack() as stack:
        redis = stack.enter_context(embedded_redis())
        bus, workers, begun_s = Bus.connect(redis.url, CELL), list[asyncio.subprocess.Process](), time.time()
        stack.push_async_callback(bus.close)
        await bus.ensure_group(CELL.rollout, GROUP_ROLLOUT)
        await bus.publish([(CELL.rollout, request(BASE, list(range(97, 113)), n, TOKENS)) for n in range(num)])
        for number in range(num):
            proxy = Proxy(server.port, bytes_per_s=BYTES_PER_S)
            await proxy.open()
            stack.push_async_callback(proxy.shut)
            variables = settings(redis.url, where, folder / f"{convoys}-{number}") | environment(proxy.endpoint)
            variables |= {"MARLAAS_CONVOYS": str(convoys), "MARLAAS_PEER_BYTES_PER_S": str(BYTES_PER_S)}
            command = (sys.executable, "-m", "rollout_service")
            workers.append(await asyncio.create_subprocess_exec(*command, env={**os.environ, **variables}))
            stack.push_async_callback(workers[-1].wait)
            stack.callback(workers[-1].kill)
        return await first(bus, [each.pid for each in workers], begun_s, in_convoy=bool(convoys))


async def first(bus: Bus, pids: list[int], begun_s: float, *, in_convoy: bool) -> First:
    """Waits until all workers are whole: their first reports say when their imports ended."""
    imported, loads_s, answered_s, whole_s = dict[int, float](), list[float](), 0.0, 0.0
    async with asyncio.timeout(600):
        while not answered_s or len(imported) < len(pids):
            await asyncio.sleep(0.02)
            if not answered_s:
                told = await bus.follow(CELL.env, "0", block_ms=None)
                answered_s = time.time() if told else 0.0
            for _, report in await bus.follow(CELL.telemetry, "0", block_ms=None):
                if isinstance(report, WorkerReport) and "start_import_s" in report.counters:
                    imported.setdefault(report.pid, begun_s + report.counters["start_import_s"])
                    loads_s.append(sum(report.counters[f"start_{each}_s"] for each in PHASES if each != "import"))
                    whole_s = whole_s or time.time()
    since_s = (max if in_convoy else min)(imported.values())
    return First(answered_s - since_s, whole_s - since_s, min(loads_s))


async def both(folder: Path, num: int, num_bytes: int) -> tuple[First, First]:
    """Alone, and as a convoy."""
    async with slow_store(folder, num_bytes) as (where, server, _):
        alone = await measure(folder, where, server, num, convoys=0)
        return alone, await measure(folder, where, server, num, convoys=num)


def convoy_report(num: int, num_bytes: int) -> Report:
    with tempfile.TemporaryDirectory() as folder:
        alone, convoy = asyncio.run(both(Path(folder), num, num_bytes))
    rows = [
        ("the first answer, s", alone.token_s, convoy.token_s),
        ("the first worker is whole, s", alone.whole_s, convoy.whole_s),
        ("the load, s", alone.load_s, convoy.load_s),
    ]
    table = make_table(
        f"{num} workers load {num_bytes / 1e6:.0f} MB over links of {BYTES_PER_S / 1e6:.0f} MB/s",
        ("after their imports", "each by itself", "as a convoy"),
        rows,
    )
    share = convoy.token_s / alone.load_s
    goal = at_most("a convoy's first answer, of the load", share, 0.5, " x")
    figures = {"alone": msgspec.structs.asdict(alone), "convoy": msgspec.structs.asdict(convoy)}
    return Report([table], {"convoys": figures}, [goal])
