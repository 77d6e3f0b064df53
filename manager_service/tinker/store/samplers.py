"""What each sampler samples with. The record never changes; it expires some time after its last use."""

import msgspec

from common.errors import NotFound
from common.messages import AdapterRef
from manager_service.api.context import Api, Base
from manager_service.records import JSON
from manager_service.runs.records import USED_S, Sampler
from manager_service.tinker.store.runs import RunStore
from manager_service.tinker.store.uses import use

NAMED_KEPT_S = 30 * 86_400
"""How long a sampler of the base model or of a checkpoint is kept after its last use."""
SAVED_KEPT_S = USED_S
"""The same of one that a save made without a name. As long, nobody deletes its version."""


class Samplers:
    def __init__(self, api: Api, runs: RunStore) -> None:
        self._api = api
        self._runs = runs

    async def create(self, base: Base, sampler: Sampler) -> None:
        await base.redis.set(base.cell.sampler(sampler.id), JSON.encode(sampler), ex=sampler.keep_s)

    async def find(self, tenant: str, sampler: str) -> tuple[Base, Sampler]:
        """Notes that it is used. Raises NotFound, also for another tenant's."""
        for base in self._api.bases.values():
            record = await base.redis.get(base.cell.sampler(sampler))
            found = None if record is None else msgspec.json.decode(record, type=Sampler)
            if found is not None and found.tenant == tenant:
                await base.redis.expire(base.cell.sampler(sampler), found.keep_s)
                return base, found
        raise NotFound(
            f"there is no sampler {sampler[:64]!r}; one that was long unused is forgotten: save again, and sample with what it gives"
        )

    async def adapter(self, base: Base, sampler: Sampler) -> AdapterRef:
        """The version that it samples with now, noted as used. Raises NotFound."""
        adapter = await self._version(sampler) if sampler.run else sampler.adapter
        if not await use(base.bus, adapter):
            raise NotFound(f"{sampler.id}: version {adapter.version} was long unused, and is deleted: save again")
        return adapter

    async def _version(self, sampler: Sampler) -> AdapterRef:
        run = await self._runs.find(sampler.tenant, sampler.run)
        state = (await run.state()).samplers.get(sampler.id)
        if state is None:
            raise NotFound(f"the sampler {sampler.id} has no version: the save that makes it is not done, or it failed")
        return AdapterRef(sampler.tenant, sampler.run, state.version)
