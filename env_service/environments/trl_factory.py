"""Environments for TRL's `GRPOTrainer(environment_factory=...)`, unmodified. An operator subclasses `FromTRL` for each:

    class Counting(FromTRL):
        factory = IncrementEnv          # called for each trajectory
        reward_funcs = (how_far,)       # as TRL calls them; not needed if the environment has `get_reward`

and registers it under the entry point group `marlaas.environments`. As in TRL, `reset` gets the row of the training file,
its result follows the last user message, and the public methods are tools, whose errors the model sees. A turn without
calls ends the trajectory. The reward is the sum of `get_reward` and the reward functions.
"""

import asyncio
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, create_model

from common.errors import InvalidInput
from common.text.tokens import ToolCall
from env_service import work
from env_service.environment import Step, Turn
from env_service.environments.openenv import MAX_SEED, MAX_SHOWN
from env_service.environments.tool_loop import MAX_CALLS, Definition, definition
from env_service.failures import EnvironmentFailed, ToolFailed

NO_TOOLS = ("reset", "get_reward")
THREADS = 32
"""Calls of an environment that run at once."""

_AFTER = re.compile(r"^(?:Returns|Raises|Examples?):", re.MULTILINE)
_NAMED = r"(\w+)[ ]*(?:\([^)\n]*\))?:"
_ARGUMENT = re.compile(rf"^\s*{_NAMED}\s*(.*?)\s*(?=\n\s*{_NAMED.replace('(', '(?:', 1)}|\Z)", re.MULTILINE | re.DOTALL)


class FromTRL:
    """Implements `LiveEnvironment`."""

    factory: ClassVar[Callable[..., Any]]
    """A class, or what returns an instance."""
    reward_funcs: ClassVar[Sequence[Callable[..., Any]]] = ()
    """Functions called for one trajectory: lists have one element. They get no trainer state."""
    job_args: ClassVar[Sequence[str]] = ()
    """Arguments of the factory that jobs may give."""
    tools: ClassVar[Sequence[Definition]] = ()
    Args: ClassVar[type[BaseModel]]

    def __init_subclass__(cls) -> None:
        fields: dict[str, Any] = dict.fromkeys(cls.job_args, (Any, None))
        cls.Args = create_model(f"{cls.__name__}Args", __config__=ConfigDict(extra="forbid"), **fields)
        if isinstance(factory := inspect.getattr_static(cls, "factory", None), type):
            cls.tools = definitions(factory)

    def __init__(self, **args: Any) -> None:
        self._make = partial(inspect.getattr_static(type(self), "factory"), **args)
        self._threads = ThreadPoolExecutor(THREADS, type(self).__name__)

    def make_item(self, seed: int, held_out: bool) -> dict[str, Any]:
        """`reset` says all."""
        return {}

    async def open(self, item: dict[str, Any], seed: int) -> "TRLSession":
        environment = await self._run(self._make)
        session = TRLSession(environment, item, self.reward_funcs, self._run)
        await session.begin(seed)
        return session

    async def _run(self, function: Callable[..., Any], /, **arguments: Any) -> Any:
        """Calls what may block, or be a coroutine."""
        if inspect.iscoroutinefunction(function):
            return await function(**arguments)
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(_called, function, arguments))


