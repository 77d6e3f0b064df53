"""Simulates rollout workers: the streams that they read, their slots, and an engine that batches continuously."""

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil

from common.wire.messages import AdapterRef
from simulator.calibration import Machine, Size
from simulator.clock import Act, Clock, Process, SimulatedHost
from simulator.links import Links
from simulator.workers import Flight

PASS_ON_S = 0.04
"""Longest time for which a turn waits in a full worker's own stream while another worker has nothing to read."""
MAX_OVERTAKEN_S = 20.0
"""While an adapter has waited less for a LoRA slot, turns of adapters that have one go before it."""
SHORT_TURN = 32
"""Tokens of a turn of which no progress is kept."""


@dataclass(slots=True)
class EngineTurns:
    """The streams `rollout:<worker>`, `rollout:first` and `rollout`, and the engines that read them. Nobody chats."""

    clock: Clock
    hop_s: float
    own_streams: bool = False
    first: deque[Flight] = field(default_factory=deque)
    fresh: deque[Flight] = field(default_factory=deque)
    free: "deque[SimulatedEngine]" = field(default_factory=deque)  # engines with free slots
    crowded: "dict[SimulatedEngine, None]" = field(default_factory=dict)  # full ones with turns in their own streams
    later: int = 0  # turns after a trajectory's first
    met: int = 0  # those of them that met their keys and values
    _passes_on: bool = False

    def put(self, flight: Flight) -> None:
        home = flight.engine
        if self.own_streams and isinstance(home, SimulatedEngine) and home.alive:
            home.own.append(flight)
            home.fill()
            return
        (self.first if flight.has_begun else self.fresh).append(flight)
        self.wake()

    def wake(self) -> None:
        if self.free and (self.first or self.fresh):
            self.free[0].fill()
            self.free.rotate(-1)

    def take(self, engine: "SimulatedEngine") -> Flight | None:
        stream = engine.own or self.first or self.fresh
        return stream.popleft() if stream else None

    def pass_on(self) -> None:
        """While somebody has nothing to read, what waits in full workers' own streams soon goes to `rollout:first`."""
        if self.free and self.crowded and not self._passes_on:
            self._passes_on = True
            self.clock.after(PASS_ON_S, self._pass_on)

    def _pass_on(self) -> None:
        self._passes_on = False
        room = sum(engine.room for engine in self.free) - len(self.first) - len(self.fresh)
        for engine in list(self.crowded):
            while room > 0 and engine.own:
                self.first.append(engine.own.popleft())
                room -= 1
            if not engine.own:
                del self.crowded[engine]
        for engine in list(self.free) if self.first else ():
            engine.fill()


@dataclass(slots=True)
class AdapterSlots:
    """Adapters that an engine computes at once, by the rules of `rollout_service/process/lora_slots.py`; `num` 0: all."""

    clock: Clock
    num: int
    load_s: float
    _users: OrderedDict[AdapterRef, int] = field(default_factory=OrderedDict)  # of adapters in slots
    _ready_s: dict[AdapterRef, float] = field(default_factory=dict)
    _waiting: OrderedDict[AdapterRef, tuple[float, list[Act]]] = field(default_factory=OrderedDict)

    def enter(self, adapter: AdapterRef, act: Act) -> None:
        """Acts when the adapter has a slot."""
        if not self.num:
            act()
            return
        self._waiting.setdefault(adapter, (self.clock.now, []))[1].append(act)
        self._advance()

    def leave(self, adapter: AdapterRef) -> None:
        if self.num:
            self._users[adapter] -= 1
            self._advance()

    def _advance(self) -> None:
        for adapter, (since, acts) in list(self._waiting.items()):
            if self._has_slot(adapter):
                del self._waiting[adapter]
                self._users[adapter] += len(acts)
                self._users.move_to_end(adapter)
                for act in acts:
                    self.clock.at(self._ready_s[adapter], act)
            elif self.clock.now - since >= MAX_OVERTAKEN_S:
                return

    def _has_slot(self, adapter: AdapterRef) -> bool:
        """Gives the adapter a slot if it has none and one is free or unused; the last is for chats."""
        if self._users.get(adapter):
            return True
        if sum(users > 0 for users in self._users.values()) >= max(1, self.num - 1):
            return False
        if adapter not in self._users:
            if len(self._users) >= self.num:
                del self._users[next(each for each, users in self._users.items() if not users)]
            self._users[adapter] = 0
            self._ready_s[adapter] = self.clock.now + self.load_s
        return True


