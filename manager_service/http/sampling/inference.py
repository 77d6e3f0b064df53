"""Asks the workers of training for chat turns and grader runs; a turn survives the death of its worker.

    reads: reply:<api>   writes: rollout:*, rollout, env, control   holds: turns under way (lost on a crash, with the connection)
    waits for: a delta or a result   unblocked by: rollout, env
    when a worker dies: another takes the turn over, from the tokens that were kept; a stream is asked for again after a silence,
    from those that were seen. A worker that stops gives the turn back, and it is asked for again at once

A completion is a job of its own, `chat-…`, so that it can be cancelled like one.
"""

import asyncio
import math
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Any

import structlog
from redis.exceptions import ResponseError

from common.bus.bus import Bus
from common.bus.streams import GROUP_ROLLOUT
from common.cancellation import cancel_all, running
from common.errors import Unavailable
from common.sharing.places import SharedThreads
from common.wire.messages import Cancel, GradeRequest, GradeResult, TurnDelta, TurnRequest, TurnResult, Usage
from manager_service.http.errors import ApiError, redis_unavailable
from manager_service.http.sampling.cell_share import BULK, CHAT, CellShare
from manager_service.http.sampling.choices import (
    Choice,
    Fresh,
    InferenceRequest,
    LastWorkers,
    ReplyMessage,
    choice_key,
    choices_of,
    continued,
    take,
)
from manager_service.http.sampling.places import MAX_WAITING, SharedPlaces
from manager_service.records.cluster import BaseTurn
from manager_service.records.tenants import TenantRecord

REPLY_TTL_S = 60
REFRESH_S = 5.0
"""A reply stream that Redis lost is made again within this time."""
BLOCK_MS = 1000
CONTROL_KEEP_S = 600.0
PUBLISH_S = 4.0
REFUSED_S = 60  # after which a base model that is refused is tried again
MAX_BULK = 65_536  # turns of one tenant that wait for a place
MAX_GRADES = 64  # grader runs of one tenant that do
log = structlog.get_logger()


