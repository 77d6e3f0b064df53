"""Samples in object storage, a file a step or an evaluation. Redis has those of a job's newest step, and whatever was not moved yet.

records/{tenant}/{base}/{job}/samples/{version}.json      a list of SampleRecord: what a step was trained on
records/{tenant}/{base}/{job}/answers/{version}.json      a list of SampleRecord: what an evaluation's first items were answered
"""

from collections.abc import Iterable, Mapping
from typing import Literal

from common.errors import NotFound
from common.objects import Objects


class SampleFiles:
    """The files of one kind, of one base model's jobs. Raises Unavailable."""

    def __init__(self, objects: Objects, base_model: str, kind: Literal["samples", "answers"] = "samples") -> None:
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


def by_version(answers: Mapping[bytes, bytes]) -> dict[int, dict[bytes, bytes]]:
    """Parts the hash `answers:<job>`; the fields of each version are ascending by item."""
    found: dict[int, dict[bytes, bytes]] = {}
    for name in sorted(answers, key=lambda name: int(name.partition(b"/")[2])):
        found.setdefault(int(name.partition(b"/")[0]), {})[name] = answers[name]
    return found


def joined(answers: Mapping[bytes, bytes]) -> bytes:
    """The answers of one version as a list in JSON."""
    return b"[" + b",".join(answers.values()) + b"]"
