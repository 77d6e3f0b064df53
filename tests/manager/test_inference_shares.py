"""Completions over two replicas of the manager: together they keep to the cell's share of the slots, and tenants' shares go by weight."""

import asyncio
import json
from collections import Counter, deque
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from common.bus.bus import Bus, Delivery, Settlement
from common.bus.streams import GROUP_ROLLOUT
from common.cancellation import running
from common.wire.messages import BASE, Sampling, TurnRequest, TurnResult, WorkerReport, f32, i32
from common.worker.telemetry import KEEP_S
from manager_service.http.context import Api, Base
from manager_service.http.sampling.cell_share import CHAT
from manager_service.http.sampling.choices import InferenceRequest
from manager_service.http.server import make_api
from manager_service.records.tenants import TenantRecord
from manager_service.scheduling.fairness import OVERSUBSCRIPTION
from manager_service.settings import ManagerSettings
from tests.common.test_worker import until
from tests.manager.test_api_cluster import report

SLOTS, NUM_ASKING, WARM_UP, MEASURED = 16, 12, 900, 150
HEAVY, LIGHT = (TenantRecord(id=name, created_at=0, weight=weight) for name, weight in (("heavy", 3.0), ("light", 1.0)))


@dataclass
class SlowWorker:
    """Holds all turns that it is asked for, and answers one at a time: always the oldest."""

    bus: Bus
    stream: str
    warm_up: int = WARM_UP
    held: deque[Delivery] = field(default_factory=deque)
    answered: list[str] = field(default_factory=list)  # tenants
    numbers_held: list[int] = field(default_factory=list)  # since the tests measure

    async def run(self) -> None:
        stream = self.stream
        await self.bus.ensure_group(stream, GROUP_ROLLOUT)
        while True:
            self.held += await self.bus.read([stream], GROUP_ROLLOUT, "slow", count=64, block_ms=5)
            if len(self.answered) > self.warm_up:
                self.numbers_held.append(len(self.held))
            if self.held:
                await self._answer(self.held.popleft())

    async def _answer(self, delivery: Delivery) -> None:
        request = delivery.message
        assert isinstance(request, TurnRequest)
        names = ("id", "tenant", "job", "partition", "epoch", "adapter", "usage")
        about = {name: getattr(request, name) for name in names}
        result = TurnResult(**about, request=request, tokens=i32([65]), logprobs=f32([-0.5]), stop_reason="length")
        await self.bus.settle([Settlement(delivery, [(request.reply_to, result)])])
        self.answered.append(request.tenant)


async def keep_asking(base: Base, tenant: TenantRecord, *, num: int = 1, bulk: bool = False) -> None:
    how: dict[str, Any] = {"num_choices": num, "sampling": [Sampling(max_tokens=1)], "seed": 1, "stream": False}
    ask = InferenceRequest(tenant=tenant, adapter=BASE, prompts=[[65, 66]], bulk=bulk, **how)
    while True:
        async for _ in base.inference.answer(ask):
            pass


async def keep_alive(bus: Bus) -> None:
    alive: WorkerReport = report("r", "rollout", slots=SLOTS)
    while True:
        await bus.broadcast(bus.cell.telemetry, alive, keep_s=KEEP_S)
        await asyncio.sleep(0.5)


async def most_told(bus: Bus, worker: SlowWorker, least: float, held: float, within: float = 2) -> float:
    """The largest weight that owners were told of. Waits until it is `least`, and the worker holds about `held` turns."""
    most = 0.0
    while most < least or len(worker.numbers_held) < MEASURED or abs(recently_held(worker) - held) > within:
        await asyncio.sleep(0.05)
        most = max(most, float(await bus.client.get(bus.cell.sampling) or 0))
    return most


def recently_held(worker: SlowWorker) -> float:
    return median(worker.numbers_held[-MEASURED:])


