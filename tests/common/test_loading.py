"""A worker that loads its base model is alive all the while, says that it loads, and ends when it is told to."""

import asyncio
import signal
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from common.bus.bus import Bus
from common.children.processes import ChildProcess
from common.errors import REFUSED
from common.settings import TINY
from common.store.bases import push_base
from common.store.objects import Objects
from common.wire.messages import WorkerReport
from common.worker.service import PHASES
from tests.manager.test_supervisor import gone
from tests.support.forked import begun

NUM_BEATS = 3


@asynccontextmanager
async def slow_worker(
    service: str, tmp_path: Path, bus: Bus, redis_url: str, **more: str
) -> AsyncGenerator[ChildProcess]:
    where = await push_base(Objects.open((tmp_path / "store").as_uri()), "tiny", TINY, lambda _: None)
    own = {
        "MARLAAS_BASE_MODELS": f"{bus.cell.base_model}={where}",
        "MARLAAS_DATA_DIR": str(tmp_path),
        "MARLAAS_REDIS_URL": redis_url,
        "MARLAAS_HEARTBEAT_FILE": str(tmp_path / "heartbeat"),
        "MARLAAS_TRAINER_THREADS": "2",
        "MARLAAS_ROLLOUT_THREADS": "2",
        "MARLAAS_TEST_SERVICE": service,
        "MARLAAS_TEST_GO_ON": str(tmp_path / "go on"),
    } | more
    worker = await begun("tests.support.slow_worker", tmp_path / "log", **own)
    try:
        async with asyncio.timeout(120):
            yield worker
    finally:
        if worker.returncode is None:
            worker.send_signal(signal.SIGKILL)
            await worker.wait()


async def heard(bus: Bus, is_it: Callable[[WorkerReport], bool]) -> WorkerReport:
    """Waits for a report."""
    while True:
        for _, report in await bus.follow(bus.cell.telemetry, "0", block_ms=None):
            if isinstance(report, WorkerReport) and is_it(report):
                return report
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("service", ["rollout", "trainer"])
async def test_a_worker_that_loads_what_the_store_has_beats_and_says_so_until_it_has_joined(
    service: str, tmp_path: Path, bus: Bus, redis_url: str
) -> None:
    async with slow_worker(service, tmp_path, bus, redis_url):
        # Given a worker whose base model takes long to load
        report = await heard(
            bus, lambda report: report.reason.startswith("loading")
        )  # a slow machine tells of the fetch before
        told = service, "starting", f"loading {bus.cell.base_model}"
        assert (report.service, report.state, report.reason) == told
        # Then its event loop turns all the while
        times = {(tmp_path / "heartbeat").stat().st_mtime_ns}
        while len(times) <= NUM_BEATS:
            times.add((tmp_path / "heartbeat").stat().st_mtime_ns)
            await asyncio.sleep(0.05)
        # And once it has loaded it joins
        (tmp_path / "go on").touch()
        report = await heard(bus, lambda report: report.state == "idle")
        # And says what its start took
        assert min(report.counters[f"start_{phase}_s"] for phase in PHASES) > 0


@pytest.mark.parametrize("service", ["rollout", "trainer"])
async def test_a_worker_that_loads_ends_when_it_is_told_to(
    service: str, tmp_path: Path, bus: Bus, redis_url: str
) -> None:
    async with slow_worker(service, tmp_path, bus, redis_url) as worker:
        await heard(bus, lambda report: report.reason.startswith("loading"))
        worker.send_signal(signal.SIGTERM)
        assert await worker.wait() == 0
        assert not (tmp_path / "go on").exists()
        helper = int((tmp_path / "helper").read_text())
        assert await gone([helper]), "what it had started to load with it"


async def test_a_worker_that_ends_before_it_works_says_why(tmp_path: Path, bus: Bus, redis_url: str) -> None:
    folder = tmp_path / "no folder"
    folder.touch()
    async with slow_worker("rollout", tmp_path, bus, redis_url, MARLAAS_CACHE_DIR=str(folder)) as worker:
        assert await worker.wait() == REFUSED
    report = await heard(bus, lambda report: report.reason.startswith("it has ended"))
    assert report.state == "starting" and "cannot hold it" in report.reason and "MARLAAS_CACHE_DIR" in report.reason
