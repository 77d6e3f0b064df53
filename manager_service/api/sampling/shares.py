"""Asks the workers of training for chat turns and grader runs; a turn survives the death of its worker.

    reads: reply:<api>   writes: rollout:first, env, control   holds: turns under way (lost on a crash, with the connection)
    waits for: a delta or a result   unblocked by: rollout, env
    when a worker dies: after a silence the turn is asked for again, from the tokens that were already seen

A completion is a job of its own, `chat-…`, so that it can be cancelled like one. Its epoch rises with every attempt.
Messages of an older attempt are not used, unless one of them is the whole answer.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import structlog
from redis.exceptions import ResponseError

from common.bus import Bus
from common.errors import InvalidInput, Unavailable
from common.messages import (
    AdapterRef,
    Cancel,
    GradeRequest,
    GradeResult,
    Message,
    Sampling,
    TrajectoryRef,
    TurnDelta,
    TurnRequest,
    TurnResult,
    f32,
    i32,
    turn_id,
    u8,
)
from common.streams import GROUP_ROLLOUT, partition_of
from common.tasks import running

REPLY_TTL_S = 60
REFRESH_S = 5.0
"""A reply stream that Redis lost is made anew within this time."""
BLOCK_MS = 1000
CONTROL_KEEP_S = 600.0
PUBLISH_S = 4.0
log = structlog.get_logger()

Reply = TurnDelta | TurnResult | GradeResult


class Replies:
    """The reply stream of this replica: one reader, which hands each message to whoever waits for its job."""

    def __init__(self, bus: Bus, api_id: str) -> None:
        self._bus = bus
        self.stream = bus.cell.reply(api_id)
        self._waiting: dict[str, asyncio.Queue[Reply]] = {}

    @contextmanager
    def of(self, job: str) -> Generator["asyncio.Queue[Reply]"]:
        """Messages that name the job, while the block runs."""
        queue: asyncio.Queue[Reply] = asyncio.Queue()
        self._waiting[job] = queue
        try:
            yield queue
        finally:
            del self._waiting[job]

    async def run(self) -> None:
        """Reads until cancelled. Redis then deletes the stream after its time to live."""
        cursor, refreshed_at = "0", float("-inf")
        while True:
            if time.monotonic() - refreshed_at > REFRESH_S:
                if not await self._refresh():
                    cursor = "0"
                refreshed_at = time.monotonic()
            entries = await self._bus.follow(self.stream, cursor, block_ms=BLOCK_MS)
            for _, message in entries:
                self._hand_over(message)
            if entries:
                cursor = entries[-1][0]
                await self._forget(cursor)

    async def _refresh(self) -> bool:
        """Keeps the stream alive. False if it had to be made anew."""
        client = self._bus.client
        if await self._bus.retrying(lambda: client.expire(self.stream, REPLY_TTL_S)):
            return True
        await self._bus.ensure_group(self.stream, "alive")  # the one command that makes an empty stream
        await self._bus.retrying(lambda: client.expire(self.stream, REPLY_TTL_S))
        return False

    async def _forget(self, last: str) -> None:
        """Deletes the entries up to this one, which were read."""
        milliseconds, sequence = last.split("-")
        first_kept = f"{milliseconds}-{int(sequence) + 1}"
        await self._bus.retrying(lambda: self._bus.client.xtrim(self.stream, minid=first_kept, approximate=False))

    def _hand_over(self, message: Any) -> None:
        queue = self._waiting.get(message.job)
        if queue is not None and isinstance(message, TurnDelta | TurnResult | GradeResult):
            queue.put_nowait(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceRequest:
    """One completion request: every prompt is answered `num_choices` times."""

    tenant: str
    adapter: AdapterRef
    prompts: Sequence[Sequence[int]]
    num_choices: int
    sampling: Sequence[Sampling]  # one a prompt
    seed: int
    stream: bool


@dataclass(frozen=True, slots=True)
class Fresh:
    """News of one choice: tokens after those shown before, and the result once it is finished."""

    choice: int  # prompt * num_choices + sample
    tokens: list[int]
    logprobs: list[float]
    result: TurnResult | None


@dataclass(slots=True)
class _Choice:
    request: TurnRequest  # the newest attempt
    prompt: Sequence[int]
    entry: str = ""  # where the request stands in the stream
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    heard_s: float = 0.0  # monotonic: last sign of life, and last token
    advanced_s: float = 0.0
    result: TurnResult | None = None


class Share:
    """The part of the rollout slots that completions may take. Completions beyond it wait here, not in a worker."""

    def __init__(self, limit: Callable[[], int]) -> None:
        self._limit = limit
        self._in_use = 0
        self._freed = asyncio.Condition()

    @asynccontextmanager
    async def of(self, num: int, timeout_s: float) -> AsyncGenerator[None]:
        """Holds `num` slots while the block runs. A request for more slots than there are waits until it is alone.

        Raises Unavailable when others held them for `timeout_s`.
        """
        try:
            async with asyncio.timeout(timeout_s), self._freed:
                await self._freed.wait_for(lambda: not self._in_use or self._in_use + num <= self._limit())
                self._in_use += num
        except TimeoutError as error:
            raise Unavailable("all slots for completions are taken; try again in a moment") from error
        try:
            yield
        finally:
            self._in_use -= num
            async with self._freed:
                self._freed.notify_all()


class Inference:
    """The completions and grader runs that one API replica asks of one cell."""

    def __init__(self, bus: Bus, api_id: str, *, silence_s: float, timeout_s: float, slots: Callable[[], int]) -> None:
        """`slots`: the number of turns that this replica may have under way at once."""
        self._bus = bus
        self._share = Share(slots)
        self._replies = Replies(bus, api_id)
        self._silence_s = silence_s
        self._timeout_s = timeout_s
        self._cancels: asyncio.Queue[Cancel] = asyncio.Queue()

    async def run(self) -> None:
        """Reads replies and sends cancellations until cancelled itself."""
        async with running(self._replies.run(), self._send_cancels()) as tasks:
            await asyncio.wait(tasks)

    async def _send_cancels(self) -> None:
        while True:
            cancel = await self._cancels.get()
            await self._bus.broadcast(self._bus.cell.control, cancel, keep_s=CONTROL_KEEP_S)

    # ---- completions ------------------------------------------------------------------------------------------------

    async def answer(self, ask: InferenceRequest) -> AsyncGenerator[Fresh]:
        """Tokens as they come, each once and in order, then each choice's result.

        Closing the iterator early frees the workers. Raises Unavailable when no worker makes progress or one fails,
        InvalidInput when the workers refuse the request.
        """
        job = f"chat-{secrets.token_hex(12)}"
        choices = {(c.request.trajectory.group, c.request.trajectory.sample): c for c in self._choices(job, ask)}
        async with (
            self._share.of(len(choices), self._timeout_s),
            aclosing(self._answers(job, choices, ask.num_choices)) as answers,
        ):
            async for fresh in answers:
                yield fresh

    async def _answers(
        self, job: str, choices: "dict[tuple[int, int], _Choice]", num_choices: int
    ) -> AsyncGenerator[Fresh]:
        with self._replies.of(job) as queue:
            try:
                for choice in choices.values():
                    await self._publish(choice)
                while any(choice.result is None for choice in choices.values()):
                    for fresh in await self._next(queue, choices, num_choices):
                        yield fresh
            finally:
                if any(choice.result is None for choice in choices.values()):
                    self._cancel(next(iter(choices.values())).request, epoch=2**31)

    async def _next(
        self, queue: "asyncio.Queue[Reply]", choices: dict[tuple[int, int], _Choice], num_choices: int
    ) -> list[Fresh]:
        try:
            async with asyncio.timeout(min(1.0, self._silence_s / 4)):
                message = await queue.get()
        except TimeoutError:
            for choice in choices.values():
                await self._look_after(choice)
            return []
        key = _choice_key(message)
        choice = choices.get(key) if key else None
        if choice is None or choice.result is not None:
            return []
        fresh = _take(choice, message, key[0] * num_choices + key[1] if key else 0)
        return [] if fresh is None else [fresh]

    def _choices(self, job: str, ask: InferenceRequest) -> list[_Choice]:
        return [
            _Choice(self._request(job, ask, group, sample), ask.prompts[group])
            for group in range(len(ask.prompts))
            for sample in range(ask.num_choices)
        ]

    def _request(self, job: str, ask: InferenceRequest, group: int, sample: int) -> TurnRequest:
        prompt = ask.prompts[group]
        trajectory = TrajectoryRef("chat", ask.seed, group, sample)
        return TurnRequest(
            id=turn_id(job, trajectory, ask.adapter.version, 0),
            tenant=ask.tenant,
            job=job,
            partition=partition_of(ask.tenant),
            adapter=ask.adapter,
            trajectory=trajectory,
            turn=0,
            tokens=i32(prompt),
            logprobs=f32([0.0] * len(prompt)),
            written=u8([0] * len(prompt)),
            sampling=ask.sampling[group],
            reply_to=self._replies.stream,
            stream=ask.stream,
        )

    async def _publish(self, choice: _Choice) -> None:
        """Appends the request, and remembers its entry. Raises Unavailable when Redis is away."""
        fields = await self._bus.fields(choice.request)
        entry = dict(zip(fields[::2], fields[1::2], strict=True))
        stream = self._bus.cell.rollout_first
        async with _within(PUBLISH_S):
            written: Any = await self._bus.retrying(lambda: self._bus.client.xadd(stream, entry))
        choice.entry = written.decode()
        choice.heard_s = time.monotonic()
        choice.advanced_s = choice.advanced_s or choice.heard_s

    # ---- silence ----------------------------------------------------------------------------------------------------

    async def _look_after(self, choice: _Choice) -> None:
        """Asks again for a turn that nobody works on any more."""
        now = time.monotonic()
        if choice.result is not None or now - choice.heard_s < self._silence_s:
            return
        if now - choice.advanced_s > self._timeout_s:
            raise Unavailable(f"no rollout worker answered within {self._timeout_s:g} seconds")
        async with _within(PUBLISH_S):
            cared_for = await self._is_cared_for(choice.entry)
        if cared_for:
            choice.heard_s = now
            return
        log.warning("turn_asked_again", job=choice.request.job, num_tokens=len(choice.tokens))
        self._cancel(choice.request, epoch=choice.request.epoch)
        choice.request = _continued(choice)
        await self._publish(choice)

    async def _is_cared_for(self, entry: str) -> bool:
        """True if the request waits in the stream, or a worker renewed it within the silence."""
        stream, client = self._bus.cell.rollout_first, self._bus.client
        if not await self._bus.retrying(lambda: client.xrange(stream, entry, entry)):
            return False
        try:
            pending: Any = await self._bus.retrying(
                lambda: client.xpending_range(stream, GROUP_ROLLOUT, entry, entry, 1)
            )
        except ResponseError as error:
            if "NOGROUP" not in str(error):
                raise
            return True
        return not pending or pending[0]["time_since_delivered"] < self._silence_s * 1000

    def _cancel(self, request: TurnRequest, *, epoch: int) -> None:
        cancel = Cancel(
            id=f"{request.job}/cancel/{epoch}",
            tenant=request.tenant,
            job=request.job,
            partition=request.partition,
            epoch=epoch,
        )
        self._cancels.put_nowait(cancel)

    # ---- graders ----------------------------------------------------------------------------------------------------

    async def grade(self, make: Callable[[str, str], GradeRequest], *, timeout_s: float) -> GradeResult:
        """Runs a grader once. `make(id, reply_to)` gives the request. Raises Unavailable if nobody answers."""
        job = f"grade-{secrets.token_hex(12)}"
        request = make(job, self._replies.stream)
        with self._replies.of(job) as queue:
            async with _within(PUBLISH_S):
                await self._bus.publish([(self._bus.cell.env, request)])
            try:
                async with asyncio.timeout(timeout_s):
                    while True:
                        message = await queue.get()
                        if isinstance(message, GradeResult):
                            return message
            except TimeoutError as error:
                raise Unavailable(f"no environment worker answered within {timeout_s:g} seconds") from error


class _within:
    """A time limit for Redis. Raises Unavailable when it is over."""

    def __init__(self, seconds: float) -> None:
        self._timeout = asyncio.timeout(seconds)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(self, *error: Any) -> None:
        try:
            await self._timeout.__aexit__(*error)
        except TimeoutError as late:
            raise Unavailable("the service's memory is away for a moment; try again") from late


def _choice_key(message: Message) -> tuple[int, int] | None:
    """(group, sample) of a turn's message: a field of results, a part of the id of deltas."""
    if isinstance(message, TurnResult):
        return message.request.trajectory.group, message.request.trajectory.sample
    parts = message.id.split("/")
    group = parts[1].rpartition(".")[2] if len(parts) > 2 else ""
    return (int(group), int(parts[2])) if group.isdecimal() and parts[2].isdecimal() else None


