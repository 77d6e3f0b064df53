"""Runs one place of a service for several base models: their base workers take turns, by `choosing`.

    _take_turns   looks for work of all base models; loads and opens base workers   waits for: an unread entry, the end of a slice
    _report       tells each second of the base models without a process, and stays entered in the cells

An env worker holds no weights, so all its base workers are open at once.
after a crash: the kernel ends the base workers, others take their entries over, and Redis forgets the place after `HOLD_S`
"""

import asyncio
import contextlib
import math
import signal
import time
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import structlog

from common.bus.bus import Bus, connect
from common.bus.redis_connection import CLUSTER
from common.bus.streams import ALL_CELLS, Cell
from common.cancellation import starting
from common.models.host_memory import host_bytes
from common.pool.base_states import BaseState
from common.pool.base_workers import BaseWorker, BaseWorkers
from common.pool.choosing import OpenSlice, WaitingBase, choose, ranked
from common.pool.gate import Expected
from common.pool.looking import Lookout, Unread
from common.pool.placing import Placing
from common.settings import Settings, kept_base
from common.wire.reported import InPool
from common.worker.telemetry import KEEP_S, About, Reporter

UNUSED_S = 600.0
"""A base worker without weights ends after so long without work or sessions."""
LOOK_S, SLOW_LOOK_S = 0.05, 0.25
"""Time between two looks; while the open base is busy, and after an idle minute."""
QUIET_S = 60.0
REPORT_S = 1.0
PATIENCE, PATIENCE_S = 4, 30.0
"""Others wait until a base model is loaded, for so many times the expected time, and at least so long: it may download, or hang."""
GOODBYE_S = 1.0
log = structlog.get_logger()
StartTask = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]


@dataclass(frozen=True, slots=True)
class PooledService:
    """The traits of a service's base workers."""

    about: About
    """A part of the reports for base models without a process."""
    itemsize: float = 0
    """Bytes of a weight on one device; 0: they hold none."""
    open_bytes: int = 0
    """Memory that the open one takes more than a closed one, at most."""
    finishes: bool = False
    """Work that was begun ends before a base model is closed; else it may be handed back."""
    sleeps: bool = False
    """A closed one has given its memory back, and one that loads needs all of it: no other is open meanwhile."""


