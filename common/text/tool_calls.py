"""The calls in a model's turn, in the two formats that base models write them in.

hermes     <tool_call>{"name": "calculator", "arguments": {"expression": "347*86"}}</tool_call>
compact    <tool_call>calculator:347*86</tool_call>
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from common.text.chat_messages import ChatMessage

ToolFormat = Literal["hermes", "compact"]

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call in a model turn; a malformed one has an `error` and is not to be executed."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    """The fault of a malformed call, in words for the model; None if it is well formed."""
    text: str = ""
    """The call as the model wrote it, without the tags."""


def malformed(name: str, text: str, error: str) -> ToolCall:
    return ToolCall(name=name, error=error, text=text)


def parse_compact(text: str, tools: Sequence[ChatMessage]) -> ToolCall:
    """`calculator:347*86`: a name, a colon, the text of the only argument."""
    name, colon, argument = text.partition(":")
    name = name.strip()
    if not colon or not name:
        return malformed(name, text, "a call must be a tool's name, a colon and its argument")
    return ToolCall(name=name, arguments={_argument_name(name, tools): argument}, text=text)


def _argument_name(tool_name: str, tools: Sequence[ChatMessage]) -> str:
    """The first required, else the first, argument in the tool's schema; "input" if there is none."""
    for tool in tools:
        function = tool.get("function", {})
        if function.get("name") == tool_name:
            schema = function.get("parameters") or {}
            names = [*schema.get("required", []), *schema.get("properties", {})]
            return names[0] if names else "input"
    return "input"


def parse_hermes(text: str) -> ToolCall:
    """`{"name": "calculator", "arguments": {"expression": "347*86"}}`"""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError) as error:
        return malformed("", text, f"the call is not JSON: {error}")
    name = call.get("name") if isinstance(call, dict) else None
    if not isinstance(name, str) or not name:
        return malformed("", text, "a call must be a JSON object with a name and arguments")
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return malformed(name, text, "the arguments of a call must be a JSON object")
    if fault := _uncarried(call):
        return malformed("", text, f"the call cannot be carried on: {fault}")
    return ToolCall(name=name, arguments=arguments, text=text)


def _uncarried(call: Any) -> str:
    """The reason why JSON of Python fits no message, such as half a surrogate pair; empty if it fits."""
    try:
        msgspec.json.encode(call)
    except (UnicodeEncodeError, RecursionError) as error:
        return getattr(error, "reason", "") or str(error)
    return ""
