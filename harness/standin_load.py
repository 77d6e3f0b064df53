"""Stand-in env, rollout and trainer workers in one process of their own, which answer after a delay and compute nothing. All but the
trainers are light ones (`harness.light`).

    owner ─ Start ─► env ─ TurnRequest x 8 ─► rollout ─ ScoredTrajectory ─► owner ─ TrainStep ─► trainer ─ AdapterUpdate ─► owner

A program of its own, so that what it uses of the processor is told apart from the managers'. Its argument is a `Load` in
JSON. Each line on its standard input is answered by one line, a `Seen` in JSON, of what happened since the line before;
the end of the input ends it.
"""

import asyncio
import contextlib
import itertools
import random
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Iterable
from functools import partial
from typing import Any

import msgspec

from common import log
from common.bus.bus import Bus, Delivery, connect
from common.bus.streams import GROUP_TRAINER, Cell
from common.cancellation import cancel_all
from common.store.adapters import AdapterStore
from common.store.objects import Objects
from common.worker.service import spare_collections
from common.worker.telemetry import About, Reporter
from common.worker.worker import Inbox, Worker, worker_id
from harness.light.env import light_env
from harness.light.rollout import light_rollout
from harness.light.worker import LightWorker
from harness.standin import StandInTrainer, stand_in_worker

BASE_MODEL = "tiny"
LEASE_S = 10.0


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """The number of workers, and the time that a trajectory takes."""

    redis_url: str
    store_url: str
    rollout: int = 1  # workers
    rollout_slots: int = 64  # trajectories that each works on at once
    env: int = 1
    env_slots: int = 64
    trainer_slots: int = 8
    idle: int = 0  # rollout workers of one slot that report once a second and take nothing
    delay_s: float = 1.0  # of a trajectory on average; single ones take half of it to one and a half


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """Since the line before."""

    trajectories: int  # answered
    cpu_s: float
    handover_ms: list[float]  # from publication to having been read; messages that wait for a slot are left out


class Workers:
    """The process, seen from the one that started it."""

    def __init__(self, load: Load) -> None:
        argv = [sys.executable, "-m", "harness.standin_load", msgspec.json.encode(load).decode()]
        self._child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    async def seen(self) -> Seen:
        """Since the call before."""
        return msgspec.json.decode(await asyncio.to_thread(self._ask), type=Seen)

    def _ask(self) -> str:
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.write("\n")
        self._child.stdin.flush()
        return self._child.stdout.readline()

    async def stop(self) -> None:
        """Ends the workers; what they worked on goes back into the streams."""
        await asyncio.to_thread(self._child.communicate)


@contextlib.asynccontextmanager
async def working(load: Load) -> AsyncGenerator[Workers]:
    workers = Workers(load)
    try:
        yield workers
    finally:
        await workers.stop()


# ---- inside ---------------------------------------------------------------------------------------------------------


class MeasuredBus(Bus):
    """Notes how old each entry is when it has been read. An entry's id says when it was published, by Redis' clock,
    which is this machine's. Light workers read by themselves; those for rollouts are left out, because turns wait for a slot by design,
    half as many as there are slots."""

    def __init__(self, redis_url: str) -> None:
        super().__init__(connect(redis_url, Cell(BASE_MODEL)), Cell(BASE_MODEL))
        self.ages_ms: list[float] = []

    async def read(self, *args: Any, **options: Any) -> list[Delivery]:
        return self._noted(await super().read(*args, **options))

    async def read_in_order(self, *args: Any, **options: Any) -> list[Delivery]:
        return self._noted(await super().read_in_order(*args, **options))

    def _noted(self, found: list[Delivery]) -> list[Delivery]:
        self.note([delivery.entry for delivery in found])
        return found

    def note(self, entries: Iterable[str]) -> None:
        now_ms = time.time() * 1000
        self.ages_ms += [now_ms - int(entry.partition("-")[0]) for entry in entries]


def trainer(load: Load, bus: Bus) -> Worker:
    handler = StandInTrainer(bus.cell, AdapterStore(Objects.open(load.store_url)))
    inbox = Inbox(bus.cell.train, GROUP_TRAINER)
    return stand_in_worker(bus, "trainer", inbox, handler, slots=load.trainer_slots, lease_s=LEASE_S)


def env_workers(load: Load, bus: MeasuredBus) -> list[LightWorker]:
    reporters = [_reporter("env", load.env_slots) for _ in range(load.env)]
    return [light_env(bus, reporter, lease_s=LEASE_S, on_read=bus.note) for reporter in reporters]


def rollout_workers(load: Load, bus: Bus) -> list[LightWorker]:
    rng = random.Random(1)
    reporters = [_reporter("rollout", load.rollout_slots) for _ in range(load.rollout)]
    seconds = partial(_seconds, rng, load.delay_s)
    return [light_rollout(bus, reporter, seconds, lease_s=LEASE_S) for reporter in reporters]


def _reporter(service: str, slots: int) -> Reporter:
    return Reporter(worker_id(service), service, BASE_MODEL, About(slots=slots))


def _seconds(rng: random.Random, delay_s: float) -> float:
    return delay_s * rng.uniform(0.5, 1.5)


async def report_idle(bus: Bus, num: int) -> None:
    """Reports for so many workers, a tenth of them at a time."""
    reporters = [Reporter(f"idle-{n}", "rollout", BASE_MODEL, About(slots=1)) for n in range(num)]
    for turn in itertools.count():
        some = [(bus.cell.telemetry, reporter.report("idle", 0)) for reporter in reporters[turn % 10 :: 10]]
        await bus.publish(some)
        await asyncio.sleep(0.1)


async def main(load: Load) -> None:
    spare_collections()
    bus, stop = MeasuredBus(load.redis_url), asyncio.Event()
    rollouts = rollout_workers(load, bus)
    workers = [*rollouts, *env_workers(load, bus), trainer(load, bus)]
    running = [asyncio.create_task(worker.run(stop)) for worker in workers]
    reporting = asyncio.create_task(report_idle(bus, load.idle))
    cpu_s, num = 0.0, 0
    while await asyncio.to_thread(sys.stdin.readline):
        used, ages, answered = time.process_time(), bus.ages_ms, sum(rollout.num for rollout in rollouts)
        bus.ages_ms = []
        seen = Seen(trajectories=answered - num, cpu_s=used - cpu_s, handover_ms=ages)
        cpu_s, num = used, answered
        print(msgspec.json.encode(seen).decode(), flush=True)
    stop.set()
    await asyncio.gather(*running)
    await cancel_all([reporting])
    await bus.close()


if __name__ == "__main__":
    log.configure("standin_load", level="warning")
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(msgspec.json.decode(sys.argv[1], type=Load)))