class PoolWorker:
    """One pooled. Its base workers are processes of the same service."""

    def __init__(self, settings: Settings, service: str, pooled: PooledService, workers: BaseWorkers) -> None:
        self._settings, self._service, self._workers = settings, pooled, workers
        self._worker = worker = workers.pool_worker
        cells = {base: Cell(base) for base in settings.models}
        shards = CLUSTER in settings.redis_url.partition("://")[0]
        one = connect(settings.redis_url, next(iter(cells.values())))
        self._buses = {
            base: Bus(connect(settings.redis_url, cell) if shards else one, cell) for base, cell in cells.items()
        }
        places = Bus(connect(settings.redis_url, ALL_CELLS) if shards else one, ALL_CELLS)
        placement = settings.placement if pooled.itemsize else "spread"  # which limits nothing before a place is known
        self._placing = Placing(places, service, worker, placement, pooled.about.slots)
        self._lookout = Lookout(self._buses, service, worker, settings.lease_s)
        places = {base: kept_base(where, settings.node_dir) for base, where in settings.models.items()}
        self._states = {base: BaseState(base, where, pooled.itemsize, pooled.sleeps) for base, where in places.items()}
        self._reporters = {
            base: Reporter(worker, service, base, pooled.about, partial(self._in_pool, base))
            for base in settings.models
        }
        self._max_bytes = settings.pool_bytes or host_bytes() // 2
        self._seen = dict.fromkeys(settings.models, Unread())
        self._open: dict[str, BaseWorker] = {}
        self._opened_at_s = 0.0
        self._opening_s = self._pause_s = 0.0
        self._helps = False  # the open base was opened off its places, or beside others as nothing waited
        self._uncrowded_at_s = time.monotonic()
        self._loading: dict[str, float] = {}  # base -> until when others wait for it
        self._quiet_since_s = time.monotonic()

    async def run(self) -> None:
        """Runs until SIGTERM or Ctrl-C. Returns once all base workers have ended."""
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        async with starting() as start:
            start(self._take_turns(start))
            start(self._report())
            await stop.wait()
        await asyncio.gather(*(self._workers.end(base) for base in [*self._workers.running]))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_S):
                for base in self._states:
                    await self._lookout.leave(base)
                    await self._tell(base, "stopped")
        for bus in self._buses.values():
            await bus.close()

    # ---- turns ------------------------------------------------------------------------------------------------------

    async def _take_turns(self, start: StartTask) -> None:
        while True:
            loaded = self._workers.loaded
            self._seen = await self._lookout.look({base: worker.worker for base, worker in loaded.items()})
            await self._forget_ended()
            current, num_bases, slice_max_s = self._current(), len(self._states), self._settings.slice_max_s
            is_busy = current is not None and current.is_busy
            self._placing.measure(current.base if current and is_busy and not self._helps else None, self._seen)
            stays = None if self._gives_way else current
            waiting = self._placing.may_open(self._waiting(), self._seen, is_idle=not (stays and is_busy))
            for each in choose(stays, waiting, num_bases=num_bases, slice_max_s=slice_max_s):
                if await self._begin(each, start):
                    break
            if is_busy:
                await self._prefetch(ranked(waiting, num_bases=num_bases, slice_max_s=slice_max_s), start)
            elif not waiting and (base := self._crowded()):
                await self._begin(base, start, helps=True)
            await self._pause()

    async def _begin(self, base: WaitingBase, start: StartTask, *, helps: bool = False) -> bool:
        """Opens a loaded base, else loads it. False: another may be opened meanwhile."""
        worker = self._workers.loaded.get(base.base)
        must_wait = self._is_loading() or base.base in self._loading
        if must_wait and (worker is None or self._service.sleeps):
            return False
        if not await self._lookout.enter(base.base, self._seen[base.base], 0 if helps else self._service.about.slots):
            return False
        if worker is not None:
            await self._switch(worker, base)
            self._helps = helps or self._placing.is_off(base.base)
            return worker.is_open
        if await self._made_room(base.base):
            self._begin_load(base.base, start)
        return False

    async def _switch(self, worker: BaseWorker, base: WaitingBase) -> None:
        """The next is open only after the last is closed, or its process has ended."""
        began_s = time.monotonic()
        with self._switching(worker.base):
            await self._close()
            self._opened_at_s, self._open[worker.base] = time.monotonic(), worker  # `_report` stays entered meanwhile
            await worker.open(base.waited_s)
        if not worker.is_open:
            return await self._failed(worker.base, f"its process {worker.ended}", died=True)
        self._states[worker.base].opened(time.monotonic() - self._opened_at_s)
        self._opened_at_s, self._opening_s = time.monotonic(), base.opening_s
        self._pause_s = base.since_closed_s - base.waited_s
        worker.busy_at_s = self._opened_at_s
        log.info("opened", base_model=worker.base, waited_s=base.waited_s, seconds=self._opened_at_s - began_s)
        await self._tell(worker.base, "stopped")  # the base worker reports; this adds the switch to the timeline

    @contextlib.contextmanager
    def _switching(self, base: str) -> Generator[None]:
        """The block's time stands in the timeline as nobody's."""
        timeline = self._reporters[base].timeline
        timeline.begin("", "", "switch")
        try:
            yield
        finally:
            timeline.end("", "", "switch")

    async def _close(self) -> None:
        for worker in [*self._open.values()] if self._service.itemsize else ():
            drain_s = None if self._service.finishes else 0.0 if self._gives_way else self._settings.slice_drain_s
            await worker.close(drain_s, self._settings.lease_s)
        await self._forget_ended()

    async def _forget_ended(self) -> None:
        """Leaves the cells of base workers that are not open any more."""
        for base, worker in [*self._open.items()]:
            if not worker.is_open:
                del self._open[base]
                state = self._states[base]
                state.closed_at_s, state.operation_s = time.monotonic(), worker.operation_s or state.operation_s
                if worker.status:
                    log.warning("base_worker_ended", base_model=base, how=worker.ended)
                await self._lookout.leave(base)

    async def _made_room(self, base: str) -> bool:
        """Ends closed base workers, and at last the open one, whose slice is over, so that one more has room."""
        state = self._states[base]
        if state.num_bytes > self._max_bytes:
            has, needs = self._max_bytes, state.num_bytes
            state.refuse(
                f"{base} needs {needs / 1e9:.2f} GB, and this worker's base models have {has / 1e9:.2f} GB: raise "
                "MARLAAS_POOL_BYTES, or serve it on another machine"
            )
            await self._lookout.leave(base)
            return False
        if (ends := self._frees(state)) is None or self._service.sleeps:
            await self._close()
            ends = self._frees(state)
        for each in ends or ():
            await self._workers.end(each)
        return ends is not None

    def _has_room(self, base: str) -> bool:
        """Could it be opened, and no other base model be ended for it?"""
        state, loaded = self._states[base], self._workers.loaded
        return state.may_open and (base in loaded or self._frees(state) == [])

    def _frees(self, state: BaseState) -> list[str] | None:
        """A base model that fits by itself is started even where an open one might then take more than there is. After a death it has all
        the memory: where that runs out, the system kills without a word. Env workers all stay open, so none makes room for another."""
        if not self._service.itemsize:
            return []
        room = max(0 if state.num_deaths else self._max_bytes - self._service.open_bytes, state.num_bytes)
        return self._workers.frees(state.num_bytes, room)

    async def _prefetch(self, order: list[WaitingBase], start: StartTask) -> None:
        """Loads the base that comes next while a slice goes on, as far as there is room."""
        sleeps = self._service.sleeps
        able = [each for each in order if (sleeps or not each.is_loaded) and each.waited_s >= each.opening_s]
        if not able or self._is_loading():
            return
        state = self._states[able[0].base]
        state.read_ahead()
        if not sleeps and state.name not in self._loading and self._has_room(state.name):
            self._begin_load(state.name, start)

    def _is_loading(self) -> bool:
        """Must others wait until one is loaded?"""
        return any(time.monotonic() < until_s for until_s in self._loading.values())

    def _begin_load(self, base: str, start: StartTask) -> None:
        patience_s = max(PATIENCE_S, PATIENCE * self._states[base].opening_s(is_loaded=False))
        self._loading[base] = math.inf if self._service.sleeps else time.monotonic() + patience_s
        start(self._load(base))

    async def _failed(self, base: str, reason: str, *, died: bool) -> None:
        self._states[base].failed(reason, died=died)
        log.error("not_loaded", base_model=base, reason=reason)
        await self._lookout.leave(base)

    async def _load(self, base: str) -> None:
        state, began_s = self._states[base], time.monotonic()
        tier = state.file_tier
        with self._switching(base):
            worker = await self._workers.load(base, tier, state.num_bytes)
        del self._loading[base]
        if not worker.worker or worker.ended:
            await self._failed(base, worker.refused or f"its process {worker.ended}", died=not worker.refused)
            return
        state.loaded(worker, tier, seconds := time.monotonic() - began_s)
        log.info("loaded", base_model=base, tier=tier, seconds=seconds, num_bytes=worker.num_bytes)
        await self._tell(base, "stopped")  # from now on the base worker reports
        if not self._service.itemsize:
            await worker.open()
            self._open[base] = worker

    # ---- what is seen -----------------------------------------------------------------------------------------------

    def _waiting(self) -> list[WaitingBase]:
        weights = [unread.weight for unread in self._seen.values() if unread.weight]
        mean = sum(weights) / len(weights) if weights else 0.0
        loaded = self._workers.loaded
        return [
            self._states[base].waiting(unread, loaded.get(base), mean)
            for base, unread in self._seen.items()
            if unread.num and base not in self._open and self._states[base].may_open
        ]

    def _crowded(self) -> WaitingBase | None:
        """A base whose workers have had more than one piece of work each for as long as one would have to wait that may open here. What
        comes next is then read here too: as nothing waits, this place would idle beside them."""
        crowded = {
            base: unread.num_begun / unread.num_open
            for base, unread in self._seen.items()
            if unread.num_begun > unread.num_open > 0 and base not in self._open and self._has_room(base)
        }
        now_s = time.monotonic()
        if not crowded:
            self._uncrowded_at_s = now_s
            return None
        base = max(crowded, key=lambda name: crowded[name])
        found = self._states[base].waiting(self._seen[base], self._workers.loaded.get(base), 0.0)
        waits = replace(found, waited_s=now_s - self._uncrowded_at_s)
        may_open = self._placing.may_open([waits], self._seen, is_idle=True)
        return found if waits.waited_s >= waits.opening_s and may_open else None

    @property
    def _gives_way(self) -> bool:
        """May the open base be closed at any time? It helps out here, and others have it open."""
        return self._helps and any(self._seen[base].num_open > 1 for base in self._open)

    def _current(self) -> OpenSlice | None:
        """The open base; None for env workers, where each may be opened at any time."""
        if not self._open or not self._service.itemsize:
            return None
        ((base, worker),) = self._open.items()
        now_s = time.monotonic()
        is_busy = bool(self._seen[base].num or worker.pulse.in_use)
        if is_busy:
            worker.busy_at_s = now_s
        return OpenSlice(
            base=base,
            is_busy=is_busy,
            lasted_s=now_s - self._opened_at_s,
            idle_s=now_s - worker.busy_at_s,
            opening_s=self._opening_s,
            pause_s=self._pause_s,
        )

    async def _pause(self) -> None:
        """Waits until the next look: a short time, unless work goes on, or nothing has been to do for long."""
        now_s = time.monotonic()
        if any(worker.pulse.in_use for worker in self._open.values()) or any(each.num for each in self._seen.values()):
            self._quiet_since_s = now_s
        await asyncio.sleep(LOOK_S)
        while (left_s := now_s + SLOW_LOOK_S - time.monotonic()) > 0 and (
            now_s - self._quiet_since_s > QUIET_S or any(worker.pulse.in_use for worker in self._open.values())
        ):
            await self._workers.changed(left_s)

    async def _end_unused(self) -> None:
        for base, worker in self._workers.loaded.items():
            is_used = self._seen[base].num or worker.pulse.num_held
            if not is_used and time.monotonic() - worker.busy_at_s >= UNUSED_S:
                await self._workers.end(base)
                log.info("base_worker_unused", base_model=base)

    # ---- reports ----------------------------------------------------------------------------------------------------

    async def _report(self) -> None:
        while True:
            await asyncio.to_thread(self._look_at_files)
            if self._service.itemsize:
                await self._placing.tell(self._max_bytes, self._states, self._workers.loaded)
            else:
                await self._end_unused()
            for worker in self._workers.running.values():
                worker.kill_if_silent(self._settings.lease_s)
            for base in self._states:
                if base in self._open:
                    recent = time.monotonic() - self._opened_at_s < REPORT_S or not self._open[base].is_open
                    await self._lookout.stay(base, opening=recent and bool(self._service.itemsize))
                elif base in self._loading and self._is_loading():
                    await self._lookout.stay(base, opening=True)
                if worker := self._workers.loaded.get(base):
                    pool = self._in_pool(base)
                    await worker.channel.send(Expected(pool.opens_in_s, pool.waiting_s))
                else:
                    await self._tell(base, "refused" if self._states[base].refused else "closed")
            await asyncio.sleep(REPORT_S)

    def _look_at_files(self) -> None:
        for state in self._states.values():
            state.look()

    def _in_pool(self, base: str) -> InPool:
        state, is_loaded = self._states[base], base in self._workers.loaded
        tier = "device" if is_loaded else state.file_tier
        return InPool(self._worker, tier, state.opening_s(is_loaded=is_loaded), self._seen[base].waited_s)

    async def _tell(self, base: str, state: str) -> None:
        bus, reporter = self._buses[base], self._reporters[base]
        report = reporter.report(state, 0, reason=self._states[base].refused)
        await bus.broadcast(bus.cell.telemetry, report, keep_s=KEEP_S)
