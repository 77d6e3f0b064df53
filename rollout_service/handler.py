"""Answers a turn request with a finished turn. Knows no bus and no retry.

Turns under way are lost with the process, and resumed from the request's tokens, or the newer ones of its progress.

    TurnRequest ─► hold its adapter ─► engine ─► TurnResult ─► env, or the API replica that asked (deltas before it)
"""

import asyncio
import struct
from collections.abc import Awaitable, Callable, Sequence

import msgspec
import numpy as np

from common.bus.deliveries import Out
from common.bus.streams import Cell
from common.errors import CorruptObject, InvalidInput, NotFound
from common.wire.messages import (
    EMPTY_F32,
    EMPTY_I32,
    Failure,
    Parked,
    ScoredTrajectory,
    TurnDelta,
    TurnRequest,
    TurnResult,
    Usage,
    f32,
    i32,
)
from common.wire.transcript import wrote
from rollout_service.adapters import AdapterCache
from rollout_service.engine import CorruptAdapter, Engine, Generated
from rollout_service.turns import weights_of

SHORT_TURN = 32
"""Tokens of a turn of which no progress is kept: sampling them again costs less. A kill costs a turn at most so many and those of
`rollout_progress_s`: never more than the larger of twice either."""
PROGRESS_HEAD = struct.Struct("<qqd")
"""Figures of the trajectory up to now: prompt tokens, sampled tokens, engine seconds."""
PROGRESS_BODY = np.dtype([("token", "<i4"), ("logprob", "<f4")])

SendDelta = Callable[[str, TurnDelta], Awaitable[None]]
News = tuple[Sequence[int], Sequence[float]]
"""New tokens of a turn, and their log-probs."""


