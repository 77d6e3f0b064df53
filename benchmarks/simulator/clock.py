"""The virtual clock, and processors that several workers share under it."""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

Act = Callable[[], None]


@dataclass(slots=True)
class Clock:
    """Events in order of time, then of their making. Nothing happens between two events."""

    now: float = 0.0
    _events: list[tuple[float, int, Act]] = field(default_factory=list)
    _made: int = 0

    def at(self, time: float, act: Act) -> None:
        self._made += 1
        heapq.heappush(self._events, (max(time, self.now), self._made, act))

    def after(self, seconds: float, act: Act) -> None:
        self.at(self.now + seconds, act)

    def step(self) -> bool:
        """The next event. False: there is none."""
        if not self._events:
            return False
        self.now, _, act = heapq.heappop(self._events)
        act()
        return True


class Computes(Protocol):
    """A worker with a thread that computes."""

    @property
    def computing(self) -> bool: ...

    def sync(self) -> None:
        """Bring its work up to the clock, at the host's speed until now."""
        ...

    def plan(self) -> None:
        """Foresee its next event, at the host's speed from now on."""
        ...


@dataclass(slots=True)
class Host:
    """Processor sharing: `cores` between all that compute; None: a core for each."""

    clock: Clock
    cores: int | None
    members: list[Computes] = field(default_factory=list)
    speed: float = 1.0  # seconds of computing that a second brings

    def changed(self) -> None:
        """Somebody began or ended to compute."""
        if self.cores is None:
            return
        speed = min(1.0, self.cores / max(1, sum(member.computing for member in self.members)))
        if speed == self.speed:
            return
        for member in self.members:
            member.sync()
        self.speed = speed
        for member in self.members:
            member.plan()


@dataclass(slots=True, eq=False)
class Process:
    """A process's loop: it does what it is given, one after another."""

    host: Host
    _given: deque[tuple[float, Act]] = field(default_factory=deque[tuple[float, Act]])  # the first is computed
    _left_s: float = 0.0
    _synced: float = 0.0
    _plan: int = 0

    def __post_init__(self) -> None:
        self.host.members.append(self)

    @property
    def computing(self) -> bool:
        return bool(self._given)

    def do(self, seconds: float, then: Act) -> None:
        """`then` happens when all that was given before and these seconds are computed."""
        self._given.append((seconds, then))
        if len(self._given) == 1:
            self._begin()
            self.host.changed()
            self.plan()

    def _begin(self) -> None:
        self._left_s, self._synced = self._given[0][0], self.host.clock.now

    def sync(self) -> None:
        now = self.host.clock.now
        elapsed, self._synced = now - self._synced, now
        self._left_s -= elapsed * self.host.speed

    def plan(self) -> None:
        if self._given:
            self._plan += 1
            number = self._plan
            self.host.clock.after(max(0.0, self._left_s) / self.host.speed, lambda: self._done(number))

    def _done(self, plan: int) -> None:
        if plan != self._plan:
            return
        _, then = self._given.popleft()
        if self._given:
            self._begin()
        else:
            self.host.changed()
        self.plan()
        then()
