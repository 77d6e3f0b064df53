"""Keeps the model with which each sampler samples. The record never changes; it expires some time after its last use."""

import time

import msgspec

from common.errors import NotFound
from common.messages import AdapterRef
from manager_service.api.context import Api, Base
from manager_service.records import JSON
from manager_service.runs.records import USED_S, Sampler, SamplerState
from manager_service.tinker.store.runs import RunStore
from manager_service.tinker.store.uses import use

NAMED_KEPT_S = 30 * 86_400
"""Seconds that a sampler of the base model or of a checkpoint is kept after its last use."""
MAX_NAMED = 20_000
"""Named samplers of one tenant in a cell."""
SAVED_KEPT_S = USED_S
"""The same of one that a save made without a name. As long, nobody deletes its version."""


class Samplers:
    def __init__(self, api: Api, runs: RunStore) -> None:
        self._api = api
        self._runs = runs

    async def create(self, base: Base, sampler: Sampler) -> None:
        """Makes a sampler of the base model or of a checkpoint. Those that were the longest unused are forgotten beyond MAX_NAMED."""
        await base.redis.set(base.cell.sampler(sampler.id), JSON.encode(sampler), ex=sampler.keep_s)
        await self._note_use(base, sampler)
        key, now = base.cell.tenant_samplers(sampler.tenant), time.time()
        await base.redis.zremrangebyscore(key, "-inf", now - NAMED_KEPT_S)
        too_many = await base.redis.zcard(key) - MAX_NAMED
        if too_many > 0:
            oldest = [name.decode() for name in await base.redis.zrange(key, 0, too_many - 1)]
            await base.redis.delete(*map(base.cell.sampler, oldest), *map(base.cell.clients, oldest))
            await base.redis.zrem(key, *oldest)

    async def _note_use(self, base: Base, sampler: Sampler) -> None:
        pipe = base.redis.pipeline(transaction=False)
        pipe.expire(base.cell.sampler(sampler.id), sampler.keep_s)
        if not sampler.run:  # a run bounds its own
            key = base.cell.tenant_samplers(sampler.tenant)
            pipe.zadd(key, {sampler.id: time.time()})
            pipe.expire(key, NAMED_KEPT_S)
        await pipe.execute()

    async def find(self, tenant: str, sampler: str) -> tuple[Base, Sampler]:
        """Notes that it is used. Raises NotFound, also for another tenant's."""
        for base in self._api.bases.values():
            record = await base.redis.get(base.cell.sampler(sampler))
            found = None if record is None else msgspec.json.decode(record, type=Sampler)
            if found is not None and found.tenant == tenant:
                await self._note_use(base, found)
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
        """The version that it samples with now, noted as used. Raises NotFound, also when the checkpoint that it was made of is gone, or
        the job's version."""
        if sampler.path is not None:
            await self._runs.check(sampler.tenant, sampler.path)
        adapter = await self._version(sampler) if sampler.run else sampler.adapter
        if not await use(base.bus, adapter):
            raise NotFound(f"{sampler.id}: version {adapter.version} was long unused, and is deleted: save again")
        return adapter

    async def _version(self, sampler: Sampler) -> AdapterRef:
        run = await self._runs.find(sampler.tenant, sampler.run)
        record = await run.base.redis.hget(run.base.cell.samplers(run.id), sampler.id)
        if record is None:
            raise NotFound(
                f"the sampler {sampler.id} has no version: its save is not done, or failed, or is too long ago: save again"
            )
        return AdapterRef(sampler.tenant, sampler.run, msgspec.json.decode(record, type=SamplerState).version)
