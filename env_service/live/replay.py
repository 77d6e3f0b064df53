"""Takes the recorded turns of a trajectory again, in a new session: the one that had answered them is lost.

What the model wrote and what it was shown stands in the request's tokens, so nothing else is kept for this.
"""

from collections.abc import Iterator

import msgspec

from common.wire.messages import TurnResult, f32, i32, turn_id
from env_service.conversation import Conversation
from env_service.failures import EnvironmentFailed
from env_service.live.sessions import Seat
from env_service.trajectory import Context


async def replay(seat: Seat, result: TurnResult, context: Context, conversation: Conversation) -> None:
    """Brings a session that was just opened to where it was before this turn.

    Raises EnvironmentFailed if it shows anything else than the model was shown then, and the errors of the session.
    """
    shown = await conversation.opening(seat.messages, seat.tools, seat.tokens)
    for past in earlier(result):
        _compare(shown, past)
        step = await seat.step(None, await conversation.turn(past, context, seat.tools))
        if step.done:
            raise EnvironmentFailed(f"the environment now ends after turn {past.request.turn + 1}")
        shown = await conversation.reply(past, step)
    _compare(shown, result)


def earlier(result: TurnResult) -> Iterator[TurnResult]:
    """The results of the turns before this one. Each led to another, so it was not cut off."""
    request = result.request
    whole = request.transcript.first(request.num_prompt)
    tokens, logprobs = whole.tokens.numpy(), whole.logprobs.numpy()
    for turn, (start, end) in enumerate(whole.segments):
        before = msgspec.structs.replace(
            request,
            id=turn_id(request.job, request.trajectory, request.trajectory_adapter.version, turn),
            turn=turn,
            transcript=whole.first(start),
            num_partial=0,
        )
        yield msgspec.structs.replace(
            result,
            id=before.id,
            request=before,
            tokens=i32(tokens[start:end]),
            logprobs=f32(logprobs[start:end]),
            stop_reason="stop",
            stop_string="",
        )


def _compare(shown: list[int], result: TurnResult) -> None:
    request = result.request
    before = request.transcript.first(request.num_prompt)
    start = before.edges[-1] if before.edges else 0
    if shown != before.tokens.numpy()[start:].tolist():
        raise EnvironmentFailed(f"the environment now shows the model something else before turn {request.turn + 1}")
