"""Runs requests for samples, and keeps what they give until it is retrieved.

    asample ─► start ─► a task: waits for quota and places ─► rollout ─► result ─► retrieve_future

holds: requests under way and their results (lost on a crash: the client's future answers 410, and it samples again)
waits for: places, turns   unblocked by: rollout
"""

import asyncio
import contextlib
import re
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import msgspec
import structlog
from redis.exceptions import RedisError

from common.bus import Bus
from common.errors import CorruptObject, InvalidInput, MarlaasError, NotFound
from common.messages import TurnResult, Usage
from common.tasks import cancel_all
from manager_service.api.errors import RETRY_AFTER_S, ApiError
from manager_service.api.quota import count_inference, tokens_today
from manager_service.api.sampling.choices import InferenceRequest
from manager_service.api.sampling.shares import Inference
from manager_service.runs.records import USED_S
from manager_service.tinker.futures.finished import Finished, Target
from manager_service.tinker.store.uses import use
from manager_service.tinker.wire.samples import TinkerSample

PREFIX = "smp"
_ID = re.compile(rf"{PREFIX}-([0-9a-f]{{16}})-(.+)-\d+")  # replica, base model
MAX_OPEN = 10_000
"""Requests of one tenant that are under way."""
MAX_SAMPLES = 65_536
"""Samples of those requests together: each is held in memory from the beginning."""
KEPT_S, RETRIEVED_S = 600.0, 30.0
"""Seconds that a result waits to be retrieved, and to be retrieved again if the first answer was lost."""
SILENT_S = 300.0
"""A request that nobody asked about for so long is given up."""
GRACE_S = 30.0
"""Time in which a silent session may show a sign of life again: after a Redis that was away, none has shown one yet."""
LOOK_EVERY_S = 10.0
USE_EVERY_S = USED_S / 4
"""Seconds between two notes of the use of a version that requests wait for."""
QUOTA_EVERY_S = 15.0
log = structlog.get_logger()


class Gone(NotFound):
    """The request is not here: it must be made again."""


class SamplesOutcome(msgspec.Struct, frozen=True):
    """The state of a request, with its samples if it is done."""

    done: bool
    samples: tuple[TinkerSample, ...] = ()
    error: str = ""  # what is wrong with it, for its user
    gone: bool = False  # it is not here, or could not be done: it must be made again
    waits_for_quota: bool = False


GONE = SamplesOutcome(done=True, gone=True)


