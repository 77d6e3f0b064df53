"""Turns of graders' models: this service's model is asked as in any turn, and the grading goes on with its answer.

    grading ─ ModelAsked ─► judge_request ─ TurnRequest ─► rollout ─ TurnResult ─► resumed ─► grading, once more

The request's context holds what is graded, so any worker can go on, and a pause, a cancellation or a dead worker is
handled as for any turn. The grading step is repeated, with the answers so far.
"""

import msgspec

from common.errors import CorruptObject, InvalidInput
from common.tasks.graders import tuned_version
from common.text.tokens import ChatTokenizer
from common.wire.codec import decode, encode
from common.wire.messages import (
    BASE,
    EMPTY_F32,
    EMPTY_I32,
    AdapterRef,
    GradeRequest,
    Sampling,
    TrajectoryRef,
    TurnRequest,
    TurnResult,
    Usage,
    turn_id,
)
from common.wire.transcript import EMPTY, shown
from env_service.failures import GraderFailed
from env_service.graders.model import ModelAsked, ModelQuestion
from env_service.work import Work

Graded = TurnResult | GradeRequest


class Judging(msgspec.Struct, frozen=True, array_like=True):
    """The context of a request to a grader's model."""

    weight: float  # the tenant's
    graded: bytes
    grader: str  # the one that asks
    answers: dict[str, str]  # of those asked before


_decoder = msgspec.msgpack.Decoder(Judging)


def judge_request(graded: Graded, asked: ModelAsked, doing: Work, tokenizer: ChatTokenizer) -> TurnRequest:
    """Asks the model. Raises GraderFailed if it cannot be asked so."""
    question = asked.question
    tokens = _rendered(question, tokenizer)
    if isinstance(graded, TurnResult):
        adapter, trajectory, turn, usage = (
            graded.request.adapter, graded.request.trajectory, graded.request.turn, graded.usage,
        )  # fmt: skip
    else:
        adapter, trajectory, turn, usage = BASE, TrajectoryRef("chat", 0, 0, 0), 0, Usage()
    turn += 1 + len(doing.answers)
    return TurnRequest(
        **graded.about(),
        id=turn_id(graded.job, trajectory, adapter.version, turn),
        adapter=adapter_of(question.model),
        trajectory=trajectory,
        turn=turn,
        transcript=shown(tokens),
        sampling=Sampling(temperature=question.temperature, max_tokens=question.max_tokens, top_p=question.top_p),
        context=msgspec.msgpack.encode(Judging(doing.weight, encode(graded), asked.grader, doing.answers)),
        usage=usage,
        judges=adapter,
    )


def _rendered(question: ModelQuestion, tokenizer: ChatTokenizer) -> list[int]:
    least = tokenizer.least_tokens(sum(len(message["content"]) for message in question.messages))
    if least > tokenizer.context:
        raise GraderFailed(f"the model's question has more tokens than the context of {tokenizer.context}")
    try:
        tokens = tokenizer.told(question.chat_template_kwargs or {}).render(question.messages)
    except (InvalidInput, ValueError) as error:
        raise GraderFailed(f"the model's question: {error}") from error
    if len(tokens) + question.max_tokens > tokenizer.context:
        raise GraderFailed(
            f"the model's question has {len(tokens)} tokens, and its answer up to {question.max_tokens}: "
            f"more than the context of {tokenizer.context}"
        )
    return tokens


def adapter_of(model: str) -> AdapterRef:
    """The version of a name: a base model's, or `ft:{base}:{tenant}:{suffix}:{job}@{version}`. Raises GraderFailed."""
    if not model.startswith("ft:"):
        return BASE
    found = tuned_version(model)
    if found is None:
        raise GraderFailed(f"the model {model[:100]} names no version")
    return found


def resumed(result: TurnResult) -> tuple[Graded, str, dict[str, str]]:
    """The original message with the answer's cost, and the epoch and attempt of a pause; the grader whose model has answered; the
    answers of those before. Raises CorruptObject."""
    request = result.request
    try:
        judging = _decoder.decode(request.context)
        graded = decode(judging.graded)
    except (msgspec.DecodeError, ValueError) as error:
        raise CorruptObject(f"what a grader's model was asked about cannot be read: {error}") from error
    if isinstance(graded, GradeRequest):
        return graded, judging.grader, judging.answers
    if not isinstance(graded, TurnResult):
        raise CorruptObject(f"a grader's model was asked about a {type(graded).__name__}")
    before = msgspec.structs.replace(
        graded.request,
        id=f"{graded.request.id.rsplit('/', 1)[0]}/{request.trajectory.attempt}",
        trajectory=request.trajectory,
        epoch=request.epoch,
    )
    whole = msgspec.structs.replace(graded, id=before.id, request=before, epoch=request.epoch, usage=result.usage)
    return whole, judging.grader, judging.answers


def graded_by(result: TurnResult) -> Graded:
    """The message of the result; if unreadable, the result as a trajectory without tokens."""
    try:
        return resumed(result)[0]
    except CorruptObject:
        request = msgspec.structs.replace(
            result.request,
            adapter=result.request.trajectory_adapter,
            judges=None,
            transcript=EMPTY,
            num_partial=0,
        )
        return msgspec.structs.replace(
            result, request=request, adapter=request.adapter, tokens=EMPTY_I32, logprobs=EMPTY_F32
        )
