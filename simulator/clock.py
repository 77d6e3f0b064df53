"""The virtual clock, and processors that several workers share under it."""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

Act = Callable[[], None]


@dataclass(slots=True)
class Clock:
    """Events in order of time, then of their making. Nothing happens between two events."""

    now: float = 0.0
    num_made: int = 0
    _events: list[tuple[float, int, Act]] = field(default_factory=list)

    def at(self, time: float, act: Act) -> None:
        self.num_made += 1
        heapq.heappush(self._events, (max(time, self.now), self.num_made, act))

    def after(self, seconds: float, act: Act) -> None:
        self.at(self.now + seconds, act)

    def step(self) -> bool:
        """The next event. False: there is none."""
        if not self._events:
            return False
        self.now, _, act = heapq.heappop(self._events)
        act()
        return True


@dataclass(slots=True)
class SimulatedHost:
    """Processor sharing: `cores` between all that compute; None: a core for each.

    All advance equally, so one clock of work serves them all: it goes on by `speed` a second. What is to be computed is an event
    on it, and when their number changes only the next event has another time.
    """

    clock: Clock
    cores: float | None
    num_computing: int = 0
    _speed: float = 1.0  # seconds of computing that a second brings
    _work: float = 0.0  # the clock of work at `_since`
    _since: float = 0.0
    _events: list[tuple[float, int, Act]] = field(default_factory=list)
    _made: int = 0
    _plan: int = 0

    @property
    def work(self) -> float:
        """Seconds that each who computed all the time has computed."""
        return self._work + (self.clock.now - self._since) * self._speed

    def after(self, seconds: float, act: Act) -> None:
        """Time at which so many seconds of somebody's work are computed."""
        self._made += 1
        heapq.heappush(self._events, (self.work + max(0.0, seconds), self._made, act))
        if self._events[0][1] == self._made:
            self._foresee()

    def began(self) -> None:
        """One more computes."""
        self._count(1)

    def ended(self) -> None:
        self._count(-1)

    def _count(self, change: int) -> None:
        self.num_computing += change
        speed = 1.0 if self.cores is None else min(1.0, self.cores / max(1, self.num_computing))
        if speed != self._speed:
            self._work, self._since, self._speed = self.work, self.clock.now, speed
            self._foresee()

    def _foresee(self) -> None:
        self._plan += 1
        if self._events:
            number, left = self._plan, self._events[0][0] - self.work
            self.clock.after(max(0.0, left) / self._speed, lambda: self._reach(number))

    def _reach(self, plan: int) -> None:
        if plan != self._plan:
            return
        _, _, act = heapq.heappop(self._events)
        self._foresee()
        act()


@dataclass(slots=True, eq=False)
class Process:
    """A process's loop: it does its tasks one after another."""

    host: SimulatedHost
    _tasks: deque[tuple[float, Act]] = field(default_factory=deque[tuple[float, Act]])  # the first is computed

    def do(self, seconds: float, then: Act) -> None:
        """`then` happens when the tasks before and these seconds are computed."""
        self._tasks.append((seconds, then))
        if len(self._tasks) == 1:
            self.host.began()
            self.host.after(seconds, self._done)

    def _done(self) -> None:
        _, then = self._tasks.popleft()
        if self._tasks:
            self.host.after(self._tasks[0][0], self._done)
        else:
            self.host.ended()
        then()
