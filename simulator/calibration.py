"""The simulator's knowledge of a machine and of a workload, as it stands in `calibration.json`."""

import math
from pathlib import Path
from statistics import NormalDist
from typing import Literal, TypeVar

import msgspec

STANDARD_NORMAL = NormalDist()


class LogNormal(msgspec.Struct, frozen=True):
    """exp(N(mu, sigma)): latencies of tools in seconds, lengths of turns in tokens."""

    mu: float
    sigma: float

    @classmethod
    def of(cls, median: float, sigma: float) -> "LogNormal":
        return cls(math.log(median), sigma)

    @classmethod
    def fit(cls, num: float, sum_log: float, sum_squared_log: float) -> "LogNormal | None":
        """Maximum likelihood from the sums of logarithms and of their squares; None: nothing was measured."""
        if num <= 0:
            return None
        mu = sum_log / num
        return cls(mu, math.sqrt(max(0.0, sum_squared_log / num - mu * mu)))

    def at(self, uniform: float) -> float:
        """The value below which this share of all lies. `uniform` in (0, 1)."""
        return math.exp(self.mu + self.sigma * STANDARD_NORMAL.inv_cdf(uniform)) if self.sigma else math.exp(self.mu)


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Service times. Seconds of a processor that nobody else wants, except those "by the clock"."""

    decode_step_s: float  # one forward of the engine, whatever its rows
    decode_row_s: float  # and for each row under way
    prefill_token_s: float  # each token computed before a turn
    train_step_s: float  # a job's step, whatever its rows
    train_token_s: float  # and for each token of its rows
    commit_s: float = 0.0  # by the clock: a step's files and manifest, beyond `trainer_loop_s`
    load_s: float = 0.0  # by the clock: an adapter's way into the engine, from when it is announced
    grade_s: float = 0.0  # by the clock: the environment's answer to a trajectory's last turn
    hop_s: float = 0.005  # by the clock: from a message's publication to whoever works on it, queues apart
    start_s: float = 0.0  # of the env worker for a group's first prompts
    engine_loop_s: float = 0.0  # of a rollout worker without its engine, for each turn
    env_loop_s: float = 0.0  # of an env worker for each turn
    trainer_loop_s: float = 0.0  # of a trainer without its computing, for each operation, while it computes the next
    control_s: float = 0.0  # of manager and Redis for each turn
    cores: float | None = None  # that all processes share; None: each has one of its own
    idle: float = 0.0  # of these, what manager and Redis use whatever happens


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Work of each job."""

    name: str = "measured"
    batch_size: int = 16
    group_size: int = 8
    num_steps: int = 5
    prompt_tokens: float = 16.0  # of a trajectory, tools' replies included
    prefill_tokens: float = 2.0  # computed before a turn, what a group shares divided between its samples
    turn_tokens: LogNormal  # sampled in a turn
    max_tokens: int = 64  # of a turn
    tool_s: LogNormal | None = None  # None: the job uses no tools
    min_calls: int = 0  # tool calls of a trajectory: uniform between these
    max_calls: int = 0


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of workers and of their slots."""

    rollout: int = 1
    env: int = 1
    trainer: int = 1
    rollout_slots: int = 128
    env_slots: int = 64
    trainer_slots: int = 32  # steps that a trainer takes at most
    trainer_window_tokens: int = 4096  # and it takes none while it has so many tokens' worth of them
    own_streams: bool = False  # a trajectory's later turns go back to the rollout worker that has their keys and values
    lora_slots: int = 0  # adapters that a rollout worker computes at once; 0: all
    start_s: float = 0.0  # until a new rollout worker reads
    kills_s: tuple[float, ...] = ()  # when the rollout worker with most rows is killed; another starts
    lease_s: float = 10.0  # then others have its turns
    progress_s: float = 1.0  # age of a turn's progress that a killed worker leaves
    least_rollout: int = 0  # rollout workers of a pool that follows its turns; 0: there are always `rollout`
    repack: bool = False  # such a pool also stops workers whose rows the others can hold
    adapter_bytes: float = 0.0  # of a version; 0: nothing travels
    store_bytes_per_s: float = 80e6  # of all who read and write the store
    link_bytes_per_s: float = 20e6  # of a worker, in each direction
    relay: bool = False  # workers pass versions on to each other, and the first reads the store; else all do


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """The file that `python -m simulator.calibrate` writes."""

    machine: Machine
    workload: Workload
    size: Size = Size()
    measured_from: dict[str, float] = {}  # what the fit is based on: seconds, steps, turns, residuals


class Spread(msgspec.Struct, frozen=True):
    mean: float
    p50: float
    p95: float

    @classmethod
    def of(cls, values: list[float]) -> "Spread":
        """Nearest rank. Raises ValueError without values."""
        if not values:
            raise ValueError("no values")
        ordered = sorted(values)
        rank = [ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)] for share in (0.5, 0.95)]
        return cls(sum(ordered) / len(ordered), *rank)


class PolicyRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run of N jobs under one policy, measured or simulated: one JSON file each.

    Busy shares are of the workers' time from the first submission to the last job's end; tokens are sampled and prompt
    tokens of trained trajectories. Measured runs may have more fields; readers ignore them.
    """

    kind: Literal["measured", "simulated"]
    policy: str
    workload: str
    n: int  # jobs
    steps: int  # of each job
    makespan_s: float
    tokens_per_s: float
    steps_per_s: float
    rollout_busy: float  # share, 0 to 1
    trainer_busy: float
    ttfs_s: Spread  # submission to first useful work: a job's first token
    tpts_s: Spread  # version to version
    jain: float  # fairness of the jobs' tokens a second, 1 is even
    wasted_tokens: int = 0
    held_s: float = 0.0  # seconds of rollout workers, their starts included
    met: float = 0.0  # share of later turns that met their keys and values
    spread_s: Spread | None = None  # from a version's announcement until the last worker that loads it ahead has it

    @property
    def tokens_per_held_s(self) -> float:
        return self.tokens_per_s * self.makespan_s / self.held_s if self.held_s else math.nan


AnyRun = TypeVar("AnyRun", bound=PolicyRun)


def jain(rates: list[float]) -> float:
    """Jain's index: (sum x)^2 / (n sum x^2)."""
    squares = sum(rate * rate for rate in rates)
    return sum(rates) ** 2 / (len(rates) * squares) if squares else 1.0


def read_calibration(path: Path) -> Calibration:
    """Raises msgspec.ValidationError naming the field that is wrong."""
    return msgspec.json.decode(path.read_bytes(), type=Calibration)


def read_runs(folder: Path, kind: type[AnyRun]) -> list[AnyRun]:
    """All runs in a folder's JSON files, other files left out. Raises ValueError if there are none."""
    runs = [msgspec.json.decode(path.read_bytes(), type=kind) for path in sorted(folder.glob("run-*.json"))]
    if not runs:
        raise ValueError(f"{folder} has no run-*.json")
    return runs


def write(value: object, path: Path) -> None:
    encoded = msgspec.json.encode(value, enc_hook=float)  # numpy's numbers
    path.write_bytes(msgspec.json.format(encoded, indent=2) + b"\n")
