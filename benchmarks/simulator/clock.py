"""The virtual clock, and processors that several workers share under it."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

Act = Callable[[], None]
LOAD_S = 1.0
"""Over so long the control plane's load is averaged."""


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
    """Processor sharing: `cores` between the workers that compute and the control plane; None: a core for each."""

    clock: Clock
    cores: int | None
    control_s: float  # processor seconds of the control plane for each turn
    members: list[Computes] = field(default_factory=list)
    speed: float = 1.0  # seconds of computing that a second brings
    _load: float = 0.0  # turns a second, averaged
    _load_at: float = 0.0

    def turned(self) -> None:
        """The control plane handled a turn."""
        decay = max(0.0, 1 - (self.clock.now - self._load_at) / LOAD_S)
        self._load, self._load_at = self._load * decay + 1 / LOAD_S, self.clock.now

    def changed(self) -> None:
        """Somebody began or ended to compute."""
        if self.cores is None:
            return
        wanted = sum(member.computing for member in self.members) + min(1.0, self._load * self.control_s)
        speed = min(1.0, self.cores / max(wanted, 1e-9))
        if speed == self.speed:
            return
        for member in self.members:
            member.sync()
        self.speed = speed
        for member in self.members:
            member.plan()
