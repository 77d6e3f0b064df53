"""Simulated workers: they take messages, need time for them, and hand the results on."""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from common.wire.messages import Init, Start, TrainStep
from simulator.calibration import Machine, Workload
from simulator.clock import Clock, Process, SimulatedHost

_MASK = (1 << 64) - 1


def mixed(state: int, number: int) -> int:
    """One step of SplitMix64 (Steele et al. 2014) from `state`, with a number added: 64 bits that look random."""
    state = (state + number + 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def uniform(state: int) -> float:
    """A number in (0, 1)."""
    return ((state >> 11) + 0.5) / (1 << 53)


LENGTH, LATENCY, CALLS, REWARD = range(4)
"""Random draws. Each is a function of job, group, sample and turn only: neither the policy nor the order of work changes a
length or a latency."""


@dataclass(slots=True, eq=False)
class Flight:
    """A trajectory under way."""

    start: Start
    sample: int
    workload: Workload
    turn: int = 0
    sampled: int = 0  # tokens
    num_calls: int = 0
    _key: int = 0

    def __post_init__(self) -> None:
        self._key = mixed(mixed(mixed(0, self.start.seed), self.start.group), self.sample)
        low, high = self.workload.min_calls, self.workload.max_calls
        self.num_calls = low + int(self.draw(CALLS) * (high - low + 1))

    def draw(self, what: int) -> float:
        return uniform(mixed(self._key, 8 * self.turn + what))

    @property
    def calls_next(self) -> bool:
        """Does this turn end in a tool call?"""
        return self.workload.tool_s is not None and self.turn < self.num_calls

    @property
    def turn_tokens(self) -> int:
        tokens = round(self.workload.turn_tokens.at(self.draw(LENGTH)))
        return min(max(1, tokens), self.workload.max_tokens)


@dataclass(slots=True)
class EngineTurns:
    """The streams `rollout:first` and `rollout`, and the engines that read them. Nobody chats."""

    clock: Clock
    hop_s: float
    first: deque[Flight] = field(default_factory=deque)
    fresh: deque[Flight] = field(default_factory=deque)
    free: "deque[SimulatedEngine]" = field(default_factory=deque)  # engines with free slots

    def put(self, flight: Flight) -> None:
        (self.first if flight.turn else self.fresh).append(flight)
        if self.free:
            self.free[0].fill()
            self.free.rotate(-1)

    def take(self) -> Flight | None:
        return self.first.popleft() if self.first else self.fresh.popleft() if self.fresh else None


@dataclass(slots=True, eq=False)
class SimulatedEngine:
    """Continuous batching by processor sharing: with n rows, each gets a token every `decode_step_s + n decode_row_s`.

    Rows end in order of a token clock that all of them share, so that an event costs the logarithm of the rows and not a
    visit to each token. A joining row's prefill is a debt that is paid before the token clock goes on.
    """

    host: SimulatedHost
    machine: Machine
    turns: EngineTurns
    slots: int
    done: Callable[[Flight], None]
    began: Callable[[Flight], None]
    busy_s: float = 0.0
    loop: Process = field(init=False)  # of the worker around it
    _rows: list[tuple[float, int, Flight]] = field(default_factory=list)  # token at which it ends, number, flight
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

    @property
    def token_s(self) -> float:
        return self.machine.decode_step_s + self.machine.decode_row_s * len(self._rows)

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
        if not self._rows:
            return
        self._plan += 1
        number = self._plan
        left_s = self._debt_s + max(0.0, self._rows[0][0] - self._tokens) * self.token_s
        self.host.after(left_s, lambda: self._end(number))

    def list_free(self) -> None:
        if not self._listed and len(self._rows) < self.slots:
            self._listed = True
            self.turns.free.append(self)

    def fill(self) -> None:
        """Take from the streams as many turns as there are free slots, one hop from now."""
        if not self._filling:
            self._filling = True
            self.host.clock.after(self.turns.hop_s, self._fill)

    def _fill(self) -> None:
        self._filling = False
        self._sync()
        was_busy = bool(self._rows)
        while len(self._rows) < self.slots and (flight := self.turns.take()):
            self._join(flight)
        if len(self._rows) >= self.slots and self._listed:
            self._listed = False
            self.turns.free.remove(self)
            if self.turns.free and (self.turns.first or self.turns.fresh):
                self.turns.free[0].fill()
        if self._rows and not was_busy:
            self.host.began()
        self._foresee()

    def _join(self, flight: Flight) -> None:
        self._joined += 1
        self._debt_s += self.machine.prefill_token_s * flight.workload.prefill_tokens
        tokens = flight.turn_tokens
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
            self.loop.do(self.machine.engine_loop_s, lambda f=flight: self.done(f))
        if not self._rows:
            self.host.ended()
        self.list_free()
        if self.turns.first or self.turns.fresh:
            self.fill()
        self._foresee()


@dataclass(slots=True)
class SimulatedEnvironment:
    """The stream `env` and its workers: `slots` messages at once, each waiting for its tool or grader.

    Their loops take turns.
    """

    host: SimulatedHost
    machine: Machine
    loops: deque[Process]
    slots: int
    answered: Callable[[Flight], None]
    queue: deque[Flight] = field(default_factory=deque)
    active: int = 0
    starts: int = 0  # Start messages not yet handled

    @property
    def backlog(self) -> int:
        """Entries of the stream."""
        return len(self.queue) + self.active + self.starts

    def put(self, flight: Flight) -> None:
        self.queue.append(flight)
        self._begin()

    def _begin(self) -> None:
        while self.queue and self.active < self.slots:
            flight = self.queue.popleft()
            self.active += 1
            self._loop().do(self.machine.env_loop_s, lambda f=flight: self._step(f))

    def _step(self, flight: Flight) -> None:
        tool = flight.workload.tool_s if flight.calls_next else None
        seconds = tool.at(flight.draw(LATENCY)) if tool else self.machine.grade_s
        self.host.clock.after(seconds, lambda: self._end(flight))

    def start(self, then: Callable[[], None]) -> None:
        """A group's first prompts are made."""
        self._loop().do(self.machine.start_s, then)

    def _loop(self) -> Process:
        self.loops.rotate(-1)
        return self.loops[0]

    def _end(self, flight: Flight) -> None:
        self.active -= 1
        self.answered(flight)
        self._begin()


@dataclass(slots=True, eq=False)
class TrainerWorker:
    """Computes operations by age, one after another, and commits each while it computes the next.

    Steps that are trained together share micro-batches, but the oldest first: they end in order of their age, and what each
    takes is its tokens. It takes operations while it has slots, and no more than its window of tokens. Real trainers let a tenant's
    shorter step overtake another's longer one, and take more for that; what jobs of like steps wait for is the same.
    """

    host: SimulatedHost
    machine: Machine
    queue: deque[Init | TrainStep]
    slots: int
    window_tokens: int
    done: Callable[[Init | TrainStep, float], None]
    busy_s: float = 0.0
    loop: Process = field(init=False)  # of the worker around it
    _taken: deque[Init | TrainStep] = field(default_factory=deque)  # the first is computed
    _num_held: int = 0  # taken and not committed
    _held_tokens: int = 0
    _began: float = 0.0  # of the first, by the clock

    def __post_init__(self) -> None:
        self.loop = Process(self.host)

    @property
    def has_room(self) -> bool:
        return self._num_held < self.slots and (not self._num_held or self._held_tokens < self.window_tokens)

    def take(self) -> None:
        """Called one hop after an operation was published, or one was committed."""
        while self.queue and self.has_room:
            message = self.queue.popleft()
            self._num_held += 1
            self._held_tokens += _num_tokens(message)
            self._taken.append(message)
            if len(self._taken) == 1:
                self.host.began()
                self._begin()

    def _begin(self) -> None:
        self._began = self.host.clock.now
        self.host.after(self._seconds(self._taken[0]), self._computed)

    def _seconds(self, message: Init | TrainStep) -> float:
        if isinstance(message, Init):
            return 0.0
        return self.machine.train_step_s + self.machine.train_token_s * _num_tokens(message)

    def _computed(self) -> None:
        self.busy_s += self.host.clock.now - self._began
        message = self._taken.popleft()
        self.loop.do(self.machine.trainer_loop_s, lambda: self._commit(message))
        if self._taken:
            self._begin()
        else:
            self.host.ended()

    def _commit(self, message: Init | TrainStep) -> None:
        versions = 2 if isinstance(message, TrainStep) and message.untrained else 1
        self.host.clock.after(versions * self.machine.commit_s, lambda: self._committed(message))

    def _committed(self, message: Init | TrainStep) -> None:
        self._num_held -= 1
        self._held_tokens -= _num_tokens(message)
        self.done(message, self._seconds(message))


def _num_tokens(message: Init | TrainStep) -> int:
    return len(message.rows.tokens) if isinstance(message, TrainStep) else 0
