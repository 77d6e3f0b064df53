"""Keeps the model with which each sampler samples. The record never changes; it expires some time after its last use."""

import time

import msgspec

from common.errors import NotFound
from common.wire.messages import AdapterRef
from manager_service.http.context import Api, Base
from manager_service.http.stores.run_store import RunStore
from manager_service.records.keys import JSON
from manager_service.records.run_records import Sampler, forget_oldest, use

NAMED_KEPT_S = 30 * 86_400
"""Seconds that a sampler of the base model or of a checkpoint is kept after its last use."""


class Samplers:
    def __init__(self, api: Api, runs: RunStore) -> None:
        self._api = api
        self._runs = runs

    async def create(self, base: Base, sampler: Sampler) -> None:
        """Makes a sampler of the base model or of a checkpoint."""
        await base.redis.set(base.cell.sampler(sampler.id), JSON.encode(sampler), ex=sampler.keep_s)
        await self.note(base, sampler.tenant, sampler.id, sampler.keep_s)

    async def note(self, base: Base, tenant: str, sampler: str, keep_s: int) -> None:
        """Notes a new one, or one that a save is to make. Beyond MAX_KEPT, those that expire first are forgotten."""
        key, now = base.cell.tenant_samplers(tenant), time.time()
        pipe = base.redis.pipeline(transaction=False)
        pipe.zadd(key, {sampler: now + keep_s})
        pipe.expire(key, NAMED_KEPT_S)
        pipe.zremrangebyscore(key, "-inf", now)
        await pipe.execute()
        await forget_oldest(base.redis, key, base.cell.sampler, base.cell.clients)

    async def of_session(self, tenant: str, session: str) -> list[str]:
        found: list[str] = []
        for base in self._api.bases.values():
            names = await base.redis.zrange(base.cell.tenant_samplers(tenant), 0, -1)
            found += [name.decode() for name in names if name.startswith(f"{session}:".encode())]
        return found

    async def find(self, tenant: str, sampler: str) -> tuple[Base, Sampler]:
        """Notes that it is used. Raises NotFound, also for another tenant's."""
        for base in self._api.bases.values():
            record = await base.redis.get(base.cell.sampler(sampler))
            found = None if record is None else msgspec.json.decode(record, type=Sampler)
            if found is not None and found.tenant == tenant:
                pipe = base.redis.pipeline(transaction=False)
                pipe.expire(base.cell.sampler(sampler), found.keep_s)
                pipe.zadd(base.cell.tenant_samplers(tenant), {sampler: time.time() + found.keep_s})
                await pipe.execute()
                return base, found
        raise NotFound(
            f"there is no sampler {sampler[:64]!r}; one that was long unused is forgotten: save again, and sample with what it gives"
        )

    async def join(self, base: Base, sampler: Sampler) -> int:
        """The number of another client of it, from 1."""
        key = base.cell.clients(sampler.id)
        number = await base.redis.incr(key)
        await base.redis.expire(key, NAMED_KEPT_S)
        return number

    async def adapter(self, base: Base, sampler: Sampler) -> AdapterRef:
        """The version that it samples with now, noted as used. Raises NotFound, also when what it was made of is gone."""
        if sampler.path is not None:
            await self._runs.check(sampler.tenant, sampler.path)
        adapter = sampler.adapter
        if sampler.inflight:
            run = await self._runs.find(sampler.tenant, adapter.job)
            adapter = msgspec.structs.replace(adapter, version=(await run.state()).inflight)
        if not await use(base.bus, adapter):
            raise NotFound(f"{sampler.id}: version {adapter.version} was long unused, and is deleted: save again")
        return adapter