class Replies:
    """The reply stream of this replica: one reader, which hands each message to whoever waits for its job."""

    def __init__(self, bus: Bus, api_id: str) -> None:
        self._bus = bus
        self.stream = bus.cell.reply(api_id)
        self._waiting: dict[str, asyncio.Queue[ReplyMessage]] = {}
        self._cursor = "0"
        self._heard = asyncio.Event()

    @contextmanager
    def of(self, job: str) -> Generator["asyncio.Queue[ReplyMessage]"]:
        """Messages that name the job, while the block runs."""
        queue: asyncio.Queue[ReplyMessage] = asyncio.Queue()
        self._waiting[job] = queue
        try:
            yield queue
        finally:
            del self._waiting[job]

    async def run(self) -> None:
        """Reads until cancelled. Redis then deletes the stream after its time to live."""
        refreshed_at = float("-inf")
        while True:
            if time.monotonic() - refreshed_at > REFRESH_S:
                if not await self._bus.keep_alive(self.stream, REPLY_TTL_S):
                    self._cursor = "0"
                refreshed_at = time.monotonic()
            entries = await self._bus.follow(self.stream, self._cursor, block_ms=BLOCK_MS)
            for _, message in entries:
                self._hand_over(message)
            if entries:
                self._cursor = entries[-1][0]
                self._heard.set()
                await self._forget(self._cursor)

    async def newest(self) -> str:
        """The id of the newest entry that was not deleted yet; `0` if there is none."""
        found: Any = await self._bus.retrying(lambda: self._bus.client.xrevrange(self.stream, count=1))
        return found[0][0].decode() if found else "0"

    async def heard(self, entry: str) -> None:
        """Waits until all up to this entry was handed over, or while Redis may have lost the stream unnoticed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(REFRESH_S):
                while _place(self._cursor) < _place(entry):
                    self._heard.clear()
                    await self._heard.wait()

    async def _forget(self, last: str) -> None:
        """Deletes the entries up to this one, which were read."""
        milliseconds, sequence = last.split("-")
        first_kept = f"{milliseconds}-{int(sequence) + 1}"
        await self._bus.retrying(lambda: self._bus.client.xtrim(self.stream, minid=first_kept, approximate=False))

    def _hand_over(self, message: Any) -> None:
        queue = self._waiting.get(message.job)
        if queue is not None and isinstance(message, TurnDelta | TurnResult | TurnRequest | GradeResult):
            queue.put_nowait(message)


def _place(entry: str) -> list[int]:
    """Returns what orders the ids of entries."""
    return [int(part) for part in entry.split("-")]


class Inference:
    """The completions and grader runs that one API replica asks of one cell."""

    def __init__(
        self,
        bus: Bus,
        api_id: str,
        *,
        silence_s: float,
        timeout_s: float,
        slots: Callable[[str], int],
        most_for_chat: float,
        num_workers: Callable[[], int],
        turn: Callable[[], BaseTurn],
    ) -> None:
        """`slots`: the completions' turns (CHAT), grader runs (`env`), and samples in bulk together with jobs' trajectories (BULK)
        that all replicas may have under way at once. `most_for_chat`: the part of rollout slots that CHAT may have.
        `num_workers`: live rollout workers. `turn`: of the base model at them."""
        self._bus = bus
        self._share = CellShare(
            bus,
            api_id,
            lambda: {kind: places.asking() for kind, places in self._places.items()},
            slots=lambda: slots(BULK),
            most_for_chat=most_for_chat,
        )
        names = {CHAT: "slots for completions", "env": "slots for graders", BULK: "slots for samples"}
        self._places = {kind: self._shared(name, kind, slots) for kind, name in names.items()}
        self._grades = self._places["env"]
        self._replies = Replies(bus, api_id)
        self._threads = SharedThreads()
        self._silence_s = silence_s
        self._timeout_s = timeout_s
        self._num_workers = num_workers
        self._last = LastWorkers()
        self._turn = turn
        self._cancels: asyncio.Queue[Cancel] = asyncio.Queue()

    async def run(self) -> None:
        """Reads replies and sends cancellations until cancelled itself."""
        async with running(self._replies.run(), self._send_cancels(), self._share.run(self._resize)) as tasks:
            await asyncio.wait(tasks)

    def _shared(self, name: str, kind: str, slots: Callable[[str], int]) -> SharedPlaces:
        part, weight = partial(self._share.part, kind), partial(self._share.weight, kind)
        return SharedPlaces(name, lambda: round(part() * slots(kind)), weight)

    def _resize(self) -> None:
        for places in self._places.values():
            places.serve()

    async def _send_cancels(self) -> None:
        while True:
            cancel = await self._cancels.get()
            await self._bus.broadcast(self._bus.cell.control, cancel, keep_s=CONTROL_KEEP_S)

    # ---- completions ------------------------------------------------------------------------------------------------

    async def answer(self, ask: InferenceRequest) -> AsyncGenerator[Fresh]:
        """Tokens as they come, each once and in order, then each choice's result.

        Closing the iterator early frees the workers. Raises Unavailable when no worker makes progress or one fails,
        InvalidInput when the workers refuse the request.
        """
        job = f"chat-{secrets.token_hex(12)}"
        make = partial(choices_of, job, ask, self._replies.stream)
        made = await self._threads.run(make, ask.tenant.id, ask.tenant.weight)
        choices = {(c.request.trajectory.group, c.request.trajectory.sample): c for c in made}
        with self._replies.of(job) as queue:
            asking = asyncio.create_task(self._ask_for(made, ask.tenant))
            try:
                while any(choice.result is None for choice in choices.values()):
                    if asking.done():
                        asking.result()
                    for fresh in await self._next(queue, choices, ask.num_choices):
                        yield fresh
            finally:
                asking.cancel()  # first what needs no await: whoever left is cancelled at each
                self._end(made)
                await asyncio.shield(cancel_all([asking]))

    def _check_turn(self, turn: BaseTurn) -> None:
        """Raises ApiError 503 where the base model cannot be opened in time."""
        is_refused, opens_in_s = turn.state == "refused", turn.opens_in_s
        if is_refused or opens_in_s > self._timeout_s:
            why = "no worker can serve it" if is_refused else f"it opens in about {opens_in_s:.0f} s"
            told = f"the base model does not answer within {self._timeout_s:g} s, for {why}: try again later"
            raise ApiError(
                503, told, code="unavailable", headers={"Retry-After": str(math.ceil(opens_in_s) or REFUSED_S)}
            )

    async def _ask_for(self, choices: "list[Choice]", tenant: TenantRecord) -> None:
        """Publishes each request once it has a place, those that get one at once together. Raises Unavailable and ApiError 503."""
        if not choices[0].bulk:
            self._check_turn(self._turn())
        waiting, places = deque(choices), self._places_of(choices[0])
        limits = (None, MAX_BULK) if choices[0].bulk else (self._timeout_s, MAX_WAITING)
        with places.behind(tenant, waiting):
            while waiting:
                if not places.asks(tenant.id):
                    self._share.exchange_soon()
                # A choice leaves `waiting` before it has a place: `behind` counts those in it, `take` counts this one.
                ready = [waiting.popleft()]
                ready[0].place = await places.take(tenant, *limits)
                while waiting and (place := places.take_now(tenant)) is not None:
                    waiting[0].place = place
                    ready.append(waiting.popleft())
                await self._publish(ready)

    def _places_of(self, choice: Choice) -> SharedPlaces:
        return self._places[BULK if choice.bulk else CHAT]

    def _end(self, choices: "list[Choice]") -> None:
        """Gives back the places, and has the workers drop what has no result, and replaced attempts."""
        for choice in choices:
            self._give_back(choice)
        if len({choice.request.epoch for choice in choices}) > 1 or any(not choice.is_answered for choice in choices):
            self._cancel(choices[0].request, epoch=2**31)

    def _give_back(self, choice: Choice) -> None:
        self._last.end(choice)
        place, choice.place = choice.place, None
        if place is not None:
            self._places_of(choice).give_back(place)

    async def _next(
        self, queue: "asyncio.Queue[ReplyMessage]", choices: dict[tuple[int, int], Choice], num_choices: int
    ) -> list[Fresh]:
        try:
            async with asyncio.timeout(min(1.0, self._silence_s / 4)):
                message = await queue.get()
        except TimeoutError:
            if lost := [choice for choice in choices.values() if await self._is_lost(choice)]:
                await self._replace(lost, queue, choices.values())
            return []
        key = choice_key(message)
        choice = choices.get(key) if key else None
        if choice is None or choice.result is not None:
            return []
        fresh = take(choice, message, key[0] * num_choices + key[1] if key else 0)
        if choice.result is not None:
            self._share.note(BULK if choice.bulk else CHAT, choice.result.usage.rollout_s)
            self._give_back(choice)
        if choice.handed_back:
            await self._ask_again([choice], choices.values())
        return [] if fresh is None else [fresh]

    async def _publish(self, choices: Sequence[Choice]) -> None:
        """Appends the requests, and remembers their entries. Raises ApiError 503 when Redis is away or full."""
        encoded = [(choice, await self._bus.fields(choice.request)) for choice in choices]
        for choice in choices:
            self._last.address(choice, self._num_workers())
        async with time_for_redis(self._bus, PUBLISH_S):
            written = await self._append(encoded)
        for choice, entry in zip(choices, written, strict=True):
            choice.entry = entry.decode()
            choice.heard_s = time.monotonic()
            choice.advanced_s = choice.advanced_s or choice.heard_s

    async def _append(self, encoded: Sequence[tuple[Choice, list[Any]]]) -> list[bytes]:
        """Appends each to the stream of the worker that it is addressed to; to that of all if there is none."""
        commands: list[list[Any]] = []
        for choice, fields in encoded:
            choice.stream = self._stream(choice)
            commands.append(["XADD", choice.stream, *(["NOMKSTREAM"] if choice.worker else []), "*", *fields])
        written = await self._bus.pipelined(commands)
        gone = [each for each, entry in zip(encoded, written, strict=True) if entry is None]
        for choice, _ in gone:
            self._last.end(choice)
        again = iter(await self._append(gone)) if gone else iter(())
        return [next(again) if entry is None else entry for entry in written]

    def _stream(self, choice: Choice) -> str:
        cell, worker = self._bus.cell, choice.worker
        if choice.bulk:
            return cell.rollout_worker(worker) if worker else cell.rollout
        return cell.rollout_chat_worker(worker) if worker else cell.rollout_chat

    # ---- silence ----------------------------------------------------------------------------------------------------

    async def _is_lost(self, choice: Choice) -> bool:
        """Does nobody work on it any more? Raises Unavailable when that takes too long."""
        now = time.monotonic()
        if not choice.entry or choice.result is not None or now - choice.heard_s < self._silence_s:
            return False
        # Signs of life put off the silence, only tokens put off this: a turn whose workers die one after the other ends here.
        if now - choice.advanced_s > self._timeout_s and not choice.bulk:
            raise Unavailable(f"no rollout worker answered within {self._timeout_s:g} seconds")
        async with time_for_redis(self._bus, PUBLISH_S):
            cared_for = await self._is_cared_for(choice)
        if cared_for:
            choice.heard_s = now
        return not cared_for

    async def _replace(
        self, lost: Sequence[Choice], queue: "asyncio.Queue[ReplyMessage]", choices: Collection[Choice]
    ) -> None:
        """Asks again for these, unless something was said of them meanwhile: a turn's entry goes when its answer is written, which may
        be long before this replica reads it."""
        async with time_for_redis(self._bus, PUBLISH_S):
            newest = await self._replies.newest()
        await self._replies.heard(newest)
        if queue.empty():
            await self._ask_again(lost, choices)

    async def _ask_again(self, lost: Sequence[Choice], choices: Collection[Choice]) -> None:
        """Asks again for some of a completion's choices. Attempts are void once they are older than all that goes on."""
        # The new attempt has a higher epoch and begins behind the tokens that were seen, which its client may have read. The worker
        # of the old one may still live: its deltas are dropped by their epoch, and the cancellation frees its slot. Its whole answer
        # is still used if it continues the same tokens (`choices.take`).
        for choice in lost:
            log.warning("turn_asked_again", job=choice.request.job, num_tokens=len(choice.tokens))
            choice.request, choice.handed_back = continued(choice), False
        oldest = min(choice.request.epoch for choice in choices if choice.result is None)
        if oldest:
            self._cancel(lost[0].request, epoch=oldest - 1)
        await self._publish(lost)

    async def _is_cared_for(self, choice: Choice) -> bool:
        """True if the request waits in the stream, or a worker renewed it within the silence. Without a stream of tokens it need not
        be renewed: another worker takes it over, and goes on from the progress that is kept."""
        stream, client, entry = choice.stream, self._bus.client, choice.entry
        if not await self._bus.retrying(lambda: client.xrange(stream, entry, entry)):
            moved: Any = await self._bus.retrying(lambda: client.get(self._bus.cell.moved(stream, entry)))
            choice.stream, choice.entry = moved.decode().split(" ") if moved else (stream, entry)
            return bool(moved)
        if not choice.request.stream:
            return True
        try:
            pending: Any = await self._bus.retrying(
                lambda: client.xpending_range(stream, GROUP_ROLLOUT, entry, entry, 1)
            )
        except ResponseError as error:
            if "NOGROUP" not in str(error):
                raise
            return True
        return not pending or pending[0]["time_since_delivered"] < self._silence_s * 1000

    def _cancel(self, request: TurnRequest | GradeRequest, *, epoch: int) -> None:
        cancel = Cancel(
            id=f"{request.job}/cancel/{epoch}",
            tenant=request.tenant,
            job=request.job,
            partition=request.partition,
            epoch=epoch,
        )
        self._cancels.put_nowait(cancel)

    # ---- graders ----------------------------------------------------------------------------------------------------

    async def grade(
        self,
        tenant: TenantRecord,
        make: Callable[[str, str], GradeRequest],
        *,
        timeout_s: float,
        charge: Callable[[Usage], Awaitable[None]],
    ) -> GradeResult:
        """Runs a grader once. `make(id, reply_to)` gives the request. `charge` hears its cost, without a result the seconds from the
        request on. Raises Unavailable if nobody answers, ApiError 429 if too many wait."""
        job = f"grade-{secrets.token_hex(12)}"
        request = make(job, self._replies.stream)
        async with self._grades.one(tenant, timeout_s, MAX_GRADES):
            with self._replies.of(job) as queue:
                async with time_for_redis(self._bus, PUBLISH_S):
                    await self._bus.publish([(self._bus.cell.env, request)])
                since, result = time.monotonic(), None
                try:
                    async with asyncio.timeout(timeout_s):
                        while not isinstance(result, GradeResult):
                            result = await queue.get()
                    return result
                except TimeoutError as error:
                    raise Unavailable(f"no environment worker answered within {timeout_s:g} seconds") from error
                finally:
                    if isinstance(result, GradeResult):
                        cost = result.usage + Usage(env_s=result.seconds)
                    else:  # nobody waits any more
                        self._cancel(request, epoch=2**31)
                        cost = Usage(env_s=time.monotonic() - since)
                    await asyncio.shield(charge(cost))


@asynccontextmanager
async def time_for_redis(bus: Bus, seconds: float) -> AsyncGenerator[None]:
    """A time limit for Redis. Raises ApiError 503 when it is over, with the last error since the beginning."""
    started_s = time.monotonic()
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as late:
        since_s, error = bus.trouble or (0.0, None)
        raise redis_unavailable(error if since_s >= started_s else None) from late
