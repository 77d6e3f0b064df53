"""Pool workers in processes of their own, over a real Redis, with base workers that load at once: who opens what, and what fails."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from shutil import copytree
from typing import Any

import psutil
import pytest

from common.bus.bus import Bus
from common.bus.streams import Cell
from common.cancellation import cancel_all
from common.children.processes import ChildProcess
from common.pool.base_states import BaseState
from common.pool.base_workers import BaseWorker, BaseWorkers
from common.pool.gate import Pulse
from common.settings import TINY
from common.store.bases import push_base
from common.store.objects import Objects
from common.wire.messages import WorkerReport
from common.worker.membership import Membership
from tests.common.test_bus import start
from tests.common.test_worker import length, until
from tests.manager.test_supervisor import gone, is_alive
from tests.support.forked import begun

LEASE_S = "1"


class Pool:
    """Some pool workers, and the cells of their base models."""

    def __init__(self, bus: Bus, folder: Path, redis_url: str, bases: str, **settings: str) -> None:
        self.cells = {name: Bus(bus.client, Cell(name)) for name in bases.split()}
        self._folder = folder
        self._settings = {
            "MARLAAS_REDIS_URL": redis_url,
            "MARLAAS_DATA_DIR": str(folder),
            "MARLAAS_BASE_MODELS": ",".join(f"{name}={TINY}" for name in self.cells),
            "MARLAAS_LEASE_S": LEASE_S,
            **settings,
        }
        self.children: list[ChildProcess] = []

    @property
    def log(self) -> str:
        return "".join(file.read_text() for file in sorted(self._folder.glob("pool-*.log")))

    async def start(self) -> ChildProcess:
        log = self._folder / f"pool-{len(self.children)}.log"
        self.children.append(await begun("tests.support.pooled_service", log, **self._settings))
        return self.children[-1]

    async def ask(self, base: str, num: int = 1) -> None:
        bus = self.cells[base]
        await bus.publish([(bus.cell.rollout, start(number)) for number in range(num)])

    async def entered(self, base: str) -> None:
        """Waits until somebody opens it."""
        cell = self.cells[base]
        await until(lambda: cell.client.zcard(cell.cell.opening("rollout")))

    async def answered(self, base: str, num: int) -> None:
        bus = self.cells[base]
        await until(lambda: length(bus, bus.cell.env, num))

    async def reports(self, base: str) -> list[WorkerReport]:
        bus = self.cells[base]
        found = await bus.follow(bus.cell.telemetry, "0", block_ms=None)
        return [message for _, message in found if isinstance(message, WorkerReport)]

    async def base_workers(self, base: str) -> set[int]:
        """Process ids of those that live."""
        await self.reported(base, "idle")
        pids = {each.pid for each in await self.reports(base)} - {child.pid for child in self.children}
        return {pid for pid in pids if is_alive(pid)}

    async def reported(self, base: str, state: str) -> WorkerReport:
        found: list[WorkerReport] = []

        async def there() -> bool:
            found[:] = [each for each in await self.reports(base) if each.state == state]
            return bool(found)

        await until(there)
        return found[-1]


async def later(bus: Bus, stream: str, num: int) -> bool:
    return await bus.client.xlen(stream) > num


@contextlib.asynccontextmanager
async def pool(bus: Bus, folder: Path, url: str, bases: str, num: int = 1, **more: Any) -> AsyncGenerator[Pool]:
    found = Pool(bus, folder, url, bases, **more)
    try:
        for _ in range(num):
            await found.start()
        yield found
    finally:
        for child in found.children:
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(signal.SIGTERM)
        await asyncio.gather(*(child.wait() for child in found.children))


async def test_three_idle_pool_workers_open_a_base_model_once_for_one_entry(
    bus: Bus, redis_url: str, tmp_path: Path
) -> None:
    async with pool(bus, tmp_path, redis_url, "echoes other", num=3) as running:
        report = await running.reported("echoes", "closed")
        assert report.slots == 4 and report.pool and report.pool.tier in ("host", "disk")
        await running.ask("echoes")
        await running.answered("echoes", 1)
        assert running.log.count('"opened"') == 1
        # and when Redis forgets where it is open, it hears of it again
        cell = running.cells["echoes"].cell
        await bus.client.delete(cell.open_at("rollout"))
        await until(lambda: bus.client.zcard(cell.open_at("rollout")))


async def test_a_place_without_work_helps_where_others_have_much_and_gives_way_at_once(
    bus: Bus, redis_url: str, tmp_path: Path
) -> None:
    async with pool(bus, tmp_path, redis_url, "takes echoes", num=2) as running:
        # Given work of one base model that fits in the slots of one worker, without end
        async def keep_asking() -> None:
            while True:
                await running.ask("takes", 2)
                await asyncio.sleep(0.5)

        asking = asyncio.create_task(keep_asking())
        await until(lambda: running.log.count('"opened"') == 2)
        # When another has work too
        await running.ask("echoes")
        await running.answered("echoes", 1)
        await cancel_all([asking])
        opened = [line for line in running.log.splitlines() if '"opened"' in line]
        assert sum('"takes"' in line for line in opened) >= 2 and any('"echoes"' in line for line in opened)


async def test_a_base_worker_that_is_killed_or_stands_still_is_started_again(
    bus: Bus, redis_url: str, tmp_path: Path
) -> None:
    async with pool(bus, tmp_path, redis_url, "echoes other") as running:
        for num, sent in ((1, signal.SIGKILL), (2, signal.SIGSTOP)):
            await running.ask("echoes")
            await running.answered("echoes", num)
            for pid in await running.base_workers("echoes"):
                os.kill(pid, sent)
        await until(lambda: running.log.count('"base_worker_ended"') >= 2)


async def test_base_models_without_weights_are_served_however_little_memory_a_pool_may_have(
    bus: Bus, redis_url: str, tmp_path: Path
) -> None:
    little: dict[str, Any] = {"MARLAAS_POOL_BYTES": "1", "MARLAAS_TEST_ITEMSIZE": "0"}
    async with pool(bus, tmp_path, redis_url, "echoes other", **little) as running:
        for base in ("echoes", "other"):
            await running.ask(base)
            await running.answered(base, 1)


async def test_a_base_worker_that_hangs_while_it_closes_is_killed_and_the_next_opens(
    bus: Bus, redis_url: str, tmp_path: Path
) -> None:
    short: dict[str, Any] = {"MARLAAS_SLICE_MAX_S": "0.2", "MARLAAS_SLICE_DRAIN_S": "0.1"}
    async with pool(bus, tmp_path, redis_url, "hangs echoes", **short) as running:
        await running.ask("hangs")
        await until(lambda: running.log.count('"opened"') == 1)
        await running.ask("echoes")
        await running.answered("echoes", 1)
        assert "was killed by SIGKILL" in running.log


async def test_a_base_model_that_cannot_be_loaded_is_refused_with_its_reason_and_others_are_served(
    bus: Bus, redis_url: str, tmp_path: Path
) -> None:
    async with pool(bus, tmp_path, redis_url, "dies refuses echoes") as running:
        for base in ("dies", "refuses", "echoes"):
            await running.ask(base)
        await running.answered("echoes", 1)
        reason = (await running.reported("dies", "refused")).reason
        assert "its process ended with status 3" in reason and "tried again in 10 minutes" in reason
        assert "its licence is not accepted" in (await running.reported("refuses", "refused")).reason
        assert running.log.count('"not_loaded"') == 3, "one dies twice before it is refused"


async def test_a_base_model_whose_folder_is_gone_is_refused_with_its_place_and_others_are_served(
    bus: Bus, redis_url: str, tmp_path: Path
) -> None:
    folder = copytree(TINY, tmp_path / "base")
    served: dict[str, Any] = {"MARLAAS_BASE_MODELS": f"gone={folder},echoes={TINY}"}
    async with pool(bus, tmp_path, redis_url, "gone echoes", **served) as running:
        await running.ask("gone")
        await running.answered("gone", 1)
        folder.rename(tmp_path / "elsewhere")
        for pid in await running.base_workers("gone"):
            os.kill(pid, signal.SIGKILL)
        for base in ("gone", "echoes"):
            await running.ask(base)
        await running.answered("echoes", 1)
        report = await running.reported("gone", "refused")
        assert str(folder) in report.reason and report.pool and report.pool.tier == "away"


async def test_a_base_model_comes_from_the_store_and_serves_only_once_it_is_open(
    bus: Bus, redis_url: str, tmp_path: Path
) -> None:
    where = await push_base(Objects.open((tmp_path / "store").as_uri()), "t", TINY, lambda _: None)
    served: dict[str, Any] = {"MARLAAS_BASE_MODELS": f"echoes={where},other={TINY}", "MARLAAS_CONVOYS": "1"}
    async with pool(bus, tmp_path, redis_url, "echoes other", **served) as running:
        report = await running.reported("echoes", "closed")
        assert report.pool and report.pool.tier == "away"
        await running.ask("echoes")
        await running.answered("echoes", 1)
        assert '"serves_early"' not in running.log, "no convoy asks who may read"


async def test_a_base_model_that_cannot_wake_is_refused_and_others_are_served(
    bus: Bus, redis_url: str, tmp_path: Path
) -> None:
    async with pool(bus, tmp_path, redis_url, "drowsy echoes") as running:
        for base in ("drowsy", "echoes"):
            await running.ask(base)
        await running.answered("echoes", 1)
        report = await running.reported("drowsy", "refused")
        assert "its process ended with status 1: rollout: no memory" in report.reason
        assert running.log.count('"not_loaded"') == 2


async def test_a_base_model_whose_loading_hangs_is_refused_and_others_are_loaded_meanwhile(
    bus: Bus, redis_url: str, tmp_path: Path
) -> None:
    short: dict[str, Any] = {"MARLAAS_TEST_PATIENCE_S": "1"}
    async with pool(bus, tmp_path, redis_url, "stalls echoes", **short) as running:
        await running.ask("stalls")
        await running.entered("stalls")
        await running.ask("echoes")
        await running.answered("echoes", 1)
        assert "was killed by SIGKILL" in (await running.reported("stalls", "refused")).reason


async def test_where_a_base_model_dies_while_it_loads_the_closed_ones_end_and_it_is_tried_once_more(
    bus: Bus, redis_url: str, tmp_path: Path
) -> None:
    async with pool(bus, tmp_path, redis_url, "greedy echoes other") as running:
        for base in ("echoes", "other", "greedy"):
            await running.ask(base)
            await running.answered(base, 1)
        assert running.log.count('"not_loaded"') == 1


async def test_a_base_model_that_its_cell_does_not_take_is_refused_with_its_reason_and_others_are_served(
    bus: Bus, redis_url: str, tmp_path: Path
) -> None:
    cell = Bus(bus.client, Cell("echoes"))
    await Membership(cell, "trainer", deterministic=True, fingerprint="ff", fingerprints={}).join()
    await bus.client.sadd(cell.cell.begun, "a-job")
    async with pool(bus, tmp_path, redis_url, "echoes other") as running:
        for base in ("echoes", "other"):
            await running.ask(base)
        await running.answered("other", 1)
        assert "in default mode, but echoes has" in (await running.reported("echoes", "refused")).reason
        assert running.log.count('"not_loaded"') == 1, "it is tried each minute"


async def test_what_a_base_worker_has_goes_back_where_a_whole_group_of_processes_is_told_to_end(
    bus: Bus, redis_url: str, tmp_path: Path
) -> None:
    async with pool(bus, tmp_path, redis_url, "takes echoes") as running:
        cell = running.cells["takes"]
        await running.ask("takes", 1000)  # more than it ends in all this time
        worker = psutil.Process((await running.reported("takes", "busy")).pid)
        psutil.Process(worker.ppid()).terminate()  # the server that forked it hears of it first
        done = await bus.client.xlen(cell.cell.env)
        await until(lambda: later(bus, cell.cell.env, done + 4))
        os.killpg(running.children[0].pid, signal.SIGTERM)
        assert await gone([running.children[0].pid])
        assert (await bus.client.xpending(cell.cell.rollout, "rollout"))["pending"] == 0


async def test_base_models_that_do_not_fit_together_end_each_other_and_one_that_never_fits_is_refused(
    bus: Bus, redis_url: str, tmp_path: Path
) -> None:
    async with pool(bus, tmp_path, redis_url, "echoes other", MARLAAS_POOL_BYTES=str(110 << 20)) as running:
        await running.ask("echoes")
        await running.answered("echoes", 1)
        first = await running.base_workers("echoes")
        await running.ask("other")  # of which nobody knows yet that it needs less
        await running.answered("other", 1)
        assert not any(map(is_alive, first))
        await running.ask("echoes")
        await running.answered("echoes", 2)
    (tmp_path / "small").mkdir()
    async with pool(bus, tmp_path / "small", redis_url, "echoes other", MARLAAS_POOL_BYTES="1000000") as running:
        await running.ask("echoes")
        report = await running.reported("echoes", "refused")
        assert "echoes needs 0.11 GB, and this worker's base models have 0.00 GB" in report.reason


async def test_a_base_worker_without_weights_ends_when_unused_and_comes_again_with_work(
    bus: Bus, redis_url: str, tmp_path: Path
) -> None:
    unused: dict[str, Any] = {"MARLAAS_TEST_UNUSED_S": "0.5"}
    async with pool(bus, tmp_path, redis_url, "echoes other", **unused) as running:
        for num in (1, 2):
            before = running.log.count(ended := '"base_model": "echoes", "event": "base_worker_unused"')
            await running.ask("echoes")
            await running.answered("echoes", num)
            await until(lambda before=before, ended=ended: running.log.count(ended) > before)
        assert "base_worker_ended" not in running.log, "it is no failure"


def test_a_refused_base_model_is_tried_again_in_a_minute_and_one_that_died_twice_in_ten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    for died, limit_s in ((False, 60), (True, 600)):
        state = BaseState("a", str(TINY), itemsize=4)
        for _ in range(1 + died):
            assert state.may_open, "one death is none too many"
            state.failed("it does not load", died=died)
        assert not state.may_open
        now_s += limit_s - 1
        assert not state.may_open
        now_s += 1
        assert state.may_open


def test_what_holds_sessions_or_gradients_ends_last() -> None:
    workers = BaseWorkers(None, "", "trainer-0")  # pyright: ignore[reportArgumentType]
    for number, (base, num_held) in enumerate({"a": 1, "b": 0, "c": 0}.items()):
        own: Any = {"num_bytes": 10, "worker": base, "closed_at_s": float(number), "pulse": Pulse(num_held=num_held)}
        workers.running[base] = BaseWorker(base, None, None, workers.news, "host", **own)  # pyright: ignore[reportArgumentType]
    assert workers.frees(10, room=30) == ["b"]
    assert workers.frees(10, room=10) == ["b", "c", "a"]


async def test_a_killed_pool_worker_takes_its_base_workers_along(bus: Bus, redis_url: str, tmp_path: Path) -> None:
    async with pool(bus, tmp_path, redis_url, "hangs echoes", num=1) as running:
        await running.ask("echoes")
        await running.answered("echoes", 1)
        workers = await running.base_workers("echoes")
        running.children[0].send_signal(signal.SIGKILL)
        await until(lambda: not any(map(is_alive, workers)))
