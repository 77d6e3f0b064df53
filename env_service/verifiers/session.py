"""One trajectory of a package's environment: what it asks its model becomes a prompt of ours, and our turn its answer.

A prompt must go on where the conversation so far ends, so that what is trained is what was sampled. An environment that rewrites its
conversation (drops thoughts, shortens it, asks something else in between) fails the trajectory, with this as the reason.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from common.text.tool_calls import ToolCall
from env_service.environment import Step, Turn
from env_service.failures import EnvironmentFailed
from env_service.verifiers.package_process import HostedTrajectory

MAX_SHOWN_BYTES = 256 * 1024
"""Bytes of the messages and tools that a trajectory begins with, and of those behind a turn."""


class VerifiersSession:
    """Implements `Session`."""

    def __init__(self, conversation: HostedTrajectory, asked: Mapping[str, Any], reply_roles: Sequence[str]) -> None:
        """`asked`: the environment's first request to its model, in token ids or in messages."""
        self.reply_roles = reply_roles
        self._conversation = conversation
        _check_size([asked.get("messages"), asked.get("tools")])
        self.tokens: Sequence[int] = asked.get("tokens") or ()
        self.messages: Sequence[Mapping[str, Any]] = asked.get("messages") or ()
        self.tools: Sequence[Mapping[str, Any]] = asked.get("tools") or ()
        self._shown: list[Any] = [*self.tokens, *map(_plain, self.messages)]
        """The conversation so far."""

    async def step(self, turn: Turn) -> Step:
        calls = _shown_calls(turn)
        text = turn.content if calls else turn.text
        cut_off = turn.stop_reason in ("length", "context")
        finish = "length" if cut_off else "tool_calls" if calls else "stop"
        answer = {"tokens": turn.tokens, "logprobs": turn.logprobs, "text": text, "calls": calls, "finish": finish}
        self._conversation.say("answer", answer)
        asked = await self._conversation.next()
        if "ends" in asked:
            return _ended(asked)
        if self.tokens:
            return Step(tokens=self._rest(turn.tokens, asked["tokens"], asked["tokens"]), done=False)
        if asked["tools"] != self.tools:
            raise EnvironmentFailed("the environment changed its tools in the middle of the trajectory")
        said = _plain({"role": "assistant", "content": text, "tool_calls": calls})
        messages = asked["messages"]
        _check_size(messages[len(self._shown) :])
        return Step(messages=self._rest([said], [*map(_plain, messages)], messages), done=False)

    async def end(self) -> Step:
        self._conversation.say("refuse")
        return _ended(await self._conversation.next())

    async def close(self) -> None:
        self._conversation.close()

    def _rest(self, said: Sequence[Any], asked: list[Any], whole: Sequence[Any]) -> Sequence[Any]:
        """Messages that a prompt adds to the conversation. `whole`: the prompt as the environment wrote it. Raises EnvironmentFailed."""
        before = [*self._shown, *said]
        if len(asked) <= len(before) or asked[: len(before)] != before:
            raise EnvironmentFailed("the environment's next prompt does not go on where the model's turn ended")
        self._shown = asked
        return whole[len(before) :]


def _check_size(shown: Any) -> None:
    """Raises EnvironmentFailed for more than the model could read, before it is rendered."""
    if (size := len(msgspec.json.encode(shown))) > MAX_SHOWN_BYTES:
        raise EnvironmentFailed(f"the environment's messages have {size} bytes, more than {MAX_SHOWN_BYTES}")


def _shown_calls(turn: Turn) -> list[dict[str, Any]]:
    """The turn's calls in OpenAI's form; none if one is malformed: the turn is then all text."""
    if any(call.error is not None for call in turn.calls):
        return []
    return [_shown_call(call, f"call_{turn.index}_{i}") for i, call in enumerate(turn.calls)]


def _shown_call(call: ToolCall, id: str) -> dict[str, Any]:
    function = {"name": call.name, "arguments": msgspec.json.encode(call.arguments).decode()}
    return {"id": id, "type": "function", "function": function}


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as far as the model sees it: environments write the same one in several ways."""
    content: Any = message.get("content") or ""
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(part["text"] for part in content)
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    said = [(call["name"], call["arguments"]) for call in calls]
    return {"role": message["role"], "content": content, "calls": said}


def _ended(message: Mapping[str, Any]) -> Step:
    parts = {name: value for name, value in message["parts"].items() if math.isfinite(value)}
    return Step(done=True, reward=message["reward"], parts=parts)
