"""The ends of trajectories and of single gradings: the reward with its parts, or the failure in place of one."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from common.wire.messages import Failure, FailureKind, GradeRequest, GradeResult, Message, StopReason, TurnResult, Usage
from env_service.environment import Step
from env_service.failures import EnvironmentFailed
from env_service.graders.runner import as_reward
from env_service.trajectory import Context, encode_state

NO_USAGE = Usage()


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a trajectory: its reward, or the failure in place of one."""

    stop_reason: StopReason
    reward: float | None = None
    parts: Mapping[str, float] | None = None
    failure: Failure | None = None


def grade_result(
    request: GradeRequest, ending: Ending, seconds: float = 0.0, usage: Usage = NO_USAGE
) -> tuple[str, Message]:
    result = GradeResult(
        **request.about(),
        id=request.id,
        reward=ending.reward,
        reward_parts=dict(ending.parts or {}),
        seconds=seconds,
        failure=ending.failure,
        usage=usage,
    )
    return request.reply_to, result


def failure_of(result: TurnResult) -> Failure | None:
    """Returns a Failure for a turn that did not come to its end, even if nobody said why."""
    if result.failure is not None:
        return result.failure
    kinds: dict[str, FailureKind] = {"cancelled": "cancelled", "failed": "infrastructure"}
    if (kind := kinds.get(result.stop_reason)) is not None:
        return Failure(kind, f"the turn was {result.stop_reason}")
    if result.adapter != result.request.adapter:
        return Failure("infrastructure", f"sampled with {result.adapter} instead of {result.request.adapter}")
    return None


def ending_of(stop: StopReason, context: Context | None, step: Step) -> Ending:
    reward = step.reward
    if context is not None and context.reward is not None:
        reward = context.reward + (0.0 if reward is None else _step_reward(reward))
    if reward is None:
        raise EnvironmentFailed("the environment ended without a reward")
    parts = dict(context.reward_parts if context else {}) | dict(_parts(step))
    return Ending(stop, _step_reward(reward), parts)


def advanced(context: Context, step: Step) -> Context:
    reward = context.reward
    if step.reward is not None:
        reward = (reward or 0.0) + _step_reward(step.reward)
    parts = context.reward_parts | dict(_parts(step))
    return msgspec.structs.replace(context, state=encode_state(step.state), reward=reward, reward_parts=parts)


def _step_reward(value: Any) -> float:
    """Raises GraderFailed if an environment's reward is not a finite number."""
    return as_reward(value, "environment")


def _parts(step: Step) -> Mapping[str, float]:
    """The parts of a step's reward. Raises EnvironmentFailed for those that no message can carry."""
    parts: Mapping[Any, Any] = step.parts  # foreign code made it
    for name, value in parts.items():
        try:
            name.encode()
        except (AttributeError, UnicodeEncodeError) as error:
            raise EnvironmentFailed(f"a part of the reward is named {ascii(name)[:100]}, which is no text") from error
        if type(value) is bool or not isinstance(value, int | float):
            raise EnvironmentFailed(f"the part {name[:100]!r} of the reward is {ascii(value)[:100]}, not a number")
    return step.parts
