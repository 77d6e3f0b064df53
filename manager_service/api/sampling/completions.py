"""POST /v1/completions: text in, text out, no chat template."""

import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field, field_validator
from starlette.responses import JSONResponse, Response

from common.errors import InvalidInput
from common.text.tokens import ChatTokenizer
from manager_service.api.context import Api, Parts, Tenant
from manager_service.api.errors import COMMON
from manager_service.api.model_names import Named, find_model
from manager_service.api.quota import check_quota
from manager_service.api.sampling.chat import ANSWERS
from manager_service.api.sampling.replies import AnswerText, finish_reason, token_logprobs
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

DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""

TokenIds = Annotated[list[int], Field(min_length=1)]


class CompletionGiven(SamplingGiven):
    """OpenAI's parameters; unknown ones are refused by name."""

    prompt: str | TokenIds | list[str] | list[TokenIds]
    logprobs: int | None = Field(None, ge=0, le=5)
    best_of: int | None = Field(None, description="Only 1")
    echo: bool | None = Field(None, description="Only false")
    suffix: str | None = Field(None, description="Only null")

    @field_validator("best_of")
    @classmethod
    def _one(cls, value: int | None) -> int | None:
        if value not in (None, 1):
            raise ValueError("not offered: leave it out")
        return value

    @field_validator("echo", "suffix")
    @classmethod
    def _left_out(cls, value: Any) -> Any:
        if value:
            raise ValueError("not offered: leave it out")
        return value


@dataclass(frozen=True, slots=True)
class Completion:
    """One request under way."""

    api: Api
    tenant: str
    body: CompletionGiven
    named: Named
    ask: InferenceRequest
    answers: list[AnswerText]
    id: str
    created: int


@router.post("/completions", responses=ANSWERS, response_class=JSONResponse)
async def completions(request: Request, api: Parts, tenant: Tenant, body: CompletionGiven) -> Response:
    """Continue text, or token ids."""
    named = await find_model(api, tenant, body.model)
    await check_quota(named.base.redis, named.base.cell, tenant)
    prompts = prompt_tokens(body.prompt, named.base.tokenizer)
    limit = body.max_tokens or DEFAULT_MAX_TOKENS
    ask = make_ask(api, tenant.id, named, body, prompts, limit=limit, num_top=body.logprobs or 0)
    answers = make_answers(ask, named.base.tokenizer, body.stops(), None)
    name = f"cmpl-{secrets.token_hex(12)}"
    completion = Completion(api, tenant.id, body, named, ask, answers, name, int(time.time()))
    headers = {VERSION_HEADER: str(named.adapter)}
    if body.stream:
        return event_stream(_chunks(completion), headers)
    try:
        return JSONResponse(await unless_gone(request, _whole(completion)), headers=headers)
    except Gone:
        return Response(status_code=499)


def prompt_tokens(prompt: str | list[int] | list[str] | list[list[int]], tokenizer: ChatTokenizer) -> list[list[int]]:
    """One list of ids a prompt. Raises InvalidInput for ids that are none."""
    if isinstance(prompt, str):
        return [_encoded(prompt, tokenizer)]
    if not prompt:
        raise InvalidInput("the prompt is empty", param="prompt")
    if isinstance(prompt[0], int):
        return [_valid_ids(prompt, tokenizer)]
    return [_encoded(p, tokenizer) if isinstance(p, str) else _valid_ids(p, tokenizer) for p in prompt]


def _encoded(text: str, tokenizer: ChatTokenizer) -> list[int]:
    try:
        return tokenizer.encode(text)
    except ValueError as error:
        raise InvalidInput(str(error), param="prompt") from error


def _valid_ids(ids: Any, tokenizer: ChatTokenizer) -> list[int]:
    if any(not 0 <= token < tokenizer.vocab_size for token in ids):
        raise InvalidInput(f"prompt: token ids are between 0 and {tokenizer.vocab_size - 1}", param="prompt")
    return list(ids)


async def _whole(completion: Completion) -> dict[str, Any]:
    async with counted(
        completion.api, completion.named, completion.tenant, completion.ask, completion.answers
    ) as progress:
        async for fresh in progress:
            answer = completion.answers[fresh.choice]
            answer.feed(fresh.tokens, fresh.logprobs)
            answer.result = fresh.result
    choices = [_choice(completion, i, answer.text(), answer) for i, answer in enumerate(completion.answers)]
    return {**_head(completion), "choices": choices, "usage": usage_of(completion.ask, completion.answers)}


async def _chunks(completion: Completion) -> AsyncIterator[str]:
    async with counted(
        completion.api, completion.named, completion.tenant, completion.ask, completion.answers
    ) as progress:
        async for fresh in progress:
            answer = completion.answers[fresh.choice]
            text = answer.feed(fresh.tokens, fresh.logprobs)
            answer.result = fresh.result
            text += answer.finish() if fresh.result else ""
            if text or fresh.result:
                choice = _choice(completion, fresh.choice, text, answer)
                yield data({**_head(completion), "choices": [choice]})
    if completion.body.include_usage():
        usage = usage_of(completion.ask, completion.answers)
        yield data({**_head(completion), "choices": [], "usage": usage})
    yield DONE


def _head(completion: Completion) -> dict[str, Any]:
    return head("text_completion", completion.named, completion.body.model, completion.id, completion.created)


def _choice(completion: Completion, index: int, text: str, answer: AnswerText) -> dict[str, Any]:
    finished = answer.result is not None
    return {
        "index": index,
        "text": text,
        "finish_reason": finish_reason(answer, []) if finished else None,
        "logprobs": _logprobs(completion, answer) if finished and completion.body.logprobs is not None else None,
    }


def _logprobs(completion: Completion, answer: AnswerText) -> dict[str, Any]:
    """OpenAI's old form. A stream gives it with the last chunk of a choice."""
    rows = token_logprobs(answer, completion.named.base.tokenizer, completion.body.logprobs or 0)
    offsets, at = list[int](), 0
    for row in rows:
        offsets.append(at)
        at += len(row["token"])
    return {
        "tokens": [row["token"] for row in rows],
        "token_logprobs": [row["logprob"] for row in rows],
        "top_logprobs": [{top["token"]: top["logprob"] for top in row["top_logprobs"]} for row in rows],
        "text_offset": offsets,
    }
