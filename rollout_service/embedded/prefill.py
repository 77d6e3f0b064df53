"""Brings into the pools what they must hold before a turn's first token: keys and values of all tokens but the last.

    a new prompt    is computed once for all rows that share adapter and tokens
    a later turn    goes on from the kept keys and values of the earlier ones, if this engine had them
    prompt_logprobs are computed whole, whatever is kept, and each token gets its score

Rows of different adapters and lengths are computed together. Everything here runs in the engine's thread.

Axes: n rows, T positions, E hidden, K key/value heads, D head size.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from base_model.stacked import FusedAdapter, LanePlanner, Product
from common.messages import AdapterRef, Array, TurnRequest
from rollout_service.embedded import kv
from rollout_service.embedded.fused import FusedDecoder, QkvAttend
from rollout_service.embedded.meter import Meter
from rollout_service.embedded.pools import EngineLimits, Pool, Pools, rounded
from rollout_service.embedded.prefix import PrefixCache, PrefixKey, TurnCache
from rollout_service.embedded.sampler import score
from rollout_service.embedded.seats import TurnRow
from rollout_service.turns import first_scored, prompt_array

PREFILL_BLOCK = 16
"""A prefill's positions are rounded up to a multiple of this."""
PREFILL_TOKENS = 2048
"""The most positions of one prefill forward, so that rows under way do not wait long."""
SCORES_BYTES = 64 << 20
"""The most bytes of scores, float32, that prompt tokens are given at once; their log-probs take as many again."""

T = TypeVar("T")
Spent = Callable[[TurnRow, float], None]
"""Called with a row and the seconds that went into it."""


def prefix_key(row: TurnRow) -> PrefixKey:
    return row.request.adapter, row.request.tokens.data[:-4]


