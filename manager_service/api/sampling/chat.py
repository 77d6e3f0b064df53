"""POST /v1/chat/completions"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field, field_validator
from starlette.responses import JSONResponse, Response

from common.errors import InvalidInput
from manager_service.api.context import Api, Parts, Tenant
from manager_service.api.errors import COMMON, declared
from manager_service.api.model_names import Named, find_model
from manager_service.api.quota import check_quota
from manager_service.api.sampling.replies import (
    AnswerText,
    finish_reason,
    shown_calls,
    token_logprob,
    token_logprobs,
    with_malformed,
)
from manager_service.api.sampling.requests import (
    DONE,
    VERSION_HEADER,
    Gone,
    SamplingGiven,
    counted,
    data,
    event_stream,
    head,
    make_answers,
    make_ask,
    unless_gone,
    usage_of,
)
from manager_service.api.sampling.shares import InferenceRequest

router = APIRouter(prefix="/v1", tags=["inference"], responses=COMMON)

ANSWERS: dict[int | str, dict[str, Any]] = {
    **declared(404, 429),
    200: {
        "description": "The completion, or with `stream` its chunks as server-sent events",
        "content": {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}},
    },
}


class ChatGiven(SamplingGiven):
    """OpenAI's parameters; unknown ones are refused by name."""

    messages: list[dict[str, Any]] = Field(min_length=1, max_length=10_000)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[dict[str, Any]] | None = Field(None, max_length=128)
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: bool | None = None  # the model decides how many it makes
    response_format: dict[str, Any] | None = Field(None, description='Only {"type": "text"}')
    store: bool | None = None
    metadata: dict[str, str] | None = None
    service_tier: Literal["auto", "default"] | None = None

    @field_validator("response_format")
    @classmethod
    def _text_only(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is not None and value != {"type": "text"}:
            raise ValueError('only {"type": "text"} is offered')
        return value

    @field_validator("store")
    @classmethod
    def _not_stored(cls, value: bool | None) -> bool | None:
        if value:
            raise ValueError("completions are not stored: leave it out")
        return value


@dataclass(frozen=True, slots=True)
class Chat:
    """One request under way."""

    api: Api
    tenant: str
    body: ChatGiven
    named: Named
    ask: InferenceRequest
    answers: list[AnswerText]
    id: str
    created: int

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.body.logprobs)


@router.post("/chat/completions", responses=ANSWERS, response_class=JSONResponse)
async def chat_completions(request: Request, api: Parts, tenant: Tenant, body: ChatGiven) -> Response:
    """Answer a conversation with a base model or an adapter; `system_fingerprint` says which version did."""
    _check(body)
    named = await find_model(api, tenant, body.model)
    await check_quota(named.base.redis, named.base.cell, tenant)
    prompt = await asyncio.to_thread(_render, named, body)
    limit = body.max_completion_tokens or body.max_tokens
    num_top = (body.top_logprobs or 0) if body.logprobs else 0
    ask = make_ask(api, tenant.id, named, body, [prompt], limit=limit, num_top=num_top)
    tools = body.tools if body.tools and body.tool_choice != "none" else None
    answers = make_answers(ask, named.base.tokenizer, body.stops(), tools)
    name = f"chatcmpl-{secrets.token_hex(12)}"
    chat = Chat(api, tenant.id, body, named, ask, answers, name, int(time.time()))
    headers = {VERSION_HEADER: str(named.adapter)}
    if body.stream:
        return event_stream(_chunks(chat), headers)
    try:
        return JSONResponse(await unless_gone(request, _whole(chat)), headers=headers)
    except Gone:
        return Response(status_code=499)


def _check(body: ChatGiven) -> None:
    if body.top_logprobs and not body.logprobs:
        raise InvalidInput("top_logprobs needs logprobs=true", param="top_logprobs")
    if body.stream_options is not None and not body.stream:
        raise InvalidInput("stream_options needs stream=true", param="stream_options")


def _render(named: Named, body: ChatGiven) -> list[int]:
    tools = [] if body.tool_choice == "none" else body.tools or []
    try:
        return named.base.tokenizer.render(body.messages, tools)
    except ValueError as error:
        raise InvalidInput(str(error), param="messages") from error


