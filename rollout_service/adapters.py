"""Loads adapters into the engine when a request names them, and drops unused ones.

Adapters are keyed by (tenant, job, version). One in use is never dropped; those that nobody uses are kept, most recent
first, up to a budget, because the next group will name the version that was just trained.
"""

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass

import structlog

from common.cancellation import cancel_all
from common.errors import MarlaasError
from common.store.adapters import AdapterStore
from common.store.parts import PARTED_BYTES
from common.wire.messages import AdapterRef
from rollout_service.engine import Engine

RECENT_S = 600.0
"""Seconds after a job's last turn here in which this worker expects more of it."""
log = structlog.get_logger()


@dataclass(slots=True)
class Entry:
    """An adapter that the engine holds or is loading."""

    loading: "asyncio.Task[int]"  # gives the bytes in memory
    users: int = 0


class AdapterCache:
    """The engine's adapters, with the number of requests that use each. Used from one event loop."""

    def __init__(self, store: AdapterStore, engine: Engine, *, idle_bytes: int) -> None:
        """`idle_bytes`: the most memory of the adapters that no request names, together."""
        self._store = store
        self._engine = engine
        self._idle_bytes = idle_bytes
        self._entries: OrderedDict[AdapterRef, Entry] = OrderedDict()  # least recently used first
        self._turns = dict[tuple[str, str], float]()  # (tenant, job) -> when its last turn came
        self._fills = set[asyncio.Task[None]]()
        self._loaded_bytes = 0  # in use or idle
        self._loads, self._load_s = 0, 0.0
        self._changing = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def hold(self, adapter: AdapterRef) -> AsyncGenerator[None]:
        """Keeps the adapter resident inside. Concurrent holders share one download. Raises NotFound, Unavailable, or CorruptObject
        if it does not match its sha256 or this base."""
        if adapter.is_base:
            yield
            return
        entry = self._enter(adapter)
        entry.users += 1
        try:
            if not _loaded(entry):
                await asyncio.shield(entry.loading)
            yield
        finally:
            entry.users -= 1
            if self._loaded_bytes > self._idle_bytes:
                await self._trim()

    def expect(self, adapter: AdapterRef) -> None:
        """Notes that a turn of its job has come."""
        if self._store.relay is not None:
            self._turns[adapter.tenant, adapter.job] = time.monotonic()

    def prefetch(self, adapter: AdapterRef) -> None:
        """Loads an adapter that will soon be named; with a relay, has the node folder hold it if its job had turns here lately. A
        failure shows when it is named."""
        if self._store.relay is None or not self._store.relay.is_usable:
            self._enter(adapter)
            return
        since = time.monotonic() - RECENT_S
        self._turns = {job: at_s for job, at_s in self._turns.items() if at_s > since}
        if (adapter.tenant, adapter.job) in self._turns and adapter not in self._entries:
            task = asyncio.create_task(self._fill(adapter), name=f"fill {adapter}")
            self._fills.add(task)
            task.add_done_callback(self._fills.discard)

    def counters(self) -> dict[str, float]:
        """Totals since the start: adapters fetched, checked and given to the engine, and seconds."""
        relay = self._store.relay
        return {"loads": float(self._loads), "load_s": self._load_s} | (relay.counters() if relay else {})

    async def close(self) -> None:
        await cancel_all([*self._fills, *(entry.loading for entry in self._entries.values())])
        self._entries.clear()
        self._loaded_bytes = 0

    def _enter(self, adapter: AdapterRef, files: Mapping[str, bytes] | None = None) -> Entry:
        """`files`: of the adapter, if they were read."""
        entry = self._entries.get(adapter)
        if entry is None:
            loading = asyncio.create_task(self._load(adapter, files), name=f"load {adapter}")
            loading.add_done_callback(lambda task: self._forget_failed(adapter, task))
            entry = self._entries[adapter] = Entry(loading)
        self._entries.move_to_end(adapter)
        return entry

    async def _fill(self, adapter: AdapterRef) -> None:
        try:
            files = await self._store.read(adapter)
            if all(len(data) <= PARTED_BYTES for data in files.values()):
                self._enter(adapter, files)
        except MarlaasError as error:
            log.warning("adapter_not_cached", adapter=str(adapter), reason=str(error))

    async def _load(self, adapter: AdapterRef, files: Mapping[str, bytes] | None) -> int:
        since = time.monotonic()
        files = files or await self._store.read(adapter)
        async with self._changing:
            num_bytes = await self._engine.load_files(adapter, files)
        self._loaded_bytes += num_bytes
        self._loads += 1
        self._load_s += time.monotonic() - since
        return num_bytes

    def _forget_failed(self, adapter: AdapterRef, task: "asyncio.Task[int]") -> None:
        """Makes the next request try a failed download again."""
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            self._entries.pop(adapter, None)
            kind = log.warning if isinstance(error, MarlaasError) else log.error
            kind("adapter_not_loaded", adapter=str(adapter), reason=str(error))

    async def _trim(self) -> None:
        """Drops idle adapters over the budget, least recently used first. Chooses each after waiting for the engine, since
        others may use, load and drop some meanwhile."""
        while (adapter := self._one_too_many()) is not None:
            self._loaded_bytes -= self._entries.pop(adapter).loading.result()
            async with self._changing:
                if adapter not in self._entries:
                    await self._engine.drop(adapter)

    def _one_too_many(self) -> AdapterRef | None:
        """The idle adapter that was used least recently, if they are over the budget together."""
        if self._loaded_bytes <= self._idle_bytes:
            return None
        idle = {a: e.loading.result() for a, e in self._entries.items() if not e.users and _loaded(e)}
        return next(iter(idle)) if sum(idle.values()) > self._idle_bytes else None


def _loaded(entry: Entry) -> bool:
    return entry.loading.done() and not entry.loading.cancelled() and entry.loading.exception() is None
