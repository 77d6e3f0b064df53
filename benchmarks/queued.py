"""Measures the memory of a manager that holds many queued jobs with large files.

    python -m benchmarks.queued [--jobs 100] [--mb 50] [--json FILE]

A real manager (`python -m manager_service`) takes in jobs of one tenant, each with a file of its own in lines of about 100 bytes.
There are no workers, so none begins to sample. PSS and RSS: as in `benchmarks.memory`.
"""

import asyncio
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from benchmarks._report import Goal, Report, make_table, run
from common.bus import Bus
from common.streams import Cell
from harness.processes import Memory, memory
from harness.redis_server import RedisServer, free_port
from harness.standin import create_job, job_spec, until_status

LIMIT_MB = 300
LINE = b'{"messages": [{"role": "user", "content": "add 12+34, and then say what you think of it"}], "a": "46"}\n'


def write_files(folder: Path, num: int, num_bytes: int) -> None:
    """One content under as many names, so that the store needs the room of one."""
    folder.mkdir(parents=True)
    first = folder / "file-0"
    first.write_bytes(LINE * (num_bytes // len(LINE)))
    for number in range(1, num):
        (folder / f"file-{number}").hardlink_to(first)


async def measure(num_jobs: int, megabytes: int, folder: Path) -> tuple[Memory, Memory]:
    """Memory before the jobs, and with them."""
    redis = RedisServer.start(folder, durable=False)
    environment = {
        "MARLAAS_REDIS_URL": redis.url,
        "MARLAAS_DATA_DIR": str(folder / "data"),
        "MARLAAS_PORT": str(free_port()),
    }
    write_files(folder / "data" / "store" / "files" / "acme", num_jobs, megabytes << 20)
    manager = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "manager_service", env=os.environ | environment
    )
    bus = Bus.connect(redis.url, Cell("tiny"))
    try:
        await take_in(bus, num_jobs=1)
        before = memory(manager.pid)
        await take_in(bus, num_jobs=num_jobs)
        return before, memory(manager.pid)
    finally:
        manager.terminate()
        await manager.wait()
        await bus.close()
        redis.stop()


async def take_in(bus: Bus, *, num_jobs: int) -> None:
    """Creates the jobs from 1 on, or job 0 if it is one, and waits until the manager has their files."""
    for number in range(1, num_jobs) if num_jobs > 1 else (0,):
        spec = msgspec.structs.replace(job_spec(f"job-{number}"), training_file=f"file-{number}", num_items=1000)
        await create_job(bus, spec)
        await until_status(bus, spec.id, "queued", "running", seconds=600)


def report(given: Any) -> Report:
    with tempfile.TemporaryDirectory() as folder:
        before, after = asyncio.run(measure(given.jobs, given.mb, Path(folder)))
    rows = [("1 job", before.pss_mb, before.rss_mb), (f"{given.jobs} jobs", after.pss_mb, after.rss_mb)]
    table = make_table(f"Memory of the manager, files of {given.mb} MB", ("holds", "PSS MB", "RSS MB"), rows)
    goal = Goal(f"{given.jobs} queued jobs", after.pss_mb, LIMIT_MB, " MB", more_is_better=False)
    return Report([table], {"before_mb": before.pss_mb, "after_mb": after.pss_mb}, [goal])


if __name__ == "__main__":
    run(__doc__, report, jobs=100, mb=50)
