"""Turns a run's telemetry into a calibration: sums, and two least squares.

Counters are totals since a worker's start, reported once a second; what is fitted are their differences between reports. What is fitted
adds up to what was counted: a simulation of the same work takes the same processor seconds.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from common.bus.bus import Bus
from common.wire.messages import WorkerReport
from manager_service.records.job_records import Hyper, JobSpec
from simulator.calibration import Calibration, LogNormal, Machine, Size, Workload

CounterDeltas = list[dict[str, float]]
"""One dictionary of counters' growth for each pair of successive reports of a worker."""


SERVICES = ("rollout", "env", "trainer")
ALIKE = 0.05
"""Steps whose tokens differ relatively less than this say nothing about what a step costs besides its tokens."""


class Recording(msgspec.Struct, frozen=True):
    """Telemetry of a run that a calibration needs; `python -m simulator.calibrate --keep FILE` writes it."""

    reports: list[WorkerReport]
    hyper: Hyper  # of the jobs, which should be alike


async def record(bus: Bus, since_s: float = 0.0) -> Recording:
    """Reads the telemetry in a cluster's Redis, which keeps an hour of it, from a time since 1970 on. Raises ValueError without a job or
    a worker."""
    entries = await bus.follow(bus.cell.telemetry, str(int(1000 * since_s)), block_ms=None, count=100_000)
    names: list[Any] = await bus.client.zrange(bus.cell.jobs_all, 0, -1)
    jobs = [name.decode() for name in names]
    base_model = bus.cell.base_model
    if not entries:
        raise ValueError(f"the cluster has no base model {base_model!r}: none of its workers has reported for an hour")
    if not jobs:
        raise ValueError(f"no job of the base model {base_model!r} ran: calibrate after a run")
    (job,) = await bus.read_hashes([bus.cell.job(jobs[-1])])
    spec = msgspec.json.decode(job[b"spec"], type=JobSpec)
    return Recording([message for _, message in entries if isinstance(message, WorkerReport)], spec.hyper)


def read_recording(path: Path) -> Recording:
    """Raises ValueError if it is none."""
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=Recording)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is no telemetry recording: give a file that --keep wrote") from error


def write_recording(recording: Recording, path: Path) -> None:
    path.write_bytes(msgspec.msgpack.encode(recording))


def calibrate(recording: Recording, *, cores: int | None, control_s: float, name: str = "measured") -> Calibration:
    """Raises ValueError if a service did nothing.

    `cores`: that all processes share and nobody else wants; None: service times are of the clock, so that waiting for a core
    as it was in this run, on a machine with other work too, is in them, and the simulator adds none.
    `control_s`: processor seconds of manager and Redis for a turn, which telemetry does not tell.
    """
    by_service = {service: deltas(recording.reports, service) for service in SERVICES}
    rollout, env, trainer = (total(by_service[service]) for service in SERVICES)
    for service, counters, counter in (
        ("rollout", rollout, "turns"),
        ("env", env, "graded"),
        ("trainer", trainer, "settled"),
    ):
        if not counters.get(counter):
            raise ValueError(f"no {service} worker did anything between two of its reports: calibrate on a longer run")
    return Calibration(
        machine=fit_machine(by_service, cores, control_s),
        workload=fit_workload(recording.hyper, rollout, env, trainer, name),
        size=fit_size(recording.reports),
        measured_from={"turns": rollout["turns"], "steps": trainer["settled"], "trajectories": env["graded"]},
    )


def fit_machine(by_service: dict[str, CounterDeltas], cores: int | None, control_s: float) -> Machine:
    rollout, env, trainer = (total(by_service[service]) for service in SERVICES)
    step_s, row_s = fit_pair(by_service["rollout"], "decode_steps", "sampled_tokens", "decode_s")
    between_s, turn_s = fit_pair(
        by_service["rollout"], "decode_steps", "turns", "cpu_s", besides=("decode_s", "prefill_s")
    )
    waiting = 1.0 if cores else max(1.0, rollout["busy_s"] / (rollout["decode_s"] + rollout["prefill_s"]))
    training_waits = 1.0 if cores else max(1.0, trainer["busy_s"] / trainer["compute_s"])
    train_step_s, train_token_s = fit_pair(by_service["trainer"], "settled", "trained_tokens", "compute_s")
    trainer_loop_s = max(0.0, trainer["cpu_s"] - trainer["compute_s"]) / trainer["settled"]
    return Machine(
        decode_step_s=step_s * waiting + between_s,
        decode_row_s=row_s * waiting,
        prefill_token_s=waiting * rollout["prefill_s"] / max(1.0, rollout["prefill_tokens"]),
        train_step_s=train_step_s * training_waits,
        train_token_s=train_token_s * training_waits,
        commit_s=max(0.0, trainer["commit_s"] / trainer["settled"] - trainer_loop_s),
        load_s=rollout["load_s"] / max(1.0, rollout["loads"]),
        grade_s=env["grade_s"] / env["graded"],
        hop_s=least(by_service["env"], "delivery_s", "delivered") + least(by_service["rollout"], "settle_s", "settled"),
        start_s=env["start_s"] / max(1.0, env["starts"]),
        engine_loop_s=turn_s,
        env_loop_s=max(0.0, env["cpu_s"] - env.get("start_s", 0.0)) / rollout["turns"],
        trainer_loop_s=trainer_loop_s,
        control_s=control_s,
        cores=cores,
    )


