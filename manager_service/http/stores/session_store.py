"""Sessions: one client each, alive while it sends a sign of life every few seconds."""

import asyncio
from collections.abc import Sequence

import msgspec

from common.errors import NotFound
from manager_service.http.context import Api
from manager_service.http.stores.tinker_names import is_session
from manager_service.records.keys import GLOBAL, JSON
from manager_service.records.run_records import SESSION_ALIVE_S, SESSION_KEPT_S, ClientSession, forget_oldest

LARGE_BYTES, MAX_LARGE = 1024, 1000
"""Sessions whose records, with what their users note in them, have more bytes; how many of them a tenant keeps."""
READ_COUNT = 100
"""Sessions that are read together: a tenant may have 8 MB of them."""


class ClientSessions:
    def __init__(self, api: Api) -> None:
        self._api = api

    async def create(self, session: ClientSession) -> None:
        """Keeps a new session. Beyond MAX_KEPT, and of large ones beyond MAX_LARGE, the tenant's oldest are forgotten."""
        await self._write(session)
        await self._show_alive(session)
        await self._list(_all(session.tenant), session)
        if len(JSON.encode(session)) > LARGE_BYTES:
            gone = await self._list(f"{_all(session.tenant)}/large", session, most=MAX_LARGE)
            if gone:
                await self._api.redis.zrem(_all(session.tenant), *gone)

    async def _list(self, of: str, session: ClientSession, most: int | None = None) -> list[str]:
        redis = self._api.redis
        await redis.zadd(of, {session.id: session.created_at})
        await redis.zremrangebyscore(of, "-inf", session.created_at - SESSION_KEPT_S)
        await redis.expire(of, SESSION_KEPT_S)
        return await forget_oldest(redis, of, _key, most=most)

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
        """The sessions of a tenant that are still kept. Others have Redis and the event loop between. Call in `Api.reads`."""
        found: list[ClientSession] = []
        for start in range(0, len(sessions), READ_COUNT):
            records = await self._api.redis.mget([_key(each) for each in sessions[start : start + READ_COUNT]])
            found += [msgspec.json.decode(record, type=ClientSession) for record in records if record is not None]
        return [session for session in found if session.tenant == tenant]

    async def alive(self, sessions: Sequence[str]) -> set[str]:
        """The sessions whose clients have shown a sign of life."""
        base = next(iter(self._api.bases.values()))  # each cell knows the same
        signs = await base.redis.mget([base.cell.session(session) for session in sessions]) if sessions else []
        return {session for session, sign in zip(sessions, signs, strict=True) if sign is not None}

    async def refresh(self, session: ClientSession) -> None:
        """Notes a sign of life."""
        await self._api.redis.expire(_key(session.id), SESSION_KEPT_S)
        await self._show_alive(session)

    async def finish(self, session: ClientSession, reason: str) -> None:
        """Ends it. The first reason stays."""
        if not session.finished:
            await self._write(msgspec.structs.replace(session, finished=reason))
        for base in self._api.bases.values():
            await base.redis.delete(base.cell.session(session.id))

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
