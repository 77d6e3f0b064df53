"""Chat messages and tools in OpenAI's form, checked and converted for chat templates."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from common.suggestions import quoted

ChatMessage = Mapping[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")

DUMMY_TOOL: ChatMessage = {
    "type": "function",
    "function": {
        "name": "tool",
        "description": "A tool.",
        "parameters": {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]},
    },
}


def dummy_turn(num_calls: int) -> list[ChatMessage]:
    """A user's message and a model turn, which calls tools if there are to be calls.

    The turn has a thought: Qwen3's template adds an empty one only while the turn is the last.
    """
    calls = [
        {"id": f"call_{i}", "type": "function", "function": {"name": "tool", "arguments": '{"input": "x"}'}}
        for i in range(num_calls)
    ]
    answer: dict[str, Any] = {"role": "assistant", "content": "" if calls else "x", "reasoning_content": "x"}
    return [{"role": "user", "content": "x"}, answer | ({"tool_calls": calls} if calls else {})]


def check_messages(messages: Sequence[Any], name: str = "messages") -> None:
    """Raises ValueError, naming the message, for what no base model can render. `name`: of the list."""
    for i, message in enumerate(messages):
        normal_message(message, f"{name}[{i}]")


def normal_message(message: Any, where: str) -> dict[str, Any]:
    """Returns a message for templates: text contents, arguments as objects, no `developer`. Raises ValueError."""
    if not isinstance(message, Mapping):
        raise ValueError(f"{where} must be an object")
    role = message.get("role")
    if role not in ROLES:
        raise ValueError(f"{where}.role must be one of {', '.join(ROLES)}, not {quoted(role)}")
    calls: Any = message.get("tool_calls")
    if calls and not isinstance(calls, list | tuple):
        raise ValueError(f"{where}.tool_calls must be a list")
    if calls and role != "assistant":
        raise ValueError(f"{where}.tool_calls belong to the assistant, not to {role}")
    normal: dict[str, Any] = {
        "role": "system" if role == "developer" else role,
        "content": _content_text(message.get("content"), f"{where}.content", optional=bool(calls)),
    }
    if calls:
        normal["tool_calls"] = [_normal_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    for key in ("name", "tool_call_id", "reasoning_content"):
        if message.get(key) is not None:
            normal[key] = valid_text(message[key], f"{where}.{key}")
    return normal


def _content_text(content: Any, where: str, *, optional: bool) -> str:
    if content is None and optional:
        return ""
    if isinstance(content, str):
        return valid_text(content, where)
    if isinstance(content, list | tuple):
        return "".join(_part_text(part, f"{where}[{i}]") for i, part in enumerate(content))
    raise ValueError(f"{where} must be a string or a list of text parts")


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text":
        return valid_text(part.get("text"), f"{where}.text")
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise ValueError(f"{where} must be a part of type 'text', not {quoted(kind)}: this model reads text only")


def _normal_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise ValueError(f"{where}.function must be an object with name and arguments")
    name = valid_text(function.get("name"), f"{where}.function.name")
    arguments = _arguments_object(function.get("arguments"), f"{where}.function.arguments")
    normal = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return normal | ({"id": valid_text(call["id"], f"{where}.id")} if call.get("id") is not None else {})


def _arguments_object(arguments: Any, where: str) -> dict[str, Any]:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError as error:
            raise ValueError(f"{where} is not JSON: {error}") from error
    if not isinstance(arguments, Mapping):
        raise ValueError(f"{where} must be a JSON object")
    return _valid_values(arguments, where)


def normal_tool(tool: Any, where: str) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or tool.get("type", "function") != "function":
        raise ValueError(f"{where} must be {{'type': 'function', 'function': {{'name': ...}}}}")
    valid_text(function.get("name"), f"{where}.function.name")
    return {"type": "function", "function": _valid_values(function, f"{where}.function")}


def _valid_values(value: Any, where: str) -> Any:
    """A copy of a JSON value; raises ValueError if it is none."""
    try:
        return json.loads(valid_text(json.dumps(value, ensure_ascii=False), where))
    except TypeError as error:
        raise ValueError(f"{where} is not JSON: {error}") from error


def valid_text(text: Any, where: str) -> str:
    if not isinstance(text, str):
        raise ValueError(f"{where} must be a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where} is not valid Unicode: {error.reason}") from error
    return text
