"""What chat and text completions have in common: their parameters, and how a request is watched over."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Annotated, Any, Literal, TypeVar

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, field_validator
from starlette.responses import StreamingResponse

from common.errors import InvalidInput
from common.messages import TEMPERATURE, Sampling, Usage
from common.text.tokens import ChatTokenizer
from manager_service.api.context import Api
from manager_service.api.errors import error_body, json_bytes, translated
from manager_service.api.model_names import Named
from manager_service.api.quota import count_inference
from manager_service.api.sampling.replies import AnswerText
from manager_service.api.sampling.shares import Fresh, InferenceRequest

VERSION_HEADER = "x-marlaas-version"
MAX_CHOICES = 64
"""Choices of one request, over all its prompts."""

T = TypeVar("T")
StopString = Annotated[str, Field(min_length=1, max_length=256)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False
    include_obfuscation: bool | None = None


class SamplingGiven(BaseModel):
    """Parameters of both. Those that cannot be honoured are accepted at their neutral value only."""

    model_config = ConfigDict(extra="forbid")

    model: str
    n: int | None = Field(None, ge=1, le=16)
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    max_tokens: int | None = Field(None, ge=1)
    stop: StopString | Annotated[list[StopString], Field(max_length=16)] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None  # not used, as OpenAI's own is for their abuse checks
    frequency_penalty: float | None = Field(None, description="Only 0")
    presence_penalty: float | None = Field(None, description="Only 0")
    logit_bias: dict[str, Any] | None = Field(None, description="Only empty")

    @field_validator("frequency_penalty", "presence_penalty", "logit_bias")
    @classmethod
    def _neutral(cls, value: Any) -> Any:
        if value:
            raise ValueError("not offered: leave it out")
        return value

    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


def make_ask(
    api: Api,
    tenant: str,
    named: Named,
    body: SamplingGiven,
    prompts: Sequence[Sequence[int]],
    *,
    limit: int | None,
    num_top: int,
) -> InferenceRequest:
    """Raises InvalidInput for a prompt that leaves no room for an answer."""
    if len(prompts) * (body.n or 1) > MAX_CHOICES:
        raise InvalidInput(f"a request gives at most {MAX_CHOICES} choices", param="n")
    context = named.base.tokenizer.context
    sampling = [_sampling(body, len(prompt), context, limit, num_top) for prompt in prompts]
    return InferenceRequest(
        tenant=tenant,
        adapter=named.adapter,
        prompts=prompts,
        num_choices=body.n or 1,
        sampling=sampling,
        seed=secrets.randbits(53) if body.seed is None else body.seed % 2**53,
        stream=bool(body.stream) and not num_top,
    )


def _sampling(body: SamplingGiven, num_prompt: int, context: int, limit: int | None, num_top: int) -> Sampling:
    room = context - num_prompt
    if room < 1:
        raise InvalidInput(
            f"the prompt has {num_prompt} tokens and the model's context {context}: there is no room for an answer;"
            " shorten the messages",
            param="messages",
            code="context_length_exceeded",
        )
    if num_prompt < 1:
        raise InvalidInput("the prompt is empty", param="prompt")
    return Sampling(
        temperature=TEMPERATURE if body.temperature is None else body.temperature,
        max_tokens=min(room, limit or room),
        top_p=1.0 if body.top_p is None else body.top_p,
        stop=body.stops(),
        num_top_logprobs=num_top,
    )


def usage_of(ask: InferenceRequest, answers: Sequence[AnswerText]) -> dict[str, Any]:
    prompt = sum(len(tokens) for tokens in ask.prompts)
    completion = sum(len(answer.tokens) for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


@asynccontextmanager
async def counted(
    api: Api, named: Named, tenant: str, ask: InferenceRequest, answers: Sequence[AnswerText]
) -> AsyncGenerator[AsyncGenerator[Fresh]]:
    """The progress of the choices. The tenant is charged for them however this ends, a client that leaves included."""
    try:
        async with aclosing(named.base.inference.answer(ask)) as progress:
            yield progress
    finally:
        total = Usage()
        for index, answer in enumerate(answers):
            total += _cost(answer, len(ask.prompts[index // ask.num_choices]))
        await asyncio.shield(count_inference(named.base.redis, named.base.cell, tenant, total))


def _cost(answer: AnswerText, num_prompt: int) -> Usage:
    """Of an unfinished choice: its prompt, and the tokens that were seen."""
    if answer.result is not None:
        return answer.result.usage
    return Usage(prompt_tokens=num_prompt, sampled_tokens=len(answer.tokens))


def make_answers(
    ask: InferenceRequest, tokenizer: ChatTokenizer, stop: Sequence[str], tools: Sequence[Any] | None
) -> list[AnswerText]:
    return [AnswerText(tokenizer, stop, tools) for _ in range(len(ask.prompts) * ask.num_choices)]


# ---- HTTP -----------------------------------------------------------------------------------------------------------


class Gone(Exception):
    """The client disconnected."""


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The work's result; it is cancelled when the client disconnects, which raises Gone."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Gone
    finally:
        for other in (task, gone):
            other.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def event_stream(events: AsyncIterator[str], headers: dict[str, str] | None = None) -> StreamingResponse:
    """Server-sent events; an error on the way is told as an event, since the status has been sent."""
    no_buffer = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})}
    return StreamingResponse(_with_errors(events), media_type="text/event-stream", headers=no_buffer)


async def _with_errors(events: AsyncIterator[str]) -> AsyncIterator[str]:
    try:
        async for event in events:
            yield event
    except Exception as error:  # the boundary: whatever it is, the client must hear of it
        ours = translated(error)
        body = error_body(ours.status_code, ours.detail, param=ours.param, code=ours.code)
        yield data(body)


def data(content: Any) -> str:
    return f"data: {json_bytes(content).decode()}\n\n"


DONE = "data: [DONE]\n\n"
Object = Literal["chat.completion", "chat.completion.chunk", "text_completion"]


def head(kind: Object, named: Named, model: str, completion: str, created: int) -> dict[str, Any]:
    """The fields that every answer and chunk begins with."""
    return {
        "id": completion,
        "object": kind,
        "created": created,
        "model": model,
        "system_fingerprint": str(named.adapter),
    }
