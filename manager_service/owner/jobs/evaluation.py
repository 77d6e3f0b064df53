"""Evaluations: each item of the validation file gets sampled answers and a greedy one, summed up as they come.

A supervised job samples nothing: the log-probs of each example's own answer give the loss.
"""

from typing import Any

from common.wire.messages import ScoredTrajectory
from manager_service.owner.jobs.open_trajectories import TrajectoryKey
from manager_service.records.job_records import FINAL, EvalTally, JobSpec, JobState


def begin(spec: JobSpec, state: JobState) -> None:
    """Lets the newest version be evaluated, unless it was, or the job has ended or used up its tokens."""
    wanted = state.status not in FINAL and (state.stop is None or state.stop.evaluates)
    if wanted and spec.num_eval_items and state.evaluated < state.version:
        state.evals.setdefault(str(state.version), new_tally(spec))


def new_tally(spec: JobSpec) -> EvalTally:
    """A tally of the items of the job's validation file."""
    num = spec.num_eval_items
    if spec.is_supervised:
        return EvalTally(units=num, expected=num)
    return EvalTally(units=2 * num, expected=num * (spec.hyper.eval_samples + 1))


def next_unit(tally: EvalTally, version: int, spec: JobSpec) -> list[TrajectoryKey]:
    """Takes the next trajectories to issue: an item's sampled answers, then its greedy one; or an example."""
    number = tally.issued
    tally.issued += 1
    if spec.is_supervised:
        return [TrajectoryKey(number, 0, "eval", version)]
    index, greedy = divmod(number, 2)
    if greedy:
        return [TrajectoryKey(index, 0, "eval_greedy", version)]
    return [TrajectoryKey(index, sample, "eval", version) for sample in range(spec.hyper.eval_samples)]


def leave_out(spec: JobSpec, state: JobState) -> dict[str, EvalTally]:
    """Removes evaluations beyond the job's tokens: unbegun ones by estimate (the mean so far), all once none is left."""
    limit, progress = spec.hyper.max_tokens_total, state.progress
    if limit is None:
        return {}
    each = progress.eval_tokens / max(1, progress.num_evaluated)
    beyond = [
        version
        for version, tally in state.evals.items()
        if state.tokens >= limit or (not tally.issued and state.tokens + each * tally.expected > limit)
    ]
    return {version: state.evals.pop(version) for version in beyond}


def count(spec: JobSpec, state: JobState, version: int, message: ScoredTrajectory) -> None:
    """Adds a settled answer or example to its version's evaluation, unless that was given up."""
    state.progress.num_evaluated += 1
    state.progress.eval_tokens += message.usage.prompt_tokens + message.usage.sampled_tokens
    tally = state.evals.get(str(version))
    if tally is None:
        return
    tally.settled += 1
    if message.reward is None:
        tally.failed += 1
        tally.failed_reason = tally.failed_reason or _reason(message)
    elif spec.is_supervised:
        _count_loss(tally, message, message.reward)
    elif message.trajectory.purpose == "eval_greedy":
        tally.greedy_num += 1
        tally.greedy_total += message.reward
    else:
        tally.num += 1
        tally.total += message.reward
        tally.squares += message.reward**2


def _count_loss(tally: EvalTally, message: ScoredTrajectory, log_prob: float) -> None:
    """`log_prob`: the mean over the example's learned tokens."""
    tokens = int(message.reward_parts.get("tokens", 1))
    tally.num += 1
    tally.tokens += tokens
    tally.total += log_prob * tokens


def _reason(message: ScoredTrajectory) -> str:
    return f"{message.failure.kind}: {message.failure.reason[:300]}" if message.failure else ""


def loss_summary(version: int, tally: EvalTally) -> dict[str, Any]:
    """The data of a supervised evaluation's event. `eval_loss`: mean over learned tokens, in nats; null if all failed."""
    return {
        "step": version,
        "version": version,
        "eval_loss": -tally.total / tally.tokens if tally.tokens else None,
        "eval_tokens": tally.tokens,
        "eval_n": tally.num,
        "eval_failed": tally.failed,
    }


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
