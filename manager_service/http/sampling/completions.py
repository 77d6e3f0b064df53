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
from manager_service.http.sampling.replies import AnswerText, echoed_logprobs, finish_reason, token_logprobs
from manager_service.http.sampling.serving import ANSWERS, Completion, Dialect, Json, serve

router = APIRouter(prefix="/v1", tags=["inference"], responses=COMMON, route_class=JsonRoute)

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for this call."""

Texts = Annotated[list[str], Field(fail_fast=True)]
ManyTokenIds = Annotated[list[TokenIds], Field(fail_fast=True)]


class CompletionGiven(SamplingGiven):
    """OpenAI's parameters; unknown ones are refused by name."""

    prompt: str | TokenIds | Texts | ManyTokenIds
    max_tokens: int | None = Field(None, ge=0)
    logprobs: int | None = Field(None, ge=0, le=5)
    best_of: int | None = Field(None, ge=1, le=1)
    echo: bool | None = None
    suffix: Annotated[str | None, Neutral] = Field(None, description="Only null")


TextCompletion = Completion[CompletionGiven]


@router.post("/completions", responses=ANSWERS, response_class=JSONResponse)
async def completions(request: Request, api: Parts, tenant: Tenant, body: CompletionGiven) -> Response:
    """Continue text, or token ids. With `echo` the answer begins with the prompt, and `max_tokens` 0 asks for nothing else."""
    _check_echo(body)
    return await serve(request, api, tenant, body, DIALECT)


async def _read(body: CompletionGiven, reader: PromptReader) -> Wanted:
    prompts, told = await _prompts(body, reader), body.logprobs is not None
    grammar = await reader.grammar(body.answer_schema())
    limit, echo = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens, bool(body.echo)
    return Wanted(
        prompts=prompts, limit=limit, num_top=body.logprobs or 0, with_logprobs=told, echo=echo, grammar=grammar
    )


def _check_echo(body: CompletionGiven) -> None:
    if not body.echo and body.max_tokens == 0:
        raise InvalidInput("max_tokens must be at least 1; 0 needs echo=true", param="max_tokens")
    if body.echo and (body.stream or (body.n or 1) > 1):
        raise InvalidInput("echo needs stream=false and n=1", param="echo")
    if body.echo and body.logprobs is not None and body.temperature not in (None, 0, 1):
        raise InvalidInput("logprobs of an echoed prompt need a temperature of 0 or 1", param="temperature")


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


def _whole(completion: TextCompletion, index: int) -> Json:
    echoed = _prompt_text(completion, index) if completion.body.echo else ""
    return _choice(completion, index, echoed + completion.answers[index].text())


def _prompt_text(completion: TextCompletion, index: int) -> str:
    prompts = [completion.body.prompt] if isinstance(completion.body.prompt, str) else completion.body.prompt
    ids = completion.ask.prompts[index]
    text = prompts[index]
    return text if isinstance(text, str) else completion.named.base.tokenizer.decode(ids, skip_special=False)


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
    tokenizer, num_top = completion.named.base.tokenizer, completion.body.logprobs or 0
    rows = (echoed_logprobs if completion.body.echo else token_logprobs)(answer, tokenizer, num_top)
    offsets, at = list[int](), 0
    for row in rows:
        offsets.append(at)
        at += len(row["token"])
    return {
        "tokens": [row["token"] for row in rows],
        "token_logprobs": [row["logprob"] for row in rows],
        "top_logprobs": [_best(row) for row in rows],
        "text_offset": offsets,
    }


def _best(row: Json) -> Json | None:
    """The alternatives and the token itself; of several with the same text the likeliest."""
    if row["logprob"] is None:
        return None
    by_rank = sorted([row, *row["top_logprobs"]], key=lambda each: each["logprob"])
    return {each["token"]: each["logprob"] for each in by_rank}


DIALECT = Dialect(
    id_prefix="cmpl",
    kind="text_completion",
    chunk_kind="text_completion",
    read=_read,
    choice=_whole,
    chunks=lambda completion, fresh, text: [_choice(completion, fresh.choice, text)] if text or fresh.result else [],
)
