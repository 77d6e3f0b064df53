"""Samples in object storage, a file a step. Redis has those of a job's newest step, and whatever was not moved yet.

records/{tenant}/{base}/{job}/samples/{version}.json      a list of SampleRecord
"""

from collections.abc import Iterable

from common.errors import NotFound
from common.objects import Objects


class SampleFiles:
    """Those of one base model's jobs. Raises Unavailable."""

    def __init__(self, objects: Objects, base_model: str) -> None:
        self._objects = objects
        self._base_model = base_model

    def _folder(self, tenant: str, job: str) -> str:
        return f"records/{tenant}/{self._base_model}/{job}/samples"

    async def write(self, tenant: str, job: str, version: int, samples: bytes) -> None:
        """Replaces what a step that was lost, and made again, had left there."""
        await self._objects.write(f"{self._folder(tenant, job)}/{version}.json", samples)

    async def read(self, tenant: str, job: str, version: int) -> bytes:
        """An empty list if there are none of this version."""
        try:
            return await self._objects.get(f"{self._folder(tenant, job)}/{version}.json")
        except NotFound:
            return b"[]"

    async def versions(self, tenant: str, job: str) -> list[int]:
        """Those that have a file, ascending. Lists all files of the job."""
        names = await self._objects.paths(self._folder(tenant, job))
        return sorted(int(name.rpartition("/")[2].removesuffix(".json")) for name in names)

    async def drop(self, tenant: str, job: str, versions: Iterable[int]) -> None:
        folder = self._folder(tenant, job)
        await self._objects.delete(*(f"{folder}/{version}.json" for version in versions))

    async def drop_below(self, tenant: str, job: str, first: int) -> None:
        """Deletes whatever is there of versions below `first`."""
        await self.drop(tenant, job, [version for version in await self.versions(tenant, job) if version < first])