def deltas(reports: Iterable[WorkerReport], service: str) -> CounterDeltas:
    """Growth of counters while a worker had work: what an idle loop takes is nobody's."""
    by_worker: defaultdict[str, list[WorkerReport]] = defaultdict(list)
    for report in reports:
        if report.service == service:
            by_worker[report.id].append(report)
    return [
        {name: value - before.counters.get(name, 0.0) for name, value in after.counters.items()}
        for found in by_worker.values()
        for before, after in pairwise(found)
        if after.busy or after.counters.get("settled", 0.0) > before.counters.get("settled", 0.0)
    ]


def total(found: CounterDeltas) -> dict[str, float]:
    sums: defaultdict[str, float] = defaultdict(float)
    for each in found:
        for name, value in each.items():
            sums[name] += value
    return sums


def fit_pair(
    found: CounterDeltas, each: str, more: str, seconds: str, *, besides: Sequence[str] = ()
) -> tuple[float, float]:
    """Seconds, without those `besides`, for each of `each`, and for each of `more`: least squares over reports, neither negative,
    together what was counted. If each has as much of `more` as any other, that has all of it."""
    used = [d for d in found if d.get(each, 0) > 0]
    num, x = (np.array([d[name] for d in used]) for name in (each, more))
    y = np.array([d[seconds] - sum(d[name] for name in besides) for d in used])
    sums = total(found)
    if not sums[more]:
        raise ValueError(f"no worker counted any {more} between two of its reports: calibrate on a longer run")
    whole = max(0.0, sums[seconds] - sum(sums[name] for name in besides))
    if np.std(x / num) < ALIKE * np.mean(x / num):
        return 0.0, whole / sums[more]
    first, second = _line(x / num, y / num, num)
    counted = first * sums[each] + second * sums[more]  # a step's computing may count in one second, its end in another
    share = whole / counted if counted > 0 else 0.0
    return first * share, second * share


def _line(x: np.ndarray, y: np.ndarray, weight: np.ndarray) -> tuple[float, float]:
    """Constant and slope of y over x, weighted; where one would be negative it is 0 and only the other is fitted."""
    mean_x, mean_y = np.average(x, weights=weight), np.average(y, weights=weight)
    slope = np.average((x - mean_x) * (y - mean_y), weights=weight) / np.average((x - mean_x) ** 2, weights=weight)
    if slope < 0:
        return float(mean_y), 0.0
    if mean_y < slope * mean_x:
        return 0.0, float(mean_y / mean_x)
    return float(mean_y - slope * mean_x), float(slope)


def least(found: CounterDeltas, seconds: str, number: str) -> float:
    """The lowest mean of any two successive reports."""
    return min((d[seconds] / d[number] for d in found if d.get(number, 0) > 0), default=0.0)


def fit_workload(
    hyper: Hyper, rollout: dict[str, float], env: dict[str, float], trainer: dict[str, float], name: str
) -> Workload:
    turn_tokens = LogNormal.fit(
        rollout["turns"], rollout["sum_log_turn_tokens"], rollout["sum_squared_log_turn_tokens"]
    )
    assert turn_tokens is not None, "turns were checked"
    tools = LogNormal.fit(env["tool_turns"], env["sum_log_tool_s"], env["sum_squared_log_tool_s"])
    trajectories = max(1.0, env["graded"])
    fewest, most = fit_calls(trajectories, env["tool_turns"], env["sum_squared_calls"])
    sampled = rollout["sampled_tokens"] / trajectories
    trained = trainer["trained_tokens"] / trajectories
    return Workload(
        name=name,
        batch_size=hyper.batch_size,
        group_size=hyper.group_size,
        num_steps=hyper.num_steps,
        prompt_tokens=max(1.0, trained - sampled),
        prefill_tokens=rollout["prefill_tokens"] / rollout["turns"],
        turn_tokens=turn_tokens,
        max_tokens=hyper.max_tokens,
        tool_s=tools,
        min_calls=fewest,
        max_calls=most,
    )


def fit_calls(num: float, sum_calls: float, sum_squared_calls: float) -> tuple[int, int]:
    """The fewest and the most calls of a trajectory, if all numbers between are equally likely: those of the same mean and
    variance."""
    mean = sum_calls / num
    width = math.sqrt(12 * max(0.0, sum_squared_calls / num - mean * mean) + 1)  # so many numbers
    fewest = max(0, round(mean - (width - 1) / 2))
    return fewest, max(fewest, round(mean + (width - 1) / 2))


def fit_size(reports: Sequence[WorkerReport]) -> Size:
    """Numbers of workers of each service, and their slots."""
    slots: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for report in reports:
        slots[report.service][report.id] = max(1, report.slots)
    each = {service: max(found.values()) for service, found in slots.items()}
    return Size(
        rollout=len(slots["rollout"]),
        env=len(slots["env"]),
        trainer=len(slots["trainer"]),
        rollout_slots=each["rollout"],
        env_slots=each["env"],
        trainer_slots=each["trainer"],
    )
