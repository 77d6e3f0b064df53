"""The environment `openenv`: a session at an OpenEnv server for each trajectory.

The server's reset gets the seed and the item's fields; what it shows is the user's message behind the item's own ones. Each action's
reward counts; the trajectory ends when the server says `done`, when no further turn is allowed, and where the model is to call
tools, when it calls none.
"""

from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

from common.errors import InvalidInput
from common.tasks.environments import OpenEnvArgs
from common.text.tokens import ToolCall
from env_service.environment import LiveEnvironment, Step, Turn, item_messages
from env_service.environments.openenv_mapping import ACT, ActionShape, shape_of, shown, shown_result, tools_told
from env_service.environments.openenv_server import ActionRefused, Observation, OpenEnvConnection, Servers
from env_service.environments.tool_loop import MAX_CALLS
from env_service.failures import EnvironmentFailed

RESET_S = 120.0
MAX_SEED = 1 << 31


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