@dataclass(slots=True, eq=False)
class SimulatedEngine:
    """Continuous batching by processor sharing: with n rows, each gets a token every `decode_step_s + n decode_row_s`.

    Rows end in order of a token clock that all of them share, so that an event costs the logarithm of the rows and not a
    visit to each token. A joining row's prefill is a debt that is paid before the token clock goes on.
    """

    name: str
    host: SimulatedHost
    machine: Machine
    size: Size
    turns: EngineTurns
    links: Links
    done: Callable[[Flight], None]
    began: Callable[[Flight], None]
    busy_s: float = 0.0
    alive: bool = True
    own: deque[Flight] = field(default_factory=deque)  # the stream `rollout:<worker>`
    orphans: deque[Flight] = field(default_factory=deque)  # of dead workers; they get seats beyond the slots
    loop: Process = field(init=False)  # of the worker around it
    lora: AdapterSlots = field(init=False)
    _rows: list[tuple[float, int, Flight]] = field(default_factory=list)  # token at which it ends, number, flight
    _held: dict[Flight, None] = field(default_factory=dict)  # that have a slot and wait for their adapter
    _ready: list[Flight] = field(default_factory=list)  # of these, those that join now
    _tokens: float = 0.0  # the token clock
    _debt_s: float = 0.0
    _synced: float = 0.0  # by the clock, and by that of work
    _worked: float = 0.0
    _joined: int = 0
    _plan: int = 0
    _filling: bool = False
    _listed: bool = False

    def __post_init__(self) -> None:
        self.loop = Process(self.host)
        self.lora = AdapterSlots(self.host.clock, self.size.lora_slots, self.machine.load_s)
        self._synced, self._worked = self.host.clock.now, self.host.work

    @property
    def token_s(self) -> float:
        return self.machine.decode_step_s + self.machine.decode_row_s * len(self._rows)

    @property
    def first_token_s(self) -> float:
        """Seconds until the row that joined last has its first token, if no other joins before."""
        return self._debt_s + self.token_s

    @property
    def num_rows(self) -> int:
        return len(self._rows) + len(self._held)

    @property
    def room(self) -> int:
        return self.size.rollout_slots - self.num_rows

    def _sync(self) -> None:
        """Bring the token clock up to now."""
        now, worked = self.host.clock.now, self.host.work
        elapsed, work = now - self._synced, worked - self._worked
        self._synced, self._worked = now, worked
        if not self._rows:
            return
        self.busy_s += elapsed
        paid = min(work, self._debt_s)
        self._debt_s -= paid
        self._tokens += (work - paid) / self.token_s

    def _foresee(self) -> None:
        """Time at which the next row ends, if none joins before."""
        self._plan += 1
        if not self._rows:
            return
        number = self._plan
        left_s = self._debt_s + max(0.0, self._rows[0][0] - self._tokens) * self.token_s
        self.host.after(left_s, lambda: self._end(number))

    # ---- reading ----------------------------------------------------------------------------------------------------

    def list_free(self) -> None:
        if self.alive and not self._listed and self.room > 0:
            self._listed = True
            self.turns.free.append(self)
            self.turns.pass_on()

    def fill(self) -> None:
        """Take from the streams as many turns as there are free slots, one hop from now."""
        if not self._filling:
            self._filling = True
            self.host.clock.after(self.turns.hop_s, self._fill)

    def _fill(self) -> None:
        self._filling = False
        if not self.alive:
            return
        while self.orphans and self.room > -self.size.rollout_slots:
            self._admit(self.orphans.popleft())
        while self.room > 0 and (flight := self.turns.take(self)):
            self._admit(flight)
        if self.room > 0:
            return
        if self._listed:
            self._listed = False
            self.turns.free.remove(self)
            self.turns.wake()
        if self.own:
            self.turns.crowded[self] = None
            self.turns.pass_on()

    def _admit(self, flight: Flight) -> None:
        """Gives a turn a slot; it joins the rows once its adapter is here and has a LoRA slot."""
        adapter = flight.start.adapter
        self._held[flight] = None
        self.links.when_here(self, adapter, lambda: self._seat(flight))

    def _seat(self, flight: Flight) -> None:
        if flight in self._held:  # the worker did not end meanwhile
            self.lora.enter(flight.start.adapter, lambda: self._make_ready(flight))

    def _make_ready(self, flight: Flight) -> None:
        self._ready.append(flight)
        if len(self._ready) == 1:
            self.host.clock.after(0.0, self._join_ready)

    def _join_ready(self) -> None:
        self._sync()
        was_busy = bool(self._rows)
        for flight in self._ready:
            if flight in self._held:
                del self._held[flight]
                self._join(flight)
        self._ready.clear()
        if self._rows and not was_busy:
            self.host.began()
        self._foresee()

    def _join(self, flight: Flight) -> None:
        self._joined += 1
        new = flight.workload.prefill_tokens
        if flight.has_begun:
            self.turns.later += 1
            self.turns.met += flight.engine is self
            new += 0.0 if flight.engine is self else flight.history
        self._debt_s += self.machine.prefill_token_s * new
        tokens = flight.left or flight.turn_tokens
        flight.sampled += tokens
        heapq.heappush(self._rows, (self._tokens + tokens, self._joined, flight))
        self.began(flight)

    def _end(self, plan: int) -> None:
        if plan != self._plan:
            return
        self._sync()
        reached = self._tokens + 0.5  # rows that end in the same step leave together
        while self._rows and self._rows[0][0] <= reached:
            flight = heapq.heappop(self._rows)[2]
            flight.left, flight.engine = 0, self
            self.lora.leave(flight.start.adapter)
            self.loop.do(self.machine.engine_loop_s, lambda f=flight: self.done(f))
        if not self._rows:
            self.host.ended()
        self.list_free()
        if self.own or self.orphans or self.turns.first or self.turns.fresh:
            self.fill()
        self._foresee()

    # ---- ending -----------------------------------------------------------------------------------------------------

    def stop(self, *, killed: bool) -> list[Flight]:
        """Ends the worker. Returns the turns that it had, each with the tokens that it still has to sample: a killed worker's
        progress is as old as its reports of it."""
        self._sync()
        self.alive = False
        if self._rows:
            self.host.ended()
        if self._listed:
            self.turns.free.remove(self)
        self.turns.crowded.pop(self, None)
        self.links.forget(self)
        unsaved = self.size.progress_s / self.token_s if killed else 0.0
        for end, _, flight in self._rows:
            flight.go_back(max(1, ceil(end - self._tokens)), ceil(unsaved), SHORT_TURN if killed else 0)
        left = [*(flight for _, _, flight in sorted(self._rows)), *self._held, *self.orphans, *self.own]
        for each in (self._rows, self._held, self.orphans, self.own):
            each.clear()
        for flight in left:
            flight.engine = None
        self._plan += 1
        return left