def _called(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """A future takes no StopIteration: nobody would hear of it."""
    try:
        return function(**arguments)
    except StopIteration as error:
        raise RuntimeError("StopIteration") from error


class TRLSession:
    def __init__(
        self,
        environment: Any,
        item: Mapping[str, Any],
        reward_funcs: Sequence[Callable[..., Any]],
        run: Callable[..., Any],
    ) -> None:
        self._environment = environment
        self._item = item
        self._reward_funcs = reward_funcs
        self._run = run
        self._completion: list[Mapping[str, Any]] = []
        self._tokens: list[int] = []
        self.messages: Sequence[Mapping[str, Any]] = ()
        self.tools = definitions(type(environment))
        if not reward_funcs and not hasattr(environment, "get_reward"):
            raise InvalidInput("the environment has no get_reward, and its operator named no reward_funcs")

    async def begin(self, seed: int) -> None:
        reset = self._environment.reset
        parameters = inspect.signature(reset).parameters
        takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
        prompt: list[Mapping[str, Any]] = list(self._item.get("messages") or [{"role": "user", "content": ""}])
        row = {"seed": seed % MAX_SEED, "prompt": prompt, **self._columns}
        seen = await self._run(reset, **{name: row[name] for name in row if takes_any or name in parameters})
        text = "" if seen is None else _text(seen)
        self.messages = [*prompt[:-1], {**prompt[-1], "content": _followed(prompt[-1]["content"], text)}]
        if not text and "messages" not in self._item:
            raise InvalidInput("the environment's reset returns nothing, and the item has no messages")

    async def step(self, turn: Turn) -> Step:
        self._tokens += turn.tokens
        calls = [{"type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in turn.calls]
        message = {"role": "assistant", "content": turn.content if calls else turn.text}
        self._completion.append({**message, "tool_calls": calls} if calls else message)
        if turn.last or not turn.calls:
            return await self.end()
        replies = [await self._reply(i, call, turn.tool_timeout_s) for i, call in enumerate(turn.calls)]
        self._completion += replies
        return Step(done=False, messages=replies)

    async def end(self) -> Step:
        """Raises EnvironmentFailed if nothing gives a reward."""
        parts = dict[str, float]()
        if hasattr(self._environment, "get_reward"):
            parts[type(self._environment).__name__] = await self._run(self._environment.get_reward)
        for function in self._reward_funcs:
            (reward,) = await self._run(
                function,
                prompts=[self.messages],
                completions=[self._completion],
                completion_ids=[self._tokens],
                environments=[self._environment],
                trainer_state=None,
                log_extra=_ignore,
                log_metric=_ignore,
                **{name: [value] for name, value in self._columns.items()},
            )
            if reward is not None:
                parts[getattr(function, "__name__", type(function).__name__)] = reward
        if not parts:
            raise EnvironmentFailed("all reward functions returned None")
        return Step(done=True, reward=math.fsum(parts.values()), parts=parts)

    async def close(self) -> None: ...

    @property
    def _columns(self) -> dict[str, Any]:
        """The row's columns except the prompt."""
        return {name: value for name, value in self._item.items() if name != "messages"}

    async def _reply(self, index: int, call: ToolCall, timeout_s: float) -> Mapping[str, Any]:
        return {
            "role": "tool",
            "tool_call_id": f"call_{index}",
            "name": call.name,
            "content": str({"error": "too many calls"}) if index >= MAX_CALLS else await self._call(call, timeout_s),
        }

    async def _call(self, call: ToolCall, timeout_s: float) -> str:
        """The reply to the model, in TRL's words. Raises ToolFailed, EnvironmentFailed."""
        if call.error is not None:
            return str({"error": call.error})
        if call.name not in [tool["function"]["name"] for tool in self.tools]:
            return str({"error": f"Tool {call.name[:40]} not found."})
        try:
            async with work.time_limit(timeout_s):
                return _text(await self._result(call))
        except TimeoutError as error:
            raise ToolFailed(f"the tool {call.name} took longer than {timeout_s:g} seconds") from error

    async def _result(self, call: ToolCall) -> Any:
        try:
            return await self._run(getattr(self._environment, call.name), **call.arguments)
        except Exception as error:  # as TRL does: the model sees it
            return str({"error": str(error)})[:MAX_SHOWN]


def _followed(content: Any, text: str) -> Any:
    """A message's content, a text or parts, with the text after it."""
    return [*content, {"type": "text", "text": text}] if isinstance(content, list) else content + text


def definitions(environment: type) -> list[Definition]:
    """The public methods as tools, by annotations and Google-style docstrings, as TRL reads them."""
    methods = inspect.getmembers(environment, inspect.isfunction)
    return [_definition(name, method) for name, method in methods if name not in NO_TOOLS and not name.startswith("_")]


def _definition(name: str, method: Callable[..., Any]) -> Definition:
    described, _, arguments = (inspect.getdoc(method) or "").partition("Args:\n")
    callee: Any = partial(method, None)  # without `self`
    schema = TypeAdapter(callee).json_schema()
    properties: dict[str, Any] = schema.get("properties", {})
    for property in properties.values():
        for word in ("title", "default"):
            property.pop(word, None)
    for argument, text in _ARGUMENT.findall(_AFTER.split(arguments)[0]):
        if argument in properties:
            properties[argument]["description"] = " ".join(text.split())
    parameters = {"type": "object", "properties": properties}
    if "required" in schema:
        parameters["required"] = schema["required"]
    return definition(name, " ".join(_AFTER.split(described)[0].split()), parameters)


def _text(result: Any) -> str:
    """A result or an observation. Raises EnvironmentFailed for images, and for too much."""
    if isinstance(result, list) and any(isinstance(part, dict) and part.get("type") == "image" for part in result):
        raise EnvironmentFailed("the environment shows images, which no base model here sees")
    if isinstance(result, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in result):
        result = "".join(part["text"] for part in result)
    text = str(result)
    if len(text) > MAX_SHOWN:
        raise EnvironmentFailed(f"the environment shows {len(text)} characters, more than {MAX_SHOWN}")
    return text


def _ignore(*_: Any) -> None: ...
