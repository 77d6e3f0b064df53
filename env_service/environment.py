"""Declares what an environment is.

    reset(item, seed) -> (state, messages)      begins a trajectory
    await step(state, turn) -> Step             answers the model's turn: with messages, or with the end and a reward

An environment object holds arguments and caches, never a trajectory: its state travels in the messages, and any worker
may take the next turn. A step may be repeated. An error of an environment masks the trajectory.

A process or a connection cannot travel. Such an environment has `open` in place of both:

    await open(item, seed) -> Session           begins a trajectory
    await session.step(turn) -> Step            as above; its state is the session's own
    await session.end() -> Step                 ends a trajectory that the environment has not ended
    await session.close()

A session stays with its env worker. If that dies, another replays it: `open` with the same item and seed, then the same
turns. What comes back must be what the model was shown, else the trajectory is masked.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from common.errors import InvalidInput
from common.text.tokens import ToolCall
from common.wire.messages import StopReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn of the model, as an environment sees it."""

    item: dict[str, Any]
    text: str
    """Without special tokens: `{{sample.output_text}}`."""
    calls: tuple[ToolCall, ...] = ()
    """Tool calls in order; one with an `error` is malformed."""
    content: str = ""
    """The text around the tool calls."""
    tokens: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    """The log-prob of each token, as it was sampled."""
    index: int = 0
    stop_reason: StopReason = "stop"
    last: bool = False
    """No turn follows, so the step must give the reward. Set after `length` or `context`, on the last turn allowed, and
    when a step is repeated because its messages do not fit into the context."""
    tool_timeout_s: float = 10.0
    key: str = ""
    """Names this step; a repeat has the same. For tools with effects outside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    state: Any = None
    """msgpack-able, at most 64 KiB. A session's steps have none."""
    messages: Sequence[Mapping[str, Any]] = ()
    """Messages of roles `tool`, `user` and `system`, shown by the model's chat template; none if done."""
    tokens: Sequence[int] = ()
    """Tokens in place of messages: from the end of the model's turn to the start of its next one."""
    done: bool
    reward: float | None = None
    """The trajectory's reward is the sum of those of its steps; at its end there must be one."""
    parts: Mapping[str, float] = field(default_factory=dict[str, float])


class Environment(Protocol):
    """May also have `tools`, tool definitions in OpenAI's form; `reply_roles` of its steps' messages, `tool` by default: a
    base model that cannot show them is refused; and `make_item(seed, held_out)`, for jobs without a training file."""

    def reset(self, item: dict[str, Any], seed: int) -> tuple[Any, Sequence[Mapping[str, Any]]]: ...

    async def step(self, state: Any, turn: Turn) -> Step: ...


class Session(Protocol):
    """One trajectory of a live environment. Its methods run one at a time; after an error or a time-out only `close` is called.
    May also have `reply_roles`, as an environment, and `tokens`, the ids of the prompt in place of `messages`."""

    @property
    def messages(self) -> Sequence[Mapping[str, Any]]:
        """The conversation that the trajectory begins with."""
        ...

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """Tool definitions in OpenAI's form."""
        ...

    async def step(self, turn: Turn) -> Step:
        """Answers a turn, each once. `turn.last`: it was cut off, or is the last turn allowed."""
        ...

    async def end(self) -> Step:
        """Gives the rest of the reward. Called once, when no turn may follow a step that did not end the trajectory."""
        ...

    async def close(self) -> None:
        """Frees what the session holds. Called once: after the end, or when the trajectory is given up or replayed."""
        ...


class LiveEnvironment(ABC):
    """May also have `make_item`, as an environment. `open` tells its class from others; inheritance is not needed.
    No Protocol: an isinstance check of one takes 10 us, and each message makes one."""

    @classmethod
    def __subclasshook__(cls, subclass: type) -> bool:
        return hasattr(subclass, "open")

    @abstractmethod
    async def open(self, item: dict[str, Any], seed: int) -> Session:
        """Begins a trajectory; a group shares item and seed. Limited by the time limit of a step."""
        ...


def item_messages(item: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The conversation that a row of a training file begins with. Raises InvalidInput."""
    messages: Any = item.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidInput("the item has no messages")
    return cast(list[Mapping[str, Any]], messages)
