"""Continuous batching: rows join as slots and memory free up, advance one token a step together, and leave at their end.

    admit   give slots to waiting rows, chats first, tenants in turn; prefill each distinct (adapter, prompt) once, except its last token
    step    one forward with every row's newest token, through its own adapter, behind the new tokens of later turns that have
            just joined; sample; see who has ended

Where either fails for several rows, it is repeated row by row, and only rows that fail by themselves end (`fault_isolation.py`).
A failed attempt leaves no trace: it draws no numbers, and keys and values are rewritten before they are read.

Forwards have 4, 8, 16 or 32 rows, then multiples of 8, in deterministic mode 48, 64, then multiples of 64; at least `min_rows`.
Prefills have a multiple of 16 positions. In deterministic mode a row's bits then do not depend on its neighbours (`selftest.py`
checks that), if nothing is kept between turns (`turn_bytes` 0). All runs in one thread, under torch.inference_mode.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from base_model.device import compute_clock, give_back_memory
from base_model.stacked import LanePlanner
from common.wire.messages import AdapterRef, StopReason
from rollout_service.embedded import kv
from rollout_service.embedded.backbone.captured import CapturedSteps, captured_for
from rollout_service.embedded.backbone.compiling import compiled_for
from rollout_service.embedded.backbone.interface import EngineBackbone, ForwardPart, ForwardTurn, QkvAttend
from rollout_service.embedded.backbone.layout import ForwardLayout, exact_rows, rounded_rows
from rollout_service.embedded.fault_isolation import FailedTurn, outcomes, tried
from rollout_service.embedded.meter import Meter
from rollout_service.embedded.pools import EngineLimits, Pool, Pools
from rollout_service.embedded.prefill import PREFILL_TOKENS, Extension, Prefill, Rest, prefix_key
from rollout_service.embedded.prefix import PrefixKey
from rollout_service.embedded.row_states import RowStates, TurnRow
from rollout_service.embedded.sampler import Allowed, Sampled, SamplingPlan, sample
from rollout_service.engine import Partial
from rollout_service.turns import first_scored, first_stop

WIDE_LANE_ROWS = 8
"""Rows of a lane where an adapter has a group's rows; measured, wider ones are no faster."""
MAX_NEW_TOGETHER = 256
"""New tokens of later turns that share attention and lanes with the newest tokens: more would copy many factors."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A row that has ended."""

    row: TurnRow
    stop_reason: StopReason | None  # None: it failed
    partial: Partial  # the whole turn
    error: Exception | None = None  # why it failed; None: the scores were not numbers


@dataclass(frozen=True, slots=True)
class ComputedStep:
    """The next token of each row of a layout; none has it yet."""

    layout: ForwardLayout
    extension: Extension | None
    tokens: np.ndarray  # int64 [n]
    logprobs: np.ndarray  # float32 [n]
    sampled: Sampled
    started: float  # by the wall's clock
    since: float  # by the meter's


