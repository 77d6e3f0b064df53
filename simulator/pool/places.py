"""Simulates pool workers: places that bases share, one open at a time. Their decisions are production's (`common/pool`)."""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from common.pool.choosing import OpenSlice, WaitingBase, choose, linger_s, longest_slice_s
from common.pool.placement import PlacementRule, PoolRow, may_open, place
from simulator.clock import Clock

LEAST_S = 1e-3
"""Time until a worker looks again, at least: what is due now may be due a rounding later."""
AVERAGED = 0.2
"""Weight of the newest operation in a base's moving average."""


class Costs(NamedTuple):
    """Seconds to open a base, by the tier that it is in."""

    device_s: float = 0.5
    host_s: float = 7.0
    disk_s: float = 80.0


class PoolSize(NamedTuple):
    """The workers of one service's pool."""

    workers: int
    slots: int = 1  # operations of its open base that a worker runs at once
    device_bases: int = 1  # closed and open ones whose process may stay
    host_bases: int = 3  # that have their place on a worker at most, and whose weights stay in the host's memory
    slice_max_s: float = 30.0


@dataclass(slots=True)
class Books:
    """Seconds of one pool worker by what it did; `held`: while bases had their place on it."""

    busy: float = 0.0
    switch: float = 0.0
    idle: float = 0.0
    held: float = 0.0
    switches: int = 0

    @property
    def wall(self) -> float:
        return self.busy + self.switch + self.idle


class WorkerSlice(NamedTuple):
    """A worker's time for one base, from the begin of its opening."""

    worker: str
    base: str
    start_s: float
    open_s: float
    end_s: float


@dataclass(slots=True)
class PoolOperation:
    base: str
    seconds: float
    at: float
    """Time at which it was asked for."""
    done: Callable[[], None]


@dataclass(slots=True, eq=False)
class ServicePool:
    """The workers of one service, and what waits for them."""

    name: str
    clock: Clock
    size: PoolSize
    costs: Costs
    placement: PlacementRule
    slices: list[WorkerSlice] | None = None
    """None: not kept."""
    workers: list["SimulatedWorker"] = field(init=False)
    waiting: dict[str, deque[PoolOperation]] = field(default_factory=dict[str, deque[PoolOperation]])
    """Unread operations of the bases that have some."""
    opening: dict[str, int] = field(default_factory=dict[str, int])
    operation_s: dict[str, float] = field(default_factory=dict[str, float])
    places: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])

    def __post_init__(self) -> None:
        self.workers = [SimulatedWorker(f"{self.name}-{number}", self) for number in range(self.size.workers)]

    def give_places(self, demand: dict[str, float]) -> dict[str, tuple[str, ...]]:
        """Computes the places again: the bases with jobs, and the share of a worker's time that each needs, are these."""
        rows = [PoolRow(worker.name, self.size.host_bases, worker.host.keys()) for worker in self.workers]
        self.places = place(self.placement, demand, dict.fromkeys(demand, 1.0), rows)
        for worker in self.workers:
            worker.hold([base for base, names in self.places.items() if worker.name in names])
        for worker in self.workers:
            worker.look()  # what waits may have got its place on another
        return self.places

    def ask(self, operation: PoolOperation) -> None:
        """One more waits. Who has its base open reads it, else whoever may open it looks."""
        self.waiting.setdefault(operation.base, deque()).append(operation)
        for worker in self.workers:
            if worker.open == operation.base and worker.reads:
                worker.look()
        if operation.base in self.waiting:
            for worker in self.workers:
                if worker.open != operation.base and (operation.base in worker.host or not worker.running):
                    worker.look()

    def take(self, base: str) -> PoolOperation:
        queue = self.waiting[base]
        operation = queue.popleft()
        if not queue:
            del self.waiting[base]
        return operation

    def enter(self, base: str) -> bool:
        """May one more worker open the base? Not if those that are opening it have slots for all that waits."""
        if len(self.waiting[base]) <= self.opening.get(base, 0) * self.size.slots:
            return False
        self.opening[base] = self.opening.get(base, 0) + 1
        return True

    def measured(self, base: str, seconds: float) -> None:
        known = self.operation_s.get(base, seconds)
        self.operation_s[base] = known + AVERAGED * (seconds - known)

    def close_books(self) -> None:
        for worker in self.workers:
            worker.account()
            worker.end_slice()


