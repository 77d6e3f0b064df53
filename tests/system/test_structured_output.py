"""Answers that follow a schema, and forced calls, through the `openai` client and all services."""

import json
import shutil
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from common.settings import TINY
from tests.support.forked import running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]


ASKED: Any = [{"role": "user", "content": "where to?"}]


class Night(BaseModel):
    kind: Literal["room", "tent"]
    beds: int = Field(ge=1, le=9)


class Stay(BaseModel):
    city: Literal["Oslo", "Rome"]
    nights: list[Night] = Field(min_length=1, max_length=2)
    note: str | None = Field(max_length=4)


def tool(name: str, model: type[BaseModel]) -> Any:
    return openai.pydantic_function_tool(model, name=name)


def base_of(folder: Path, **template: str) -> Path:
    """`tiny` with calls of hermes' format."""
    shutil.copytree(TINY, folder)
    (folder / "marlaas.json").write_text(json.dumps({"tool_format": "hermes"}))
    for old, new in template.items():
        jinja = folder / "chat_template.jinja"
        jinja.write_text(jinja.read_text().replace(f"'<|{old}|>'", f"'<|{old}|>{new}'"))
    return folder


async def test_the_openai_client_gets_schemas_followed_and_calls_forced(tmp_path: Path) -> None:
    names = {
        "calls": base_of(tmp_path / "calls"),
        "thinks": base_of(tmp_path / "thinks", assistant="<think>"),
        "tiny": TINY,
    }
    bases = ",".join(f"{name}={folder}" for name, folder in names.items())
    async with (
        running(tmp_path / "data", environment={"MARLAAS_BASE_MODELS": bases}) as (cluster, _),
        openai.AsyncOpenAI(base_url=f"{cluster.base_url}/v1", api_key=cluster.api_key) as client,
    ):
        await schemas_are_followed(client)
        await calls_are_forced(client)
        await answers_are_calls_or_json(client)
        await what_cannot_be_followed_is_refused_by_name(client)


async def schemas_are_followed(client: openai.AsyncOpenAI) -> None:
    asked = ASKED
    for temperature in (0.0, 1.0):
        parsed = await client.chat.completions.parse(
            model="calls", messages=asked, response_format=Stay, n=4, temperature=temperature, max_tokens=400
        )
        for choice in parsed.choices:
            assert choice.finish_reason == "stop" and choice.message.parsed is not None
    form: Any = {"type": "json_schema", "json_schema": {"name": "stay", "schema": Night.model_json_schema()}}
    stream = await client.chat.completions.create(model="tiny", messages=asked, response_format=form, stream=True)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert Night.model_validate_json(text).beds in range(1, 10)
    told = await client.completions.create(
        model="calls", prompt="a room: ", max_tokens=64, extra_body={"response_format": form}
    )
    assert Night.model_validate_json(told.choices[0].text)


async def calls_are_forced(client: openai.AsyncOpenAI) -> None:
    tools, asked = [tool("book", Stay), tool("ask", Night)], ASKED
    kinds = {"book": Stay, "ask": Night}
    choices: list[Any] = ["required", {"type": "function", "function": {"name": "ask"}}]
    for choice in choices:
        answer: Any = await client.chat.completions.create(
            model="calls", messages=asked, tools=tools, tool_choice=choice, n=8, max_tokens=400
        )
        for each in answer.choices:
            (call,) = each.message.tool_calls
            assert (each.finish_reason, each.message.content) == ("tool_calls", None)
            assert kinds[call.function.name].model_validate_json(call.function.arguments)
            assert choice == "required" or call.function.name == "ask"


async def answers_are_calls_or_json(client: openai.AsyncOpenAI) -> None:
    asked: Any = {"model": "calls", "messages": ASKED, "tools": [tool("book", Stay)], "response_format": Night}
    parsed = await client.chat.completions.parse(**asked, n=8, max_tokens=400)
    for choice in parsed.choices:
        calls, night = choice.message.tool_calls or [], choice.message.parsed
        assert len(calls) + (night is not None) == 1
        assert all(Stay.model_validate_json(call.function.arguments) for call in calls)
    forced: Any = {"none": "stop", "required": "tool_calls"}
    for tool_choice, reason in forced.items():
        parsed = await client.chat.completions.parse(**asked, tool_choice=tool_choice, max_tokens=400)
        assert parsed.choices[0].finish_reason == reason


async def what_cannot_be_followed_is_refused_by_name(client: openai.AsyncOpenAI) -> None:
    def schema(schema: Any) -> Any:
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}

    tools = [tool("ask", Night)]
    odd = [{"type": "function", "function": {"name": "odd", "parameters": {"not": {}}}}]
    named = {"type": "function", "function": {"name": "absent"}}
    for model, body, words in (
        (
            "calls",
            schema({"type": "array", "uniqueItems": True}),
            r'response_format: Unimplemented keys: \["uniqueItems"\]',
        ),
        ("calls", schema({"type": "string", "pattern": "(?=a)b"}), "response_format: .*look-around"),
        ("calls", schema({"description": "x" * 70_000}), "bytes are too many: at most 65536"),
        ("calls", schema({"type": "array", "items": {}, "maxItems": 10**9}), "maxItems come to 1e.09: at most 10000"),
        ("calls", {"tools": odd, "tool_choice": "required"}, "tools: the parameters of odd: Unimplemented keys"),
        ("calls", {"tools": tools, "tool_choice": named}, "tool_choice: tools have no 'absent'"),
        ("calls", {"tool_choice": "required"}, "tool_choice needs tools"),
        ("tiny", {"tools": tools, "response_format": {"type": "json_object"}}, 'leave out either, or .*"none"'),
        ("tiny", {"tools": tools, "tool_choice": "required"}, "none can be forced: use tool_choice=auto"),
        ("thinks", {"response_format": {"type": "json_object"}}, "opens <think>.*enable_thinking"),
    ):
        with pytest.raises(openai.BadRequestError, match=words):
            await client.chat.completions.create(
                model=model, messages=[{"role": "user", "content": "x"}], max_tokens=8, extra_body=body
            )
