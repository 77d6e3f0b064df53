"""The interface of a process that computes tokens for the process engine. A `Core` is one life of it.

    process_engine ─ add, remove, sample ─► Core ─ chunks ─► process_engine

Two implementations: `vllm_engine.VllmCore`, and `tests/support/fake_core.py`, which dies and loads as told.
"""

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from common.wire.messages import Tops


class CoreDied(Exception):
    """The process ended, or can no longer be trusted; the next one must get its requests again."""


class UnreadableAdapter(Exception):
    """The process cannot read these files as an adapter of its base model. It goes on."""


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """An adapter as the process knows it."""

    number: int  # above 0, never used for another adapter in this process
    name: str
    folder: Path  # PEFT layout; it stays while a request names the adapter


@dataclass(frozen=True, slots=True)
class SamplingRequest:
    """One turn, or what is left of it."""

    id: str  # never used before in this process
    tokens: list[int]  # [T] all so far
    adapter: AdapterFolder
    salt: str  # what is cached under one salt serves no other
    temperature: float
    top_p: float
    num_top_logprobs: int
    max_tokens: int  # still to come
    end_ids: tuple[int, ...]  # tokens that end the turn; they belong to it
    seed: int | None  # of a stream of its own; None: it draws from the process's
    top_k: int = 0  # 0: all tokens
    chat: bool = False  # before those that are none, where the process has no room for all
    by_token: bool = False  # somebody reads its tokens one by one, or looks for a stop string
    grammar: str = ""  # that what is sampled follows, from its first token on
    prompt_logprobs: bool = False  # in the first chunk; at temperature 1 whatever that of the tokens to come is


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """The next tokens of a turn. Axis: n of them."""

    tokens: list[int]  # [n]
    logprobs: list[float]  # [n] at the sampling temperature
    top_logprobs: list[list[tuple[int, float]]]  # [n] best first, as many as were asked for
    finished: bool  # an end-of-turn token, or no room left
    prompt_logprobs: list[float] = field(default_factory=list[float])  # of all the request's tokens but the first
    prompt_top_logprobs: Tops = field(default_factory=Tops)  # of the same
    num_cached: int = 0  # tokens of the request whose keys and values were there


class Core(Protocol):
    """Used from one event loop."""

    @property
    def pid(self) -> int:
        """The process's id, once started."""
        ...

    @property
    def kv_tokens(self) -> int | None:
        """Tokens whose keys and values fit into memory at once, once started; None: not known."""
        ...

    async def start(self) -> None:
        """Returns when the process is ready to sample at full speed."""
        ...

    async def stop(self) -> None:
        """Ends the process, whatever state it is in."""
        ...

    async def wait_dead(self) -> None:
        """Returns when the process has ended."""
        ...

    async def add(self, adapter: AdapterFolder) -> None:
        """Loads the adapter. Raises UnreadableAdapter. May hang if the process dies: race it with `wait_dead`."""
        ...

    async def remove(self, adapter: AdapterFolder) -> None:
        """Unloads the adapter, which no request names. May never return, as `add`."""
        ...

    async def sleep(self) -> None:
        """Gives the device's memory back; no request is under way. Whatever it raises, it cannot be trusted any more."""
        ...

    async def wake(self) -> None:
        """Takes the memory back, and has no adapter. Raises as `sleep`; may never return, as `add`."""
        ...

    def sample(self, request: SamplingRequest) -> AsyncGenerator[TokenChunk]:
        """Gives chunks until one is finished; closing it early ends the turn, and cancelling it gives what waits before it raises. The
        adapter is loaded. Raises CoreDied; may also hang if the process dies."""
        ...
