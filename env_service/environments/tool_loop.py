"""Environments of one question: a turn's tool calls are run, or the turn is graded as the answer."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Any

from common.tasks.graders import Grader
from common.text.tokens import ToolCall
from env_service import work
from env_service.environment import Step, Turn, item_messages
from env_service.failures import ToolFailed
from env_service.graders.attempt import Attempt, tools_of
from env_service.graders.runner import GraderRunner

MAX_CALLS = 8
"""Calls that one turn may make; further ones are answered with an error message."""


Definition = Mapping[str, Any]


def definition(name: str, description: str, parameters: Mapping[str, Any]) -> Definition:
    """The definition of a tool, in OpenAI's form."""
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function of one text. The model sees all that it returns, error messages included."""

    name: str
    description: str
    argument: str
    run: Callable[[str, float], Awaitable[str]]
    """(argument, time limit in seconds) -> reply. Raises ToolFailed; a tool over the limit has failed too."""
    waits_s: float = 0.0
    """Seconds that it may wait for its turn on top of the limit, if it keeps the limit itself."""

    @property
    def definition(self) -> Definition:
        """The tool in OpenAI's form."""
        properties = {self.argument: {"type": "string"}}
        parameters = {"type": "object", "properties": properties, "required": [self.argument]}
        return definition(self.name, self.description, parameters)


class SingleTurn:
    """One question, one answer, one grader."""

    tools: Sequence[Mapping[str, Any]] = ()

    def __init__(self, grader: Grader, graders: GraderRunner) -> None:
        self._grader = grader
        self._graders = graders

    def reset(self, item: dict[str, Any], seed: int) -> tuple[None, Sequence[Mapping[str, Any]]]:
        return None, item_messages(item)

    async def step(self, state: None, turn: Turn) -> Step:
        attempt = Attempt(turn.item, turn.text, tools_of(turn.calls))
        grade = await self._graders.grade(self._grader, attempt, key=turn.key)
        return Step(state=None, done=True, reward=grade.reward, parts=grade.parts)


class ToolLoop(SingleTurn):
    """The same with one tool. A turn without a call is the answer."""

    def __init__(self, tool: Tool, grader: Grader, graders: GraderRunner) -> None:
        super().__init__(grader, graders)
        self.tools = (tool.definition,)
        self._tool = tool

    async def step(self, state: None, turn: Turn) -> Step:
        """Calls run concurrently. Raises ToolFailed and GraderFailed."""
        if not turn.calls or turn.last:
            return replace(await super().step(state, turn), done=not turn.calls)
        replies = await asyncio.gather(*(self._reply(i, call, turn) for i, call in enumerate(turn.calls)))
        return Step(state=None, done=False, messages=replies)

    async def _reply(self, index: int, call: ToolCall, turn: Turn) -> Mapping[str, Any]:
        content = self._refusal(index, call) or await self._run(call, turn.tool_timeout_s)
        work.beat()
        return {"role": "tool", "tool_call_id": f"call_{index}", "content": content}

    def _refusal(self, index: int, call: ToolCall) -> str:
        if index >= MAX_CALLS:
            return "error: too many calls"
        if call.error is not None:
            return f"error: {call.error}"
        if call.name != self._tool.name:
            return f"error: no tool {call.name[:40]}"
        if not isinstance(call.arguments.get(self._tool.argument), str):
            return f"error: the argument is {self._tool.argument}, a string"
        return ""

    async def _run(self, call: ToolCall, timeout_s: float) -> str:
        try:
            async with _limit(self._tool, timeout_s):
                return await self._tool.run(call.arguments[self._tool.argument], timeout_s)
        except TimeoutError as error:
            raise ToolFailed(f"the tool {self._tool.name} took longer than {timeout_s:g} seconds") from error


def _limit(tool: Tool, timeout_s: float) -> AbstractAsyncContextManager[Any]:
    return asyncio.timeout(timeout_s + tool.waits_s) if tool.waits_s else work.time_limit(timeout_s)