@dataclass(slots=True, eq=False)
class Request:
    """One request for samples."""

    id: str
    tenant: str
    ask: InferenceRequest
    samples: list[TinkerSample | None]
    key: tuple[str, str]  # tenant, what names the request, if anything does
    asker: Target | None  # None: it names no sampler
    asked_s: float  # monotonic: when its client last asked about it
    retrieved: bool = False
    done: asyncio.Event = field(default_factory=asyncio.Event)
    waits_for_quota: bool = False
    error: str = ""  # what is wrong with it, for its user
    gone: bool = False  # it could not be done
    usage: Usage = field(default_factory=Usage)
    task: "asyncio.Task[None] | None" = None

    def outcome(self) -> SamplesOutcome:
        samples = tuple(sample for sample in self.samples if sample is not None)
        return SamplesOutcome(self.done.is_set(), samples, self.error, self.gone, self.waits_for_quota)


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
        self._num_samples: Counter[str] = Counter()  # by tenant, of those requests
        self._silent: dict[str, float] = {}  # session without a sign of life -> since when, as the clock says
        self.finished = Finished(bus)

    def start(self, ask: InferenceRequest, once: str = "", asker: Target | None = None) -> str:
        """The id of the request's future. A request that comes again, as `once` names it, is not made again. Raises ApiError 429."""
        tenant = ask.tenant.id
        key = (tenant, once)
        if once and key in self._ids:
            return self._ids[key]
        if self._open[tenant] >= MAX_OPEN or self._num_samples[tenant] + ask.num_choices > MAX_SAMPLES:
            raise _too_many()
        name = f"{self._prefix}{next(self._numbers)}"
        request = Request(name, tenant, ask, [None] * ask.num_choices, key, asker, self._clock())
        self._requests[name] = request
        if once:
            self._ids[key] = name
        self._open[tenant] += 1
        self._num_samples[tenant] += ask.num_choices
        request.task = asyncio.create_task(self._serve(request))
        request.task.add_done_callback(lambda _: self._end(request))  # one that is cancelled may never have begun
        return name

    async def outcome(self, tenant: str, name: str, timeout_s: float) -> SamplesOutcome:
        """Waits for a request's result."""
        try:
            request = self.find(tenant, name)
        except Gone:
            return GONE
        try:
            async with asyncio.timeout(timeout_s):
                await request.done.wait()
            request.retrieved = True
        except TimeoutError:
            pass
        if request.gone:
            self.cancel(request)
        return request.outcome()

    def find(self, tenant: str, request: str) -> Request:
        """Raises Gone, also for another tenant's."""
        found = self._requests.get(request)
        if found is None or found.tenant != tenant:
            raise Gone(f"the request {request[:64]!r} is not here any more: ask again")
        found.asked_s = self._clock()
        return found

    def give_up(self, tenant: str, request: str) -> None:
        """Cancels a request that its client does not want any more. What is not here is passed over."""
        with contextlib.suppress(Gone):
            self.cancel(self.find(tenant, request))

    def end_session(self, session: str) -> None:
        """Cancels what a client has under way that is no more."""
        for request in self._of_sessions({session}):
            self.cancel(request)

    async def end_silent(self) -> None:
        """Cancels what those clients have under way whose sessions have ended, or show no sign of life."""
        sessions = {request.asker.session for request in self._requests.values() if request.asker}
        silent, now = sessions - await self._there(sessions, self._bus.cell.session), self._clock()
        self._silent = {session: self._silent.get(session, now) for session in silent}
        finished = await self._there(silent, self._bus.cell.finished_session)
        over = {session for session, since in self._silent.items() if now - since > GRACE_S or session in finished}
        for request in self._of_sessions(over):
            self.cancel(request)

    def _of_sessions(self, sessions: Container[str]) -> list[Request]:
        """Requests that have no result."""
        found = (each for each in self._requests.values() if each.asker and each.asker.session in sessions)
        return [request for request in found if not request.done.is_set()]

    async def _there(self, sessions: Iterable[str], key: Callable[[str], str]) -> set[str]:
        """The sessions of these that have such a key."""
        asked, client = list(sessions), self._bus.client
        found: Any = await self._bus.retrying(lambda: client.mget([key(each) for each in asked])) if asked else []
        return {session for session, value in zip(asked, found, strict=True) if value is not None}

    def cancel(self, request: Request) -> None:
        request.gone = request.gone or not request.done.is_set()
        self._forget(request)
        if request.task is not None:
            request.task.cancel()

    def note_sign_of_life(self, asker: Target) -> None:
        """Notes that a client waits for all of its requests at once."""
        for request in self._requests.values():
            if request.asker == asker:
                request.asked_s = self._clock()

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
            await cancel_all([request.task for request in self._requests.values() if request.task is not None])

    def look(self) -> None:
        """Drops requests whose clients have been silent for too long."""
        now = self._clock()
        for request in list(self._requests.values()):
            if now - request.asked_s > _patience_s(request):
                self.cancel(request)

    async def use_versions(self) -> None:
        """Keeps the versions that requests wait for, so that they are there when their turn comes."""
        for adapter in {each.ask.adapter for each in self._requests.values() if not each.done.is_set()}:
            await use(self._bus, adapter)

    def _forget(self, request: Request) -> None:
        self._requests.pop(request.id, None)
        if self._ids.get(request.key) == request.id:
            del self._ids[request.key]

    async def _serve(self, request: Request) -> None:
        try:
            await self._within_quota(request)
            await self._sample(request)
        except (InvalidInput, CorruptObject) as error:
            request.error = str(error)
        except (MarlaasError, RedisError, ApiError) as error:
            log.warning("samples_given_up", request=request.id, reason=str(error))
            request.gone = True
        except Exception:  # the boundary: it goes to whoever asks for the samples, as a request to be made again
            log.error("samples_failed", request=request.id, exc_info=True)
            request.gone = True
        finally:
            self._end(request)
            await asyncio.shield(self._charge(request))

    def _end(self, request: Request) -> None:
        """Lets others have the room of a request; once, however often it is called."""
        if not request.done.is_set():
            request.done.set()
            self._open[request.tenant] -= 1
            self._num_samples[request.tenant] -= request.ask.num_choices

    async def _within_quota(self, request: Request) -> None:
        """Waits while the tenant's tokens of the day are used up."""
        limit, redis, cell = request.ask.tenant.max_tokens_per_day, self._bus.client, self._bus.cell
        while (
            limit is not None and await self._bus.retrying(lambda: tokens_today(redis, cell, request.tenant)) >= limit
        ):
            request.waits_for_quota = True
            await asyncio.sleep(QUOTA_EVERY_S)
        request.waits_for_quota = False

    async def _sample(self, request: Request) -> None:
        async with aclosing(self._inference.answer(request.ask)) as progress:
            async for fresh in progress:
                if fresh.result is not None:
                    request.samples[fresh.choice] = _sampled(fresh.result)
                    request.usage += fresh.result.usage

    async def _charge(self, request: Request) -> None:
        usage, cell, asker = request.usage, self._bus.cell, request.asker
        if asker:
            await self.finished.add(asker, request.id, failed=request.gone or bool(request.error))
        if usage != Usage():
            session = asker.session if asker else ""
            await self._bus.retrying(lambda: count_inference(self._bus.client, cell, request.tenant, usage, session))


def place_of(request: str) -> tuple[str, str] | None:
    """(replica, base model) that a request's id names."""
    found = _ID.fullmatch(request)
    return (found[1], found[2]) if found else None


def _patience_s(request: Request) -> float:
    if not request.done.is_set():
        return SILENT_S
    return RETRIEVED_S if request.retrieved else KEPT_S


def _sampled(result: TurnResult) -> TinkerSample:
    """The context's end reads like the limit of tokens."""
    reason = "stop" if result.stop_reason == "stop" else "length"
    return TinkerSample(result.tokens, result.logprobs, reason, result.prompt_logprobs)


def _too_many() -> ApiError:
    error = ApiError(
        429,
        f"{MAX_OPEN:,} of your requests for samples are under way, or {MAX_SAMPLES:,} samples: wait until some have ended",
        code="too_many",
    )
    error.headers = {"Retry-After": str(RETRY_AFTER_S)}
    return error
