"""Computes what the cache must hold before a turn's first token: keys and values of all tokens but the last.

    a new prompt    is computed once for all rows that share adapter and tokens
    a later turn    goes on from the kept keys and values of the earlier ones, if this engine had them

Rows of different adapters and lengths are computed together. Everything here runs in the engine's thread.

Axes: n rows, T positions, K key/value heads, D head size.
"""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from base_model.stacked import FusedAdapter, LanePlanner, Product
from common.messages import AdapterRef
from rollout_service.embedded import kv
from rollout_service.embedded.fused import FusedDecoder, QkvAttend
from rollout_service.embedded.meter import Meter
from rollout_service.embedded.prefix import PrefixCache, PrefixKey, TurnCache
from rollout_service.embedded.seats import TurnRow

PREFILL_BLOCK = 16
"""A prefill's positions are rounded up to a multiple of this."""
PREFILL_TOKENS = 2048
"""The most positions of one prefill forward, so that rows under way do not wait long."""

T = TypeVar("T")
Spent = Callable[[TurnRow, float], None]
"""Called with a row and the seconds that went into it."""


def prefix_key(row: TurnRow) -> PrefixKey:
    return row.request.adapter, row.request.tokens.data[:-4]


class Prefill:
    """Prefills rows, and keeps the results for later ones."""

    def __init__(
        self,
        model: FusedDecoder,
        meter: Meter,
        spent: Spent,
        *,
        prefix_bytes: int,
        turn_bytes: int,
        lane_rows: int,
    ) -> None:
        """`prefix_bytes`, `turn_bytes`: for keys and values of prompts, and of trajectories between two turns."""
        self._model = model
        self._meter = meter
        self._spent = spent
        self._planner = LanePlanner(model.embedding.device, lane_rows)
        self._prefixes = PrefixCache(prefix_bytes)
        self.turns = TurnCache(turn_bytes)
        self.busy_s = 0.0

    def forget(self, adapter: AdapterRef) -> None:
        self._prefixes.drop(adapter)
        self.turns.drop(adapter)

    def clear(self) -> None:
        self._prefixes.clear()
        self.turns.clear()

    # ---- new prompts ------------------------------------------------------------------------------------------------

    def prefixes(self, rows: Sequence[TurnRow]) -> dict[PrefixKey, Tensor]:
        """Finds each distinct prefix, [layers, T, 2K, D], in the cache or computes it, those of like padded length and rank together."""
        found: dict[PrefixKey, Tensor] = {}
        sharing: dict[PrefixKey, list[TurnRow]] = {}
        for row in rows:
            key = prefix_key(row)
            cached = self._prefixes.get(key)
            if cached is not None:
                found[key] = cached
            elif key[1]:
                sharing.setdefault(key, []).append(row)
        groups: dict[tuple[int, int], list[PrefixKey]] = {}
        for key, same in sharing.items():
            groups.setdefault(_class_of(same[0], len(key[1]) // 4), []).append(key)
        for (width, _), members in groups.items():
            for part in _parts(members, width):
                found |= self._compute(part, [sharing[key] for key in part], width)
        return found

    def _compute(self, keys: list[PrefixKey], sharing: list[list[TurnRow]], width: int) -> dict[PrefixKey, Tensor]:
        lengths = [len(key[1]) // 4 for key in keys]
        tokens = [np.frombuffer(key[1], "<i4") for key in keys]
        attend = kv.PrefillAttend(self._model.config, len(keys))
        self._forward(tokens, [0] * len(keys), width, attend, sharing)
        kept = attend.kept()
        result = {key: kept[i, :, : lengths[i]].clone() for i, key in enumerate(keys)}
        for key, prefix in result.items():
            self._prefixes.put(key, prefix)
        return result

    # ---- later turns ------------------------------------------------------------------------------------------------

    def extend(self, pool: kv.Pool, rows: Sequence[tuple[TurnRow, int]]) -> None:
        """Computes the rest of `rows` of a pool, each with the number of tokens whose keys and values it has already."""
        groups: dict[tuple[int, int], list[tuple[TurnRow, int]]] = {}
        for row, start in rows:
            if (num := len(row.request.tokens) - 1 - start) > 0:
                groups.setdefault(_class_of(row, num), []).append((row, start))
        for (width, _), members in groups.items():
            for part in _parts(members, width):
                tokens = [row.request.tokens.numpy()[start:-1] for row, start in part]
                starts = [start for _, start in part]
                places = [pool.seats.index(row.seat) for row, _ in part]
                attend = kv.ExtendAttend(self._model.config, pool, places, starts, [len(t) for t in tokens], width)
                self._forward(tokens, starts, width, attend, [[row] for row, _ in part])

    # ---- both -------------------------------------------------------------------------------------------------------

    def _forward(
        self, tokens: Sequence[np.ndarray], starts: list[int], width: int, attend: QkvAttend, rows: list[list[TurnRow]]
    ) -> None:
        """Runs one forward of sequences that begin at `starts`, each for all of its `rows`."""
        started, since = time.perf_counter(), self._meter.now()
        device, context = self._model.embedding.device, self._model.config.context
        padded = np.zeros((len(tokens), width), np.int64)
        for index, own in enumerate(tokens):
            padded[index, : len(own)] = own
        positions = np.minimum(np.array(starts)[:, None] + np.arange(width), context - 1)
        inputs, places = (torch.from_numpy(values.reshape(-1)).to(device) for values in (padded, positions))
        self._model.forward(inputs, places, attend, self._products([same[0].adapter for same in rows]))
        total = sum(map(len, tokens))
        self._meter.prefilled(total, padded.size, since)
        seconds = time.perf_counter() - started
        self.busy_s += seconds
        for own, same in zip(tokens, rows, strict=True):
            for row in same:
                self._spent(row, seconds * len(own) / total / len(same))

    def _products(self, adapters: list[FusedAdapter | None]) -> list[Product]:
        named = [a for a in adapters if a is not None]  # all or none: a prefill is of one rank class
        return self._planner.plan_sequences(named) if named else []


def _class_of(row: TurnRow, num_tokens: int) -> tuple[int, int]:
    """The padded length and rank that rows of one forward have in common."""
    return kv.rounded(num_tokens, PREFILL_BLOCK), row.adapter.rank if row.adapter else 0


def _parts(members: list[T], width: int) -> list[list[T]]:
    size = max(1, PREFILL_TOKENS // width)
    return [members[first : first + size] for first in range(0, len(members), size)]
