"""Starts a worker service, for the three `__main__`: settings in, a running worker until SIGTERM."""

import asyncio
import contextlib
import os
import resource
import signal
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from common import log
from common.adapters import AdapterStore
from common.bus import Bus
from common.downloads import Download
from common.errors import REFUSED, InvalidInput, MarlaasError
from common.handlers import Handler
from common.membership import Membership
from common.messages import AdapterNew, Outside
from common.objects import Objects, patiently
from common.settings import Settings, explained, refuse_unknown, resolve_config, resolve_model
from common.streams import Cell
from common.tasks import cancel_all, running
from common.telemetry import KEEP_S, Reporter
from common.worker import Inbox, Worker, worker_id

S = TypeVar("S", bound=Settings)
HEARTBEAT_S = 1.0
PROGRESS_S = 1.0
"""Between two words of a download."""
NEED_WEIGHTS = ("rollout", "trainer")


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts of which a service is built."""

    worker: str
    """This worker's id."""
    cell: Cell
    bus: Bus
    objects: Objects
    store: AdapterStore
    fingerprints: dict[str, str]
    """Of the cell's services in deterministic mode; kept current while the worker runs."""


@dataclass(frozen=True, slots=True)
class BuiltService:
    """A built service: what the worker loop needs to know of it."""

    handler: Handler
    inboxes: list[Inbox]
    slots: int
    kv_tokens: int | None = None
    ahead: int = 0
    """Messages that it reads beyond its slots: the handler decides which of them it works on first."""
    orphan_slots: int = 0
    """Messages of dead workers that it works on beyond its slots, beside a full load."""
    drain_s: float = 0.0
    progress_s: float = 0.0
    max_lora_rank: int | None = None
    outside: Outside | None = None
    dtype: str = ""
    fingerprint: str = ""
    """Of the bits that it computes in deterministic mode."""
    resident: Callable[[], list[str]] = field(default=list)
    waiting: Callable[[], dict[str, str]] = field(default=dict)
    counters: Callable[[], dict[str, float]] = field(default=dict)
    on_adapter_new: Callable[[AdapterNew], None] | None = None
    has_room: Callable[[], bool] = lambda: True
    takes_leftovers: Callable[[], bool] = lambda: False
    beside: Sequence[Callable[[], Coroutine[Any, Any, None]]] = ()
    """Loops that run as long as the worker; an error of one ends it."""
    close: Sequence[Callable[[], Awaitable[None]]] = ()


def run(name: str, settings_type: type[S], build: Callable[[S, Parts], Awaitable[BuiltService]]) -> None:
    """Run one worker until SIGTERM or Ctrl-C. Wrong settings end it with one line that says what to do."""
    run_with(name, settings_type, lambda settings: _run(name, settings, build))


def _allow_files() -> None:
    """Lets this process open as many files and connections as the machine does; the usual limit is meant for programs of before."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # a system that caps it lower than it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def run_with(name: str, settings_type: type[S], main: Callable[[S], Coroutine[Any, Any, None]]) -> NoReturn:
    """Run a service's `main`. Whatever ends it early is one line; the exit status `REFUSED` means wrong settings."""
    _allow_files()
    try:
        refuse_unknown()
        settings = settings_type()
    except (MarlaasError, ValueError) as error:
        leave(f"{name}: {explained(error)}", REFUSED)
    log.configure(name, level=settings.log_level)
    try:
        asyncio.run(main(settings))
    except* (MarlaasError, ValueError) as group:  # a service's loops run in task groups
        error = _first(group)
        leave(f"{name}: {explained(error)}", REFUSED if isinstance(error, InvalidInput) else 1)
    leave()


