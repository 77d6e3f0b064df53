"""Simulates the rollout workers of a cell: they start, are killed and, in an elastic pool, come and go by production's own rules."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from manager_service.scheduling.elastic import Retirement, WorkerLoad, WorkerRange, row_slots, wanted
from simulator.calibration import Size
from simulator.clock import Clock
from simulator.engine import SimulatedEngine
from simulator.workers import Flight

LOOK_S = 1.0
"""Time between two looks at an elastic pool, and most between two searches for a dead worker's turns."""


@dataclass
class Fleet:
    """The live rollout workers. `num_turns`: slots that turns would fill if there were so many; None: no job is left."""

    clock: Clock
    size: Size
    make: Callable[[str], SimulatedEngine]
    num_turns: Callable[[], float | None]
    changed: Callable[[], None]  # there are more workers, or fewer
    live: list[SimulatedEngine] = field(default_factory=list[SimulatedEngine])
    all: list[SimulatedEngine] = field(default_factory=list[SimulatedEngine])
    held_s: float = 0.0  # of those that ended
    _since_s: dict[str, float] = field(default_factory=dict[str, float])  # worker -> begin of its start
    _starting: int = 0

    def begin(self) -> None:
        """The workers that there are at first have started."""
        least = self.size.least_rollout or self.size.rollout
        self._range = WorkerRange(least, self.size.rollout)
        self._retirement = Retirement(repack=self.size.repack)
        for _ in range(least):
            self._join(self.clock.now)
        for at_s in self.size.kills_s:
            self.clock.at(at_s, self._kill)
        if not self._range.is_fixed:
            self.clock.after(LOOK_S, self._look)

    def end(self) -> None:
        """No job is left."""
        self.held_s += sum(self.clock.now - since for since in self._since_s.values())
        self._since_s.clear()

    def _join(self, since_s: float) -> None:
        engine = self.make(f"rollout-{len(self.all)}")
        self._since_s[engine.name] = since_s
        self.all.append(engine)
        self.live.append(engine)
        engine.list_free()
        engine.fill()

    def _start(self) -> None:
        since_s = self.clock.now
        self._starting += 1

        def started() -> None:
            self._starting -= 1
            self._join(since_s)
            self.changed()

        self.clock.after(self.size.start_s, started)

    def _leave(self, engine: SimulatedEngine) -> None:
        self.live.remove(engine)
        self.held_s += self.clock.now - self._since_s.pop(engine.name)

    # ---- deaths -----------------------------------------------------------------------------------------------------

    def _kill(self) -> None:
        """Kills the worker with most rows; another takes its place."""
        if self.num_turns() is None or not self.live:
            return
        engine = max(self.live, key=lambda each: each.num_rows)
        lost = engine.stop(killed=True)
        self._leave(engine)
        found_s = self.size.lease_s + min(LOOK_S, self.size.lease_s / 4)
        self.clock.after(found_s, lambda: self._take_over(lost))
        if self._range.is_fixed:
            self._start()

    def _take_over(self, lost: Sequence[Flight]) -> None:
        """Evenly, beyond the slots of those that live; while none does, a later look finds one."""
        if not self.live:
            self.clock.after(LOOK_S, lambda: self._take_over(lost))
            return
        for number, flight in enumerate(lost):
            self.live[number % len(self.live)].orphans.append(flight)
        for engine in self.live:
            engine.fill()

    # ---- an elastic pool --------------------------------------------------------------------------------------------

    def _look(self) -> None:
        turns = self.num_turns()
        if turns is None:
            return
        self.clock.after(LOOK_S, self._look)
        loads = [WorkerLoad(each.name, self.size.rollout_slots, each.num_rows) for each in self.live]
        number = self._range.clamp(wanted(turns, row_slots(loads)))
        for _ in range(number - len(self.live) - self._starting):
            self._start()
        name = self._retirement.look(self.clock.now, loads, number, settled=not self._starting)
        for engine in [each for each in self.live if each.name == name]:
            self._leave(engine)
            for flight in engine.stop(killed=False):
                engine.turns.put(flight)
            self.changed()
