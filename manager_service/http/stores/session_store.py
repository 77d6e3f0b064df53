"""Sessions: one client each, alive while it sends a sign of life every few seconds. A tenant's sessions are bounded: those alive,
those kept, and what each says of itself.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from common.errors import InvalidInput, NotFound
from manager_service.http.context import Api
from manager_service.http.errors import ApiError
from manager_service.http.stores.tinker_names import is_session
from manager_service.records.keys import GLOBAL, JSON
from manager_service.records.run_records import SESSION_ALIVE_S, SESSION_KEPT_S, ClientSession

MAX_ALIVE = 1024
"""Sessions of one tenant that are alive at once."""
MAX_KEPT = 4096
"""Sessions of one tenant that are kept, alive or not."""
MAX_TOLD_BYTES = 4 << 10
"""Bytes that a client may tell of a session or of a run: its metadata, name and tags."""

# KEYS: those alive by their last sign of life. ARGV: the session, now, the moment until which silence ends one, most of them.
# Answers 0 if there is no room.
_BEGIN = """
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', ARGV[3])
if redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[4]) then return 0 end
redis.call('ZADD', KEYS[1], ARGV[2], ARGV[1])
return 1
"""


def check_told(**told: Any) -> None:
    """Raises InvalidInput if what a client tells of a session or a run is too much to keep, by the request's names."""
    num_bytes = len(JSON.encode([each for each in told.values() if each]))
    if num_bytes > MAX_TOLD_BYTES:
        names = ", ".join(told)
        raise InvalidInput(
            f"{names}: {num_bytes} bytes as JSON, and together they have at most {MAX_TOLD_BYTES}: keep what is longer yourself",
            param=next(iter(told)),
            code="too_large",
        )


class ClientSessions:
    def __init__(self, api: Api) -> None:
        self._api = api

    async def create(self, session: ClientSession) -> None:
        """Raises ApiError if too many are alive."""
        begin, now = self._api.redis.register_script(_BEGIN), time.time()
        words = [session.id, repr(now), repr(now - SESSION_ALIVE_S), MAX_ALIVE]
        if not await begin(keys=[_alive(session.tenant)], args=words):
            raise _too_many()
        await self._write(session)
        await self._show_alive(session)
        of = _all(session.tenant)
        await self._api.redis.zadd(of, {session.id: session.created_at})
        await self._api.redis.zremrangebyscore(of, "-inf", session.created_at - SESSION_KEPT_S)
        await self._api.redis.expire(of, SESSION_KEPT_S)
        await self._forget_oldest(session.tenant)

    async def _forget_oldest(self, tenant: str) -> None:
        """Forgets sessions that are not alive beyond MAX_KEPT: first those that were silent the longest."""
        of = _all(tenant)
        too_many = await self._api.redis.zcard(of) - MAX_KEPT
        if too_many <= 0:
            return
        sessions = await self._api.redis.zrange(of, 0, -1)
        alive = await self._api.redis.zmscore(_alive(tenant), sessions)
        silent = [session.decode() for session, sign in zip(sessions, alive, strict=True) if sign is None]
        pipe = self._api.redis.pipeline(transaction=False)
        for session in silent:
            pipe.pttl(_key(session))
        lefts_ms = await pipe.execute() if silent else []
        longest_first = [session for _, session in sorted(zip(lefts_ms, silent, strict=True))]
        if gone := longest_first[:too_many]:
            await self._api.redis.delete(*map(_key, gone))
            await self._api.redis.zrem(of, *gone)

    async def find(self, tenant: str, session: str) -> ClientSession:
        """Raises NotFound, also for another tenant's."""
        record = await self._api.redis.get(_key(session)) if is_session(session) else None
        found = None if record is None else msgspec.json.decode(record, type=ClientSession)
        if found is None or found.tenant != tenant:
            raise NotFound(f"there is no session {session[:64]!r}")
        return found

    async def newest_first(self, tenant: str, *, limit: int, offset: int) -> list[str]:
        """Ids of a tenant's sessions of the last month."""
        found = await self._api.redis.zrange(_all(tenant), offset, offset + limit - 1, desc=True)
        return [session.decode() for session in found]

    async def ids_before(self, tenant: str, before: tuple[int, str] | None) -> list[str]:
        """Newest first: those before a beginning, in seconds since 1970, and an id; None: all."""
        latest = "+inf" if before is None else before[0]
        found = await self._api.redis.zrange(_all(tenant), latest, "-inf", desc=True, byscore=True, withscores=True)
        rows = [(int(created_at), session.decode()) for session, created_at in found]
        return [session for created_at, session in rows if before is None or (created_at, session) < before]

    async def some(self, tenant: str, sessions: Sequence[str]) -> list[ClientSession]:
        """The sessions of a tenant that are still kept."""
        records = await self._api.redis.mget([_key(session) for session in sessions]) if sessions else []
        found = [msgspec.json.decode(record, type=ClientSession) for record in records if record is not None]
        return [session for session in found if session.tenant == tenant]

    async def alive(self, sessions: Sequence[str]) -> set[str]:
        """The sessions whose clients have shown a sign of life."""
        base = next(iter(self._api.bases.values()))  # each cell knows the same
        signs = await base.redis.mget([base.cell.session(session) for session in sessions]) if sessions else []
        return {session for session, sign in zip(sessions, signs, strict=True) if sign is not None}

    async def refresh(self, session: ClientSession) -> None:
        """Notes a sign of life."""
        await self._api.redis.zadd(_alive(session.tenant), {session.id: time.time()})
        await self._api.redis.expire(_key(session.id), SESSION_KEPT_S)
        await self._show_alive(session)

    async def finish(self, session: ClientSession, reason: str) -> None:
        """Ends it. The first reason stays."""
        if not session.finished:
            await self._write(msgspec.structs.replace(session, finished=reason))
        for base in self._api.bases.values():
            await base.redis.delete(base.cell.session(session.id))
        await self._api.redis.zrem(_alive(session.tenant), session.id)

    async def _write(self, session: ClientSession) -> None:
        await self._api.redis.set(_key(session.id), JSON.encode(session), ex=SESSION_KEPT_S)

    async def _show_alive(self, session: ClientSession) -> None:
        """Tells the owners of each cell. A Redis that is away keeps no other from hearing it."""
        signs = (
            base.redis.set(base.cell.session(session.id), session.tenant, ex=SESSION_ALIVE_S)
            for base in self._api.bases.values()
        )
        for error in await asyncio.gather(*signs, return_exceptions=True):
            if isinstance(error, BaseException):
                raise error


def _key(session: str) -> str:
    return f"{GLOBAL}session:{session}"


def _all(tenant: str) -> str:
    return f"{GLOBAL}sessions:{tenant}"


def _alive(tenant: str) -> str:
    return f"{GLOBAL}alive:{tenant}"


def _too_many() -> ApiError:
    return ApiError(  # the SDK would repeat after a 429 for minutes, and say nothing
        400,
        f"{MAX_ALIVE:,} of your sessions are alive: end some (close their clients, or POST /api/v1/sessions/ID/finish); one whose"
        f" client is silent ends after {SESSION_ALIVE_S // 60} minutes",
        code="too_many_sessions",
        retry=False,
    )