def _first(error: BaseException) -> Exception:
    """The first error in a group of groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, Exception)
    return error


def leave(error: str = "", status: int = 0) -> NoReturn:
    """End this process now, with the error's line if there is one.

    Threads are not waited for: one may still compute what was handed back, and one of the object store's may want to tell
    its result to an interpreter that is shutting down, which aborts the process.
    """
    if error:
        sys.stderr.write(f"{error}\n")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


async def _run(name: str, settings: S, build: Callable[[S, Parts], Awaitable[BuiltService]]) -> None:
    async with heartbeat(settings.heartbeat_file):
        objects = Objects.open(settings.store)
        await patiently(objects.probe)
        await _serve(name, settings, build, objects)


async def _serve(
    name: str, settings: S, build: Callable[[S, Parts], Awaitable[BuiltService]], objects: Objects
) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    cell = Cell(settings.model_name)
    bus = Bus.connect(settings.redis_url, cell, objects)
    parts = Parts(worker_id(name), cell, bus, objects, AdapterStore(objects), fingerprints={})
    starting = Reporter(parts.worker, name, cell.base_model, slots=0)
    await _fetch_base(settings.models[settings.model_name], starting, bus, stop)
    service = await build(settings, parts)
    fingerprint, fingerprints = service.fingerprint, parts.fingerprints
    membership = Membership(
        bus, name, deterministic=settings.deterministic, fingerprint=fingerprint, fingerprints=fingerprints
    )
    reporter = _reporter(parts.worker, name, cell, service)
    worker = _worker(settings, bus, service, reporter)
    try:
        if await _join(membership, reporter, bus, stop):
            async with running(membership.keep(stop), *(loop() for loop in service.beside)):
                await worker.run(stop)
    finally:
        for close in service.close:
            await close()
        await bus.close()


async def _fetch_base(where: str, reporter: Reporter, bus: Bus, stop: asyncio.Event) -> None:
    """Downloads a base model of the hub with what this service needs of it, and says meanwhile how far it is; ends the process on `stop`.
    What is there of a file by then is kept for the next start. Raises InvalidInput.
    """
    if Path(where).is_dir():
        return
    resolve = resolve_model if reporter.service in NEED_WEIGHTS else resolve_config
    fetching = asyncio.create_task(asyncio.to_thread(resolve, where))
    stopped, download = asyncio.create_task(stop.wait()), Download(where)
    either = partial(asyncio.wait, [fetching, stopped], timeout=PROGRESS_S, return_when=asyncio.FIRST_COMPLETED)
    while not (await either())[0]:
        reason = await asyncio.to_thread(download.progress)
        await bus.broadcast(bus.cell.telemetry, reporter.report("starting", 0, reason=reason), keep_s=KEEP_S)
    if not fetching.done():
        leave()  # nothing ends the thread that downloads
    await cancel_all([stopped])
    fetching.result()


def _reporter(worker: str, name: str, cell: Cell, service: BuiltService) -> Reporter:
    return Reporter(
        worker,
        name,
        cell.base_model,
        slots=service.slots,
        kv_tokens=service.kv_tokens,
        max_lora_rank=service.max_lora_rank,
        outside=service.outside,
        dtype=service.dtype,
        fingerprint=service.fingerprint,
        resident=service.resident,
        waiting=service.waiting,
        measured=service.counters,
    )


def _worker(settings: Settings, bus: Bus, service: BuiltService, reporter: Reporter) -> Worker:
    return Worker(
        bus,
        service.handler,
        inboxes=service.inboxes,
        reporter=reporter,
        lease_s=settings.lease_s,
        max_deliveries=settings.max_deliveries,
        ahead=service.ahead,
        orphan_slots=service.orphan_slots,
        drain_s=service.drain_s,
        progress_s=service.progress_s,
        on_adapter_new=service.on_adapter_new,
        has_room=service.has_room,
        takes_leftovers=service.takes_leftovers,
    )


async def _join(membership: Membership, reporter: Reporter, bus: Bus, stop: asyncio.Event) -> bool:
    """Waits until the cell takes this worker, and says meanwhile why it does not. False: told to stop before that."""

    async def tell(reason: str) -> None:
        await bus.broadcast(bus.cell.telemetry, reporter.report("refused", 0, reason=reason), keep_s=KEEP_S)

    joining, stopped = asyncio.create_task(membership.wait_to_join(tell)), asyncio.create_task(stop.wait())
    await asyncio.wait({joining, stopped}, return_when=asyncio.FIRST_COMPLETED)
    joined = joining.done()
    await cancel_all([joining, stopped])
    if joined:
        joining.result()
    return joined


@contextlib.asynccontextmanager
async def heartbeat(file: Path | None) -> AsyncGenerator[None]:
    """While the block runs, a file's time of change says that this process's event loop turns."""

    async def beat(path: Path) -> None:
        while True:
            path.touch()
            await asyncio.sleep(HEARTBEAT_S)

    beating = [asyncio.create_task(beat(file))] if file else []
    try:
        yield
    finally:
        await cancel_all(beating)
