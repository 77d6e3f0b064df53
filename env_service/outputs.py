"""Parts of the messages that the handler sends: first requests, and ends of trajectories and gradings. Pure functions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from common import rng
from common.errors import InvalidInput
from common.wire.messages import (
    Failure,
    FailureKind,
    GradeRequest,
    GradeResult,
    Message,
    ScoredTrajectory,
    Start,
    StopReason,
    TrajectoryRef,
    TurnRequest,
    TurnResult,
    Usage,
    turn_id,
)
from common.wire.transcript import Transcript, shown
from env_service.environment import Environment, LiveEnvironment, Step
from env_service.failures import EnvironmentFailed
from env_service.graders.runner import as_reward
from env_service.trajectory import Context, encode_context, encode_state

NO_USAGE = Usage()


def split_by_sample(start: Start) -> list[Start]:
    """A Start for each sample. Their ids name trajectories; the group's own stands for all of them."""
    version = start.adapter.version
    ids = {sample: turn_id(start.job, _ref(start, sample), version, 0) for sample in start.samples}
    return [msgspec.structs.replace(start, id=ids[sample], samples=(sample,)) for sample in start.samples]


def _ref(start: Start, sample: int) -> TrajectoryRef:
    return TrajectoryRef(start.purpose, start.seed, start.group, sample, start.attempt)


def first_requests(start: Start, tokens: Sequence[int], context: bytes, usage: Usage) -> list[TurnRequest]:
    """One for each sample of the group."""
    prompt = shown(tokens)
    return [
        TurnRequest(
            **start.about(),
            id=turn_id(start.job, ref, start.adapter.version, 0),
            adapter=start.adapter,
            untrained=start.untrained,
            trajectory=ref,
            turn=0,
            transcript=prompt,
            sampling=start.sampling,
            context=context,
            usage=usage,
        )
        for ref in (_ref(start, sample) for sample in start.samples)
    ]


def next_request(result: TurnResult, context: Context, reply: Sequence[int], usage: Usage) -> TurnRequest:
    request = result.request
    turn = request.turn + 1
    return msgspec.structs.replace(
        request,
        id=turn_id(request.job, request.trajectory, request.adapter.version, turn),
        turn=turn,
        transcript=result.so_far + shown(reply),
        num_partial=0,
        context=encode_context(context),
        usage=usage,
    )


def seed_of(of: Start | TrajectoryRef, purpose: str) -> int:
    """A function of the job's seed and the group only. Both kinds of evaluation see the same."""
    split = "train" if of.purpose == "train" else "held_out"
    return int(rng.bits(of.seed, f"{purpose}/{split}", of.group))


def made_item(environment: Environment | LiveEnvironment, start: Start) -> dict[str, Any]:
    make_item = getattr(environment, "make_item", None)
    if make_item is None:
        raise InvalidInput(f"the environment {start.env.name} does not make items: the job needs a training file")
    return make_item(seed_of(start, "item"), start.purpose != "train")


# ---- ends ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a trajectory: its reward, or the failure in place of one."""

    stop_reason: StopReason
    reward: float | None = None
    parts: Mapping[str, float] | None = None
    failure: Failure | None = None


def settled(
    result: TurnResult,
    context: Context | None,
    ending: Ending,
    usage: Usage,
    text: str,
    verdicts: list[dict[str, str]],
) -> ScoredTrajectory:
    """The end of a trajectory after this turn. `context`: None if it cannot be read."""
    written = result.so_far
    request = msgspec.structs.replace(result.request, usage=result.usage + usage)
    num_turns = request.turn + (1 if len(result.tokens) else 0)
    num_prompt = context.num_prompt if context else (*written.edges, len(written))[0]
    whole = scored(request, written, ending, num_turns=num_turns, text=text, num_prompt=num_prompt)
    return msgspec.structs.replace(whole, verdicts=verdicts)


def scored(
    request: TurnRequest,
    written: Transcript,
    ending: Ending,
    *,
    num_turns: int,
    text: str = "",
    num_prompt: int = 0,
) -> ScoredTrajectory:
    return ScoredTrajectory(
        **request.about(),
        id=request.id,
        adapter=request.adapter,
        trajectory=request.trajectory,
        transcript=written,
        num_prompt=num_prompt,
        reward=ending.reward,
        reward_parts=dict(ending.parts or {}),
        stop_reason=ending.stop_reason,
        num_turns=num_turns,
        output_text=text,
        usage=request.usage,
        failure=ending.failure,
    )


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
