"""The seam between the rollout service and its engines: what an engine must do.

handler ─ load_files, generate ─► Engine ─ Generated ─► handler
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from common.wire.messages import EMPTY_F32, AdapterRef, Array, StopReason, Tops, TurnRequest
from common.worker.handlers import Beat

OnToken = Callable[[Sequence[int], Sequence[float]], None]
"""Called with new tokens and log-probs since the last call, without the resumed ones."""
BEAT_EVERY_S = 0.25
"""The time, or so, between two calls of a turn's `beat` while it gets nearer to its end."""


@dataclass(frozen=True, slots=True)
class Generated:
    """One finished turn, with the tokens that a resumed request brought. Axis: N tokens of the turn."""

    adapter: AdapterRef  # that sampled every token here
    tokens: list[int]  # [N] the sampled end-of-turn token included
    logprobs: list[float]  # [N]
    stop_reason: StopReason  # stop, length or context
    stop_string: str
    top_logprobs: list[list[tuple[int, float]]]  # of the tokens sampled here; empty unless asked for
    num_sampled: int  # how many of the last tokens were sampled here
    busy_s: float  # engine seconds, each forward's split evenly over its tokens
    prompt_logprobs: Array = EMPTY_F32  # f4 [num_prompt], NaN where not asked for; empty unless asked for
    prompt_top_logprobs: Tops = field(default_factory=Tops)  # [num_prompt]; empty unless asked for


@dataclass(frozen=True, slots=True)
class Partial:
    """The progress of an unfinished turn."""

    tokens: list[int]  # the resumed ones included
    logprobs: list[float]
    num_sampled: int
    busy_s: float


class CorruptAdapter(Exception):
    """The adapter gives scores that are not numbers; only the rows that name it fail."""


class Tokenizer(Protocol):
    """The part of `common.text.tokens.ChatTokenizer` that an engine uses."""

    end_of_turn_ids: tuple[int, ...]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str: ...

    def to_json(self) -> str: ...


class Engine(Protocol):
    """Generates turns, many at a time, each with its own adapter. Used from one event loop."""

    @property
    def in_use(self) -> int:
        """Turns under way or waiting."""
        ...

    @property
    def kv_tokens(self) -> int | None:
        """Tokens whose keys and values fit into memory, next to the prompts' cache; None: not known."""
        ...

    async def start(self) -> None:
        """Returns once the engine can generate; raises if this machine cannot keep its promises."""
        ...

    async def stop(self) -> None:
        """Ends turns under way with CancelledError."""
        ...

    async def load_files(self, adapter: AdapterRef, files: Mapping[str, bytes]) -> int:
        """Makes an adapter resident from its files (PEFT layout); returns its bytes in memory. Loading twice is harmless. Raises
        CorruptObject if the files are no adapter of this base model."""
        ...

    async def drop(self, adapter: AdapterRef) -> None:
        """Forgets an unused resident adapter and all that was cached under its name."""
        ...

    def resident(self) -> list[AdapterRef]:
        """Lists the adapters that `generate` accepts now, besides the base model and untrained ones."""
        ...

    async def generate(self, request: TurnRequest, *, on_token: OnToken | None = None, beat: Beat) -> Generated:
        """Samples one turn, from `request.num_partial` on. Cancelling it takes it out of the batch at once.

        Only the request decides the tokens: its base, adapter, tokens, sampling and trajectory, never its neighbours, attempt or
        time. `torch` keeps that to the bit, except the last digits where an earlier turn's keys and values were kept
        (`EngineLimits.turns`); on `vllm` scores differ in their last digits with the rest of the batch, and a resumed turn
        draws other numbers. `beat` is called now and then while tokens come.

        Log-probs, the prompt's too, are of logits / temperature (0 counts as 1) over the whole vocabulary. `vllm` differs: with
        top_k, top_p or a grammar they are among the tokens kept, and it refuses prompt_logprobs at temperatures other than 0 and 1.

        Raises NotFound if the adapter is not resident, InvalidInput for a request that cannot be computed, CorruptAdapter for
        one that cannot be loaded or whose scores are not numbers.
        """
        ...

    def partial(self, request_id: str) -> Partial | None:
        """The progress of a turn under way or just cancelled; None if unknown."""
        ...
