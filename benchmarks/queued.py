"""Measures the memory of a manager that holds many queued jobs with large files, and how long it answers nobody meanwhile.

    python -m benchmarks.queued [--jobs 100] [--mb 50] [--line_bytes 100] [--json FILE]

A real manager (`python -m manager_service`) takes in jobs of one tenant, each with a file of its own in lines of so many bytes, 15
or more. There are no workers, so none begins to sample. PSS and RSS: as in `benchmarks.memory`; the peak: VmHWM. The longest stop is the
longest time that `/healthz` took to answer, of a question every 10 ms.
"""

import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec

from benchmarks._report import Goal, Report, make_table, run
from common.bus import Bus
from common.streams import Cell
from common.tasks import cancel_all
from harness.processes import Memory, memory
from harness.redis_server import RedisServer, free_port
from harness.standin import create_job, job_spec, until_status

LIMIT_MB, LIMIT_S = 300, 0.25
ASK_EVERY_S = 0.01


class Measured(NamedTuple):
    """The figures of one manager."""

    before: Memory  # with one job, of a file of one line
    after: Memory
    peak_mb: float
    longest_stop_s: float


def write_files(folder: Path, num: int, num_bytes: int, line_bytes: int) -> None:
    """One content under as many names, so that the store needs the room of one; file 0 is one line of it."""
    folder.mkdir(parents=True)
    line = b'{"prompt":"%s"}\n' % (b"a" * (line_bytes - 14))
    (folder / "file-0").write_bytes(line)
    first = folder / "file-1"
    first.write_bytes(line * (num_bytes // len(line)))
    for number in range(2, num + 1):
        (folder / f"file-{number}").hardlink_to(first)


async def measure(given: Any, folder: Path) -> Measured:
    redis, port = RedisServer.start(folder, durable=False), free_port()
    environment = {
        "MARLAAS_REDIS_URL": redis.url,
        "MARLAAS_DATA_DIR": str(folder / "data"),
        "MARLAAS_PORT": str(port),
    }
    write_files(folder / "data" / "store" / "files" / "acme", given.jobs, given.mb << 20, given.line_bytes)
    manager = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "manager_service", env=os.environ | environment
    )
    bus, stops = Bus.connect(redis.url, Cell("tiny")), [0.0]
    try:
        await take_in(bus, 0)
        before = memory(manager.pid)
        asking = asyncio.create_task(ask(f"http://127.0.0.1:{port}/healthz", stops))
        await take_in(bus, *range(1, given.jobs + 1))
        await cancel_all([asking])
        return Measured(before, memory(manager.pid), peak_mb(manager.pid), max(stops))
    finally:
        manager.terminate()
        await manager.wait()
        await bus.close()
        redis.stop()


async def ask(url: str, answered_in_s: list[float]) -> None:
    """Asks again and again, until cancelled."""
    async with httpx.AsyncClient(timeout=600) as client:
        while True:
            began = time.perf_counter()
            (await client.get(url)).raise_for_status()
            answered_in_s.append(time.perf_counter() - began)
            await asyncio.sleep(ASK_EVERY_S)


def peak_mb(pid: int) -> float:
    """The most memory that a process has had, in MB of a million bytes."""
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 / 1e6


async def take_in(bus: Bus, *numbers: int) -> None:
    """Creates these jobs, one after the other, and waits until the manager has their files."""
    for number in numbers:
        spec = msgspec.structs.replace(job_spec(f"job-{number}"), training_file=f"file-{number}", num_items=1000)
        await create_job(bus, spec)
        await until_status(bus, spec.id, "queued", "running", seconds=600)


def report(given: Any) -> Report:
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(given, Path(folder)))
    jobs, after = f"{given.jobs} jobs", found.after
    rows = [("a small job", found.before.pss_mb, found.before.rss_mb), (f"and {jobs}", after.pss_mb, after.rss_mb)]
    title = f"Memory of the manager, files of {given.mb} MB in lines of {given.line_bytes} bytes"
    table = make_table(title, ("holds", "PSS MB", "RSS MB"), rows)
    goals = [
        Goal(f"{given.jobs} queued jobs", after.pss_mb, LIMIT_MB, " MB", more_is_better=False),
        Goal("peak", found.peak_mb, LIMIT_MB, " MB", more_is_better=False),
        Goal("longest stop", found.longest_stop_s, LIMIT_S, " s", more_is_better=False),
    ]
    figures = {"before_mb": found.before.pss_mb, "after_mb": after.pss_mb}
    return Report([table], figures | {"peak_mb": found.peak_mb, "longest_stop_s": found.longest_stop_s}, goals)


if __name__ == "__main__":
    run(__doc__, report, jobs=100, mb=50, line_bytes=100)
