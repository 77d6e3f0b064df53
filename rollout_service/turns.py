"""Checks a request, finds stop strings, and keeps the turns under way, for every engine. For one event loop."""

import asyncio
import contextlib
import math
from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from typing import Generic, TypeVar

import numpy as np

from common.errors import InvalidInput
from common.wire.messages import BASE, AdapterRef, Array, Sampling, Tops, TurnRequest, f32
from rollout_service.engine import Partial

MAX_KEPT_PARTIALS = 1024
MAX_STOP_IDS = 128
"""Each step of the torch engine compares with as many ids as some turn has had."""
STOP_MARGIN = 4
"""Tokens decoded beyond a stop string's bytes in the search for it: one character may need so many."""
END_CHARACTERS = 3
"""A stop string's last characters, which are looked for first."""

T = TypeVar("T")


def weights_of(request: TurnRequest) -> AdapterRef:
    """The weights that compute the turn. Caches and results name `request.adapter` all the same."""
    return BASE if request.untrained else request.adapter


def check_request(request: TurnRequest, *, vocab: int, context: int, max_temperature: float = math.inf) -> None:
    """Raises InvalidInput for a request that cannot be computed. `context`: most tokens of a sequence."""
    tokens, sampling = request.tokens.numpy(), request.sampling
    if request.num_prompt < 1 or request.num_partial < 0:
        raise InvalidInput("a turn needs at least one token before it")
    if tokens.min() < 0 or tokens.max() >= vocab:
        raise InvalidInput("a token is outside of the base model's vocabulary")
    if sampling.prompt_logprobs and request.num_prompt >= context:
        raise InvalidInput(f"prompt_logprobs needs a prompt of fewer tokens than the context, which has {context}")
    if not 0 <= sampling.temperature <= max_temperature:
        raise InvalidInput(f"this engine's temperature lies in [0, {max_temperature:g}]")
    _check_sampling(sampling, vocab)


def _check_sampling(sampling: Sampling, vocab: int) -> None:
    if sampling.max_tokens < 0 or not 0 < sampling.top_p <= 1:
        raise InvalidInput("max_tokens must be at least 0, which samples nothing, top_p in (0, 1]")
    if sampling.top_k < 0:
        raise InvalidInput("top_k must be 0, for all tokens, or more")
    if not 0 <= sampling.num_top_logprobs <= vocab:
        raise InvalidInput("num_top_logprobs must be between 0 and the size of the base model's vocabulary")
    if sampling.prompt_logprobs < -1:
        raise InvalidInput("prompt_logprobs must be a number of tokens, or -1 for all of the prompt")
    stop_ids = sampling.stop_ids or ()
    if len(stop_ids) > MAX_STOP_IDS or not all(0 <= token < vocab for token in stop_ids):
        raise InvalidInput(f"stop_ids must be at most {MAX_STOP_IDS} ids, all in the base model's vocabulary")


def first_scored(request: TurnRequest) -> int:
    """The index of the first prompt token with a requested log-prob. The very first token has none."""
    asked = request.sampling.prompt_logprobs
    return 1 if asked < 0 else max(1, request.num_prompt - asked)


def prompt_array(request: TurnRequest, scores: Sequence[float] | np.ndarray) -> Array:
    """A prompt's log-probs [num_prompt] from those of its last tokens, from `first_scored` on."""
    whole = np.full(request.num_prompt, np.nan, np.float32)
    whole[request.num_prompt - len(scores) :] = scores
    return f32(whole)


def prompt_tops(request: TurnRequest, tops: Tops) -> Tops:
    """A prompt's alternatives [num_prompt] from those of its last tokens, as `prompt_array`; none if none were asked for."""
    return [[] for _ in range(request.num_prompt - len(tops))] + tops if request.sampling.num_top_logprobs else []


def first_stop(stops: Sequence[str], tokens: Sequence[int], decode: Callable[[Sequence[int]], str]) -> str:
    """The first stop string that the last token completes; "" for none. Its tokens are kept; the reader cuts the text. `decode`:
    ids to text, special tokens included."""
    if not stops:
        return ""
    near = decode(tokens[-(4 * END_CHARACTERS + STOP_MARGIN) :])
    likely = [stop for stop in stops if stop and stop[-END_CHARACTERS:] in near]
    if not likely:  # long strings are compared for few tokens only
        return ""
    text = decode(tokens[-(max(len(stop.encode()) for stop in likely) + STOP_MARGIN) :])
    num_new = len(decode(tokens[-STOP_MARGIN:]))
    return next((stop for stop in likely if stop in text[-len(stop) - num_new :]), "")


class TurnsUnderWay(Generic[T]):
    """The turns of one engine by request id, and the partials of the last cancelled ones."""

    def __init__(self, partial_of: Callable[[T], Partial | None]) -> None:
        """`partial_of`: reports how far a turn has come; None if it has ended."""
        self._partial_of = partial_of
        self._turns: dict[str, T] = {}
        self._cancelled: OrderedDict[str, Partial] = OrderedDict()

    def __len__(self) -> int:
        return len(self._turns)

    def all(self) -> list[T]:
        return list(self._turns.values())

    @contextlib.contextmanager
    def enter(self, request_id: str, turn: T) -> Generator[None]:
        """Lists the turn as under way inside. If it is cancelled there, its partial is kept."""
        self._turns[request_id] = turn
        self._cancelled.pop(request_id, None)
        try:
            yield
        except asyncio.CancelledError:
            self._keep(request_id, self._partial_of(turn))
            raise
        finally:
            if self._turns.get(request_id) is turn:
                del self._turns[request_id]

    def partial(self, request_id: str) -> Partial | None:
        """See `Engine.partial`."""
        turn = self._turns.get(request_id)
        return self._cancelled.get(request_id) if turn is None else self._partial_of(turn)

    def _keep(self, request_id: str, partial: Partial | None) -> None:
        if partial is not None:
            self._cancelled[request_id] = partial
        if len(self._cancelled) > MAX_KEPT_PARTIALS:
            self._cancelled.popitem(last=False)
