"""Fills the pools before a turn's first token: keys and values of all tokens but the last.

    a new prompt    is computed once for all rows that share adapter and tokens
    a later turn    goes on from the kept keys and values of the earlier ones, if this engine had them, as does a chat that begins
                    like an earlier one: its new tokens are computed without padding, in the forward of the step that gives its first token
    prompt_logprobs are computed whole, whatever is kept, and each token gets its score

Rows of different adapters and lengths are computed together. Everything here runs in the engine's thread.

Axes: n rows, T positions, E hidden, K key/value heads, D head size.
"""

import contextlib
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from base_model.stacked import FusedAdapter, LanePlanner
from common.wire.messages import AdapterRef, Array, Tops, TurnRequest
from rollout_service.embedded import kv
from rollout_service.embedded.backbone.interface import EngineBackbone, ForwardPart, ForwardTurn
from rollout_service.embedded.meter import Meter
from rollout_service.embedded.pools import EngineLimits, Pools, rounded
from rollout_service.embedded.prefix import CacheByAdapter, PrefixKey, TurnCache
from rollout_service.embedded.row_states import TurnRow
from rollout_service.embedded.sampler import score
from rollout_service.turns import first_scored, prompt_array, prompt_tops

PREFILL_BLOCK = 16
"""A prefill's positions are rounded up to a multiple of this."""
PREFILL_TOKENS = 2048
"""The most positions of one prefill forward, so that rows under way do not wait long; with more to compute, no further row joins."""
SCORES_BYTES = 64 << 20
"""The most bytes of prompt tokens' scores, float32, at once; their log-probs take as many again."""

T = TypeVar("T")
Spent = Callable[[TurnRow, float], None]
"""Called with a row and the seconds that went into it."""
Shares = Sequence[tuple[TurnRow, float]]
"""Rows, and the tokens that are computed for each."""


class Rest(NamedTuple):
    """The tokens left to compute of a row whose beginning was kept."""

    row: TurnRow
    start: int  # tokens whose keys and values it has

    @property
    def num(self) -> int:
        return len(self.row.request.transcript) - 1 - self.start


class Extension(NamedTuple):
    """The rest of some rows, as the beginning of a forward: tokens [N] at their positions [N]."""

    tokens: np.ndarray
    positions: np.ndarray
    spans: Sequence[kv.NewTokens]
    adapters: Sequence[FusedAdapter | None]  # of each token
    shares: Shares

    @property
    def num(self) -> int:
        return len(self.tokens)


def prefix_key(row: TurnRow) -> PrefixKey:
    return row.request.adapter, row.request.transcript.ids[:-4], row.request.tenant


