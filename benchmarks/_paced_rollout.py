"""A rollout worker at a given pace: the real loop, handler and process engine over a core that computes nothing, so that two processor
cores are enough for many workers. `python -m benchmarks._paced_rollout URL LEASE_S SLOTS NOTES [LOAD_S [BASE NODE_DIR [PEER_BYTES_PER_S]]]`
runs one until it is killed, or is told to stop: then it hands its turns back. It first fetches the base model BASE into the node folder
as a real one does, through its peers only if it is told at what speed to pass it on, and takes LOAD_S more to load.

It writes to the file NOTES, by the machine's monotonic clock:

    step   <s> <rows>                    all rows have one token more
    begin  <s> <turn> <tokens> <steps>   a turn has its first token here: tokens that it had before, this worker's steps before
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import structlog

from base_model.adapter import init_adapter, save_adapter
from benchmarks.rollout import NoEnd
from common.bus.bus import Bus
from common.bus.streams import Cell
from common.cancellation import running
from common.peers.base_fetch import BaseFetch
from common.peers.chain import Relay
from common.peers.folder import NodeFolder
from common.peers.holders import Holders
from common.settings import TINY
from common.store.objects import Objects
from common.wire.messages import AdapterRef, LoraSpec
from common.worker.telemetry import About, Reporter
from common.worker.worker import Habits, Worker, worker_id
from rollout_service.handler import RolloutHandler
from rollout_service.process.adapter_files import AdapterFiles, linear_shapes
from rollout_service.process.core import AdapterFolder, SamplingRequest, TokenChunk
from rollout_service.process.process_engine import ProcessEngine, Shape
from rollout_service.settings import RolloutSettings

CELL = Cell("tiny")
STEP_S, ROW_S = 0.04, 0.0004
PROGRESS_S = 0.5
MAX_LORAS = 8
ARGUMENTS = "MARLAAS_TEST_PACED"
"""The variable with the arguments of a worker that is forked, and has none."""


def nothing(line: str) -> None: ...


@cache
def adapter_files() -> dict[str, bytes]:
    return save_adapter(init_adapter(LoraSpec(1, 1.0, ("q_proj",)), linear_shapes(TINY), 0), "tiny")


class Resident:
    """Stands for the worker's cache where the engine has all adapters from the start."""

    def expect(self, adapter: AdapterRef) -> None: ...

    def hold(self, adapter: AdapterRef) -> contextlib.AbstractAsyncContextManager[None]:
        return contextlib.nullcontext()


@dataclass
class PacedCore:
    """Gives each turn a token a step. A step takes `step_s`, and `row_s` for each turn in it; to load takes `load_s`."""

    step_s: float
    row_s: float = 0.0
    load_s: float = 0.0
    note: Callable[[str], None] = nothing
    pid: int = 1
    kv_tokens: int | None = None
    num_steps: int = 0
    _rows: int = 0
    _known: set[str] = field(default_factory=set[str])  # trajectories of which a turn ended here
    _stepped: asyncio.Condition = field(default_factory=asyncio.Condition)
    _stepping: "asyncio.Task[None] | None" = None

    async def start(self) -> None:
        await asyncio.sleep(self.load_s)
        self._stepping = asyncio.create_task(self._step())

    async def stop(self) -> None:
        if self._stepping:
            self._stepping.cancel()

    async def wait_dead(self) -> None:
        await asyncio.Event().wait()

    async def add(self, adapter: AdapterFolder) -> None: ...

    async def remove(self, adapter: AdapterFolder) -> None: ...

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...

    async def sample(self, request: SamplingRequest) -> AsyncGenerator[TokenChunk]:
        begun, self._rows = self.num_steps, self._rows + 1
        trajectory = request.id.rpartition("+")[0].rsplit("/", 2)[0]
        num_cached = len(request.tokens) if trajectory in self._known else 0
        try:
            for left in range(request.max_tokens - 1, -1, -1):
                async with self._stepped:
                    await self._stepped.wait()
                if left == request.max_tokens - 1:
                    turn = request.id.rpartition("+")[0]
                    self.note(f"begin {time.monotonic()} {turn} {len(request.tokens)} {begun}")
                if not left:
                    self._known.add(trajectory)
                yield TokenChunk([97], [-1.0], [], finished=not left, num_cached=num_cached)
        finally:
            self._rows -= 1

    async def _step(self) -> None:
        due_s = time.monotonic()
        while True:
            due_s = max(due_s + self.step_s + self.row_s * self._rows, time.monotonic())
            await asyncio.sleep(due_s - time.monotonic())
            self.num_steps += 1
            self.note(f"step {time.monotonic()} {self._rows}")
            async with self._stepped:
                self._stepped.notify_all()


