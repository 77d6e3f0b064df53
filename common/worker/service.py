"""Starts a worker service, for the three `__main__`: settings in, a running worker until SIGTERM."""

import asyncio
import contextlib
import gc
import os
import resource
import signal
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import structlog

from common import log
from common.bus.bus import Bus
from common.bus.redis_connection import own_address
from common.bus.streams import Cell
from common.cancellation import cancel_all, done_before, running
from common.children.helpers import kill_children
from common.children.prefork import fork_server
from common.children.processes import own_age_s
from common.errors import REFUSED, InvalidInput, MarlaasError
from common.models.base_digest import BaseIdentity, base_digest
from common.models.host_memory import own_bytes
from common.peers.base_fetch import BaseFetch
from common.peers.chain import Relay
from common.peers.convoys import WHOLE, Convoy
from common.peers.folder import NodeFolder
from common.peers.holders import Holders
from common.pool.base_workers import BaseWorkers
from common.pool.gate import Gate, Loaded, NotTaken, stay_awake
from common.pool.pool_worker import PooledService, PoolWorker
from common.settings import (
    MODEL_FILES,
    Settings,
    explained,
    refuse_unknown,
    resolve_config,
    resolve_model,
    stored_digest,
)
from common.store.adapters import AdapterStore
from common.store.known_store import recognised_at_once, recognised_by_service
from common.store.objects import Objects, patiently
from common.worker.handlers import Handler
from common.worker.membership import Membership
from common.worker.telemetry import KEEP_S, About, Reporter
from common.worker.worker import Habits, Inbox, Worker, worker_id

S = TypeVar("S", bound=Settings)
T = TypeVar("T")
HEARTBEAT_S = 1.0
PROGRESS_S = 1.0
"""Time between two progress reports of a download or of loading."""
LOADING_S = 10
NEED_WEIGHTS = ("rollout", "trainer")
SERVES_PEERS = "rollout"
PHASES = ("import", "fetch", "check", "load")
"""Phases of a start; reports count the seconds of each, as `start_fetch_s`."""
YOUNG_OBJECTS = 20_000
"""New objects before the garbage collector runs. Most die without it; Python's 700 come several times a second."""


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
    """Fingerprints of the cell's services in deterministic mode; kept current while the worker runs."""


@dataclass(frozen=True, slots=True)
class BuiltService:
    """A built service: what the worker loop needs to know of it."""

    handler: Handler
    inboxes: list[Inbox]
    about: About
    habits: Habits
    loops: Sequence[Callable[[], Coroutine[Any, Any, None]]] = ()
    """Loops that run as long as the worker; an error of one ends it."""
    close: Sequence[Callable[[], Awaitable[None]]] = ()
    num_bytes: Callable[[], int] = own_bytes
    """Memory of this process, where it computes."""
    num_held: Callable[[], int] = int
    """Number of sessions, or of gradients of runs, that end with this process."""
    sleep: Callable[[], Coroutine[Any, Any, None]] = stay_awake
    """Gives the device's memory to other base models, while this one is closed."""
    wake: Callable[[], Coroutine[Any, Any, None]] = stay_awake
    """Takes it back. An error of either ends the worker, whose base model is then loaded again."""


Build = Callable[[S, Parts], Coroutine[Any, Any, BuiltService]]
Pooled = Callable[[S], PooledService]
Early = Callable[[S, Parts, Convoy, asyncio.Event], Coroutine[Any, Any, None]]
"""Serves in a convoy while the base model comes, until the event."""


def run(name: str, settings_type: type[S], build: Build[S], pooled: Pooled[S], early: Early[S] | None = None) -> None:
    """Run one worker until SIGTERM or Ctrl-C. Wrong settings end it with one line that says what to do.

    A thread runs `build`: the event loop beats meanwhile, reports the start, and hears SIGTERM. With several base models and none
    named it is a pool worker: each base model's own process builds the service, and `pooled` says what those are like.
    """

    def main(settings: S) -> Coroutine[Any, Any, None]:
        if settings.base_model or len(settings.models) == 1:
            return _run(name, settings, build, early)
        spec = sys.modules["__main__"].__spec__
        assert spec is not None, "it runs by python -m"
        workers = BaseWorkers(fork_server(), spec.name, worker_id(name))
        return _pooled(settings, PoolWorker(settings, name, pooled(settings), workers))

    run_with(name, settings_type, main)


