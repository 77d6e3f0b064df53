"""Holds an attempt as graders see it: an item, and the model's last turn."""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec

from common.text.tool_calls import ToolCall


class Attempt:
    """One answer to an item. What graders of a `multi` share is made once."""

    def __init__(
        self, item: Mapping[str, Any], output_text: str, output_tools: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """`output_tools`: in OpenAI's form, as `tools_of` makes them."""
        self.item = item
        self.output_text = output_text
        self._output_tools = output_tools

    @cached_property
    def sample(self) -> dict[str, Any]:
        """The model's last turn as templates see it."""
        return {**self.unparsed, "output_json": _json(self.output_text)}

    @property
    def unparsed(self) -> dict[str, Any]:
        """The same without `output_json`."""
        return {"output_text": self.output_text, "output_tools": self._output_tools}

    @property
    def written(self) -> dict[str, Any]:
        """`sample` for msgspec's JSON: `output_json` is copied from the text, not parsed."""
        return {**self.unparsed, "output_json": _checked(self.output_text)}

    @cached_property
    def encoded(self) -> bytes:
        """For `decoded`, in another process."""
        return msgspec.msgpack.encode((self.item, self.output_text, self._output_tools))


def decoded(attempt: bytes) -> Attempt:
    return Attempt(*msgspec.msgpack.decode(attempt))


def tools_of(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    return [_tool(i, call) for i, call in enumerate(calls)]


def _tool(index: int, call: ToolCall) -> dict[str, Any]:
    arguments = json.dumps(call.arguments) if call.error is None else call.text
    return {"id": f"call_{index}", "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _checked(text: str) -> msgspec.Raw | None:
    try:
        return msgspec.json.decode(text, type=msgspec.Raw)
    except (msgspec.DecodeError, RecursionError):
        return None


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
