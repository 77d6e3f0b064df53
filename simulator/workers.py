"""Simulated env workers and trainers, and what travels between workers: they take messages, need time for them, and hand the results on."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from common.wire.messages import Init, Start, TrainStep
from simulator.calibration import Machine, Workload
from simulator.clock import Act, Process, SimulatedHost

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
    left: int = 0  # tokens of a turn that was interrupted
    engine: object = None  # the worker that has its keys and values
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
    def has_begun(self) -> bool:
        """Did it have a turn at a worker before?"""
        return self.turn > 0 or self.left > 0

    @property
    def history(self) -> float:
        """Tokens of its past: what a worker computes first if it lacks their keys and values."""
        return self.sampled + self.turn * self.workload.prompt_tokens / (self.num_calls + 1)

    def go_back(self, left: int, unsaved: int, short: int) -> None:
        """Its turn ends early, with `left` of its tokens to sample, and the last `unsaved` again; one of at most `short` begins again."""
        done = self.turn_tokens - left
        self.left = left + (done if done <= short else min(done, unsaved))
        self.sampled -= self.left

    @property
    def turn_tokens(self) -> int:
        tokens = round(self.workload.turn_tokens.at(self.draw(LENGTH)))
        return min(max(1, tokens), self.workload.max_tokens)


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
    write: Callable[[Act], None]  # puts a version's bytes into the store
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
        seconds = versions * self.machine.commit_s
        self.write(lambda: self.host.clock.after(seconds, lambda: self._committed(message)))

    def _committed(self, message: Init | TrainStep) -> None:
        self._num_held -= 1
        self._held_tokens -= _num_tokens(message)
        self.done(message, self._seconds(message))


def _num_tokens(message: Init | TrainStep) -> int:
    return len(message.rows.tokens) if isinstance(message, TrainStep) else 0
