"""Sends a trajectory's parts once: results and requests of turns refer to what Redis has already.

    TurnRequest ─► rollout ─► ShortResult ─► env ─► ShortRequest ─► rollout ─► ShortResult ─► env ─► ScoredTrajectory

The *history* of an entry is a list in Redis of the payloads that led to it, oldest first, a whole TurnRequest before all
others. The script that settles an entry appends its payload, if what follows refers to it, and else deletes the list: so each
list belongs to one pending entry. A reader restores the messages, so no handler sees the short forms. Where one would not
restore the same message, as after a turn that moved to another worker, the whole message begins a new history.
"""

from typing import Any

import msgspec

from common.wire.messages import (
    EMPTY_F32,
    AdapterRef,
    Array,
    Failure,
    Message,
    StopReason,
    Tops,
    TurnRequest,
    TurnResult,
    Usage,
)
from common.wire.transcript import Transcript

MAX_CHANGED_CONTEXT_BYTES = 4096
"""Beyond this the whole request is sent: a history shall not keep many large contexts."""


class History(msgspec.Struct, frozen=True):
    """The first `num` payloads of a list in Redis, each with its entry's id behind it; `entry`: the last of these."""

    key: str
    num: int
    entry: str


class ShortResult(Message, frozen=True, kw_only=True):
    """A TurnResult without its request. rollout → env."""

    adapter: AdapterRef | None = None  # None: that of the request
    tokens: Array
    logprobs: Array
    stop_reason: StopReason
    stop_string: str = ""
    top_logprobs: list[list[tuple[int, float]]] = []
    prompt_logprobs: Array = EMPTY_F32
    prompt_top_logprobs: Tops = []
    usage: Usage
    failure: Failure | None = None
    worker: str = ""


class ShortRequest(Message, frozen=True, kw_only=True):
    """The TurnRequest of the turn after a result. env → rollout."""

    shown: bytes  # i4, the environment's tokens after the model's turn
    same: int  # bytes that the context begins with, as it was
    context: bytes = b""  # its other bytes
    session: str = ""
    usage: Usage


SHARED_FIELDS = tuple(name for name in ShortResult.__struct_fields__ if name != "adapter")


def shortened(cause: object, output: Message) -> Message | None:
    """The message as sent where the history, with `cause` as its last item, is known. None: whole."""
    match cause, output:
        case TurnRequest(), TurnResult() if output.request == cause and not cause.reply_to:
            return _short_result(output)
        case TurnResult(), TurnRequest() if output.turn == cause.request.turn + 1 and not output.reply_to:
            short = _short_request(cause, output)
            same = len(short.context) <= MAX_CHANGED_CONTEXT_BYTES and _request_after(cause, short) == output
            return short if same else None
        case _:
            return None


def restored(history: list[Message], message: Message) -> Message:
    """The whole message. Raises ValueError if the history does not lead to it."""
    whole, *later = (*history, message)
    for short in later:
        match whole, short:
            case TurnRequest(), ShortResult():
                whole = _result_of(whole, short)
            case TurnResult(), ShortRequest():
                whole = _request_after(whole, short)
            case _:
                raise ValueError(f"no {type(short).__name__} follows on a {type(whole).__name__}")
    return without_history(whole)


def without_history(message: Message) -> Message:
    """The message of an entry that has no history. Raises ValueError if it needs one."""
    if isinstance(message, (ShortResult, ShortRequest)):
        raise ValueError(f"a {type(message).__name__} without its history")
    return message


def _short_result(result: TurnResult) -> ShortResult:
    adapter = None if result.adapter == result.request.adapter else result.adapter
    return ShortResult(adapter=adapter, **_shared(result))


def _result_of(request: TurnRequest, short: ShortResult) -> TurnResult:
    return TurnResult(request=request, adapter=short.adapter or request.adapter, **_shared(short))


def _shared(result: TurnResult | ShortResult) -> dict[str, Any]:
    """The fields that a result and its short form have in common."""
    return {name: getattr(result, name) for name in SHARED_FIELDS}


def _short_request(result: TurnResult, request: TurnRequest) -> ShortRequest:
    same = _num_same(result.request.context, request.context)
    return ShortRequest(
        **request.about(),
        id=request.id,
        shown=request.transcript.ids[len(result.so_far.ids) :],
        same=same,
        context=request.context[same:],
        session=request.session,
        usage=request.usage,
    )


def _request_after(result: TurnResult, short: ShortRequest) -> TurnRequest:
    before = result.request
    return msgspec.structs.replace(
        before,
        id=short.id,
        epoch=short.epoch,
        turn=before.turn + 1,
        transcript=result.so_far + Transcript(short.shown),
        num_partial=0,
        context=before.context[: short.same] + short.context,
        session=short.session,
        usage=short.usage,
    )


def _num_same(one: bytes, other: bytes) -> int:
    """The number of bytes with which both begin."""
    same, most = 0, min(len(one), len(other))
    while same < most:
        end = (same + most + 1) // 2
        if one[same:end] == other[same:end]:
            same = end
        else:
            most = end - 1
    return same
