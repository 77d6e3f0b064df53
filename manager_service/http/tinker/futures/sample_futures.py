"""Runs requests for samples, and keeps their results in memory until they are retrieved: other replicas ask for them.

    asample ─► start ─► a task: waits for quota and places ─► rollout ─► result ─► retrieve_future
    a replica ─ PeerQuestion ─► peers:<the other> ─► it waits for the result ─ PeerAnswer ─► peers:<the replica>

holds: requests under way and their results (lost on a crash: the client's future answers 410, and it samples again)
reads: its own `peers:…`   writes: the others'   waits for: places, turns, peers   unblocked by: rollout, other replicas
when a replica dies: its stream ends after TTL_S, and whoever asks hears that the request is gone
"""

import asyncio
import contextlib
import math
import re
import time
from collections import Counter
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import msgspec
import structlog
from redis.exceptions import RedisError

from common.bus.bus import Bus
from common.cancellation import cancel_all, starting
from common.errors import CorruptObject, InvalidInput, MarlaasError, NotFound
from common.wire.messages import TurnResult, Usage
from manager_service.http.errors import ApiError, too_many
from manager_service.http.quota import count_inference, tokens_today
from manager_service.http.sampling.choices import InferenceRequest
from manager_service.http.sampling.inference import Inference
from manager_service.http.tinker.wire.sample_requests import TinkerSample
from manager_service.records.run_records import SESSION_ALIVE_S, USED_S, use
from manager_service.records.tenants import TenantRecord

PREFIX = "smp"
_ID = re.compile(rf"{PREFIX}-([0-9a-f]{{16}})-(.+)-\d+")  # replica, base model
MAX_OPEN = 10_000
"""Requests of one tenant that are under way, or whose results nobody has retrieved."""
MAX_SAMPLES = 65_536
"""Samples of those requests together: each is held in memory from the beginning. So is a prompt: its TOKENS are as much as a sample."""
TOKENS = 512
KEPT_S, RETRIEVED_S = 600.0, 30.0
"""Seconds that a result waits to be retrieved, and to be retrieved again if the first answer was lost."""
UNASKED_S = 60.0
"""A request of no session that nobody asked about for so long is given up."""
SILENT_S, GRACE_S = 20.0, 20.0
"""Seconds after which a session without a heartbeat is silent, and more until it is over: after a Redis that was away, none has had one
yet."""
LOOK_EVERY_S = 5.0
USE_EVERY_S = USED_S / 4
"""Seconds between two notes of the use of a version that requests wait for."""
QUOTA_EVERY_S = 15.0
TTL_S, REFRESH_S = 60, 5.0
BLOCK_MS = 1000
PEER_GRACE_S = 3.0
"""Seconds that a replica waits for another's answer after that one's wait for the result."""
log = structlog.get_logger()


class Gone(NotFound):
    """The request is not here: it must be made again."""


class SamplesOutcome(msgspec.Struct, frozen=True):
    """The state of a request, with its samples if it is done."""

    done: bool = True
    samples: tuple[TinkerSample, ...] = ()
    error: str = ""  # what is wrong with it, for its user
    gone: bool = False  # it is not here, or could not be done: it must be made again


WAITS, GONE = SamplesOutcome(done=False), SamplesOutcome(gone=True)


@dataclass(slots=True, eq=False)
class Request:
    """One request for samples."""

    id: str
    ask: InferenceRequest
    key: tuple[str, str]  # tenant, what names the request, if anything does
    session: str  # empty: it names no sampler
    task: "asyncio.Task[SamplesOutcome]"
    asked_s: float  # monotonic: when its client last asked about it
    retrieved: bool = False
    has_room: bool = True  # it counts among its tenant's