async def _whole(chat: Chat) -> dict[str, Any]:
    async with counted(chat.api, chat.named, chat.tenant, chat.ask, chat.answers) as progress:
        async for fresh in progress:
            answer = chat.answers[fresh.choice]
            answer.feed(fresh.tokens, fresh.logprobs)
            answer.result = fresh.result
    choices = [_choice(chat, i, answer) for i, answer in enumerate(chat.answers)]
    first = head("chat.completion", chat.named, chat.body.model, chat.id, chat.created)
    return {**first, "choices": choices, "usage": usage_of(chat.ask, chat.answers)}


def _choice(chat: Chat, index: int, answer: AnswerText) -> dict[str, Any]:
    content, calls = answer.message()
    shown, text = shown_calls(calls), with_malformed(content, calls)
    message: dict[str, Any] = {"role": "assistant", "content": text or (None if shown else ""), "refusal": None}
    if shown:
        message["tool_calls"] = shown
    return {
        "index": index,
        "message": message,
        "finish_reason": finish_reason(answer, calls),
        "logprobs": _logprobs(chat, answer) if chat.wants_logprobs else None,
    }


def _logprobs(chat: Chat, answer: AnswerText) -> dict[str, Any]:
    rows = token_logprobs(answer, chat.named.base.tokenizer, chat.body.top_logprobs or 0)
    return {"content": rows, "refusal": None}


# ---- streaming ------------------------------------------------------------------------------------------------------


async def _chunks(chat: Chat) -> AsyncIterator[str]:
    for index in range(len(chat.answers)):
        yield _chunk(chat, index, {"role": "assistant", "content": ""})
    async with counted(chat.api, chat.named, chat.tenant, chat.ask, chat.answers) as progress:
        async for fresh in progress:
            answer = chat.answers[fresh.choice]
            text = answer.feed(fresh.tokens, fresh.logprobs)
            answer.result = fresh.result
            text += answer.finish() if fresh.result else ""
            if text or (chat.wants_logprobs and fresh.tokens):
                yield _chunk(
                    chat, fresh.choice, {"content": text}, logprobs=_fresh_logprobs(chat, answer, len(fresh.tokens))
                )
            if fresh.result:
                for event in _last_chunks(chat, fresh.choice, answer):
                    yield event
    if chat.body.include_usage():
        first = head("chat.completion.chunk", chat.named, chat.body.model, chat.id, chat.created)
        yield data({**first, "choices": [], "usage": usage_of(chat.ask, chat.answers)})
    yield DONE


def _last_chunks(chat: Chat, index: int, answer: AnswerText) -> list[str]:
    """Tool calls, which are known only at the end, and the reason for it."""
    _, calls = answer.message()
    shown = [{"index": i, **call} for i, call in enumerate(shown_calls(calls))]
    malformed = with_malformed("", calls)
    events = [_chunk(chat, index, {"content": malformed})] if malformed else []
    events += [_chunk(chat, index, {"tool_calls": shown})] if shown else []
    return [*events, _chunk(chat, index, {}, finish=finish_reason(answer, calls))]


def _fresh_logprobs(chat: Chat, answer: AnswerText, num_fresh: int) -> dict[str, Any] | None:
    if not chat.wants_logprobs:
        return None
    tokenizer, end = chat.named.base.tokenizer, answer.visible_tokens()
    if answer.result is not None and chat.body.top_logprobs:
        rows = token_logprobs(answer, tokenizer, chat.body.top_logprobs)
        return {"content": rows[max(0, len(answer.tokens) - num_fresh) :], "refusal": None}
    start = len(answer.tokens) - num_fresh
    pairs = list(zip(answer.tokens, answer.logprobs, strict=True))[start:end]
    return {"content": [token_logprob(tokenizer, *pair) | {"top_logprobs": []} for pair in pairs], "refusal": None}


def _chunk(
    chat: Chat, index: int, delta: dict[str, Any], *, finish: str | None = None, logprobs: dict[str, Any] | None = None
) -> str:
    first = head("chat.completion.chunk", chat.named, chat.body.model, chat.id, chat.created)
    choice = {"index": index, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
    usage = {"usage": None} if chat.body.include_usage() else {}
    return data({**first, "choices": [choice], **usage})
