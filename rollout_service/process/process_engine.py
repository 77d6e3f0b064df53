"""Runs turns in a process of its own, which may die: it is started again, and turns go on.

    generate ─► a slot (a suspect turn: all) ─► a slot for its adapter ─► Core.sample ─► tokens
                                ▲  if the process dies: once more, from the tokens so far

    holds: turns under way, with their tokens; folders of adapters   waits for: slots, a running process
    after the process dies: `_keep` starts another, in which every turn goes on; turns that saw two deaths run one by one

A log-prob that is not a number may come from the turn's own adapter, or from what another left in memory that the process
reuses. So the process is given up, and the turn runs once more, with no other turn in a fresh one: if it fails again, its
adapter is to blame, and nobody else is harmed.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog

from common.cancellation import cancel_all
from common.errors import CorruptObject, InvalidInput, NotFound, Unavailable
from common.wire.messages import AdapterRef, TurnRequest
from rollout_service.engine import BEAT_EVERY_S, Beat, CorruptAdapter, Generated, OnToken, Partial, Tokenizer
from rollout_service.process.adapter_files import AdapterFiles, Stored
from rollout_service.process.busy_clock import BusyClock
from rollout_service.process.core import AdapterFolder, Core, CoreDied, TokenChunk, UnreadableAdapter
from rollout_service.process.lora_slots import KnownAdapters, LoraSlots
from rollout_service.process.sleeping import Sleeping, in_time
from rollout_service.process.turn import NotFinite, OpenTurn
from rollout_service.turns import TurnsUnderWay, check_request, weights_of

MAX_DEATHS = 4
"""A turn is given up after so many deaths of its process, the last two with no other turn in it."""
SILENCE_S = 120.0
"""A process is taken for dead when it owes tokens and gives none for so long."""
RESTART_DELAYS_S = (0.0, 1.0, 5.0, 20.0, 60.0)

LoadingTurn = Callable[[], contextlib.AbstractContextManager[None]]
T = TypeVar("T")
log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the base model and of the process."""

    vocab: int
    context: int  # the most tokens of a sequence
    slots: int  # turns at once
    max_loras: int  # adapters at once, the bare base model not counted
    max_known: int  # adapters in the process's memory, likewise
    max_temperature: float
    masks: bool = False  # does the process follow grammars?


