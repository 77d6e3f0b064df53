"""The embedded engine: continuous batching on torch in one thread of its own.

The thread owns the running rows; the event loop sees it through commands and results only.

    event loop ─ commands (add, abort, drop) ─► thread: running.advance() ─ ended rows, new tokens ─► event loop

    waits for: a command, when no row is under way   unblocked by: generate
    after an error of a row: it ends with it, and the others go on (`fault_isolation.py`)
    after any other, such as memory that ran out: every row under way fails with it, and the next ones start afresh
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from base_model.adapter import load_adapter
from base_model.stacked import FusedAdapter, fuse
from common.errors import InvalidInput, NotFound
from common.wire.messages import AdapterRef, TurnRequest
from rollout_service.embedded.backbone.interface import EngineBackbone
from rollout_service.embedded.batch import Ended, RunningRows
from rollout_service.embedded.pools import EngineLimits
from rollout_service.embedded.row_states import TurnRow
from rollout_service.engine import BEAT_EVERY_S, Beat, CorruptAdapter, Generated, OnToken, Partial, Tokenizer
from rollout_service.grammar import Grammars
from rollout_service.turns import TurnsUnderWay, check_request, weights_of

IDLE_S = 5.0
"""Memory is given back after so long without work."""


@dataclass(slots=True, eq=False)
class Ticket:
    """The caller that waits for a row."""

    future: "asyncio.Future[Generated]"
    beat: Beat
    shown: int = 0  # tokens given to on_token


class TorchEngine:
    """Implements `Engine` over a base model in this process."""

    def __init__(self, model: EngineBackbone, tokenizer: Tokenizer, *, limits: EngineLimits | None = None) -> None:
        self._config, self._like = model.config, model.embedding
        self._running = RunningRows(
            model,
            end_ids=tokenizer.end_of_turn_ids,
            decode=lambda ids: tokenizer.decode(ids, skip_special=False),
            limits=limits or EngineLimits(),
        )
        self._grammars = Grammars(tokenizer, model.config.vocab)
        self._shapes = model.linear_shapes()
        self._adapters: dict[AdapterRef, FusedAdapter] = {}
        self._turns = TurnsUnderWay(self._running.progress)
        self._commands: list[Callable[[], None]] = []
        self._wake = threading.Condition()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._streaming: set[TurnRow] = set()

    # ---- Engine --------------------------------------------------------------------------------------------

    @property
    def in_use(self) -> int:
        return len(self._turns)

    @property
    def kv_tokens(self) -> int:
        return self._running.kv_tokens

    @property
    def kv_used(self) -> int:
        """Tokens of `kv_tokens` that the turns under way take, or wait for."""
        return sum(row.length_class for row in self._turns.all())

    def resident(self) -> list[AdapterRef]:
        return list(self._adapters)

    def counters(self) -> dict[str, float]:
        """Totals since the start: `busy_s` in forwards and sampling, `sampled_tokens`, and the meter's."""
        totals = {"busy_s": self._running.busy_s, "sampled_tokens": float(self._running.sampled_tokens)}
        return totals | self._running.meter.counters()

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="torch-engine", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        thread, self._thread = self._thread, None
        if thread is None:
            return
        with self._wake:
            self._stopping = True
            self._wake.notify()
        await asyncio.to_thread(thread.join)
        for row in self._turns.all():
            row.handle.future.cancel()

    async def load_files(self, adapter: AdapterRef, files: Mapping[str, bytes]) -> int:
        """See `Engine.load_files`."""
        if adapter not in self._adapters:
            self._adapters[adapter] = await asyncio.to_thread(self._fuse, files)
        return self._adapters[adapter].num_bytes

    async def drop(self, adapter: AdapterRef) -> None:
        self._adapters.pop(adapter, None)
        self._submit(lambda: self._running.forget(adapter))

    async def generate(self, request: TurnRequest, *, on_token: OnToken | None = None, beat: Beat) -> Generated:
        fused = self._check(request)
        ticket = Ticket(asyncio.get_running_loop().create_future(), beat)
        row = TurnRow(request, fused, ticket, on_token)
        if request.sampling.grammar:
            row.guide = await self._grammars.guide(request)
        try:
            with self._turns.enter(request.id, row):
                self._submit(lambda: self._add(row))
                return await ticket.future
        except asyncio.CancelledError:
            self._submit(lambda: self._leave(row))
            raise

    def partial(self, request_id: str) -> Partial | None:
        return self._turns.partial(request_id)

    # ---- on the event loop ---------------------------------------------------------------------------------

    def _fuse(self, files: Mapping[str, bytes]) -> FusedAdapter:
        return fuse(load_adapter(files), self._shapes, self._config.num_layers, like=self._like)

    def _check(self, request: TurnRequest) -> FusedAdapter | None:
        if self._thread is None:
            raise RuntimeError("the engine is not running")
        weights = weights_of(request)
        if not weights.is_base and weights not in self._adapters:
            raise NotFound(f"adapter {weights} is not resident")
        check_request(request, vocab=self._config.vocab, context=self._config.context)
        return None if weights.is_base else self._adapters[weights]

    def _submit(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def _deliver(self, results: list[tuple[Ticket, Generated | Exception]]) -> None:
        for ticket, result in results:
            if ticket.future.done():
                continue
            if isinstance(result, Exception):
                ticket.future.set_exception(result)
            else:
                ticket.future.set_result(result)

    # ---- in the engine's thread ----------------------------------------------------------------------------

    def _add(self, row: TurnRow) -> None:
        if row.handle.future.cancelled():
            return
        self._running.add(row)
        if row.on_token:
            row.handle.shown = row.request.num_partial
            self._streaming.add(row)

    def _leave(self, row: TurnRow) -> None:
        self._streaming.discard(row)
        self._running.abort(row)

    @torch.inference_mode()
    def _run(self) -> None:
        last_beat = 0.0
        while self._next_commands():
            results = self._advance()
            now = time.monotonic()
            beats = [row.handle.beat for row in self._running.active()] if now - last_beat > BEAT_EVERY_S else []
            last_beat = now if beats else last_beat
            self._post(results, beats)

    def _next_commands(self) -> bool:
        """Runs the commands; blocks while there is nothing to do. False: stop."""
        with self._wake:
            while not (self._commands or self._running.has_work or self._stopping):
                if not self._wake.wait(IDLE_S):
                    self._running.relax()
            commands, self._commands = self._commands, []
        for command in commands:
            command()
        return not self._stopping

    def _advance(self) -> list[tuple[Ticket, Generated | Exception]]:
        if not self._running.has_work:
            return []
        try:
            ended = self._running.advance()
        except Exception as error:  # the boundary: what fails must not end the thread
            self._streaming.clear()
            failure = RuntimeError(f"forward failed: {error!r}")
            return [(row.handle, failure) for row in self._running.clear()]
        return [(end.row.handle, _result(end)) for end in ended]

    def _post(self, results: list[tuple[Ticket, Generated | Exception]], beats: list[Beat]) -> None:
        """Makes one call into the event loop a step, and none when there is nothing to say."""
        ended = {ticket for ticket, _ in results}
        deltas = [self._delta(row) for row in self._streaming if row.handle not in ended and row.slot >= 0]
        for row in [row for row in self._streaming if row.handle in ended]:
            self._streaming.discard(row)
        if not (results or beats or deltas) or self._loop is None:
            return

        def tell() -> None:
            for call in deltas:
                call()
            for beat in beats:
                beat()
            self._deliver(results)

        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(tell)

    def _delta(self, row: TurnRow) -> Callable[[], None]:
        tokens, logprobs = self._running.sampled_since(row, row.handle.shown)
        row.handle.shown += len(tokens)

        def call() -> None:
            if row.on_token and tokens and not row.handle.future.done():
                row.on_token(tokens, logprobs)

        return call


def _result(end: Ended) -> Generated | Exception:
    if isinstance(end.error, InvalidInput):
        return end.error
    if end.error is not None:
        return RuntimeError(f"a turn of job {end.row.request.job} failed by itself: {end.error!r}")
    if end.stop_reason is None:
        return CorruptAdapter(f"adapter {end.row.request.adapter} gives scores that are not numbers")
    return Generated(
        adapter=end.row.request.adapter,
        tokens=end.partial.tokens,
        logprobs=end.partial.logprobs,
        stop_reason=end.stop_reason,
        stop_string=end.row.stop_string,
        top_logprobs=end.row.top_logprobs,
        num_sampled=end.partial.num_sampled,
        busy_s=end.partial.busy_s,
        prompt_logprobs=end.row.prompt_logprobs,
        prompt_top_logprobs=end.row.prompt_top_logprobs,
    )
