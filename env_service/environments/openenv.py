"""The environment `openenv`: a session at an OpenEnv server for each trajectory.

The server's reset gets the seed and the item's fields; its observation becomes the user's message after the item's own.
The rewards of all actions add up. The trajectory ends when the server says `done`, when no turn is left, and, where the
model is to call tools, when it calls none. The server's schemas say how a turn becomes an action:

    action with one text that it must have            the model's text is that text
    any other action                                  the model calls the tool `act`, whose parameters are the action's
    action that calls tools (`CallToolAction`, MCP)   the model calls the environment's tools
"""

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import msgspec

from common.errors import InvalidInput
from common.tasks.environments import OpenEnvArgs
from common.text.tokens import ToolCall
from env_service.environment import LiveEnvironment, Step, Turn, item_messages
from env_service.environments.openenv_server import (
    MAX_TOLD,
    ActionRefused,
    Observation,
    OpenEnvConnection,
    Schemas,
    Servers,
)
from env_service.environments.tool_loop import MAX_CALLS, Definition, definition
from env_service.failures import EnvironmentFailed

RESET_S = 120.0
MAX_SEED = 1 << 31
ACT = "act"
MAX_SHOWN = 64 * 1024
"""Characters of an observation that the model is shown."""
MAX_TOOLS_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class ActionShape:
    """The form in which an environment wants its actions."""

    text_field: str = ""
    """The one that takes the model's text; "": the model calls tools."""
    asks_for_tools: bool = False
    """The session tells its tools, and takes calls of them."""
    tools: Sequence[Definition] = ()


class OpenEnv(LiveEnvironment):
    def __init__(self, args: OpenEnvArgs, servers: Servers) -> None:
        self._args = args
        self._servers = servers
        self._shape: ActionShape | None = None

    def make_item(self, seed: int, held_out: bool) -> dict[str, Any]:
        """The seed, which the session gets as well, says all."""
        return {}

    async def open(self, item: dict[str, Any], seed: int) -> "OpenEnvSession":
        server = self._servers.find(self._args)
        async with AsyncExitStack() as stack:
            connection = await self._servers.connect(server)
            stack.push_async_callback(connection.close)
            if self._shape is None:
                self._shape = shape_of(await self._servers.schemas(server))
            session = OpenEnvSession(connection, self._args, self._shape)
            await session.begin(item, seed)
            stack.pop_all()
        return session


class OpenEnvSession:
    def __init__(self, connection: OpenEnvConnection, args: OpenEnvArgs, shape: ActionShape) -> None:
        self._connection = connection
        self._args = args
        self._shape = shape
        self.messages: list[Mapping[str, Any]] = []
        self.tools = shape.tools
        self.reply_roles = ("user",) if shape.text_field else ("tool",)

    async def begin(self, item: Mapping[str, Any], seed: int) -> None:
        fields = {name: value for name, value in item.items() if name != "messages"}
        data = {"seed": seed % MAX_SEED, **self._args.reset, **fields}
        first = await self._connection.ask("reset", data, timeout_s=RESET_S)
        if first.done:
            raise EnvironmentFailed("the OpenEnv server's episode is over at its reset")
        if self._shape.asks_for_tools:
            listed = await self._connection.ask("step", {"type": "list_tools"}, timeout_s=RESET_S)
            self.tools = tools_told(listed.observation)
        messages = item_messages(item) if "messages" in item else []
        text = self._shown(first)
        self.messages = [*messages, *([_message("user", text)] if text else [])]
        if self._args.system:
            self.messages.insert(0, _message("system", self._args.system))
        if not messages and not text:
            raise InvalidInput("the OpenEnv server's reset shows nothing, and the item has no messages")

    async def step(self, turn: Turn) -> Step:
        if not self._shape.text_field:
            return await self._call_all(turn)
        try:
            action = {self._shape.text_field: turn.text}
            result = await self._connection.ask("step", action, timeout_s=turn.tool_timeout_s)
        except ActionRefused as error:
            return Step(done=False, messages=[_message("user", f"error: {error}")])
        return Step(done=result.done, reward=_reward(result), messages=[_message("user", self._shown(result))])

    async def end(self) -> Step:
        """Ends with the reward earned so far."""
        return Step(done=True, reward=0.0)

    async def close(self) -> None:
        await self._connection.close()

    async def _call_all(self, turn: Turn) -> Step:
        """Calls run one after the other: each changes the environment."""
        replies, rewards, done = list[Mapping[str, Any]](), list[float](), not turn.calls
        for index, call in enumerate(turn.calls):
            content = "error: the episode is over" if done else "error: too many calls"
            if not done and index < MAX_CALLS:
                content, result = await self._call(call, turn.tool_timeout_s)
                done = result is not None and result.done
                rewards += [] if result is None or (reward := _reward(result)) is None else [reward]
            replies.append({"role": "tool", "tool_call_id": f"call_{index}", "content": content})
        reward = sum(rewards) if rewards or not turn.calls else None
        return Step(done=done, reward=reward, messages=replies)

    async def _call(self, call: ToolCall, timeout_s: float) -> tuple[str, Observation | None]:
        """The reply to the model, and the result of the action, if it was one."""
        names = [tool["function"]["name"] for tool in self.tools]
        if call.error is not None or call.name not in names:
            return f"error: {call.error or f'no tool {call.name[:40]}'}", None
        if call.name == ACT and not self._shape.asks_for_tools:
            action = call.arguments
        else:
            action = {"type": "call_tool", "tool_name": call.name, "arguments": call.arguments}
        try:
            result = await self._connection.ask("step", action, timeout_s=timeout_s)
        except ActionRefused as error:
            return f"error: {error}", None
        return (shown_result(result.observation) if self._shape.asks_for_tools else self._shown(result)), result

    def _shown(self, result: Observation) -> str:
        return shown(result.observation, self._args.observation_field)