class Prefill:
    """Prefills rows, and keeps the results for later ones."""

    def __init__(self, model: EngineBackbone, pools: Pools, meter: Meter, spent: Spent, limits: EngineLimits) -> None:
        self._model = model
        self._pools = pools
        self._meter = meter
        self._spent = spent
        self._planner = LanePlanner(model.embedding.device, PREFILL_BLOCK, budget_bytes=limits.prefill_lanes)
        self._prefixes = CacheByAdapter[PrefixKey, Tensor](limits.prefixes, lambda states: states.nbytes)
        self.turns = TurnCache(limits.turns)
        self._piece = max(1, SCORES_BYTES // (4 * model.config.vocab))
        self.busy_s = 0.0

    def num_new(self, row: TurnRow) -> int:
        """The tokens that `fill` would compute for a row alone; 0 for one that has kept ones before it."""
        key, request = prefix_key(row), row.request
        kept = not request.sampling.prompt_logprobs and (self.turns.knows(request) or key in self._prefixes)
        return 0 if kept else len(key[1]) // 4

    def forget(self, adapter: AdapterRef) -> None:
        self._prefixes.drop(adapter)
        self.turns.drop(adapter)

    def clear(self) -> None:
        self._prefixes.clear()
        self.turns.clear()

    def fill(self, rows: Sequence[TurnRow]) -> list[Rest]:
        """Prefills rows with places in the pools; returns what is left to compute, with the next token or before."""
        rests: list[Rest] = []
        new: dict[PrefixKey, list[TurnRow]] = {}
        for row in rows:
            pool, key, past = self._pools.of(row), prefix_key(row), self.turns.take(row.request)
            self._meter.joined(row.request.turn, is_hit=past is not None and row.request.turn > 0)
            if row.request.sampling.prompt_logprobs:
                row.prompt_logprobs, row.prompt_top_logprobs = prompt_array(row.request, ()), []
                new.setdefault(key, []).append(row)
            elif past is not None:
                pool.put(row.slot, past)
                rests.append(Rest(row, past.shape[1]))
            elif (cached := self._prefixes.get(key)) is not None:
                pool.put(row.slot, cached)
            else:
                new.setdefault(key, []).append(row)
        self._prefill({key: same for key, same in new.items() if key[1]})
        *early, last = [*_within((rest for rest in rests if rest.num), PREFILL_TOKENS)] or [[]]
        for part in early:
            self._extend(part)
        return last

    # ---- new prompts ------------------------------------------------------------------------------------------------

    def _prefill(self, new: dict[PrefixKey, list[TurnRow]]) -> None:
        """Computes each distinct prefix once for all its rows, grouped by padded length and rank."""
        groups: dict[tuple[int, int], list[PrefixKey]] = {}
        for key, same in new.items():
            groups.setdefault(_class_of(same[0], len(key[1]) // 4), []).append(key)
        for (width, _), members in groups.items():
            for part in _parts(members, width):
                self._compute(part, [new[key] for key in part], width)

    def _compute(self, keys: list[PrefixKey], sharing: list[list[TurnRow]], width: int) -> None:
        nums = [len(key[1]) // 4 for key in keys]
        shares = [(row, num / len(same)) for num, same in zip(nums, sharing, strict=True) for row in same]
        with self._metered(shares, len(keys) * width):
            tokens = np.zeros((len(keys), width), np.int32)
            for own, num, key in zip(tokens, nums, keys, strict=True):
                own[:num] = np.frombuffer(key[1], "<i4")
            positions = np.tile(np.minimum(np.arange(width), self._model.config.context - 1), len(keys))
            firsts = [(pool := self._pools.of(same[0]), pool.row(same[0].slot)) for same in sharing]
            attend = kv.PrefillAttend(self._model.config, firsts, nums, width)
            adapters = [same[0].adapter for same in sharing]
            named = [a for a in adapters if a is not None]  # all or none: these are of one rank class
            products = self._planner.plan_sequences(named, width) if named else []
            turns = [
                ForwardTurn([(row.slot, row.length_class) for row in same], num, same[0].adapter)
                for num, same in zip(nums, sharing, strict=True)
            ]
            part = ForwardPart(tokens.size, attend, products, turns, width)
            hidden = self._forward(tokens.ravel(), positions, part)
        for key, same, states in zip(keys, sharing, hidden.split(width), strict=True):
            self._share(key, same)
            self._score([row for row in same if row.request.sampling.prompt_logprobs], states)

    def _share(self, key: PrefixKey, same: list[TurnRow]) -> None:
        """Gives the first row's keys and values to the others, and keeps them for later rows."""
        pool, first, num = self._pools.of(same[0]), same[0].slot, len(key[1]) // 4
        for row in same[1:]:
            pool.copy(first, self._pools.of(row), row.slot, num)
        if self._prefixes.make_room(num * self._pools.token_bytes):
            self._prefixes.put(key, pool.kept(first, num))

    def _score(self, rows: Sequence[TurnRow], hidden: Tensor) -> None:
        """Gives rows of one prefix their prompts' log-probs. hidden [T, E]: a state for each prefix token."""
        known: dict[tuple[Any, ...], tuple[Array, Tops]] = {}
        for row in rows:
            started, sampling = time.perf_counter(), row.request.sampling
            how = (sampling.prompt_logprobs, sampling.num_top_logprobs, sampling.temperature)
            asked = (row.request.transcript.ids, row.request.num_prompt, *how)
            if asked not in known:
                known[asked] = self._prompt_logprobs(row.request, hidden)
            row.prompt_logprobs, row.prompt_top_logprobs = known[asked]
            seconds = time.perf_counter() - started
            self.busy_s += seconds
            self._spent(row, seconds)

    def _prompt_logprobs(self, request: TurnRequest, hidden: Tensor) -> tuple[Array, Tops]:
        first, num, num_top = first_scored(request), request.num_prompt, request.sampling.num_top_logprobs
        tokens = torch.from_numpy(request.tokens.numpy()[first:num].astype(np.int64)).to(hidden.device)
        temperature = request.sampling.temperature or 1.0
        states, piece = hidden[first - 1 : num - 1], self._piece
        own, *best = score(self._model.logits, states, tokens, temperature=temperature, piece=piece, num_top=num_top)
        tops = [[*zip(ids, values, strict=True)] for values, ids in zip(*(each.tolist() for each in best), strict=True)]
        return prompt_array(request, own.cpu().numpy()), prompt_tops(request, tops)

    # ---- later turns ------------------------------------------------------------------------------------------------

    def keep(self, row: TurnRow, tokens: bytes) -> None:
        """Keeps a row's keys and values for its trajectory's next turn. `tokens`: those computed, i4."""
        num = len(tokens) // 4
        if self.turns.make_room(num * self._pools.token_bytes):
            self.turns.keep(row.request, tokens, self._pools.of(row).kept(row.slot, num))

    def extension(self, rests: Sequence[Rest]) -> Extension:
        """Puts the rests of rows end to end, all lengths, ranks and pools together."""
        placed = sorted(((self._span(rest), rest) for rest in rests), key=lambda pair: pair[0].kind)
        spans = [span for span, _ in placed]
        return Extension(
            np.concatenate([rest.row.request.tokens.numpy()[rest.start : -1] for _, rest in placed]),
            np.concatenate([np.arange(span.start, span.start + span.num) for span in spans]),
            spans,
            [rest.row.adapter for _, rest in placed for _ in range(rest.num)],
            [(rest.row, rest.num) for rest in rests],
        )

    def part(self, extension: Extension) -> ForwardPart:
        """Makes a part of a forward of it, with attention and adapters of its own."""
        attend = kv.ExtendAttend(self._model.config, extension.spans)
        return ForwardPart(extension.num, attend, self._planner.plan(extension.adapters, extension.num))

    def _span(self, rest: Rest) -> kv.NewTokens:
        pool = self._pools.of(rest.row)
        return kv.NewTokens(pool, pool.row(rest.row.slot), rest.start, rest.num)

    def _extend(self, rests: Sequence[Rest]) -> None:
        with self._metered([(rest.row, rest.num) for rest in rests], sum(rest.num for rest in rests)):
            extension = self.extension(rests)
            self._forward(extension.tokens, extension.positions, self.part(extension))

    # ---- both -------------------------------------------------------------------------------------------------------

    def _forward(self, tokens: np.ndarray, positions: np.ndarray, part: ForwardPart) -> Tensor:
        """Runs one forward over tokens [N] at their positions [N]; returns the hidden states [N, E]."""
        inputs = torch.from_numpy(np.stack([tokens, positions]).astype(np.int64)).to(self._model.embedding.device)
        return self._model.forward(inputs[0], inputs[1], [part])

    @contextlib.contextmanager
    def _metered(self, shares: Shares, num_positions: int) -> Generator[None]:
        """Counts a forward. `shares`: of its tokens, each row's; the other positions are padding."""
        started, since = time.perf_counter(), self._meter.now()
        yield
        self.count(shares, num_positions, self._meter.now() - since, time.perf_counter() - started)

    def count(self, shares: Shares, num_positions: int, computed_s: float, seconds: float) -> None:
        """Counts tokens and time: of the meter's clock, and of the wall's."""
        total = sum(num for _, num in shares)
        self._meter.prefilled(round(total), num_positions, computed_s)
        self.busy_s += seconds
        for row, num in shares:
            self._spent(row, seconds * num / total)


def _within(rests: Iterable[Rest], num_tokens: int) -> Iterator[list[Rest]]:
    """Cuts them into parts of so many tokens, or of one row."""
    part: list[Rest] = []
    for rest in rests:
        if part and sum(each.num for each in part) + rest.num > num_tokens:
            yield part
            part = []
        part.append(rest)
    if part:
        yield part


def _class_of(row: TurnRow, num_tokens: int) -> tuple[int, int]:
    """The padded length and rank that rows of one forward have in common."""
    return rounded(num_tokens, PREFILL_BLOCK), row.adapter.rank if row.adapter else 0


def _parts(members: list[T], width: int) -> list[list[T]]:
    size = max(1, PREFILL_TOKENS // width)
    return [members[first : first + size] for first in range(0, len(members), size)]
