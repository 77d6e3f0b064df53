"""The one seam of the rollout service: what an engine must do, whoever computes the tokens.

One file touches vLLM, one package torch.

    handler ─ load_files, generate ─► Engine ─ Generated ─► handler
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from common.messages import AdapterRef, StopReason, TurnRequest

OnToken = Callable[[Sequence[int], Sequence[float]], None]
"""Called with the tokens and log-probs that are new since the last call, the resumed ones not included."""
Beat = Callable[[], None]
"""Called every BEAT_EVERY_S or so while a turn gets nearer to its end."""
BEAT_EVERY_S = 0.25


@dataclass(frozen=True, slots=True)
class Generated:
    """One finished turn, the tokens that a resumed request brought included. Axis: N tokens of the turn."""

    adapter: AdapterRef  # that sampled every token here
    tokens: list[int]  # [N] the sampled end-of-turn token included
    logprobs: list[float]  # [N]
    stop_reason: StopReason  # stop, length or context
    stop_string: str
    top_logprobs: list[list[tuple[int, float]]]  # of the tokens sampled here; empty unless asked for
    num_sampled: int  # how many of the last tokens were sampled here
    busy_s: float  # engine seconds, each forward's split evenly over its tokens


@dataclass(frozen=True, slots=True)
class Partial:
    """How far an unfinished turn has come."""

    tokens: list[int]  # the resumed ones included
    logprobs: list[float]
    num_sampled: int
    busy_s: float


class CorruptAdapter(Exception):
    """The adapter gives scores that are not numbers; only the rows that name it fail."""


class Tokenizer(Protocol):
    """What an engine needs of `common.text.tokens.ChatTokenizer`."""

    end_of_turn_ids: tuple[int, ...]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str: ...


class Engine(Protocol):
    """Generates turns, many at a time, each with its own adapter. Used from one event loop."""

    @property
    def slots(self) -> int:
        """How many turns are generated at once; more wait, in order of arrival."""
        ...

    @property
    def in_use(self) -> int:
        """Turns under way or waiting."""
        ...

    @property
    def kv_tokens(self) -> int | None:
        """Tokens whose keys and values fit into its memory at once, beside the cache of prompts; None: not known."""
        ...

    async def start(self) -> None:
        """Ready to generate when it returns; raises if this machine cannot keep the engine's promises."""
        ...

    async def stop(self) -> None:
        """Turns under way end with CancelledError."""
        ...

    async def load_files(self, adapter: AdapterRef, files: Mapping[str, bytes]) -> int:
        """Make an adapter resident from its files (PEFT layout); returns its bytes in memory. Loading twice is harmless.

        Raises CorruptObject if the files are no adapter of this base model.
        """
        ...

    async def drop(self, adapter: AdapterRef) -> None:
        """Forget a resident adapter and all that was cached under its name. Nothing that names it may be under way."""
        ...

    def resident(self) -> list[AdapterRef]:
        """Adapters that `generate` accepts now; the base model always is, and is not listed."""
        ...

    async def generate(self, request: TurnRequest, *, on_token: OnToken | None = None, beat: Beat) -> Generated:
        """Sample one turn, from `request.num_partial` on. Cancelling it takes it out of the batch at once.

        What decides the tokens is the request alone: its base, adapter, tokens, sampling and trajectory, never its
        neighbours, attempt or time. `torch` keeps that to the bit, but for the last digits where an earlier turn's keys and
        values were kept (`MARLAAS_ROLLOUT_TURN_BYTES`); on `vllm` scores differ in their last digits with what else is in
        the batch, and a resumed turn draws other numbers. `beat` is called now and then while tokens come.

        Raises NotFound if the adapter is not resident, InvalidInput for a request that cannot be computed,
        CorruptAdapter for one that cannot be loaded or whose scores are not numbers.
        """
        ...

    def partial(self, request_id: str) -> Partial | None:
        """What was sampled of a turn that is under way or was cancelled lately; None if nothing is known of it."""
        ...
