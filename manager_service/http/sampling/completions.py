"""POST /v1/completions: text in, text out, no chat template."""

from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import JSONResponse, Response

from common.errors import InvalidInput
from manager_service.http.context import Parts, Tenant
from manager_service.http.errors import COMMON
from manager_service.http.reading.bodies import JsonRoute
from manager_service.http.sampling.completion_requests import (
    Neutral,
    PromptReader,
    SamplingGiven,
    TokenIds,
    Wanted,
    check_num_choices,
    valid_ids,
)
from manager_service.http.sampling.replies import AnswerText, finish_reason, token_logprobs
from manager_service.http.sampling.serving import ANSWERS, Completion, Dialect, Json, serve

router = APIRouter(prefix="/v1", tags=["inference"], responses=COMMON, route_class=JsonRoute)

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for this call."""

Texts = Annotated[list[str], Field(fail_fast=True)]
ManyTokenIds = Annotated[list[TokenIds], Field(fail_fast=True)]


class CompletionGiven(SamplingGiven):
    """OpenAI's parameters; unknown ones are refused by name."""

    prompt: str | TokenIds | Texts | ManyTokenIds
    logprobs: int | None = Field(None, ge=0, le=5)
    best_of: int | None = Field(None, ge=1, le=1)
    echo: Annotated[bool | None, Neutral] = Field(None, description="Only false")
    suffix: Annotated[str | None, Neutral] = Field(None, description="Only null")


TextCompletion = Completion[CompletionGiven]


@router.post("/completions", responses=ANSWERS, response_class=JSONResponse)
async def completions(request: Request, api: Parts, tenant: Tenant, body: CompletionGiven) -> Response:
    """Continue text, or token ids."""
    return await serve(request, api, tenant, body, DIALECT)


async def _read(body: CompletionGiven, reader: PromptReader) -> Wanted:
    prompts, told = await _prompts(body, reader), body.logprobs is not None
    grammar = await reader.grammar(body.answer_schema())
    limit = body.max_tokens or DEFAULT_MAX_TOKENS
    return Wanted(prompts=prompts, limit=limit, num_top=body.logprobs or 0, with_logprobs=told, grammar=grammar)


async def _prompts(body: CompletionGiven, reader: PromptReader) -> list[list[int]]:
    """The token ids of each prompt. Raises InvalidInput for none, for too many, and for ids outside the vocabulary."""
    prompt: Any = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    if not prompt:
        raise InvalidInput("the prompt is empty", param="prompt")
    prompts: list[Any] = [prompt] if isinstance(prompt[0], int) else prompt
    check_num_choices(len(prompts), body)
    if isinstance(prompts[0], str):
        return await reader.encode(prompts)
    return [valid_ids(ids, reader.base.tokenizer, "prompt") for ids in prompts]


def _choice(completion: TextCompletion, index: int, text: str) -> Json:
    answer = completion.answers[index]
    finished = answer.result is not None
    return {
        "index": index,
        "text": text,
        "finish_reason": finish_reason(answer, []) if finished else None,
        "logprobs": _logprobs(completion, answer) if finished and completion.body.logprobs is not None else None,
    }


def _logprobs(completion: TextCompletion, answer: AnswerText) -> Json:
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


DIALECT = Dialect(
    id_prefix="cmpl",
    kind="text_completion",
    chunk_kind="text_completion",
    read=_read,
    choice=lambda completion, index: _choice(completion, index, completion.answers[index].text()),
    chunks=lambda completion, fresh, text: [_choice(completion, fresh.choice, text)] if text or fresh.result else [],
)
