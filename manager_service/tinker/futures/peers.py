"""Replicas of the API ask each other for samples: a request's result is where it was made, and its client may ask anywhere.

    a replica ─ Question ─► peers:<the other> ─► it waits for the result ─ Answer ─► peers:<the replica>
    a replica ─ GivenUp ─► peers:<the other> ─► it cancels the request

reads: its own stream   writes: the others'   holds: questions under way
when a replica dies: its stream ends after TTL_S, and whoever asks hears that the request is gone
"""

import asyncio
import time
from itertools import count
from typing import Any

import msgspec

from common.bus import Bus
from common.tasks import starting
from manager_service.tinker.futures.samples import GONE, Samples, SamplesOutcome

TTL_S = 60
REFRESH_S = 5.0
BLOCK_MS = 1000
GRACE_S = 3.0
"""Seconds that a replica waits for another's answer after that one has stopped waiting for the result."""


class PeerQuestion(msgspec.Struct, frozen=True, tag="Question"):
    number: int
    asker: str  # replica
    tenant: str
    request: str
    timeout_s: float


class PeerAnswer(msgspec.Struct, frozen=True, tag="Answer"):
    number: int  # of the question
    outcome: SamplesOutcome


class GivenUp(msgspec.Struct, frozen=True, tag=True):
    """Its client does not want it any more."""

    tenant: str
    request: str


_decoder = msgspec.msgpack.Decoder(PeerQuestion | PeerAnswer | GivenUp)


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
            async with asyncio.timeout(timeout_s + GRACE_S):
                return await waiting
        except TimeoutError:
            return SamplesOutcome(done=False)
        finally:
            del self._waiting[question.number]

    async def give_up(self, replica: str, tenant: str, request: str) -> None:
        """Cancels a request, wherever it was made."""
        if replica == self._api_id:
            self._samples.give_up(tenant, request)
        else:
            await self._send(replica, GivenUp(tenant, request))

    async def run(self) -> None:
        """Reads until cancelled."""
        cursor, refreshed_s = "0", float("-inf")
        async with starting() as start:
            while True:
                if time.monotonic() - refreshed_s > REFRESH_S:
                    await self._bus.keep_alive(self._bus.cell.peers(self._api_id), TTL_S)
                    refreshed_s = time.monotonic()
                for entry, message in await self._read(cursor):
                    cursor = entry
                    if isinstance(message, PeerQuestion):
                        start(self._answer(message))
                    elif isinstance(message, GivenUp):
                        self._samples.give_up(message.tenant, message.request)
                    elif (waiting := self._waiting.get(message.number)) is not None and not waiting.done():
                        waiting.set_result(message.outcome)

    async def _answer(self, question: PeerQuestion) -> None:
        outcome = await self._samples.outcome(question.tenant, question.request, question.timeout_s)
        await self._send(question.asker, PeerAnswer(question.number, outcome))

    async def _send(self, replica: str, message: PeerQuestion | PeerAnswer | GivenUp) -> bool:
        """False if that replica is not there."""
        stream, content = self._bus.cell.peers(replica), msgspec.msgpack.encode(message)
        client = self._bus.client
        written: Any = await self._bus.retrying(lambda: client.xadd(stream, {"payload": content}, nomkstream=True))
        return written is not None

    async def _read(self, after: str) -> list[tuple[str, PeerQuestion | PeerAnswer | GivenUp]]:
        """Entries behind an id. What was read is deleted."""
        stream, client = self._bus.cell.peers(self._api_id), self._bus.client
        found: Any = await self._bus.retrying(
            lambda: client.xread({stream: after}, count=100, block=BLOCK_MS), block_ms=BLOCK_MS
        )
        entries = [entry for pages in (found or {}).values() for page in pages for entry in page]
        if entries:
            await self._bus.retrying(lambda: client.xdel(stream, *(entry for entry, _ in entries)))
        return [(entry.decode(), _decoder.decode(fields[b"payload"])) for entry, fields in entries]