async def until_both_know(bus: Bus) -> None:
    """Waits until one replica has told of one tenant and the other of two, and each has heard what the other told."""

    async def told() -> list[tuple[int, int]]:
        """The time until which each replica counts, and the number of its tenants."""
        found: Any = await bus.client.hvals(bus.cell.inference)
        return [(int(ends), len(json.loads(asking)[CHAT])) for ends, asking in (one.split(b" ", 1) for one in found)]

    async def both_told() -> bool:
        return sorted(number for _, number in await told()) == [1, 2]

    async def told_again() -> bool:
        return min(ends for ends, _ in await told()) > last

    await until(both_told)
    last = max(ends for ends, _ in await told())
    await until(told_again)


@asynccontextmanager
async def two_replicas(redis_url: str, folder: Path) -> AsyncGenerator[list[Api]]:
    async with AsyncExitStack() as stack:
        settings = ManagerSettings(redis_url=redis_url, data_dir=folder)
        yield [await stack.enter_async_context(make_api(settings)) for _ in range(2)]


def share_of(tenant: str, worker: SlowWorker) -> float:
    """Says how much of the newest answers a tenant has got: replicas hear of each other in time, not after so many answers."""
    return Counter(newest := worker.answered[-2 * MEASURED :])[tenant] / len(newest)


async def test_two_replicas_keep_to_the_cells_share_and_to_the_tenants_weights(
    redis_url: str, tmp_path: Path, bus: Bus
) -> None:
    """The heavy tenant asks both, the light one the second alone."""
    about_a_quarter = pytest.approx(0.25, rel=0.1)
    async with two_replicas(redis_url, tmp_path) as apis:
        first, second = (api.bases["tiny"] for api in apis)
        worker = SlowWorker(bus, bus.cell.rollout_chat)
        whom = ((first, HEAVY), (second, HEAVY), (second, LIGHT))
        asking = [keep_asking(base, tenant) for base, tenant in whom for _ in range(NUM_ASKING)]
        async with running(keep_alive(bus), first.run(), second.run(), worker.run(), *asking):
            await until_both_know(bus)
            worker.answered.clear()
            worker.numbers_held.clear()
            await until(lambda: len(worker.numbers_held) >= MEASURED and share_of("light", worker) == about_a_quarter)
    held = median(worker.numbers_held[-MEASURED:])
    assert held <= SLOTS / 2 + 2, "half of the slots, and what a replica keeps for a tenant that has none"


async def test_samples_in_bulk_share_the_slots_with_jobs_by_weight(redis_url: str, tmp_path: Path, bus: Bus) -> None:
    jobs = 3.0
    await bus.client.hset(bus.cell.weights, "1", repr(jobs))
    async with two_replicas(redis_url, tmp_path) as apis:
        first, second = (api.bases["tiny"] for api in apis)
        worker = SlowWorker(bus, bus.cell.rollout, warm_up=1200)
        asking = [keep_asking(base, HEAVY, num=num, bulk=True) for base in (first, second) for num in range(20, 40, 3)]
        async with running(keep_alive(bus), first.run(), second.run(), worker.run(), *asking):
            share = HEAVY.weight / (HEAVY.weight + jobs)
            told = await most_told(bus, worker, 3.0, OVERSUBSCRIPTION * SLOTS * share)
    assert told == 3.0, "owners see the tenant's weight once, though it asks two replicas"


@pytest.mark.parametrize(("num_asking", "held", "told"), [(12, 6, 3.0), (1, 1, 1 / 3)], ids=["much", "little"])
async def test_completions_share_the_slots_with_jobs_by_weight(
    redis_url: str, tmp_path: Path, bus: Bus, num_asking: int, held: int, told: float
) -> None:
    """Gives a weight of 3 beside 5 six of 16 slots. Who asks for one alone leaves the others to the jobs."""
    await bus.client.hset(bus.cell.weights, "1", "5.0")
    async with two_replicas(redis_url, tmp_path) as apis:
        base = apis[0].bases["tiny"]
        worker = SlowWorker(bus, bus.cell.rollout_chat)
        asking = [keep_asking(base, HEAVY) for _ in range(num_asking)]
        async with running(keep_alive(bus), base.run(), worker.run(), *asking):
            weight = await most_told(bus, worker, 0.8 * told, held, within=2 if num_asking > 1 else 0)
    assert weight == pytest.approx(told, rel=0.25)