async def _pooled(settings: Settings, worker: PoolWorker) -> None:
    async with heartbeat(settings.heartbeat_file):
        await worker.run()


def _allow_files() -> None:
    """Raises the limit on open files and connections to the machine's; the usual one is too low for thousands."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # a system that caps it lower than it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def run_with(name: str, settings_type: type[S], main: Callable[[S], Coroutine[Any, Any, None]]) -> NoReturn:
    """Run a service's `main`. An early end is one line; exit status `REFUSED` means wrong settings."""
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


def spare_collections(*, holds_tensors: bool = False) -> None:
    """Hides what start-up made from the garbage collector, and runs it seldom unless a cycle may hold tensors. Call
    when a service is built: a collection of all imported code stops the event loop for 100 ms."""
    gc.collect()
    gc.freeze()
    if not holds_tensors:
        gc.set_threshold(YOUNG_OBJECTS)


def _first(error: BaseException) -> Exception:
    """The first error in a group of groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, Exception)
    return error


def leave(error: str = "", status: int = 0) -> NoReturn:
    """End this process now, with the error's line if there is one.

    Does not wait for threads: one may compute what was handed back, and one of the object store's may want to tell its
    result to an interpreter that shuts down, which aborts the process.
    """
    if error:
        sys.stderr.write(f"{error}\n")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


async def _run(name: str, settings: S, build: Build[S], early: Early[S] | None) -> None:
    imported_s = own_age_s()
    async with heartbeat(None if settings.pool_worker else settings.heartbeat_file):
        is_known = await recognised_at_once(settings, [settings.model_name])
        objects = Objects.open(settings.store)
        await patiently(objects.probe)
        start = _Start.of(name, settings, objects, imported_s)
        relay = await _open_relay(settings, start) if name == SERVES_PEERS and settings.relays else None
        loops: list[Coroutine[Any, Any, None]] = [relay.run()] if relay else []
        digest = stored_digest(settings.models[settings.model_name])
        if early and relay and settings.convoys and digest and not start.gate:  # which says when this one may read
            convoy = Convoy(start.bus, start.reporter.worker, relay.holders.address, settings.convoys)
            relay.convoy = convoy
            parts, start = start.parts(BaseIdentity(settings.model_name, digest), relay), replace(start, convoy=convoy)
            loops.append(early(settings, parts, convoy, start.stop))
        async with running(*loops):
            await _serve(settings, build, start, relay, is_known)


async def _open_relay(settings: Settings, start: "_Start") -> Relay | None:
    """None, and all comes from the store, if this worker cannot serve others."""
    holders = Holders(start.bus, start.reporter.worker, store_places=settings.store_places)
    folder = NodeFolder(settings.node_dir / "files", settings.cache_bytes)
    relay = Relay(start.objects, folder, holders, bytes_per_s=settings.peer_bytes_per_s)
    try:
        await relay.open(await asyncio.to_thread(own_address, settings.redis_url), settings.peer_port)
    except OSError as error:
        structlog.get_logger().warning("no_peers", reason=f"{error}; see MARLAAS_PEER_PORT")
        return None
    return relay


async def _serve(
    settings: S,
    build: Build[S],
    start: "_Start",
    relay: Relay | None,
    is_known: bool,  # the store was recognised
) -> None:
    cell, gate = start.bus.cell, start.gate
    settings, base = await _identified(settings, start, relay)
    parts = start.parts(base, relay)
    service = await start.during(build(settings, parts), _loading(cell.base_model), "load")
    if gate:
        gate.num_bytes, gate.num_held = service.num_bytes, service.num_held
        gate.sleep, gate.wake = service.sleep, service.wake
    try:
        if not is_known:
            recognised = recognised_by_service(settings, [cell.base_model], start.objects)
            await start.during(recognised, _loading(cell.base_model))
        if start.convoy:
            start.convoy.state = WHOLE
        async with running(_spare_collections(start)):
            await serve(settings, service, parts, start.ended(service.about), start.stop, gate)
    finally:
        for close in [*([relay.close] if relay else []), *service.close]:
            await close()
        await start.bus.close()


async def _spare_collections(start: "_Start") -> None:
    if start.convoy and start.convoy.place >= 0:  # what it had must be collected
        await start.convoy.over.wait()
    spare_collections(holds_tensors=start.reporter.service in NEED_WEIGHTS)


async def serve(
    settings: Settings,
    service: BuiltService,
    parts: Parts,
    reporter: Reporter,
    stop: asyncio.Event,
    gate: Gate | None = None,
) -> None:
    """Joins the cell, and works until `stop`."""
    membership, lease_s = _member(reporter.service, settings, service, parts), settings.lease_s
    more: dict[str, Any] = {"lease_s": lease_s, "habits": service.habits, "gate": gate}
    worker = Worker(parts.bus, service.handler, service.inboxes, reporter, **more)
    if await _join(membership, reporter, parts.bus, stop, gate):
        async with running(membership.keep(stop), *(loop() for loop in service.loops)):
            await worker.run(stop)


@dataclass(frozen=True, slots=True)
class _Start:
    """Reports what a worker does before it is built, and ends it when it is told to."""

    reporter: Reporter
    bus: Bus
    objects: Objects
    stop: asyncio.Event
    gate: Gate | None
    seconds: dict[str, float]  # of each phase
    convoy: Convoy | None = None

    @classmethod
    def of(cls, name: str, settings: Settings, objects: Objects, imported_s: float) -> "_Start":
        """`imported_s`: the process's age when its own code began."""
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        cell = Cell(settings.model_name)
        gate = Gate.of_input(settings.pool_worker) if settings.pool_worker else None
        told: dict[str, Any] = {"pool": gate.state, "counters": gate.counters} if gate else {}
        reporter = Reporter(worker_id(name), name, cell.base_model, About(slots=0), **told)
        bus = Bus.connect(settings.redis_url, cell, objects)
        return cls(reporter, bus, objects, stop, gate, dict.fromkeys(PHASES, 0.0) | {"import": imported_s})

    def parts(self, base: BaseIdentity, relay: Relay | None) -> Parts:
        store = AdapterStore(self.objects, base, relay)
        return Parts(self.reporter.worker, self.bus.cell, self.bus, self.objects, store, fingerprints={})

    def ended(self, about: About) -> Reporter:
        """The worker's own, which tells what its start took."""
        for phase, seconds in self.seconds.items():
            self.reporter.count(f"start_{phase}_s", round(seconds, 3))
        return replace(self.reporter, about=about)

    async def during(self, work: Coroutine[Any, Any, T], progress: Callable[[], str], phase: str = "") -> T:
        """The result of `work`. Reports `progress` meanwhile; ends the process on `stop`, for nothing ends a thread."""
        since_s = time.monotonic()
        try:
            return await self._during(work, progress)
        finally:
            if phase:
                self.seconds[phase] += time.monotonic() - since_s

    async def _during(self, work: Coroutine[Any, Any, T], progress: Callable[[], str]) -> T:
        working, telling = asyncio.create_task(work), asyncio.create_task(self._tell(progress))
        if not await done_before(self.stop, asyncio.wait([working])):
            if self.convoy:
                await self.convoy.over.wait()
            kill_children()
            leave()
        await cancel_all([telling])
        if isinstance(error := working.exception(), InvalidInput):
            told = self.gate.tell(NotTaken(str(error))) if self.gate else self._say(f"it has ended: {error}")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await told
        return working.result()

    async def _tell(self, progress: Callable[[], str]) -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            await self._say(await asyncio.to_thread(progress))

    async def _say(self, why: str) -> None:
        report = self.reporter.report("starting", 0, reason=why)
        await self.bus.broadcast(self.bus.cell.telemetry, report, keep_s=KEEP_S)