class RolloutHandler:
    """Implements `common.worker.handlers.Handler` for TurnRequest."""

    def __init__(
        self,
        engine: Engine,
        adapters: AdapterCache,
        cell: Cell,
        *,
        send_delta: SendDelta,
        worker: str = "",
        deterministic: bool = False,
        heir: Callable[[], str] = str,
    ) -> None:
        """`worker`: to which later turns come back; "": to any. `deterministic`: no progress is kept, and a moved turn of a job starts
        again: going on from its tokens changes bits. `heir`: the stream of what is handed back; "": that of all workers."""
        self._engine = engine
        self._adapters = adapters
        self._cell = cell
        self._send_delta = send_delta
        self._worker = worker
        self._deterministic = deterministic
        self._heir = heir

    async def __call__(self, message: TurnRequest, beat: Callable[[], None]) -> list[Out]:
        """Generates the turn. Raises Unavailable when the store is away; other trouble is a failed TurnResult."""
        request = _without_partial(message) if self._restarts(message) else message
        self._adapters.expect(request.adapter)
        try:
            async with self._adapters.hold(weights_of(request)):
                generated = await self._generate(request, beat)
        except (CorruptObject, CorruptAdapter) as error:
            return [self._failed_turn(message, Failure("corrupt_adapter", str(error)))]
        except (InvalidInput, NotFound) as error:
            return [self._failed_turn(message, Failure("invalid", str(error)))]
        return [(self._reply_stream(message), _result(request, generated, self._worker))]

    def park(self, message: TurnRequest) -> list[Out]:
        """Sends the owner the request as at the start of its turn, with what the turn has cost so far."""
        request = _without_partial(self._charged(message))
        parked = Parked(**message.about(), id=message.id, request=request)
        return [(self._cell.scored(message.partition), parked)]

    def drop(self, message: TurnRequest) -> list[Out]:
        """Tells the owner what an ended job's trajectory cost; a chat's API replica counts for itself."""
        if message.reply_to:
            return []
        return self.failed(self._charged(message), Failure("cancelled", "the job has ended"))

    def hand_back(self, message: TurnRequest) -> list[Out]:
        """The request with its tokens so far, for any other worker, or for the API replica that asked."""
        partial = self._engine.partial(message.id)
        request = self._charged(message)
        if self._restarts(message):
            request = _without_partial(request)
        elif partial is not None:
            request = _with_tokens(request, partial.tokens, partial.logprobs)
        return [(message.reply_to or self._heir() or self._cell.rollout_first, request)]

    def progress(self, message: TurnRequest) -> tuple[bytes, bytes] | None:
        """The turn's tokens and log-probs so far, and its trajectory's cost with them; see `Resumes`. None for a short turn, for a
        stream, whose tokens the API replica keeps, and in deterministic mode."""
        partial = self._engine.partial(message.id)
        if partial is None or len(partial.tokens) <= SHORT_TURN or message.stream:
            return None
        if self._deterministic or self._restarts(message):
            return None
        usage = self._charged(message).usage
        head = PROGRESS_HEAD.pack(usage.prompt_tokens, usage.sampled_tokens, usage.rollout_s)
        body = np.empty(len(partial.tokens), PROGRESS_BODY)
        body["token"], body["logprob"] = partial.tokens, partial.logprobs
        return head, body.tobytes()

    def resumed(self, message: TurnRequest, progress: bytes) -> TurnRequest:
        """The request with the tokens and the cost that `progress` said."""
        prompt_tokens, sampled_tokens, rollout_s = PROGRESS_HEAD.unpack_from(progress)
        body = np.frombuffer(progress, PROGRESS_BODY, offset=PROGRESS_HEAD.size)
        usage = msgspec.structs.replace(
            message.usage, prompt_tokens=prompt_tokens, sampled_tokens=sampled_tokens, rollout_s=rollout_s
        )
        request = msgspec.structs.replace(message, usage=usage)
        return _with_tokens(request, body["token"], body["logprob"])

    def failed(self, message: TurnRequest, failure: Failure) -> list[Out]:
        """A failed trajectory for the owner, or a failed turn for the API replica or env worker that asked."""
        if message.reply_to or message.judges is not None:
            return [self._failed_turn(message, failure)]
        scored = ScoredTrajectory(
            **message.about(),
            id=message.id,
            adapter=message.trajectory_adapter,
            trajectory=message.trajectory,
            stop_reason="failed",
            usage=message.usage,
            failure=failure,
        )
        return [(self._cell.scored(message.partition), scored)]

    # ---- a turn --------------------------------------------------------------------------------------------

    async def _generate(self, request: TurnRequest, beat: Callable[[], None]) -> Generated:
        if request.stream and request.reply_to:
            generated = await self._stream(request, beat)
        else:
            generated = await self._engine.generate(request, beat=beat)
        if generated.adapter != request.adapter:
            raise RuntimeError(f"asked for adapter {request.adapter}, the engine used {generated.adapter}")
        return generated

    async def _stream(self, request: TurnRequest, beat: Callable[[], None]) -> Generated:
        news = asyncio.Queue[News | None]()
        pump = asyncio.create_task(self._pump(request, news), name=f"deltas {request.id}")
        try:
            generated = await self._engine.generate(
                request, on_token=lambda tokens, logprobs: news.put_nowait((tokens, logprobs)), beat=beat
            )
            news.put_nowait(None)
            await pump
            return generated
        finally:
            pump.cancel()

    async def _pump(self, request: TurnRequest, news: "asyncio.Queue[News | None]") -> None:
        """Sends tokens in order, up to None; those that come while a message is under way go into the next."""
        offset, closed = request.num_partial, False
        while not closed:
            come = [await news.get(), *(news.get_nowait() for _ in range(news.qsize()))]
            closed = come[-1] is None
            tokens, logprobs = ([one for new in come if new for one in new[part]] for part in (0, 1))
            if tokens:
                delta = TurnDelta(
                    **request.about(),
                    id=request.id,
                    adapter=request.adapter,
                    offset=offset,
                    tokens=i32(tokens),
                    logprobs=f32(logprobs),
                )
                await self._send_delta(request.reply_to, delta)
                offset += len(tokens)

    def _restarts(self, message: TurnRequest) -> bool:
        """True for a turn that begins again when it moves: no request carries alternatives to its tokens."""
        must_keep_bits = self._deterministic and not message.reply_to
        return must_keep_bits or bool(message.sampling.num_top_logprobs)

    def _charged(self, message: TurnRequest) -> TurnRequest:
        """The request with what this worker spent on it so far."""
        partial = self._engine.partial(message.id)
        if partial is None:
            return message
        spent = Usage(_prompt_tokens(message), partial.num_sampled, rollout_s=partial.busy_s)
        return msgspec.structs.replace(message, usage=message.usage + spent)

    def _reply_stream(self, message: TurnRequest) -> str:
        return message.reply_to or self._cell.holder(message.session)

    def _failed_turn(self, message: TurnRequest, failure: Failure) -> Out:
        result = TurnResult(
            **message.about(),
            id=message.id,
            request=message,
            adapter=message.adapter,
            tokens=EMPTY_I32,
            logprobs=EMPTY_F32,
            stop_reason="failed",
            usage=message.usage,
            failure=failure,
        )
        return self._reply_stream(message), result


def _result(request: TurnRequest, generated: Generated, worker: str) -> TurnResult:
    spent = Usage(_prompt_tokens(request), generated.num_sampled, rollout_s=generated.busy_s)
    return TurnResult(
        **request.about(),
        id=request.id,
        request=request,
        adapter=generated.adapter,
        tokens=i32(generated.tokens),
        logprobs=f32(generated.logprobs),
        stop_reason=generated.stop_reason,
        stop_string=generated.stop_string,
        top_logprobs=generated.top_logprobs,
        prompt_logprobs=generated.prompt_logprobs,
        prompt_top_logprobs=generated.prompt_top_logprobs,
        usage=request.usage + spent,
        worker=worker,
    )


def _prompt_tokens(request: TurnRequest) -> int:
    """The number of tokens that the model reads and did not write; a shared prompt counts for each."""
    return len(request.transcript) - request.transcript.num_written


def _without_partial(request: TurnRequest) -> TurnRequest:
    """The request as it was at the start of its turn."""
    if not request.num_partial:
        return request
    before = request.transcript.first(request.num_prompt)
    return msgspec.structs.replace(request, transcript=before, num_partial=0)


def _with_tokens(
    request: TurnRequest, tokens: Sequence[int] | np.ndarray, logprobs: Sequence[float] | np.ndarray
) -> TurnRequest:
    """The request with all tokens of this turn that were sampled so far."""
    whole = request.transcript.first(request.num_prompt) + wrote(tokens, logprobs)
    return msgspec.structs.replace(request, transcript=whole, num_partial=len(tokens))