class Life:
    """One life of the process: its core, its slots, and when it is over."""

    def __init__(self, core: Core, base: AdapterFolder, shape: Shape) -> None:
        self.core = core
        self.base = base  # always loaded, in a slot of its own
        self._shape = shape
        self.forget()
        self.over: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # why
        self._watching = asyncio.create_task(self._watch())

    def hold(self, adapter: AdapterFolder, *, chat: bool) -> contextlib.AbstractAsyncContextManager[None]:
        """Keeps the adapter loaded inside."""
        return contextlib.nullcontext() if adapter == self.base else self.slots.hold(adapter, chat=chat)

    async def drop(self, adapter: AdapterFolder) -> None:
        """Removes an adapter that nobody holds from the process."""
        await self.slots.drop(adapter)
        await self._known.drop(adapter)

    def forget(self) -> None:
        """Knows no adapters any more, as the process does not while it sleeps."""
        self._known = KnownAdapters(max(self._shape.max_loras, self._shape.max_known), self._add, self._remove)
        self.slots = LoraSlots(self._shape.max_loras, self._known)

    def end(self, reason: str) -> None:
        """Gives all turns in this life CoreDied."""
        if not self.over.done():
            self.over.set_result(reason)

    async def unless_over(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. Raises CoreDied once this life is over, whether `work` noticed or not."""
        task = asyncio.create_task(work)
        try:
            await asyncio.wait([task, self.over], return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not task.done():
                await cancel_all([task])
        if self.over.done() and (task.cancelled() or task.exception() is not None):
            raise CoreDied(self.over.result())
        return task.result()

    async def close(self) -> None:
        """Ends the process; returns when it is gone."""
        await self.slots.close()
        await self.core.stop()
        await cancel_all([self._watching])

    async def _watch(self) -> None:
        await self.core.wait_dead()
        self.end("its process ended")

    async def _add(self, adapter: AdapterFolder) -> None:
        await self.unless_over(self.core.add(adapter))

    async def _remove(self, adapter: AdapterFolder) -> None:
        await self.unless_over(self.core.remove(adapter))


@dataclass(slots=True)
class Counts:
    """Totals since the start."""

    sampled_tokens: int = 0
    restarts: int = 0
    requests: int = 0  # to the process, so that each has a name of its own
    chunks: int = 0  # that it gave
    later_turns: int = 0  # ended, the first ones of trajectories left out
    kv_hits: int = 0  # of these, how many found keys and values of the turns before


class ProcessEngine:
    """Implements `Engine` over a `Core`."""

    def __init__(
        self,
        make_core: Callable[[], Core],
        files: AdapterFiles,
        tokenizer: Tokenizer,
        shape: Shape,
        turn: LoadingTurn = contextlib.nullcontext,
    ) -> None:
        """`make_core` makes the next core without blocking. `turn`, which may block, is held while one starts and measures memory."""
        self._make_core = make_core
        self._turn_to_load = turn
        self._files = files
        self._shape = shape
        self._tokenizer = tokenizer
        self._free_slots = asyncio.Semaphore(shape.slots)
        self._entrance = asyncio.Lock()  # both wake those who wait in order of arrival
        self._busy = BusyClock()
        self._counts = Counts()
        self._turns = TurnsUnderWay(OpenTurn.partial)
        self._sleeping = Sleeping(shape.vocab, shape.context, files.canary)
        self._life: asyncio.Future[Life] | None = None
        self._tasks: list[asyncio.Task[None]] = []

    # ---- Engine -----------------------------------------------------------------------------------------------------

    @property
    def in_use(self) -> int:
        return len(self._turns)

    @property
    def pid(self) -> int | None:
        """The process's id; None while there is none."""
        life = self._current()
        return life.core.pid if life else None

    @property
    def kv_tokens(self) -> int | None:
        """The number that the process tells; None while there is none."""
        life = self._current()
        return life.core.kv_tokens if life else None

    @property
    def kv_used(self) -> int:
        """Tokens of the turns under way, those that wait for a slot included."""
        return sum(turn.request.num_prompt + len(turn.tokens) for turn in self._turns.all())

    def resident(self) -> list[AdapterRef]:
        return self._files.refs()

    def counters(self) -> dict[str, float]:
        """Totals since the start, and `adapter_waiting`: turns that wait for a slot now."""
        life = self._current()
        return {
            "busy_s": self._busy.busy_s,
            "sampled_tokens": float(self._counts.sampled_tokens),
            "engine_restarts": float(self._counts.restarts),
            "later_turns": float(self._counts.later_turns),
            "kv_hits": float(self._counts.kv_hits),
            "adapter_waiting": float(life.slots.num_waiting if life else 0),
        }

    async def start(self) -> None:
        self._life = asyncio.get_running_loop().create_future()
        life = await self._begin()
        self._life.set_result(life)
        self._tasks = self._watched(life)

    async def stop(self) -> None:
        await cancel_all(self._tasks)
        life, self._life = self._current(), None
        if life is not None:
            life.end("the engine was stopped")
        self._files.close()
        if life is not None:
            await life.close()

    async def sleep(self) -> None:
        """Gives the device's memory back; no turn is under way. Raises Unavailable, as `wake`: this engine is useless then."""
        life = self._current()
        await cancel_all(self._tasks)  # nobody starts another process, which would take memory
        if life is None:
            raise Unavailable("the engine's process had just ended")
        life.forget()
        await in_time("fall asleep", life.unless_over(self._sleeping.sleep(life.core, life.base)))

    async def wake(self) -> None:
        """Returns when it can generate again."""
        life = self._current()
        assert life is not None, "it sleeps"
        await in_time("wake as it was", life.unless_over(self._sleeping.wake(life.core, life.base)))
        self._tasks = self._watched(life)

    async def load_files(self, adapter: AdapterRef, files: Mapping[str, bytes]) -> int:
        """See `Engine.load_files`. The process loads it before its first turn. Raises InvalidInput for too large a rank."""
        try:
            return (await asyncio.to_thread(self._files.put, adapter, files)).num_bytes
        except (ValueError, KeyError) as error:
            raise CorruptObject(str(error)) from error

    async def drop(self, adapter: AdapterRef) -> None:
        stored, life = self._files.drop(adapter), self._current()
        if stored is not None and life is not None:
            with contextlib.suppress(CoreDied):  # the next process does not know it
                await life.drop(stored.adapter)

    async def generate(self, request: TurnRequest, *, on_token: OnToken | None = None, beat: Beat) -> Generated:
        stored = self._check(request)
        turn = self._turn(request, on_token, beat)
        with self._turns.enter(request.id, turn), self._files.hold(stored):
            while not turn.is_over:
                await self._go_on(turn, stored)
        self._counts.later_turns += request.turn > 0
        self._counts.kv_hits += request.turn > 0 and turn.num_cached > 0
        return turn.generated()

    def partial(self, request_id: str) -> Partial | None:
        return self._turns.partial(request_id)

    # ---- a turn -----------------------------------------------------------------------------------------------------

    def _check(self, request: TurnRequest) -> Stored:
        if self._life is None:
            raise RuntimeError("the engine is not running")
        weights = weights_of(request)
        stored = self._files.put_base() if weights.is_base else self._files.get(weights)
        if stored is None:
            raise NotFound(f"adapter {request.adapter} is not resident")
        shape, sampling = self._shape, request.sampling
        check_request(request, vocab=shape.vocab, context=shape.context, max_temperature=shape.max_temperature)
        if sampling.prompt_logprobs and sampling.temperature not in (0, 1):
            raise InvalidInput("this engine gives prompt_logprobs at temperature 1 (or 0, which counts as 1) only")
        if sampling.grammar and (request.num_partial or not shape.masks):
            raise InvalidInput(
                "this engine cannot follow a grammar here: leave out response_format, force no tool_choice"
            )
        return stored

    def _turn(self, request: TurnRequest, on_token: OnToken | None, beat: Beat) -> OpenTurn:
        stop_ids = request.sampling.stop_ids
        return OpenTurn(
            request,
            context=request.sampling.context(self._shape.context),
            end_ids=self._tokenizer.end_of_turn_ids if stop_ids is None else stop_ids,
            decode=lambda ids: self._tokenizer.decode(ids, skip_special=False),
            beat=beat,
            on_token=on_token,
        )

    async def _go_on(self, turn: OpenTurn, stored: Stored) -> None:
        """Samples in the present process until the turn or the process ends. Raises the error that fails the turn."""
        if stored.broken:
            raise CorruptAdapter(f"adapter {stored.ref}: {stored.broken}")
        if turn.deaths >= MAX_DEATHS:
            raise InvalidInput(
                f"the engine's process died {turn.deaths} times under this turn, also when no other turn was in it"
            )
        async with self._slots_for(turn):
            life, before = await self._running(), turn.num_requests
            try:
                await life.unless_over(self._sample(turn, stored, life))
            except CoreDied as error:
                life.end(str(error))
                turn.deaths += turn.num_requests - before  # none if it was not in the process yet
            except NotFinite as error:
                self._blame(turn, stored, str(error))
                life.end(f"{stored.ref} gave log-probs that are not numbers")
            except UnreadableAdapter as error:
                stored.broken = f"the engine cannot read it: {error}"

    @contextlib.asynccontextmanager
    async def _slots_for(self, turn: OpenTurn) -> AsyncGenerator[None]:
        """Holds a slot inside, in order of arrival.

        A suspect turn holds all slots: no other turn is in the process if it dies again. It keeps the entrance while it waits,
        so that newcomers cannot delay it without end.
        """
        num_slots, taken = self._shape.slots if turn.is_suspect else 1, 0
        try:
            async with self._entrance:
                while taken < num_slots:
                    await self._free_slots.acquire()
                    taken += 1
            yield
        finally:
            for _ in range(taken):
                self._free_slots.release()

    def _blame(self, turn: OpenTurn, stored: Stored, why: str) -> None:
        """Blames the adapter at the second time, with no other turn in the process: at the first a neighbour may be the cause."""
        turn.not_finite += 1
        if turn.not_finite > 1:
            stored.broken = f"its scores are not numbers: {why}"

    async def _sample(self, turn: OpenTurn, stored: Stored, life: Life) -> None:
        """Samples until the turn ends. Raises CoreDied, NotFinite, UnreadableAdapter."""
        async with life.hold(stored.adapter, chat=turn.request.chat):
            self._counts.requests += 1
            request = turn.next_request(f"{turn.request.id}+{self._counts.requests}", stored.adapter)
            entered, busy_before = self._busy.enter(), turn.busy_s
            try:
                async with contextlib.aclosing(life.core.sample(request)) as chunks:
                    async for chunk in chunks:
                        self._take(turn, chunk)
                        turn.busy_s = busy_before + self._busy.share_s(entered)
                        if turn.is_over:
                            return
                raise CoreDied("it ended a turn too early")
            finally:
                turn.busy_s = busy_before + self._busy.leave(entered)

    def _take(self, turn: OpenTurn, chunk: TokenChunk) -> None:
        before = len(turn.tokens)
        try:
            turn.take(chunk)
        finally:
            self._counts.chunks += 1
            self._counts.sampled_tokens += len(turn.tokens) - before

    # ---- the process ------------------------------------------------------------------------------------------------

    def _current(self) -> Life | None:
        running = self._life is not None and self._life.done() and not self._life.cancelled()
        return self._life.result() if running and self._life else None

    async def _running(self) -> Life:
        """The present life, or the next one once it has begun."""
        while True:
            assert self._life is not None
            life = await asyncio.shield(self._life)
            if not life.over.done():
                return life
            await asyncio.sleep(0)  # `_keep` is about to notice

    async def _begin(self) -> Life:
        """Starts a fresh process and loads the bare base model's adapter, when its turn to load comes."""
        with contextlib.ExitStack() as turn:
            await asyncio.to_thread(turn.enter_context, self._turn_to_load())
            return await self._begin_now()

    async def _begin_now(self) -> Life:
        core = self._make_core()
        try:
            await core.start()
            life = Life(core, self._files.put_base().adapter, self._shape)
            await life.unless_over(core.add(life.base))
            return life
        except BaseException:
            await core.stop()
            raise

    def _watched(self, life: Life) -> "list[asyncio.Task[None]]":
        return [asyncio.create_task(self._keep(life)), asyncio.create_task(self._beat_all())]

    async def _keep(self, life: Life) -> None:
        """Notices that the process has died, reports it, and starts another."""
        while True:
            following = await self._until_over(life)
            self._counts.restarts += 1
            log.error("engine_died", pid=life.core.pid, reason=life.over.result(), turns=self.in_use)
            await life.close()
            life = await self._begin_patiently()
            following.set_result(life)
            log.warning("engine_restarted", pid=life.core.pid, turns=self.in_use)

    async def _until_over(self, life: Life) -> "asyncio.Future[Life]":
        """Waits until the process dies or is given up. Returns the next life, which `_running` awaits from now on."""
        silent = asyncio.create_task(self._until_silent())
        try:
            await asyncio.wait([silent, life.over], return_when=asyncio.FIRST_COMPLETED)
        finally:
            silent.cancel()
        self._life = following = asyncio.get_running_loop().create_future()
        life.end(f"it gave no token for {SILENCE_S:.0f} s")
        return following

    async def _until_silent(self) -> None:
        """Returns when, with turns in the process, no turn came and none got a token for SILENCE_S."""
        seen = (-1, -1)
        while (now := (self._counts.requests, self._counts.chunks)) != seen or not self._busy.num_under_way:
            seen = now
            await asyncio.sleep(SILENCE_S)

    async def _begin_patiently(self) -> Life:
        attempt = 0
        while True:
            await asyncio.sleep(RESTART_DELAYS_S[min(attempt, len(RESTART_DELAYS_S) - 1)])
            try:
                return await self._begin()
            except Exception as error:  # the boundary: whatever keeps a process from starting may pass
                attempt += 1
                log.error("engine_not_restarted", attempt=attempt, reason=repr(error))

    async def _beat_all(self) -> None:
        """Beats for all turns while the process gives tokens: those waiting for a slot get nearer too."""
        seen = 0
        while True:
            await asyncio.sleep(BEAT_EVERY_S)
            if self._counts.chunks != seen:
                seen = self._counts.chunks
                for turn in self._turns.all():
                    turn.beat()
