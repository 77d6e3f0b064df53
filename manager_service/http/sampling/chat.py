"""POST /v1/chat/completions"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import JSONResponse, Response

from common.errors import InvalidInput
from common.suggestions import quoted
from common.text.chat_template import TemplateKwargs
from common.text.tokens import ChatTokenizer
from manager_service.http.context import Parts, Tenant
from manager_service.http.errors import COMMON
from manager_service.http.reading.bodies import JsonRoute
from manager_service.http.sampling.choices import Fresh
from manager_service.http.sampling.completion_requests import Neutral, PromptReader, SamplingGiven, Wanted
from manager_service.http.sampling.replies import (
    AnswerText,
    finish_reason,
    shown_calls,
    token_logprob,
    token_logprobs,
    with_malformed,
)
from manager_service.http.sampling.serving import ANSWERS, Completion, Dialect, Json, serve
from manager_service.http.schemas import Given

router = APIRouter(prefix="/v1", tags=["inference"], responses=COMMON, route_class=JsonRoute)


class FunctionName(Given):
    name: str


class NamedTool(Given):
    type: Literal["function"]
    function: FunctionName


class ChatGiven(SamplingGiven):
    """OpenAI's parameters; unknown ones are refused by name."""

    messages: list[dict[str, Any]] = Field(min_length=1, max_length=10_000, fail_fast=True)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[dict[str, Any]] | None = Field(None, max_length=128, fail_fast=True)
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None  # the model decides how many it makes
    chat_template_kwargs: TemplateKwargs | None = Field(None, description="The template's own: enable_thinking")
    store: Annotated[bool | None, Neutral] = Field(None, description="Only false: completions are not stored")
    metadata: dict[str, str] | None = None
    service_tier: Literal["auto", "default"] | None = None


Chat = Completion[ChatGiven]


@router.post("/chat/completions", responses=ANSWERS, response_class=JSONResponse)
async def chat_completions(request: Request, api: Parts, tenant: Tenant, body: ChatGiven) -> Response:
    """Answer a conversation with a base model or an adapter; `system_fingerprint` says which version did."""
    if body.top_logprobs and not body.logprobs:
        raise InvalidInput("top_logprobs needs logprobs=true", param="top_logprobs")
    if body.stream_options is not None and not body.stream:
        raise InvalidInput("stream_options needs stream=true", param="stream_options")
    return await serve(request, api, tenant, body, DIALECT)


async def _read(body: ChatGiven, reader: PromptReader) -> Wanted:
    tools = None if body.tool_choice == "none" else body.tools or None
    prompt = await reader.render(body.messages, tools or [], body.chat_template_kwargs)
    limit = body.max_completion_tokens or body.max_tokens
    num_top, told = body.top_logprobs or 0, bool(body.logprobs)
    grammar = await reader.grammar(*_constraints(body, tools, reader.base.tokenizer))
    if grammar:
        _check_no_thoughts(prompt, reader.base.tokenizer)
    return Wanted(prompts=[prompt], limit=limit, num_top=num_top, with_logprobs=told, tools=tools, grammar=grammar)


def _constraints(
    body: ChatGiven, tools: list[Any] | None, tokenizer: ChatTokenizer
) -> tuple[dict[str, Any] | None, list[Any]]:
    """The JSON Schema of the answer's text and the functions that it may call instead; neither if it is free. Raises InvalidInput."""
    schema = body.answer_schema()
    if body.tool_choice not in (None, "auto", "none"):
        return None, _forced(body, tools, tokenizer)  # a call has no text
    if schema is None or not tools:
        return schema, []
    if tokenizer.tool_format != "hermes":
        raise InvalidInput(
            "this base model's calls are not JSON, so with tools its answers follow no response_format: leave out either, or send"
            ' tool_choice="none"',
            param="response_format",
        )
    return schema, [tool["function"] for tool in tools]