def _take(choice: _Choice, message: Reply, index: int) -> Fresh | None:
    """The news in a message. Raises Unavailable or InvalidInput for a failed turn."""
    if isinstance(message, TurnDelta):
        return _take_delta(choice, message, index)
    if not isinstance(message, TurnResult):
        return None
    current = message.request.epoch == choice.request.epoch
    if message.failure is not None or message.stop_reason in ("failed", "cancelled"):
        if not current:
            return None
        raise _refused(message)
    tokens = [int(token) for token in message.tokens.numpy()]
    known = len(choice.tokens)
    if not current and tokens[:known] != choice.tokens:
        return None
    choice.result = message
    logprobs = [float(value) for value in message.logprobs.numpy()]
    return Fresh(index, tokens[known:], logprobs[known:], message)


def _take_delta(choice: _Choice, delta: TurnDelta, index: int) -> Fresh | None:
    known = len(choice.tokens)
    if delta.epoch != choice.request.epoch or delta.offset > known:
        return None
    choice.heard_s = time.monotonic()
    skip = known - delta.offset
    tokens = [int(token) for token in delta.tokens.numpy()[skip:]]
    logprobs = [float(value) for value in delta.logprobs.numpy()[skip:]]
    if not tokens:
        return None
    choice.advanced_s = choice.heard_s
    choice.tokens += tokens
    choice.logprobs += logprobs
    return Fresh(index, tokens, logprobs, None)


def _refused(result: TurnResult) -> Exception:
    failure = result.failure
    if failure is None:
        return Unavailable("the completion was cancelled")
    if failure.kind == "invalid":
        return InvalidInput(failure.reason, code="invalid_request")
    return Unavailable(f"the completion failed ({failure.kind}): {failure.reason}")


def _continued(choice: _Choice) -> TurnRequest:
    """The next attempt, which goes on after the tokens that were seen."""
    before, prompt, seen = choice.request, list(choice.prompt), choice.tokens
    trajectory = msgspec.structs.replace(before.trajectory, attempt=before.trajectory.attempt + 1)
    return msgspec.structs.replace(
        before,
        id=turn_id(before.job, trajectory, before.adapter.version, 0),
        epoch=before.epoch + 1,
        trajectory=trajectory,
        tokens=i32([*prompt, *seen]),
        logprobs=f32([0.0] * len(prompt) + choice.logprobs),
        written=u8([0] * len(prompt) + [1] * len(seen)),
        num_partial=len(seen),
    )