def _reward(result: Observation) -> float | None:
    return None if result.reward is None else float(result.reward)


def _message(role: str, content: str) -> Mapping[str, Any]:
    return {"role": role, "content": content}


# ---- actions and observations ----------------------------------------------------------------------------------------


def shape_of(schemas: Schemas) -> ActionShape:
    """Raises EnvironmentFailed for a schema that is no object's."""
    action = schemas.action
    fields: Any = action.get("properties")
    if not isinstance(fields, dict):
        raise EnvironmentFailed("the OpenEnv server's schema of actions has no properties")
    names = [name for name in fields if name != "metadata"]
    if "tool_name" in names and fields.get("type", {}).get("default") == "call_tool":
        return ActionShape(asks_for_tools=True)
    must = [name for name in names if name in action.get("required", ())] or names
    if len(must) == 1 and fields[must[0]].get("type") == "string" and "enum" not in fields[must[0]]:
        return ActionShape(text_field=must[0])
    parameters = {**action, "properties": {name: fields[name] for name in names}}
    return ActionShape(tools=(definition(ACT, str(action.get("description", "")), parameters),))


def tools_told(observation: Mapping[str, Any]) -> list[Definition]:
    """The tools in the answer to `list_tools`. Raises EnvironmentFailed."""
    if (size := len(msgspec.json.encode(observation))) > MAX_TOOLS_BYTES:
        raise EnvironmentFailed(f"the OpenEnv server's tools have {size} bytes, more than {MAX_TOOLS_BYTES}")
    try:
        return [definition(tool["name"], tool["description"], tool["input_schema"]) for tool in observation["tools"]]
    except (LookupError, TypeError) as error:
        raise EnvironmentFailed("the OpenEnv server does not tell its tools") from error


def shown(observation: Mapping[str, Any], field: str = "") -> str:
    """The part of an observation that the model sees: a field, its only text, or all as JSON. Raises EnvironmentFailed."""
    fields = {name: value for name, value in observation.items() if name != "metadata"}
    if field and field not in fields:
        raise EnvironmentFailed(f"the observation has no {field!r}; it has {', '.join(fields)}"[:MAX_TOLD])
    if field or len(fields) == 1:
        fields = {"": fields[field] if field else next(iter(fields.values()))}
    value = fields.get("", fields)
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode() if fields else ""
    if len(text) > MAX_SHOWN:
        raise EnvironmentFailed(f"the observation has {len(text)} characters, more than {MAX_SHOWN}")
    return text


def shown_result(observation: Mapping[str, Any]) -> str:
    """The part of a tool's result that the model sees."""
    if (error := observation.get("error")) is not None:
        return "error: " + shown({"": error})
    result = observation.get("result")
    return shown({"": result.get("data", result) if isinstance(result, dict) else result})