@contextlib.asynccontextmanager
async def working(
    url: str, lease_s: float, slots: int, core: PacedCore, *, own_streams: bool = True, jobs: Iterable[AdapterRef] = ()
) -> AsyncGenerator[ProcessEngine]:
    """Runs a worker inside, with the slots and habits of a real one. What is under way at the end goes back."""
    settings = RolloutSettings(rollout_slots=slots, own_streams=own_streams)
    bus, files = Bus.connect(url, CELL), linear_shapes(TINY)
    shape = Shape(320, 2048, settings.engine_slots, MAX_LORAS, MAX_LORAS, max_temperature=2.0)
    engine = ProcessEngine(lambda: core, AdapterFiles(files, max_rank=16), NoEnd(), shape)
    adapters: Any = Resident()

    async def send_delta(*_: object) -> None: ...

    own_id = worker_id("rollout")
    handler = RolloutHandler(engine, adapters, CELL, send_delta=send_delta, worker=own_id if own_streams else "")
    inboxes = settings.inboxes(CELL, own_id)[1:]
    reporter = Reporter(own_id, "rollout", CELL.base_model, About(slots=settings.shared_slots))
    habits = Habits(orphan_slots=settings.orphan_slots, progress_s=PROGRESS_S)
    worker, stop = Worker(bus, handler, inboxes, reporter, lease_s=lease_s, habits=habits), asyncio.Event()
    await engine.start()
    for job in jobs:
        await engine.load_files(job, adapter_files())
    async with running(worker.run(stop)) as (task,):
        yield engine
        stop.set()
        await task
    await engine.stop()
    await bus.close()


@contextlib.asynccontextmanager
async def fetched(url: str, where: str, node_dir: Path, bytes_per_s: int | None) -> AsyncGenerator[None]:
    """Has a base model in the node folder, and inside passes it on at this speed; None: to nobody, and all comes from the store."""
    bus, objects = Bus.connect(url, CELL), Objects.open(os.environ["MARLAAS_STORE_URL"])
    holders = Holders(bus, worker_id("rollout"), store_places=1)
    relay = Relay(objects, NodeFolder(node_dir / "files", 0), holders, bytes_per_s=bytes_per_s)
    await relay.open("127.0.0.1", 0)
    async with running(relay.run()):
        chain = relay if bytes_per_s else None
        await BaseFetch(objects, node_dir, where, with_weights=True, relay=chain).run()
        yield
    await relay.close()
    await bus.close()


async def serve(url: str, lease_s: float, slots: int, core: PacedCore) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with working(url, lease_s, slots, core):
        await stop.wait()


async def fetch_and_serve(url: str, lease_s: float, slots: int, core: PacedCore, base: Sequence[str] = ()) -> None:
    """`base`: where it is, the node folder, and bytes a second for peers."""
    if not base:
        return await serve(url, lease_s, slots, core)
    where, node_dir, *speed = base
    async with fetched(url, where, Path(node_dir), int(speed[0]) if speed else None):
        await serve(url, lease_s, slots, core)


def main(url: str, lease_s: str, slots: str, notes: str, load_s: str = "0", *base: str) -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    with Path(notes).open("a", buffering=1) as file:
        core = PacedCore(STEP_S, ROW_S, float(load_s), lambda line: print(line, file=file))
        asyncio.run(fetch_and_serve(url, float(lease_s), int(slots), core, base))


if __name__ == "__main__":
    main(*(sys.argv[1:] or os.environ[ARGUMENTS].split()))
