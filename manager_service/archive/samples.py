"""Samples in object storage: an object a step and an evaluation. Owners write them while the job runs; the archive leaves them in place.

records/{tenant}/{base}/{job}/samples/{version}.json      a list of SampleRecord: what a step was trained on
records/{tenant}/{base}/{job}/answers/{version}.json      a list of SampleRecord: what an evaluation's first items were answered
"""

from collections.abc import Iterable

from common.errors import NotFound
from common.objects import Objects
from manager_service.kept import Kept
from manager_service.records import JobState, SampleKind


class SampleFiles:
    """The files of one kind, of one base model's jobs. Raises Unavailable."""

    def __init__(self, objects: Objects, base_model: str, kind: SampleKind = "samples") -> None:
        self._objects = objects
        self._base_model = base_model
        self._kind = kind

    def _folder(self, tenant: str, job: str) -> str:
        return f"records/{tenant}/{self._base_model}/{job}/{self._kind}"

    async def write(self, tenant: str, job: str, version: int, samples: bytes) -> None:
        """Replaces what a step that was lost, and made again, had left there."""
        await self._objects.write(f"{self._folder(tenant, job)}/{version}.json", samples)

    async def read(self, tenant: str, job: str, version: int) -> bytes:
        """An empty list if there are none of this version."""
        try:
            return await self._objects.get(f"{self._folder(tenant, job)}/{version}.json")
        except NotFound:
            return b"[]"

    async def has(self, tenant: str, job: str, version: int) -> bool:
        return await self._objects.exists(f"{self._folder(tenant, job)}/{version}.json")

    async def versions(self, tenant: str, job: str) -> list[int]:
        """Versions that have a file, ascending. Lists all files of the job."""
        names = await self._objects.paths(self._folder(tenant, job))
        return sorted(int(name.rpartition("/")[2].removesuffix(".json")) for name in names)

    async def drop(self, tenant: str, job: str, versions: Iterable[int]) -> None:
        folder = self._folder(tenant, job)
        await self._objects.delete(*(f"{folder}/{version}.json" for version in versions))

    async def drop_below(self, tenant: str, job: str, first: int) -> None:
        """Deletes whatever is there of versions below `first`."""
        await self.drop(tenant, job, [version for version in await self.versions(tenant, job) if version < first])


def sample_versions(state: JobState) -> list[int]:
    """A job's versions that may have samples of a step, ascending. Looks at no file."""
    kept = state.kept.get("samples", Kept())
    return list(range(max(1, kept.first), kept.newest + 1))