def _loading(base: str) -> Callable[[], str]:
    """`loading q, for 20 s`: it changes every LOADING_S, so whoever waits sees that it goes on."""
    since = time.monotonic()

    def progress() -> str:
        seconds = int((time.monotonic() - since) / LOADING_S) * LOADING_S
        return f"loading {base}" + (f", for {seconds} s" if seconds else "")

    return progress


async def _identified(settings: S, start: _Start, relay: Relay | None) -> tuple[S, BaseIdentity]:
    """The base model's identity, as far as this service has its files; fetches them first. The settings name the folder of what came
    from the store. Raises InvalidInput."""
    name, with_weights = settings.model_name, start.reporter.service in NEED_WEIGHTS
    folder = await _fetch_base(settings, start, relay, with_weights=with_weights)
    digesting = asyncio.to_thread(base_digest, folder, with_weights=with_weights)
    digest = await start.during(digesting, _loading(name), "check")
    if stored_digest(settings.models[name]):
        settings = settings.model_copy(update={"base_models": f"{name}={folder}", "base_model": name})
    return settings, BaseIdentity(name, digest)


async def _fetch_base(settings: Settings, start: _Start, relay: Relay | None, *, with_weights: bool) -> Path:
    """Fetches a hub's or the store's base model for this service, and goes on after a restart. Raises InvalidInput."""
    where = settings.models[settings.model_name]
    if Path(where).is_dir():
        return Path(where)
    if stored_digest(where):
        fetch = BaseFetch(start.objects, settings.node_dir, where, with_weights=with_weights, relay=relay)
        return await start.during(patiently(fetch.run), fetch.progress, "fetch")
    resolve = resolve_model if with_weights else resolve_config
    return await start.during(asyncio.to_thread(resolve, where), Download(where).progress, "fetch")