class Samples:
    """The requests for samples that one replica of the API has under way in one cell."""

    def __init__(
        self, bus: Bus, inference: Inference, api_id: str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._bus = bus
        self._inference = inference
        self._prefix = f"{PREFIX}-{api_id}-{bus.cell.base_model}-"
        self._clock = clock
        self._numbers = count()
        self._requests: dict[str, Request] = {}
        self._ids: dict[tuple[str, str], str] = {}  # by `key`
        self._open: Counter[str] = Counter()  # by tenant
        self._num_samples: Counter[str] = Counter()  # by tenant, of those requests, as `_size` has it
        self._silent: dict[str, float] = {}  # session without a sign of life -> since when, as the clock says

    def start(self, ask: InferenceRequest, once: str = "", session: str = "") -> str:
        """The id of the request's future. What comes again, by its `once`, is not made again. Raises ApiError 429."""
        tenant = ask.tenant.id
        key = (tenant, once)
        if once and key in self._ids:
            return self._ids[key]
        if self._open[tenant] >= MAX_OPEN or self._num_samples[tenant] + _size(ask) > MAX_SAMPLES:
            raise too_many(
                f"{MAX_OPEN:,} of your requests for samples are under way or not retrieved, or {MAX_SAMPLES:,} samples, as which each"
                f" {TOKENS} tokens of a prompt count: retrieve some, or wait until some have ended"
            )
        name = f"{self._prefix}{next(self._numbers)}"
        task = asyncio.create_task(self._serve(name, ask, session))
        request = self._requests[name] = Request(name, ask, key, session, task, self._clock())
        if once:
            self._ids[key] = name
        self._open[tenant] += 1
        self._num_samples[tenant] += _size(ask)
        task.add_done_callback(lambda _: self._make_room(request))  # a task that is cancelled may never have begun
        return name

    async def outcome(self, tenant: str, name: str, timeout_s: float) -> SamplesOutcome:
        """Waits for a request's result."""
        try:
            request = self.find(tenant, name)
        except Gone:
            return GONE
        await asyncio.wait([request.task], timeout=timeout_s)
        if not request.task.done():
            return WAITS
        outcome = GONE if request.task.cancelled() else request.task.result()
        request.retrieved = True
        self._make_room(request)
        if outcome.gone:
            self._forget(request)
        return outcome

    def find(self, tenant: str, name: str) -> Request:
        """Raises Gone, also for another tenant's."""
        request = self._requests.get(name)
        if request is None or request.ask.tenant.id != tenant:
            raise Gone(f"the request {name[:64]!r} is not here any more: ask again")
        request.asked_s = self._clock()
        return request

    def give_up(self, tenant: str, name: str) -> None:
        """Cancels a request, if it is here."""
        with contextlib.suppress(Gone):
            self.cancel(self.find(tenant, name))

    def end_session(self, session: str) -> None:
        """Cancels what a client has under way that is no more."""
        for request in list(self._requests.values()):
            if request.session == session and not request.task.done():
                self.cancel(request)

    async def end_silent(self) -> None:
        """Cancels the requests of sessions that have ended, or show no sign of life."""
        sessions, now = sorted({request.session for request in self._requests.values()} - {""}), self._clock()
        keys = [self._bus.cell.session(session) for session in sessions]
        left_ms = await self._bus.pipelined(("PTTL", key) for key in keys)
        heard_ms = (SESSION_ALIVE_S - SILENT_S) * 1000
        silent = [session for session, left in zip(sessions, left_ms, strict=True) if left < heard_ms]
        self._silent = {session: self._silent.get(session, now) for session in silent}
        for session, since in self._silent.items():
            if now - since >= GRACE_S:
                self.end_session(session)

    def cancel(self, request: Request) -> None:
        self._forget(request)
        request.task.cancel()

    async def run(self) -> None:
        """Gives up what nobody asks about, until cancelled; then everything."""
        used_at = self._clock()
        try:
            while True:
                await asyncio.sleep(LOOK_EVERY_S)
                self.look()
                await self.end_silent()
                if self._clock() - used_at >= USE_EVERY_S:
                    used_at = self._clock()
                    await self.use_versions()
        finally:
            await cancel_all([request.task for request in self._requests.values()])

    def look(self) -> None:
        """Drops requests whose clients have not asked for too long."""
        now = self._clock()
        for request in list(self._requests.values()):
            if now - request.asked_s > _patience_s(request):
                self.cancel(request)

    async def use_versions(self) -> None:
        """Keeps the versions that requests wait for, so that they are there when their turn comes."""
        for adapter in {each.ask.adapter for each in self._requests.values() if not each.task.done()}:
            await use(self._bus, adapter)

    def _forget(self, request: Request) -> None:
        self._requests.pop(request.id, None)
        if self._ids.get(request.key) == request.id:
            del self._ids[request.key]
        self._make_room(request)

    def _make_room(self, request: Request) -> None:
        """Lets others have the room of a request that is over, once its result was retrieved or is here no more."""
        over = request.task.done() and (request.retrieved or request.id not in self._requests)
        if over and request.has_room:
            request.has_room = False
            self._open[request.ask.tenant.id] -= 1
            self._num_samples[request.ask.tenant.id] -= _size(request.ask)

    async def _serve(self, name: str, ask: InferenceRequest, session: str) -> SamplesOutcome:
        try:
            await self._within_quota(ask.tenant)
            return SamplesOutcome(samples=await self._sample(ask, session))
        except (InvalidInput, CorruptObject) as error:
            return SamplesOutcome(error=str(error))
        except (MarlaasError, RedisError, ApiError) as error:
            log.warning("samples_given_up", request=name, reason=str(error))
        except Exception:  # the boundary: it goes to whoever asks for the samples, as a request to be made again
            log.error("samples_failed", request=name, exc_info=True)
        return GONE

    async def _within_quota(self, tenant: TenantRecord) -> None:
        """Waits while the tenant's tokens of the day are used up."""
        limit, redis, cell = tenant.max_tokens_per_day, self._bus.client, self._bus.cell
        while limit is not None and await self._bus.retrying(lambda: tokens_today(redis, cell, tenant.id)) >= limit:
            await asyncio.sleep(QUOTA_EVERY_S)

    async def _sample(self, ask: InferenceRequest, session: str) -> tuple[TinkerSample, ...]:
        """The samples, in order. What they took is charged, also of a request that is cancelled or fails."""
        samples, usage = dict[int, TinkerSample](), Usage()
        try:
            async with aclosing(self._inference.answer(ask)) as progress:
                async for fresh in progress:
                    if fresh.result is not None:
                        samples[fresh.choice] = _sampled(fresh.result)
                        usage += fresh.result.usage
        finally:
            await asyncio.shield(self._charge(ask.tenant.id, usage, session))
        return tuple(samples[choice] for choice in sorted(samples))

    async def _charge(self, tenant: str, usage: Usage, session: str) -> None:
        redis, cell = self._bus.client, self._bus.cell
        if usage != Usage():
            await self._bus.retrying(lambda: count_inference(redis, cell, tenant, usage, session))


class PeerQuestion(msgspec.Struct, frozen=True, tag="Question"):
    number: int
    asker: str  # replica
    tenant: str
    request: str
    timeout_s: float | None  # None: its client does not want it any more, and no answer comes


class PeerAnswer(msgspec.Struct, frozen=True, tag="Answer"):
    number: int  # of the question
    outcome: SamplesOutcome


_decoder = msgspec.msgpack.Decoder(PeerQuestion | PeerAnswer)


class Peers:
    """One replica's questions to the others, and its answers to theirs."""

    def __init__(self, bus: Bus, samples: Samples, api_id: str) -> None:
        self._bus = bus
        self._samples = samples
        self._api_id = api_id
        self._numbers = count()
        self._waiting: dict[int, asyncio.Future[SamplesOutcome]] = {}

    async def outcome(self, replica: str, tenant: str, request: str, timeout_s: float) -> SamplesOutcome:
        """Waits for the result of a request, wherever it was made."""
        if replica == self._api_id:
            return await self._samples.outcome(tenant, request, timeout_s)
        question = PeerQuestion(next(self._numbers), self._api_id, tenant, request, timeout_s)
        waiting: asyncio.Future[SamplesOutcome] = asyncio.get_running_loop().create_future()
        self._waiting[question.number] = waiting
        try:
            if not await self._send(replica, question):
                return GONE
            async with asyncio.timeout(timeout_s + PEER_GRACE_S):
                return await waiting
        except TimeoutError:
            return WAITS
        finally:
            del self._waiting[question.number]

    async def give_up(self, replica: str, tenant: str, request: str) -> None:
        """Cancels a request, wherever it was made."""
        if replica == self._api_id:
            self._samples.give_up(tenant, request)
        else:
            await self._send(replica, PeerQuestion(next(self._numbers), self._api_id, tenant, request, None))

    async def run(self) -> None:
        """Reads until cancelled. What was read is deleted."""
        stream, client = self._bus.cell.peers(self._api_id), self._bus.client
        refreshed_s = float("-inf")
        async with starting() as start:
            while True:
                if time.monotonic() - refreshed_s > REFRESH_S:
                    await self._bus.keep_alive(stream, TTL_S)
                    refreshed_s = time.monotonic()
                found: Any = await self._bus.retrying(
                    lambda: client.xread({stream: "0"}, count=100, block=BLOCK_MS), block_ms=BLOCK_MS
                )
                entries = [entry for pages in (found or {}).values() for page in pages for entry in page]
                for entry, fields in entries:
                    start(self._take(_decoder.decode(fields[b"payload"])))
                    await self._bus.retrying(partial(client.xdel, stream, entry))

    async def _take(self, message: PeerQuestion | PeerAnswer) -> None:
        if isinstance(message, PeerAnswer):
            waiting = self._waiting.get(message.number)
            if waiting is not None and not waiting.done():
                waiting.set_result(message.outcome)
        elif message.timeout_s is None:
            self._samples.give_up(message.tenant, message.request)
        else:
            outcome = await self._samples.outcome(message.tenant, message.request, message.timeout_s)
            await self._send(message.asker, PeerAnswer(message.number, outcome))

    async def _send(self, replica: str, message: PeerQuestion | PeerAnswer) -> bool:
        """False if that replica is not there."""
        stream, content = self._bus.cell.peers(replica), msgspec.msgpack.encode(message)
        client = self._bus.client
        written: Any = await self._bus.retrying(lambda: client.xadd(stream, {"payload": content}, nomkstream=True))
        return written is not None


def place_of(request: str) -> tuple[str, str]:
    """(replica, base model) that a request's id names; empty if it names none."""
    match = _ID.fullmatch(request)
    return (match[1], match[2]) if match else ("", "")


def _size(ask: InferenceRequest) -> int:
    return ask.num_choices + sum(map(len, ask.prompts)) // TOKENS


def _patience_s(request: Request) -> float:
    if not request.task.done():
        return math.inf if request.session else UNASKED_S
    return RETRIEVED_S if request.retrieved else KEPT_S


def _sampled(result: TurnResult) -> TinkerSample:
    """The context's end reads like the limit of tokens."""
    reason = "stop" if result.stop_reason == "stop" else "length"
    return TinkerSample(result.tokens, result.logprobs, reason, result.prompt_logprobs)