def _forced(body: ChatGiven, tools: list[Any] | None, tokenizer: ChatTokenizer) -> list[Any]:
    """The functions of which the answer must call one. Raises InvalidInput."""
    name = body.tool_choice.function.name if isinstance(body.tool_choice, NamedTool) else None
    found = [tool["function"] for tool in tools or () if name in (None, tool["function"]["name"])]
    if not found:
        raise InvalidInput(
            f"tool_choice: tools have no {quoted(name)}" if name else "tool_choice needs tools", param="tool_choice"
        )
    if tokenizer.tool_format != "hermes":
        raise InvalidInput(
            "this base model's calls are not JSON, so none can be forced: use tool_choice=auto", param="tool_choice"
        )
    return found


def _check_no_thoughts(prompt: list[int], tokenizer: ChatTokenizer) -> None:
    if tokenizer.decode(prompt[-8:], skip_special=False).rstrip().endswith("<think>"):
        raise InvalidInput(
            "the chat template opens <think>, and thoughts follow no grammar: send"
            ' chat_template_kwargs={"enable_thinking": false}, or leave out response_format and a forced tool_choice',
            param="chat_template_kwargs",
        )


def _choice(chat: Chat, index: int) -> Json:
    answer = chat.answers[index]
    content, calls = answer.message()
    shown, text = shown_calls(calls), with_malformed(content, calls)
    message: Json = {"role": "assistant", "content": text or (None if shown else ""), "refusal": None}
    if shown:
        message["tool_calls"] = shown
    return {
        "index": index,
        "message": message,
        "finish_reason": finish_reason(answer, calls),
        "logprobs": _logprobs(chat, answer) if chat.body.logprobs else None,
    }


def _logprobs(chat: Chat, answer: AnswerText) -> Json:
    rows = token_logprobs(answer, chat.named.base.tokenizer, chat.body.top_logprobs or 0)
    return {"content": rows, "refusal": None}


# ---- streaming ------------------------------------------------------------------------------------------------------


def _chunks(chat: Chat, fresh: Fresh, text: str) -> Iterator[Json]:
    """The new text; at the end also the tool calls, which are known only then, and the reason for the end."""
    answer = chat.answers[fresh.choice]
    if text or (chat.body.logprobs and fresh.tokens):
        logprobs = _fresh_logprobs(chat, answer, len(fresh.tokens)) if chat.body.logprobs else None
        yield _delta(fresh.choice, {"content": text}, logprobs=logprobs)
    if fresh.result is None:
        return
    _, calls = answer.message()
    if malformed := with_malformed("", calls):
        yield _delta(fresh.choice, {"content": malformed})
    if shown := [{"index": i, **call} for i, call in enumerate(shown_calls(calls))]:
        yield _delta(fresh.choice, {"tool_calls": shown})
    yield _delta(fresh.choice, {}, finish=finish_reason(answer, calls))


def _fresh_logprobs(chat: Chat, answer: AnswerText, num_fresh: int) -> Json:
    tokenizer, start = chat.named.base.tokenizer, len(answer.tokens) - num_fresh
    if answer.result is not None and chat.body.top_logprobs:
        rows = token_logprobs(answer, tokenizer, chat.body.top_logprobs)
        return {"content": rows[max(0, start) :], "refusal": None}
    pairs = list(zip(answer.tokens, answer.logprobs, strict=True))[start : answer.visible_tokens()]
    return {"content": [token_logprob(tokenizer, *pair) | {"top_logprobs": []} for pair in pairs], "refusal": None}


def _delta(index: int, delta: Json, *, finish: str | None = None, logprobs: Json | None = None) -> Json:
    return {"index": index, "delta": delta, "finish_reason": finish, "logprobs": logprobs}


DIALECT = Dialect(
    id_prefix="chatcmpl",
    kind="chat.completion",
    chunk_kind="chat.completion.chunk",
    read=_read,
    choice=_choice,
    chunks=_chunks,
    opening=lambda index: _delta(index, {"role": "assistant", "content": ""}),
)