def _member(name: str, settings: Settings, service: BuiltService, parts: Parts) -> Membership:
    return Membership(
        parts.bus,
        name,
        deterministic=settings.deterministic,
        fingerprint=service.about.fingerprint,
        fingerprints=parts.fingerprints,
        digest=parts.store.base.digest,
    )


async def _join(membership: Membership, reporter: Reporter, bus: Bus, stop: asyncio.Event, gate: Gate | None) -> bool:
    """Waits until the cell takes this worker, and says why it does not. False: told to stop before that."""

    async def tell(reason: str) -> None:
        await bus.broadcast(bus.cell.telemetry, reporter.report("refused", 0, reason=reason), keep_s=KEEP_S)
        if gate:
            await gate.tell(NotTaken(reason))

    joined = await done_before(stop, membership.wait_to_join(tell))
    if gate and joined:
        await gate.sleep()
        await gate.tell(Loaded(reporter.worker, gate.num_bytes()))
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


class Download:
    """Measures a base model's download by the files in Hugging Face's cache. Asks the hub once for their sizes."""

    def __init__(self, where: str) -> None:
        """`where`: `owner/name` or `owner/name@revision`."""
        self._repo, _, revision = where.partition("@")
        self._where, self._revision = where, revision or None
        self._total: int | None = None

    def progress(self) -> str:
        """`downloading owner/name: 43% of 1.2 GB, 516 MB are here`; no part if the hub does not say their size."""
        from huggingface_hub import constants, errors  # here, as in `settings`
        from huggingface_hub.file_download import repo_folder_name

        if self._total is None:
            try:
                self._total = self._size()
            except (OSError, ValueError, errors.HTTPError):  # pyright: ignore[reportPrivateImportUsage]
                self._total = 0
        blobs = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=self._repo, repo_type="model") / "blobs"
        done = sum(_size_of(file) for file in blobs.glob("*"))
        part = f"{min(1.0, done / self._total):.0%} of {self._total / 1e9:.1f} GB, " if self._total else ""
        return f"downloading {self._where}: {part}{done / 1e6:,.0f} MB are here"

    def _size(self) -> int:
        from huggingface_hub import HfApi

        files = HfApi().model_info(self._repo, revision=self._revision, files_metadata=True).siblings or []
        return sum(file.size or 0 for file in files if any(fnmatch(file.rfilename, pattern) for pattern in MODEL_FILES))


def _size_of(file: Path) -> int:
    with contextlib.suppress(FileNotFoundError):  # it has just become another file
        return file.stat().st_size
    return 0
