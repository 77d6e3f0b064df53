"""Holds the keys and values of the rows under way: a pool for each length class, so that short rows do not pay for long ones.

A pool has a tensor [rows, length, 2K, D] for each layer (K key heads, then K value heads). Rows stand without gaps: when one
leaves, the last takes its place. What follows a row's own tokens is masked but must be finite, so a row with NaN, or of a
huge adapter, is cleared when it leaves. How the memory is divided (`EngineLimits`):

    kv_bytes ─┬─ pools        rows under way, and one layer of a pool that is being resized
              ├─ prefixes     prompts that are kept for neighbours
              ├─ turns        trajectories that are kept for their next turn
              └─ lanes        copies of adapters' factors: of steps, and of prefills

Each part keeps to its own. The activations of a forward come on top: those of its rows, or of a prefill's positions.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from base_model.kernels import DEFAULT
from common.errors import InvalidInput
from common.models.footprint import cache_room, fitting_context
from rollout_service.embedded.backbone.interface import ModelShape
from rollout_service.embedded.row_states import TurnRow

MIN_LENGTH = 64
FIRST_ROWS = 4
"""Rows of a new pool; it grows to twice its rows. Fewer where memory is short."""
BLOCK = 32
"""Attention is computed over a length rounded up to this."""
KEPT_PART = 16
"""Prefixes take at most this part of the memory, and turns another."""
STEP_LANES_PART, PREFILL_LANES_PART = 8, 16


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Sizes of one engine."""

    slots: int = 64  # rows under way at once
    kv_bytes: int = 1 << 30  # all of the above together; rows that do not fit wait
    prefix_bytes: int = 64 << 20  # the most of it for prefixes
    turn_bytes: int = 64 << 20  # and for turns; none in deterministic mode
    min_rows: int = DEFAULT.min_rows  # of a forward, and of an adapter's product in it
    exact: bool = False  # deterministic mode: a row's bits do not depend on how long its neighbours are

    @property
    def prefixes(self) -> int:
        """Bytes, as all of these."""
        return min(self.prefix_bytes, self.kv_bytes // KEPT_PART)

    @property
    def turns(self) -> int:
        return 0 if self.exact else min(self.turn_bytes, self.kv_bytes // KEPT_PART)

    @property
    def step_lanes(self) -> int:
        return self.kv_bytes // STEP_LANES_PART

    @property
    def prefill_lanes(self) -> int:
        return self.kv_bytes // PREFILL_LANES_PART

    @property
    def pools(self) -> int:
        return self.kv_bytes - self.prefixes - self.turns - self.step_lanes - self.prefill_lanes


def rounded(length: int, multiple: int = BLOCK) -> int:
    return -(-length // multiple) * multiple


def length_class(length: int, context: int) -> int:
    """The smallest power of two that holds `length` (at least MIN_LENGTH), or the whole context."""
    return min(max(MIN_LENGTH, 1 << (length - 1).bit_length()), rounded(context))


class Pool:
    """The rows of one length class. `slots[r]` is the slot of row r."""

    def __init__(self, length: int, layers: list[Tensor], slots: list[int]) -> None:
        self.length = length
        self.layers = layers
        self.slots = slots

    @classmethod
    def empty(cls, config: ModelShape, length: int, like: Tensor) -> "Pool":
        shape = (0, length, 2 * config.num_kv_heads, config.head_dim)
        return cls(length, [like.new_zeros(shape) for _ in range(config.num_layers)], [])

    @property
    def num_rows(self) -> int:
        """Rows that there is memory for."""
        return len(self.layers[0])

    def row(self, slot: int) -> int:
        return self.slots.index(slot)

    def only(self, slot: int) -> "Pool":
        """One row as a pool of its own, in the same memory; it counts until rows come or go."""
        row = self.row(slot)
        return Pool(self.length, [layer[row : row + 1] for layer in self.layers], [slot])

    def put(self, slot: int, past: Tensor) -> None:
        """Gives a row the keys and values of its first T tokens, [layers, T, 2K, D]."""
        row = self.row(slot)
        for layer, values in zip(self.layers, past, strict=True):
            layer[row, : len(values)] = values

    def copy(self, slot: int, other: "Pool", to_slot: int, num_tokens: int) -> None:
        """Gives a row of `other` the keys and values of this row's first tokens."""
        row, to_row = self.row(slot), other.row(to_slot)
        for layer, target in zip(self.layers, other.layers, strict=True):
            target[to_row, :num_tokens] = layer[row, :num_tokens]

    def kept(self, slot: int, num_tokens: int) -> Tensor:
        """A copy of the keys and values of a row's first tokens, [layers, T, 2K, D]."""
        row = self.row(slot)
        return torch.stack([layer[row, :num_tokens] for layer in self.layers])

    def remove(self, slot: int, lengths: np.ndarray, *, clear: bool = False) -> None:
        """Gives its place to the last row. `lengths`: rows' tokens, by slot; nothing behind them is copied."""
        # Rows stand without gaps, so that a forward reads each pool as one slice. What follows a row's tokens is masked by adding minus
        # infinity to its scores: old numbers there are harmless, NaN is not (0 * NaN is NaN), nor are keys so large that a query makes
        # infinity of them (less infinity it is NaN). So a row that may hold such is cleared.
        row, last = self.row(slot), len(self.slots) - 1
        num = lengths[self.slots[last]]
        for layer in self.layers:
            if row != last:
                layer[row, :num] = layer[last, :num]
            if clear:
                layer[row, num:] = layer[last] = 0
        self.slots[row] = self.slots[last]
        self.slots.pop()

    def resize(self, num_rows: int) -> None:
        """Makes memory for so many rows, layer by layer: of only one layer the old and the new live together."""
        kept = len(self.slots)
        for number, old in enumerate(self.layers):
            new = old.new_zeros(num_rows, *old.shape[1:])
            new[:kept] = old[:kept]
            self.layers[number] = new
            del old


class Pools:
    """The pools of all length classes. Together they take at most `budget_bytes`, also while one is resized."""

    def __init__(self, config: ModelShape, like: Tensor, budget_bytes: int) -> None:
        """Raises InvalidInput if not even one row of the whole context fits."""
        self._config, self._like = config, like
        self.token_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * like.element_size()
        whole = self.token_bytes * length_class(config.context, config.context)
        self._room = cache_room(budget_bytes, config.num_layers)
        if self._room < whole:
            fits = fitting_context(budget_bytes, config.num_layers, self.token_bytes)
            lower = f", or set MARLAAS_MAX_CONTEXT={fits} for all services" if fits else ""
            raise InvalidInput(
                f"the memory for keys and values does not hold one row of the model's whole context of {config.context} tokens,"
                f" which takes {whole} bytes: {self._room} are left for rows; raise MARLAAS_ROLLOUT_KV_BYTES{lower}"
            )
        self._pools: dict[int, Pool] = {}
        self._reserved = 0

    @property
    def tokens(self) -> int:
        """Tokens that fit together; each row takes the length class of its greatest possible length."""
        return self._room // self.token_bytes

    def __iter__(self) -> Iterator[Pool]:
        return iter(self._pools.values())

    def of(self, row: TurnRow) -> Pool:
        return self._pools[row.length_class]

    def reserve(self, row: TurnRow, length: int) -> bool:
        """Reserves what a row of this length may need until `release`; False if it does not fit now."""
        row.length_class = length_class(length, self._config.context)
        needed = self.token_bytes * row.length_class
        fits = self._reserved + needed <= self._room
        self._reserved += needed if fits else 0
        return fits

    def release(self, row: TurnRow) -> None:
        self._reserved -= self.token_bytes * row.length_class

    def add(self, row: TurnRow) -> Pool:
        """Gives a row with a reservation its place."""
        pool = self._pools.get(row.length_class)
        if pool is None:
            pool = self._pools[row.length_class] = Pool.empty(self._config, row.length_class, self._like)
        if len(pool.slots) == pool.num_rows:
            self._grow(pool)
        pool.slots.append(row.slot)
        return pool

    def clear(self) -> None:
        self._pools.clear()
        self._reserved = 0

    def relax(self) -> None:
        """Gives back the memory of all pools, which must be empty."""
        self._pools.clear()

    def _grow(self, pool: Pool) -> None:
        """Makes room for a row or more; gives back others' spare rows that are in the way."""
        if not (more := self._rows_left(pool)):
            for other in self._pools.values():
                if other is not pool and other.num_rows > len(other.slots):
                    other.resize(len(other.slots))
            more = self._rows_left(pool)
        assert more, "a row without a reservation"
        pool.resize(pool.num_rows + min(max(FIRST_ROWS, pool.num_rows), more))

    def _rows_left(self, pool: Pool) -> int:
        taken = sum(each.num_rows * each.length for each in self._pools.values()) * self.token_bytes
        return (self._room - taken) // (self.token_bytes * pool.length)