class RunningRows:
    """The rows under way and those that wait."""

    def __init__(
        self,
        model: EngineBackbone,
        *,
        end_ids: Sequence[int],
        decode: Callable[[Sequence[int]], str],
        limits: EngineLimits,
        captured: CapturedSteps | None = None,
    ) -> None:
        """`decode`: token ids to text with special tokens, where stop strings are looked for. `captured`: None: as on this device."""
        config, device = model.config, model.embedding.device
        self._model, self._config, self._device = model, config, device
        self._decode = decode
        self._limits = limits
        self._rounded = exact_rows if limits.exact else rounded_rows
        self._compiled = compiled_for(model.embedding, exact=limits.exact)
        self._states = RowStates(limits.slots, end_ids, config.context, self._compiled)
        self._pools = Pools(config, model.embedding, limits.pools)
        wide = None if limits.exact else WIDE_LANE_ROWS
        self._captured = captured or captured_for(model, limits.step_lanes // 2)
        budget = limits.step_lanes // 2 if self._captured else limits.step_lanes
        self._planner = LanePlanner(device, limits.min_rows, wide_rows=wide, budget_bytes=budget)
        self._waiting: deque[TurnRow] = deque()
        self._layout: ForwardLayout | None = None
        self.meter = Meter(compute_clock(device))
        self._prefill = Prefill(self._model, self._pools, self.meter, self._spent, limits)
        self._rests: list[Rest] = []  # that the rows' next step computes
        self._were_chats = False  # did the last step compute the first tokens of chats?
        self._ended: list[Ended] = []  # that nobody was told of yet
        self._step_s = 0.0  # totals since the start
        self.sampled_tokens = 0

    # ---- what the engine calls -----------------------------------------------------------------------------

    @property
    def num_active(self) -> int:
        return self._limits.slots - len(self._states.free)

    @property
    def busy_s(self) -> float:
        """Seconds in forwards and sampling since the start."""
        return self._step_s + self._prefill.busy_s

    @property
    def kv_tokens(self) -> int:
        """See `Pools.tokens`."""
        return self._pools.tokens

    @property
    def has_work(self) -> bool:
        return bool(self._waiting) or self.num_active > 0

    def active(self) -> list[TurnRow]:
        return [row for row in self._states.rows if row is not None]

    def rows(self) -> list[TurnRow]:
        return [*self.active(), *self._waiting]

    def add(self, row: TurnRow) -> None:
        """Has it wait, chats before others, and of these behind as many of each other tenant as wait of its own."""
        before, chat = Counter[tuple[str, bool]](), row.request.chat
        mine = sum((row.request.tenant, chat) == (other.request.tenant, other.request.chat) for other in self._waiting)
        for place, other in enumerate(self._waiting):
            kind = other.request.tenant, other.request.chat
            if chat > kind[1] or (chat == kind[1] and before[kind] > mine):
                self._waiting.insert(place, row)
                return
            before[kind] += 1
        self._waiting.append(row)

    def abort(self, row: TurnRow) -> None:
        """Removes the row; does nothing if it has ended."""
        if self._has_slot(row):
            self._remove(row, clear=True)
        elif row in self._waiting:
            self._waiting.remove(row)

    def progress(self, row: TurnRow) -> Partial | None:
        """Reports how far the row has come; None if it has ended.

        May be called from another thread: a row's count is raised after its tokens are written.
        """
        states, slot, request = self._states, row.slot, row.request
        if slot < 0:
            tokens, logprobs = (
                each.numpy()[request.num_prompt :].tolist() for each in (request.tokens, request.logprobs)
            )
            return Partial(tokens, logprobs, 0, 0.0)
        tokens, logprobs = states.sampled(slot)
        busy_s = float(states.busy_s[slot])
        if states.rows[slot] is not row:
            return None
        return Partial(tokens, logprobs, len(tokens) - request.num_partial, busy_s)

    def sampled_since(self, row: TurnRow, first: int) -> tuple[list[int], list[float]]:
        """Tokens and log-probs of a row under way from the turn's token `first` on."""
        return self._states.sampled(row.slot, first)

    def forget(self, adapter: AdapterRef) -> None:
        """Drops what is cached under an adapter's name."""
        self._prefill.forget(adapter)

    def clear(self) -> list[TurnRow]:
        """Starts afresh after an error; returns the rows that are lost."""
        lost = [*self.rows(), *(end.row for end in self._ended)]
        self._ended.clear()
        self._waiting.clear()
        self._pools.clear()
        self._prefill.clear()
        self._rests.clear()
        if self._captured:
            self._captured.clear()
        for row in self.active():
            self._states.leave(row)
        self._layout = None
        return lost

    def relax(self) -> None:
        """Gives back memory that only the last rush needed. No row is under way."""
        self._pools.relax()
        if self._captured:
            self._captured.clear()
        give_back_memory()

    def advance(self) -> list[Ended]:
        """Admits rows, then adds one token to every row, or at first to chats that joined: a step of all takes longer, the longer its
        rows are, if it is not captured. Removes and returns the rows that ended."""
        all_at_once = self._were_chats or self._captured
        chats = [row for row in self._admit() if row.request.chat and self._has_slot(row) and not all_at_once]
        self._were_chats = bool(chats)
        if self.num_active:
            self._step(chats or self.active())
        ended, self._ended = self._ended, []
        return ended

    # ---- admission -----------------------------------------------------------------------------------------

    def _admit(self) -> list[TurnRow]:
        """Returns the rows that joined."""
        joined: list[TurnRow] = []
        new = dict[PrefixKey, int]()  # tokens to compute
        while (
            self._waiting and self._states.free and sum(new.values()) < PREFILL_TOKENS and self._fits(self._waiting[0])
        ):
            row = self._waiting.popleft()
            key = prefix_key(row)
            new[key] = max(new.get(key, 0), self._prefill.num_new(row))
            slot = tried(lambda row=row: self._states.take(row))
            if isinstance(slot, Exception):
                self._pools.release(row)
                self._ended.append(Ended(row, None, Partial([], [], 0, 0.0), slot))
            else:
                joined.append(row)
        if not joined:
            return []
        done = [row for row in joined if self._states.stop_reason(row.slot)]  # nothing left to sample
        unread = [row for row in done if not row.request.sampling.prompt_logprobs]
        for row in unread:
            self._end(row, self._states.stop_reason(row.slot), in_pool=False)
        self._join([row for row in joined if row not in unread])
        for row in done:
            if self._has_slot(row):
                self._finish(row, _sum_of_scores(row))
        return joined

    def _fits(self, row: TurnRow) -> bool:
        request = row.request
        context = request.sampling.context(self._config.context)
        longest = min(context, request.num_prompt + request.sampling.max_tokens)
        return self._pools.reserve(row, max(longest, len(request.transcript)))

    def _join(self, joined: list[TurnRow]) -> None:
        if not joined:
            return
        self._states.draw(np.array([row.slot for row in joined]))
        self._layout = None
        for row in joined:
            self._pools.add(row)
        fill = self._prefill.fill
        for outcome in outcomes(joined, lambda: fill(joined), lambda row: fill([row])):
            if isinstance(outcome, FailedTurn):
                self._end(outcome.row, None, error=outcome.error)
            else:
                self._rests += outcome

    # ---- one token -----------------------------------------------------------------------------------------

    def _step(self, rows: list[TurnRow]) -> None:
        rests = self._rests
        self._rests = [rest for rest in rests if rest.row not in rows and self._has_slot(rest.row)]

        def compute(rows: Sequence[TurnRow]) -> ComputedStep:
            return self._compute(rows, [rest for rest in rests if rest.row in rows])

        for outcome in outcomes(rows, lambda: compute(rows), lambda row: compute([row])):
            if isinstance(outcome, FailedTurn):
                self._end(outcome.row, None, error=outcome.error)
            else:
                self._settle(outcome)

    def _compute(self, rows: Sequence[TurnRow], rests: Sequence[Rest]) -> ComputedStep:
        """Computes a step; its rows stay as they are."""
        started, since = time.perf_counter(), self.meter.now()
        layout = self._lay_out_rows(rows)
        extension = self._prefill.extension(rests) if rests else None
        sampled = self._forward(layout, extension)
        both = sampled.both.cpu().numpy()[:, : len(layout.slots)]  # the one transfer
        tokens, logprobs = both[0].astype(np.int64), both[1].astype(np.float32)
        return ComputedStep(layout, extension, tokens, logprobs, sampled, started, since)

    def _settle(self, step: ComputedStep) -> None:
        """Gives the rows their tokens, and removes those that have ended."""
        layout, slots = step.layout, step.layout.slots
        ended = self._states.append(slots, step.tokens, step.logprobs)
        for place in layout.watched:
            row = self._row(int(slots[place]))
            has_stopped = tried(lambda row=row, place=place: self._watch(row, place, step))
            if isinstance(has_stopped, Exception):
                self._end(row, None, error=has_stopped)
                ended[place] = False
            else:
                ended[place] |= has_stopped
        self._count(layout, step.extension, self.meter.now() - step.since, time.perf_counter() - step.started)
        for place in np.flatnonzero(ended):
            self._finish(self._row(int(slots[place])), float(step.logprobs[place]))

    def _count(self, layout: ForwardLayout, extension: Extension | None, computed_s: float, seconds: float) -> None:
        """Counts a step's time, of the meter's clock and of the wall's: each position costs alike."""
        if extension:
            share = extension.num / (extension.num + layout.size)
            self._prefill.count(extension.shares, extension.num, share * computed_s, share * seconds)
            computed_s, seconds = (1 - share) * computed_s, (1 - share) * seconds
        self.meter.stepped(layout.size, computed_s)
        self._step_s += seconds
        self.sampled_tokens += len(layout.slots)
        self._states.busy_s[layout.slots] += seconds / len(layout.slots)

    def _forward(self, layout: ForwardLayout, extension: Extension | None) -> Sampled:
        """One forward of all rows' newest tokens, behind those of `extension`, which they see."""
        num, states = len(layout.slots), self._states
        inputs = np.zeros((2, layout.size), np.int64)
        inputs[0, :num] = states.last[layout.slots]
        inputs[1, :num] = states.length[layout.slots] - 1
        uniforms = states.uniforms(layout.slots)
        if self._captured and not extension and layout is self._layout:
            sampled = self._captured.step(layout, inputs[0, :num], inputs[1, :num], uniforms)
            if sampled is not None:
                return sampled
        before = extension.num if extension else 0
        if extension:
            inputs = np.concatenate([[extension.tokens, extension.positions], inputs], axis=1)
        tokens, positions = torch.from_numpy(inputs).to(self._device)
        parts = self._parts(layout, extension, positions[before : before + num])
        hidden = self._model.forward(tokens, positions, parts)[before:]
        numbers = torch.from_numpy(uniforms).to(self._device)
        return sample(self._model.logits(hidden)[:num], numbers, layout.sampling, self._allowed(layout))

    def _allowed(self, layout: ForwardLayout) -> Allowed | None:
        if not layout.masked:
            return None
        guides = [self._row(int(layout.slots[place])).guide for place in layout.masked]
        tokens = np.stack([guide.allowed() for guide in guides if guide])
        return Allowed(torch.tensor(layout.masked, device=self._device), torch.from_numpy(tokens).to(self._device))

    def _parts(self, layout: ForwardLayout, extension: Extension | None, positions: Tensor) -> list[ForwardPart]:
        """Returns one part for all, or one more for new tokens of later turns if these are many or attention is not compiled.
        `positions` [n]: of rows' newest tokens."""
        compiled = self._compiled()
        if extension and (compiled is None or extension.num > MAX_NEW_TOGETHER):
            return [self._prefill.part(extension), *self._parts(layout, None, positions)]
        if compiled is not None:
            rows = kv.new_rows(layout.pools, positions.numpy(), extension.spans if extension else ())
            return [self._one_part(layout, extension, kv.CompiledAttend(self._config, compiled.attend, rows))]
        longest = [int(self._states.length[pool.slots].max()) for pool in layout.pools]
        places = kv.slices(layout.pools, positions, longest)
        return [self._one_part(layout, None, kv.DecodeAttend(self._config, places, exact=self._limits.exact))]

    def _one_part(self, layout: ForwardLayout, extension: Extension | None, attend: QkvAttend) -> ForwardPart:
        if extension:
            layout.products = None
            size = extension.num + layout.size
            return ForwardPart(size, attend, self._planner.plan([*extension.adapters, *layout.adapters], size))
        if layout.products is None:
            layout.products = self._planner.plan(layout.adapters, layout.size)
        return ForwardPart(layout.size, attend, layout.products, layout.turns)

    def _lay_out_rows(self, rows: Sequence[TurnRow]) -> ForwardLayout:
        if len(rows) < self.num_active:
            self._layout = None  # its products end with the next plan
            return self._lay_out([self._pools.of(row).only(row.slot) for row in rows])
        self._layout = self._layout or self._lay_out([pool for pool in self._pools if pool.slots])
        return self._layout

    def _lay_out(self, pools: list[Pool]) -> ForwardLayout:
        slots = np.array([slot for pool in pools for slot in pool.slots])
        rows = [self._row(slot) for slot in slots]
        size = self._rounded(len(rows), self._limits.min_rows)
        adapters = [row.adapter for row in rows]
        turns = [ForwardTurn([(row.slot, row.length_class)], 1, row.adapter) for row in rows]
        watched = [i for i, row in enumerate(rows) if _is_watched(row)]
        masked = [i for i, row in enumerate(rows) if row.guide]
        plan = SamplingPlan.of([row.request.sampling for row in rows], self._config.vocab, self._device)
        return ForwardLayout(pools, slots, size, adapters, turns, None, plan, watched, masked)

    def _has_slot(self, row: TurnRow) -> bool:
        return row.slot >= 0 and self._states.rows[row.slot] is row

    def _row(self, slot: int) -> TurnRow:
        row = self._states.rows[slot]
        assert row is not None, "a row of the forward has no slot"
        return row

    # ---- after a token -------------------------------------------------------------------------------------

    def _watch(self, row: TurnRow, place: int, step: ComputedStep) -> bool:
        """Top log-probs, stop strings and grammar of one row, in Python. True if a stop string is complete."""
        if row.guide and not np.isnan(step.logprobs[place]):
            row.guide.take([int(step.tokens[place])])
        num_top = row.request.sampling.num_top_logprobs
        if num_top and step.sampled.top:
            values, tokens = (part[place, :num_top].tolist() for part in step.sampled.top)
            row.top_logprobs.append(list(zip(tokens, values, strict=True)))
        if stops := row.request.sampling.stop:
            row.stop_string = first_stop(stops, self._states.sampled(row.slot)[0], self._decode)
        return bool(row.stop_string)

    def _finish(self, row: TurnRow, logprob: float) -> None:
        stopped = "stop" if row.stop_string else self._states.stop_reason(row.slot)
        self._end(row, None if np.isnan(logprob) else stopped)

    def _end(
        self, row: TurnRow, reason: StopReason | None, *, in_pool: bool = True, error: Exception | None = None
    ) -> None:
        partial = self.progress(row)
        assert partial is not None, "a row ends once"
        self.meter.ended(partial.num_sampled)
        if in_pool and (reason == "stop" or (reason and row.request.chat)):
            self._keep(row)
        self._remove(row, clear=reason is None, in_pool=in_pool)
        self._ended.append(Ended(row, reason, partial, error))

    def _keep(self, row: TurnRow) -> None:
        """Keeps keys and values for the trajectory's next turn: of all but the last token, which no forward saw."""
        if not self._prefill.turns.wants(row.request):
            return
        num = int(self._states.length[row.slot]) - 1
        prompt = row.request.transcript.ids[: 4 * row.request.num_prompt]
        self._prefill.keep(row, prompt + self._states.tokens[row.slot, : num - row.request.num_prompt].tobytes())

    def _spent(self, row: TurnRow, seconds: float) -> None:
        self._states.busy_s[row.slot] += seconds

    def _remove(self, row: TurnRow, *, clear: bool = False, in_pool: bool = True) -> None:
        if in_pool:
            clear = clear or (row.adapter is not None and row.adapter.is_huge)
            self._pools.of(row).remove(row.slot, self._states.length, clear=clear)
        self._states.leave(row)
        self._pools.release(row)
        self._layout = None


def _sum_of_scores(row: TurnRow) -> float:
    """The sum of a row's prompt log-probs: not a number if one of them is not."""
    return float(row.prompt_logprobs.numpy()[first_scored(row.request) :].sum())


def _is_watched(row: TurnRow) -> bool:
    return bool(row.request.sampling.stop or row.request.sampling.num_top_logprobs or row.guide)