class Prefill:
    """Prefills rows, and keeps the results for later ones."""

    def __init__(self, model: FusedDecoder, pools: Pools, meter: Meter, spent: Spent, limits: EngineLimits) -> None:
        self._model = model
        self._pools = pools
        self._meter = meter
        self._spent = spent
        self._planner = LanePlanner(model.embedding.device, limits.min_rows, budget_bytes=limits.prefill_lanes)
        self._prefixes = PrefixCache(limits.prefixes)
        self.turns = TurnCache(limits.turns)
        self._piece = max(1, SCORES_BYTES // (4 * model.config.vocab))
        self.busy_s = 0.0

    def forget(self, adapter: AdapterRef) -> None:
        self._prefixes.drop(adapter)
        self.turns.drop(adapter)

    def clear(self) -> None:
        self._prefixes.clear()
        self.turns.clear()

    def fill(self, rows: Sequence[TurnRow]) -> None:
        """Prefills rows that have their places in the pools."""
        to_extend: dict[Pool, list[tuple[TurnRow, int]]] = {}
        new: dict[PrefixKey, list[TurnRow]] = {}
        for row in rows:
            pool, key, past = self._pools.of(row), prefix_key(row), self.turns.take(row.request)
            if row.request.sampling.prompt_logprobs:
                row.prompt_logprobs = prompt_array(row.request, ())
                new.setdefault(key, []).append(row)
            elif past is not None:
                pool.put(row.seat, past)
                to_extend.setdefault(pool, []).append((row, past.shape[1]))
            elif (cached := self._prefixes.get(key)) is not None:
                pool.put(row.seat, cached)
            else:
                new.setdefault(key, []).append(row)
        self._prefill({key: same for key, same in new.items() if key[1]})
        for pool, members in to_extend.items():
            self._extend(pool, members)

    # ---- new prompts ------------------------------------------------------------------------------------------------

    def _prefill(self, new: dict[PrefixKey, list[TurnRow]]) -> None:
        """Computes each distinct prefix once for all of its rows, those of like padded length and rank together."""
        groups: dict[tuple[int, int], list[PrefixKey]] = {}
        for key, same in new.items():
            groups.setdefault(_class_of(same[0], len(key[1]) // 4), []).append(key)
        for (width, _), members in groups.items():
            for part in _parts(members, width):
                self._compute(part, [new[key] for key in part], width)

    def _compute(self, keys: list[PrefixKey], sharing: list[list[TurnRow]], width: int) -> None:
        tokens = [np.frombuffer(key[1], "<i4") for key in keys]
        firsts = [(pool := self._pools.of(same[0]), pool.row(same[0].seat)) for same in sharing]
        attend = kv.PrefillAttend(self._model.config, firsts, [len(t) for t in tokens], width)
        hidden = self._forward(tokens, [0] * len(keys), width, attend, sharing)
        for key, same, states in zip(keys, sharing, hidden.split(width), strict=True):
            self._share(key, same)
            self._score([row for row in same if row.request.sampling.prompt_logprobs], states)

    def _share(self, key: PrefixKey, same: list[TurnRow]) -> None:
        """Gives the first row's keys and values to the others, and keeps them for later rows."""
        pool, first, num = self._pools.of(same[0]), same[0].seat, len(key[1]) // 4
        for row in same[1:]:
            pool.copy(first, self._pools.of(row), row.seat, num)
        if self._prefixes.make_room(num * self._pools.token_bytes):
            self._prefixes.put(key, pool.kept(first, num))

    def _score(self, rows: Sequence[TurnRow], hidden: Tensor) -> None:
        """Gives rows of one prefix the log-probs of their prompts. hidden [T, E]: a state for each token of the prefix."""
        known: dict[tuple[Any, ...], Array] = {}
        for row in rows:
            started, sampling = time.perf_counter(), row.request.sampling
            asked = (row.request.tokens.data, row.request.num_prompt, sampling.prompt_logprobs, sampling.temperature)
            if asked not in known:
                known[asked] = self._prompt_logprobs(row.request, hidden)
            row.prompt_logprobs = known[asked]
            seconds = time.perf_counter() - started
            self.busy_s += seconds
            self._spent(row, seconds)

    def _prompt_logprobs(self, request: TurnRequest, hidden: Tensor) -> Array:
        first, num = first_scored(request), request.num_prompt
        tokens = torch.from_numpy(request.tokens.numpy()[first:num].astype(np.int64)).to(hidden.device)
        temperature = request.sampling.temperature or 1.0
        scores = score(
            self._model.logits, hidden[first - 1 : num - 1], tokens, temperature=temperature, piece=self._piece
        )
        return prompt_array(request, scores.cpu().numpy())

    # ---- later turns ------------------------------------------------------------------------------------------------

    def keep(self, row: TurnRow, tokens: bytes) -> None:
        """Keeps a row's keys and values for its trajectory's next turn. `tokens`: those of which it has them, i4."""
        num = len(tokens) // 4
        if self.turns.wants(row.request) and self.turns.make_room(num * self._pools.token_bytes):
            self.turns.put(row.request, tokens, self._pools.of(row).kept(row.seat, num))

    def _extend(self, pool: Pool, rows: Sequence[tuple[TurnRow, int]]) -> None:
        """Computes the rest of `rows` of a pool, each with the number of tokens whose keys and values it has already."""
        groups: dict[tuple[int, int], list[tuple[TurnRow, int]]] = {}
        for row, start in rows:
            if (num := len(row.request.tokens) - 1 - start) > 0:
                groups.setdefault(_class_of(row, num), []).append((row, start))
        for (width, _), members in groups.items():
            for part in _parts(members, width):
                tokens = [row.request.tokens.numpy()[start:-1] for row, start in part]
                starts = [start for _, start in part]
                places = [pool.row(row.seat) for row, _ in part]
                attend = kv.ExtendAttend(self._model.config, pool, places, starts, [len(t) for t in tokens], width)
                self._forward(tokens, starts, width, attend, [[row] for row, _ in part])

    # ---- both -------------------------------------------------------------------------------------------------------

    def _forward(
        self, tokens: Sequence[np.ndarray], starts: list[int], width: int, attend: QkvAttend, rows: list[list[TurnRow]]
    ) -> Tensor:
        """Runs one forward of sequences that begin at `starts`, each for all of its `rows`; returns the hidden states."""
        started, since = time.perf_counter(), self._meter.now()
        device, context = self._model.embedding.device, self._model.config.context
        padded = np.zeros((len(tokens), width), np.int64)
        for index, own in enumerate(tokens):
            padded[index, : len(own)] = own
        positions = np.minimum(np.array(starts)[:, None] + np.arange(width), context - 1)
        inputs, places = (torch.from_numpy(values.reshape(-1)).to(device) for values in (padded, positions))
        hidden = self._model.forward(inputs, places, attend, self._products([same[0].adapter for same in rows], width))
        total = sum(map(len, tokens))
        self._meter.prefilled(total, padded.size, since)
        seconds = time.perf_counter() - started
        self.busy_s += seconds
        for own, same in zip(tokens, rows, strict=True):
            for row in same:
                self._spent(row, seconds * len(own) / total / len(same))
        return hidden

    def _products(self, adapters: list[FusedAdapter | None], width: int) -> list[Product]:
        named = [a for a in adapters if a is not None]  # all or none: a prefill is of one rank class
        return self._planner.plan_sequences(named, width) if named else []


def _class_of(row: TurnRow, num_tokens: int) -> tuple[int, int]:
    """The padded length and rank that rows of one forward have in common."""
    return rounded(num_tokens, PREFILL_BLOCK), row.adapter.rank if row.adapter else 0


def _parts(members: list[T], width: int) -> list[list[T]]:
    size = max(1, PREFILL_TOKENS // width)
    return [members[first : first + size] for first in range(0, len(members), size)]
