"""The live environment of a `verifiers` package. An operator subclasses it for each package that jobs may name:

    class Addition(Verifiers):
        python = "/srv/environments/addition"       # an interpreter, or the folder of a Python environment
        taskset = "addition"                        # verifiers.v1; or, up to verifiers 0.3, environment = "addition"
        args = {"largest": 99}
        job_args = ("largest",)

and registers it under the entry point group `marlaas.environments`. Jobs choose among what the operator installed, and
set only the arguments in `job_args`.

A prompt must continue the conversation so far, so that what is trained is what was sampled. An environment that rewrites
its conversation (drops thoughts, shortens it, asks something else in between) fails the trajectory with this reason.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import msgspec
from pydantic import BaseModel, ConfigDict, create_model

from common.errors import InvalidInput
from common.text.tool_calls import ToolCall
from env_service.environment import Step, Turn
from env_service.failures import EnvironmentFailed
from env_service.verifiers.package_process import HostedTrajectory, Hosts

MAX_SHOWN_BYTES = 256 * 1024
"""Bytes of the messages and tools that a trajectory begins with, and of those behind a turn."""


class Verifiers:
    """Implements `LiveEnvironment`. An item is `{"task": place}` of a training row, or made, to draw a task."""

    python: ClassVar[str]
    """The interpreter, or the Python environment's folder, with the package and `verifiers` installed."""
    taskset: ClassVar[str] = ""
    """The name of a taskset for `verifiers.v1` (0.4 on). It is played with token ids."""
    environment: ClassVar[str] = ""
    """The name that `load_environment` takes (verifiers up to 0.3). Played with chat completions."""
    args: ClassVar[Mapping[str, Any]] = {}
    """The fields of the taskset's configuration, or the arguments of `load_environment`."""
    job_args: ClassVar[Sequence[str]] = ()
    """The part of `args` that jobs may give. Name none that can hold a path or the name of a module."""
    env: ClassVar[Mapping[str, Any]] = {}
    """`verifiers.v1`: the rest of the environment's configuration, such as the agent's harness and runtime."""
    renderer: ClassVar[Mapping[str, Any] | None] = None
    """`verifiers.v1`: the renderer's configuration; None: by the base model's name, else its chat template."""
    variables: ClassVar[Sequence[str]] = ()
    """Names of the env worker's variables that the package needs, such as a judge's key. Its process gets no others except
    those in `package_process.py`."""
    reply_roles: ClassVar[Sequence[str]] = ()
    """Roles of the environment's messages: a base model that cannot show them is refused at once."""
    Args: ClassVar[type[BaseModel]]

    hosts: Hosts
    """The worker's, which sets it."""
    base: Path
    """The folder of the base model, whose tokenizer `verifiers.v1` needs. The worker sets it."""

    def __init_subclass__(cls) -> None:
        fields: dict[str, Any] = dict.fromkeys(cls.job_args, (Any, None))
        cls.Args = create_model(f"{cls.__name__}Args", __config__=ConfigDict(extra="forbid"), **fields)

    def __init__(self, **args: Any) -> None:
        if bool(self.taskset) == bool(self.environment):
            raise InvalidInput(f"{type(self).__name__} must name a taskset or an environment, one of them")
        self._load = self._load_with({**self.args, **args})

    def make_item(self, seed: int, held_out: bool) -> dict[str, Any]:
        return {"seed": seed, "held_out": held_out}

    async def open(self, item: dict[str, Any], seed: int) -> "VerifiersSession":
        load = self._load | ({"tokenizer": str(self.base.resolve())} if self.taskset else {})
        conversation = await self.hosts.begin(self.python, load, _task_of(item), self.variables)
        with ExitStack() as unless_open:
            unless_open.callback(conversation.close)
            request = await conversation.next()
            if "ends" in request:
                raise EnvironmentFailed("the environment ended without asking its model anything")
            unless_open.pop_all()
        return VerifiersSession(conversation, request, self.reply_roles)

    def _load_with(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """The environment that `host.py` is told to load."""
        if self.environment:
            return {"environment": self.environment, "args": args}
        return {"config": {**self.env, "taskset": {"id": self.taskset, **args}}, "renderer": self.renderer}


def _task_of(item: Mapping[str, Any]) -> dict[str, Any]:
    """The part of an item that the host needs. Raises InvalidInput."""
    if not ("task" in item or "seed" in item):
        raise InvalidInput('a row of the training file must name one of the environment\'s tasks: "task": 17')
    return {name: item[name] for name in ("task", "seed", "held_out") if name in item}


class VerifiersSession:
    """Implements `Session`: what the environment asks its model becomes our prompt, and our turn its answer."""

    def __init__(self, conversation: HostedTrajectory, request: Mapping[str, Any], reply_roles: Sequence[str]) -> None:
        """`asked`: the environment's first request to its model, in token ids or in messages."""
        self.reply_roles = reply_roles
        self._conversation = conversation
        _check_size([request.get("messages"), request.get("tools")])
        self.tokens: Sequence[int] = request.get("tokens") or ()
        self.messages: Sequence[Mapping[str, Any]] = request.get("messages") or ()
        self.tools: Sequence[Mapping[str, Any]] = request.get("tools") or ()
        self._shown: list[Any] = [*self.tokens, *map(_plain, self.messages)]
        """The conversation so far."""

    async def step(self, turn: Turn) -> Step:
        calls = _shown_calls(turn)
        text = turn.content if calls else turn.text
        cut_off = turn.stop_reason in ("length", "context")
        finish = "length" if cut_off else "tool_calls" if calls else "stop"
        answer = {"tokens": turn.tokens, "logprobs": turn.logprobs, "text": text, "calls": calls, "finish": finish}
        self._conversation.say("answer", answer)
        request = await self._conversation.next()
        if "ends" in request:
            return _ended(request)
        if self.tokens:
            return Step(tokens=self._rest(turn.tokens, request["tokens"], request["tokens"]), done=False)
        if request["tools"] != self.tools:
            raise EnvironmentFailed("the environment changed its tools in the middle of the trajectory")
        model_message = _plain({"role": "assistant", "content": text, "tool_calls": calls})
        messages = request["messages"]
        _check_size(messages[len(self._shown) :])
        return Step(messages=self._rest([model_message], [*map(_plain, messages)], messages), done=False)

    async def end(self) -> Step:
        self._conversation.say("refuse")
        return _ended(await self._conversation.next())

    async def close(self) -> None:
        self._conversation.close()

    def _rest(self, model_message: Sequence[Any], request: list[Any], whole: Sequence[Any]) -> Sequence[Any]:
        """Messages that a prompt adds. `whole`: the environment's prompt. Raises EnvironmentFailed."""
        before = [*self._shown, *model_message]
        if len(request) <= len(before) or request[: len(before)] != before:
            raise EnvironmentFailed("the environment's next prompt does not go on where the model's turn ended")
        self._shown = request
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
    functions = [(call["name"], call["arguments"]) for call in calls]
    return {"role": message["role"], "content": content, "calls": functions}


def _ended(message: Mapping[str, Any]) -> Step:
    parts = {name: value for name, value in message["parts"].items() if math.isfinite(value)}
    return Step(done=True, reward=message["reward"], parts=parts)
