"""Keeps the state of each row under way, as arrays over slots, so that a step costs no Python per row.

A row keeps its slot from admission to its end; its place in a forward changes as others come and go.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from base_model.stacked import FusedAdapter
from common.rng import key_of, uniform_rows
from common.wire.messages import EMPTY_F32, Array, StopReason, Tops, TurnRequest
from rollout_service.embedded.backbone.compiling import Compiled
from rollout_service.engine import OnToken
from rollout_service.grammar import Guide

DRAWN_AHEAD = 64
"""Uniform numbers are drawn for so many positions of a row at once."""
NO_TOKEN = -1


@dataclass(slots=True, eq=False)
class TurnRow:
    """One turn under way."""

    request: TurnRequest
    adapter: FusedAdapter | None  # None: the bare base model
    handle: Any  # of the caller to tell, opaque here
    on_token: OnToken | None = None
    slot: int = -1
    length_class: int = 0  # of its pool
    stop_string: str = ""
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list[list[tuple[int, float]]])
    prompt_logprobs: Array = EMPTY_F32  # see `Generated`
    prompt_top_logprobs: Tops = field(default_factory=Tops)
    guide: Guide | None = None  # of a turn with a grammar


class RowStates:
    """The rows under way, by slot."""

    def __init__(
        self, num: int, end_ids: Sequence[int], context: int, compiled: Callable[[], Compiled | None] = lambda: None
    ) -> None:
        """`end_ids`: end turns whose requests name none. `context`: most tokens of a sequence. `compiled`: tells what draws faster."""
        self._served = context
        self._compiled = compiled
        self._end_ids = end_ids
        self.rows: list[TurnRow | None] = [None] * num
        self.free = list(range(num - 1, -1, -1))
        self.ends = np.full((num, len(end_ids)), NO_TOKEN)  # the tokens that end each row's turn
        self.last = np.zeros(num, np.int64)  # the newest token, not yet in the cache
        self.length = np.zeros(num, np.int64)  # tokens of the sequence, `last` included
        self.count = np.zeros(num, np.int64)  # tokens of this turn
        self.limit = np.zeros(num, np.int64)  # the most tokens of this turn
        self.context = np.zeros(num, np.int64)  # the most tokens of the sequence
        self.busy_s = np.zeros(num)
        self.tokens = np.zeros((num, 64), np.int32)
        self.logprobs = np.zeros((num, 64), np.float32)
        self._keys = np.zeros((num, 2), np.uint64)
        self._coordinates = np.zeros((num, 3), np.uint64)  # group, sample, turn
        self._drawn = np.zeros((num, DRAWN_AHEAD))

    def take(self, row: TurnRow) -> int:
        """Gives the row a slot; the tokens that its request brought count as sampled."""
        request, slot = row.request, self.free[-1]
        partial, tokens = request.num_partial, request.tokens.numpy()
        self.length[slot] = len(tokens)
        self.count[slot] = partial
        self.limit[slot] = request.sampling.max_tokens
        self.context[slot] = request.sampling.context(self._served)
        self.busy_s[slot] = 0.0
        self._end_with(slot, self._end_ids if request.sampling.stop_ids is None else request.sampling.stop_ids)
        self._widen(max(request.sampling.max_tokens, partial))
        if len(tokens):
            self.last[slot] = tokens[-1]
        if partial:
            self.tokens[slot, :partial] = tokens[-partial:]
            self.logprobs[slot, :partial] = request.logprobs.numpy()[-partial:]
        ref = request.trajectory
        self._keys[slot] = key_of(*ref.sampling_stream)
        self._coordinates[slot] = [v & 0xFFFFFFFF for v in (ref.group, ref.sample, request.turn)]
        self.free.pop()  # after all that a faulty request could make fail
        self.rows[slot] = row
        row.slot = slot  # last: from here on other threads may read its progress
        return slot

    def leave(self, row: TurnRow) -> None:
        self.rows[row.slot] = None
        self.free.append(row.slot)

    def uniforms(self, slots: np.ndarray) -> np.ndarray:
        """float64 [n]: the number that decides each row's next token."""
        return self._drawn[slots, self.count[slots] % DRAWN_AHEAD]

    def append(self, slots: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray) -> np.ndarray:
        """Adds one token a row; returns which rows ended, or have log-probs that are not numbers: bool [n]."""
        count = self.count[slots]
        self.tokens[slots, count] = tokens
        self.logprobs[slots, count] = logprobs
        self.last[slots] = tokens
        count += 1
        self.count[slots] = count
        self.length[slots] += 1
        used_up = count % DRAWN_AHEAD == 0
        if used_up.any():
            self.draw(slots[used_up])
        is_end = (self.ends[slots] == tokens[:, None]).any(axis=1)
        ended = is_end | (count >= self.limit[slots]) | (self.length[slots] >= self.context[slots])
        return ended | np.isnan(logprobs)

    def stop_reason(self, slot: int) -> StopReason | None:
        """The reason why the row has ended, apart from stop strings; None if it has not."""
        count = self.count[slot]
        if count and self.tokens[slot, count - 1] in self.ends[slot]:
            return "stop"
        if count >= self.limit[slot]:
            return "length"
        return "context" if self.length[slot] >= self.context[slot] else None

    def sampled(self, slot: int, first: int = 0) -> tuple[list[int], list[float]]:
        """The turn's tokens from `first` on, and their log-probs."""
        count = self.count[slot]
        return self.tokens[slot, first:count].tolist(), self.logprobs[slot, first:count].tolist()

    def draw(self, slots: np.ndarray) -> None:
        """Draws the next numbers of rows: of those that just joined, or with none left."""
        first = (self.count[slots] // DRAWN_AHEAD * DRAWN_AHEAD).astype(np.uint64)
        keys, coordinates, drawn = self._keys[slots], self._coordinates[slots], np.empty((len(slots), DRAWN_AHEAD))
        if (compiled := self._compiled()) is not None:
            compiled.draw(keys, coordinates, first, drawn)
        else:
            positions = first[:, None] + np.arange(DRAWN_AHEAD, dtype=np.uint64)
            drawn = uniform_rows(keys, *coordinates.T[:, :, None], positions)
        self._drawn[slots] = drawn

    def _end_with(self, slot: int, tokens: Sequence[int]) -> None:
        if (extra := len(tokens) - self.ends.shape[1]) > 0:
            self.ends = np.pad(self.ends, ((0, 0), (0, extra)), constant_values=NO_TOKEN)
        self.ends[slot] = NO_TOKEN
        self.ends[slot, : len(tokens)] = tokens

    def _widen(self, tokens: int) -> None:
        width = self.tokens.shape[1]
        if tokens <= width:
            return
        extra = (1 << (min(tokens, self._served) - 1).bit_length()) - width
        if extra > 0:
            self.tokens = np.pad(self.tokens, ((0, 0), (0, extra)))
            self.logprobs = np.pad(self.logprobs, ((0, 0), (0, extra)))