@dataclass(slots=True, eq=False)
class SimulatedWorker:
    """One place. It reads what waits for its open base, and switches as `choose` says."""

    name: str
    pool: ServicePool
    books: Books = field(default_factory=Books)
    open: str = ""
    device: OrderedDict[str, None] = field(default_factory=OrderedDict[str, None])
    """Bases whose process runs, used longest ago first."""
    host: dict[str, float] = field(default_factory=dict[str, float])
    """Bases with their place here, and from when on each one's weights are in memory: they are read ahead."""
    running: int = 0
    next: str = ""
    """The base that it switches to: it reads nothing meanwhile."""
    _closed_at: dict[str, float] = field(default_factory=dict[str, float])
    _is_opening: bool = False
    _since: float = 0.0  # of the books
    _opened_at: float = 0.0
    _overdue_at: float = 0.0
    _began_at: float = 0.0  # of the opening
    _idle_since: float = 0.0
    _pause: float = 0.0
    _alarm: float = inf

    @property
    def reads(self) -> bool:
        return not self.next and self.running < self.pool.size.slots

    def hold(self, bases: Iterable[str]) -> None:
        """Bases have their place here from now on, and others no more."""
        self.account()
        now, known = self.pool.clock.now, self.host
        self.host = {base: known.get(base, now + self.pool.costs.disk_s) for base in bases}
        self._closed_at = {base: at for base, at in self._closed_at.items() if base in self.pool.places}

    def look(self) -> None:
        """Reads what it can, and switches if it should."""
        if self.next:
            return
        if self.pool.waiting:
            for base in self._candidates():
                if self.pool.enter(base.base):
                    return self._switch(base.base)
        while self.running < self.pool.size.slots and self.open in self.pool.waiting:
            self._start(self.pool.take(self.open))

    def account(self) -> None:
        """Writes down what it did since the last time. To be called before that changes."""
        now = self.pool.clock.now
        passed, self._since = now - self._since, now
        if self.running:
            self.books.busy += passed
        elif self._is_opening:
            self.books.switch += passed
        else:
            self.books.idle += passed
        self.books.held += passed if self.host else 0.0

    # ---- operations -------------------------------------------------------------------------------------------------

    def _start(self, operation: PoolOperation) -> None:
        if not self.running:
            self.account()
        self.running += 1
        self.pool.clock.after(operation.seconds, lambda: self._end(operation))

    def _end(self, operation: PoolOperation) -> None:
        if self.running == 1:
            self.account()
        self.running -= 1
        self._idle_since = self.pool.clock.now
        self.pool.measured(operation.base, operation.seconds)
        operation.done()
        if self.next and not self.running and not self._is_opening:
            self._begin_opening()
        else:
            self.look()

    # ---- switches ---------------------------------------------------------------------------------------------------

    def _candidates(self) -> list[WaitingBase]:
        """The bases that may follow now. Sets an alarm for when that may change."""
        pool, now = self.pool, self.pool.clock.now
        is_idle = not self.running and self.open not in pool.waiting
        if self.open and not is_idle and now < self._overdue_at:
            if any(base in self.host for base in pool.waiting if base != self.open):
                self._wake(self._overdue_at)
            return []
        # `choose` would say the same at each event. To ask it only where a base may follow saves most of the time.
        others = [(base, queue[0].at) for base, queue in pool.waiting.items() if base != self.open]
        times = [self._follows_at(base, since, is_idle=is_idle) for base, since in others]
        self._wake(min((time for time in times if time > now), default=inf))
        if not any(time <= now for time in times):
            return []
        able = [self._waiting(base, since) for base, since in others]
        able = may_open(pool.placement, self.name, able, pool.places, is_idle=is_idle)
        current = self._current(is_busy=not is_idle) if self.open else None
        found = choose(current, able, num_bases=len(pool.places), slice_max_s=pool.size.slice_max_s)
        if not found:
            self._wake(now)  # a rounding apart
        return found

    def _current(self, *, is_busy: bool) -> OpenSlice:
        now = self.pool.clock.now
        return OpenSlice(
            base=self.open,
            is_busy=is_busy,
            lasted_s=now - self._opened_at,
            idle_s=0.0 if is_busy else now - self._idle_since,
            opening_s=self._opened_at - self._began_at,
            pause_s=self._pause,
        )

    def _waiting(self, base: str, since: float) -> WaitingBase:
        now = self.pool.clock.now
        return WaitingBase(
            base=base,
            waited_s=now - since,
            operation_s=self.pool.operation_s.get(base, 1.0),
            opening_s=self._opening_s(base),
            is_loaded=base in self.device,
            since_closed_s=now - self._closed_at.get(base, -inf),
        )

    def _follows_at(self, base: str, since: float, *, is_idle: bool) -> float:
        """The first time at which the rules let a base follow, as things are. `since`: it waits since then."""
        opening_s = self._opening_s(base)
        if base in self.host:
            costs, read_at = self.pool.costs, self.host[base]
            from_memory = max(read_at, since + costs.host_s)
            follows_at = since if base in self.device else min(from_memory, since + opening_s)
        elif not self.pool.places.get(base) and self.pool.placement != "isolated":
            follows_at = since + opening_s
        elif self.pool.placement == "backfill" and is_idle:
            follows_at = since + self.pool.operation_s.get(base, 1.0) + opening_s
        else:
            return inf
        lingers_s = linger_s(opening_s, self._pause)
        return max(follows_at, self._idle_since + lingers_s) if self.open and is_idle else follows_at

    def _opening_s(self, base: str) -> float:
        costs = self.pool.costs
        if base in self.device:
            return costs.device_s
        return costs.host_s if self.host.get(base, inf) <= self.pool.clock.now else costs.disk_s

    def _wake(self, at: float) -> None:
        """Looks again at a time, unless it does earlier."""
        at = max(at, self.pool.clock.now + LEAST_S)
        if at < self._alarm and at < inf:
            self._alarm = at
            self.pool.clock.at(at, lambda: self._ring(at))

    def _ring(self, at: float) -> None:
        if at == self._alarm:
            self._alarm = inf
            self.look()

    def _switch(self, base: str) -> None:
        self._pause = self.pool.waiting[base][0].at - self._closed_at.get(base, -inf)
        self.next = base
        if not self.running:
            self._begin_opening()

    def _begin_opening(self) -> None:
        self.account()
        self.end_slice()
        now, cost = self.pool.clock.now, self._opening_s(self.next)
        self._closed_at[self.open] = now
        self.device[self.next] = None
        self.device.move_to_end(self.next)
        while len(self.device) > self.pool.size.device_bases:
            self.device.popitem(last=False)
        self.open, self._is_opening, self._began_at = "", True, now
        self.books.switches += 1
        self.pool.clock.after(cost, self._opened)

    def _opened(self) -> None:
        self.account()
        self.open, self.next, self._is_opening = self.next, "", False
        now = self._opened_at = self._idle_since = self.pool.clock.now
        self._overdue_at = now + longest_slice_s(now - self._began_at, self.pool.size.slice_max_s)
        self.pool.opening[self.open] -= 1
        self.look()

    def end_slice(self) -> None:
        """Keeps the slice for the picture."""
        if self.open and self.pool.slices is not None:
            self.pool.slices.append(
                WorkerSlice(self.name, self.open, self._began_at, self._opened_at, self.pool.clock.now)
            )
