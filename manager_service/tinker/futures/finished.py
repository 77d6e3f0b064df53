"""Tells a sampler's client which of its requests are finished, many at once.

    the replica that sampled ─► ended:<sampler>:<clone> ─► retrieve_futures, at any replica ─► the client fetches each result

reads and writes: `ended:…`, which expires   waits for: an event   unblocked by: this replica's requests; others' within LOOK_EVERY_S
after a crash: what the replica had under way is never told, so clients are not asked to wait in this way: see CLIENT_CONFIG
"""

import asyncio
import time
from typing import Any, NamedTuple

import msgspec

from common.bus import Bus

CLONE = 1_000_000_000
"""Each client of a sampler numbers its requests from a multiple of this on."""
KEPT_S = 900
NUM_KEPT = 20_000
"""Events of one client that are kept."""
MAX_TOLD = 1000
"""Events that are told at once."""
LOOK_EVERY_S = 1.0
PER_MS = 1 << 20
"""A cursor is the milliseconds of a stream's entry times this, and its number within them."""


class Target(NamedTuple):
    """One client of a sampler."""

    sampler: str
    clone: int

    @property
    def session(self) -> str:
        return self.sampler.partition(":")[0]


def target_of(sampler: str | None, seq: int | None) -> Target | None:
    """The sampler and client of this request; None if it is of no sampler."""
    return None if sampler is None else Target(sampler, (seq or 0) // CLONE)


class FinishedRequest(msgspec.Struct, frozen=True):
    request_id: str
    state: str  # `finished` or `failed`


class Finished:
    """Events of one cell."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._waiting: dict[Target, set[asyncio.Event]] = {}

    async def add(self, target: Target, request: str, *, failed: bool) -> None:
        """Call once the result can be retrieved."""
        key = self._key(target)
        fields: Any = {"request": request, "state": "failed" if failed else "finished"}

        async def call() -> Any:
            pipe = self._bus.client.pipeline(transaction=False)
            pipe.xadd(key, fields, maxlen=NUM_KEPT)
            pipe.expire(key, KEPT_S)
            return await pipe.execute()

        await self._bus.retrying(call)
        for event in self._waiting.get(target, ()):
            event.set()

    async def behind(self, target: Target, cursor: int, timeout_s: float) -> tuple[list[FinishedRequest], int]:
        """Waits for events behind a cursor; none in time: an empty list. Gives the next cursor too."""
        event, end_s = asyncio.Event(), time.monotonic() + timeout_s
        waiting = self._waiting.setdefault(target, set())
        waiting.add(event)
        try:
            while True:
                event.clear()
                found = await self._look(target, cursor)
                left_s = end_s - time.monotonic()
                if found or left_s <= 0:
                    return [one for _, one in found], max([cursor, *(at for at, _ in found)])
                try:
                    async with asyncio.timeout(min(left_s, LOOK_EVERY_S)):
                        await event.wait()
                except TimeoutError:
                    pass
        finally:
            waiting.discard(event)
            if not waiting:
                self._waiting.pop(target, None)

    async def _look(self, target: Target, cursor: int) -> list[tuple[int, FinishedRequest]]:
        key, after = self._key(target), f"({cursor // PER_MS}-{cursor % PER_MS}"
        rows: Any = await self._bus.retrying(lambda: self._bus.client.xrange(key, min=after, count=MAX_TOLD))
        return [
            (_cursor(entry), FinishedRequest(fields[b"request"].decode(), fields[b"state"].decode()))
            for entry, fields in rows
        ]

    def _key(self, target: Target) -> str:
        return self._bus.cell.ended(target.sampler, target.clone)


def _cursor(entry: bytes) -> int:
    moment, _, number = entry.decode().partition("-")
    return int(moment) * PER_MS + int(number)
