"""Simulates the rollout workers of a cell: they start, are killed and, in an elastic pool, come and go by production's own rules."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil, inf
from typing import NamedTuple

from manager_service.scheduling.elastic import Retirement, WorkerLoad, WorkerRange, row_slots, wanted
from simulator.calibration import Size
from simulator.clock import Act, Clock
from simulator.engine import SimulatedEngine
from simulator.workers import Flight

LOOK_S = 1.0
"""Time between two looks at an elastic pool, and most between two searches for a dead worker's turns."""
HPA_PODS = 4
"""Pods by which Kubernetes' autoscaler lets any deployment grow at a look."""


class PoolRule(NamedTuple):
    """The way in which an elastic pool follows its turns: by default that of `marlaas up`; else that of Kubernetes' autoscaler."""

    look_s: float = LOOK_S  # between two looks
    fill: bool = False  # all slots, as a stream's length over a worker's slots says; else `wanted` leaves room
    growth: float = inf  # at a look, to so many times as many workers at most, or `HPA_PODS` more
    keep_s: float | None = None  # as many stay as any look of so many seconds wanted, the fullest; None: `Retirement`


MARLAAS_UP = PoolRule()


@dataclass
class Fleet:
    """The live rollout workers. `num_turns`: slots that turns would fill if there were so many; None: no job is left."""

    clock: Clock
    size: Size
    make: Callable[[str], SimulatedEngine]
    num_turns: Callable[[], float | None]
    changed: Callable[[], None]  # there are more workers, or fewer
    rule: PoolRule = MARLAAS_UP
    load: Callable[[SimulatedEngine, Act], None] | None = None  # a start's end, then it acts
    live: list[SimulatedEngine] = field(default_factory=list[SimulatedEngine])
    all: list[SimulatedEngine] = field(default_factory=list[SimulatedEngine])
    held_s: float = 0.0  # of those that ended
    most: int = 0  # at a time, those that start included
    _since_s: dict[str, float] = field(default_factory=dict[str, float])  # worker -> begin of its start
    _starting: int = 0
    _wanted: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])  # at the looks of `rule.keep_s`

    def begin(self, number: int = 0) -> None:
        """The workers that there are at first have started: so many, or the least."""
        least = self.size.least_rollout or self.size.rollout
        self._range = WorkerRange(least, self.size.rollout)
        self._retirement = Retirement(repack=self.size.repack)
        for _ in range(max(number, least)):
            self._join(self._make())
        for at_s in self.size.kills_s:
            self.clock.at(at_s, self._kill)
        if not self._range.is_fixed:
            self.clock.after(LOOK_S, self._look)

    def end(self) -> None:
        """No job is left."""
        self.held_s += sum(self.clock.now - since for since in self._since_s.values())
        self._since_s.clear()

    def _make(self) -> SimulatedEngine:
        engine = self.make(f"rollout-{len(self.all)}")
        self._since_s[engine.name] = self.clock.now
        self.most = max(self.most, len(self._since_s))
        self.all.append(engine)
        return engine

    def _join(self, engine: SimulatedEngine) -> None:
        self.live.append(engine)
        engine.list_free()
        engine.fill()

    def _start(self) -> None:
        engine = self._make()
        self._starting += 1

        def started() -> None:
            self._starting -= 1
            self._join(engine)
            self.changed()

        self.clock.after(self.size.start_s, lambda: self.load(engine, started) if self.load else started())

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
        self.clock.after(self.rule.look_s, self._look)
        loads = [WorkerLoad(each.name, self.size.rollout_slots, each.num_rows) for each in self.live]
        slots, there = row_slots(loads), len(self.live) + self._starting
        number = self._range.clamp(ceil(turns / slots) if self.rule.fill and slots else wanted(turns, slots))
        for _ in range(int(min(number, max(self.rule.growth * there, there + HPA_PODS))) - there):
            self._start()
        leaving = self._leaving(loads, number)
        for engine in [each for each in self.live if each.name in leaving]:
            self._leave(engine)
            for flight in engine.stop(killed=False):
                engine.turns.put(flight)
            self.changed()

    def _leaving(self, loads: Sequence[WorkerLoad], number: int) -> set[str | None]:
        """Names of the workers that stop now."""
        now = self.clock.now
        if self.rule.keep_s is None:
            return {self._retirement.look(now, loads, number, settled=not self._starting)}
        self._wanted = [each for each in self._wanted if each[0] > now - self.rule.keep_s] + [(now, number)]
        surplus = len(loads) - max(number for _, number in self._wanted)
        return {each.worker for each in sorted(loads, key=lambda each: each.rows)[: max(0, surplus)]}
