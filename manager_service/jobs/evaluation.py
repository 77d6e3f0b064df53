"""Evaluations: each item of the validation file gets sampled answers and a greedy one, which are summed up as they come."""

from typing import Any

from common.messages import ScoredTrajectory
from manager_service.jobs.open_trajectories import TrajectoryKey
from manager_service.records import EvalTally


def new_tally(num_items: int, eval_samples: int) -> EvalTally:
    return EvalTally(units=2 * num_items, expected=num_items * (eval_samples + 1))


def next_unit(tally: EvalTally, version: int, eval_samples: int) -> list[TrajectoryKey]:
    """Takes the trajectories that are issued next: an item's sampled answers, then its greedy one."""
    index, greedy = divmod(tally.issued, 2)
    tally.issued += 1
    if greedy:
        return [TrajectoryKey(index, 0, "eval_greedy", version)]
    return [TrajectoryKey(index, sample, "eval", version) for sample in range(eval_samples)]


def count(tally: EvalTally, message: ScoredTrajectory) -> None:
    """Adds an answer that has settled."""
    tally.settled += 1
    if message.reward is None:
        tally.failed += 1
    elif message.trajectory.purpose == "eval_greedy":
        tally.greedy_num += 1
        tally.greedy_total += message.reward
    else:
        tally.num += 1
        tally.total += message.reward
        tally.squares += message.reward**2


def summary(version: int, tally: EvalTally) -> dict[str, Any]:
    """The data of the evaluation's event. Means are null if every answer failed."""
    return {
        "step": version,
        "version": version,
        "eval_reward_mean": tally.total / tally.num if tally.num else None,
        "eval_reward_stderr": _stderr(tally),
        "eval_greedy_mean": tally.greedy_total / tally.greedy_num if tally.greedy_num else None,
        "eval_n": tally.num,
        "eval_failed": tally.failed,
    }


def _stderr(tally: EvalTally) -> float | None:
    """Standard error of the mean reward over sampled answers."""
    if tally.num < 2:
        return None
    mean = tally.total / tally.num
    variance = max(0.0, tally.squares / tally.num - mean**2) * tally.num / (tally.num - 1)
    return (variance / tally.num) ** 0.5
