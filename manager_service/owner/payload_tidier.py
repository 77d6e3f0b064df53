"""Deletes the payloads of big messages that nobody will ask for again, behind the commits that make them so."""

import asyncio
import math
from collections.abc import Iterable

import structlog

from common.errors import Unavailable
from common.objects import Objects
from manager_service.jobs.changes import Changes

log = structlog.get_logger()


class PayloadTidier:
    """Works for the jobs of an owner. A payload that stays costs space and nothing else."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._jobs: set[str] = set()  # that may have payloads
        self._untidy = asyncio.Queue[tuple[str, float]]()  # job, oldest version whose payloads are needed

    def note(self, jobs: Iterable[str]) -> None:
        """Notes that jobs may have payloads."""
        self._jobs.update(jobs)

    def follow(self, changes: Changes) -> None:
        """Follows what was committed."""
        for job in self._jobs & changes.oldest_in_use.keys():
            self._untidy.put_nowait((job, changes.oldest_in_use[job]))
        for job in (*changes.finished, *changes.settled, *(moved.job for moved in changes.over)):
            self._jobs.discard(job)
            self._untidy.put_nowait((job, math.inf))

    async def run(self) -> None:
        """Deletes payloads that name old versions, those that a crash left too."""
        while True:
            job, oldest = await self._untidy.get()
            try:
                for version in await self._objects.folders(f"payloads/{job}"):
                    if int(version) < oldest:
                        await self._objects.delete_folder(f"payloads/{job}/{version}")
            except Unavailable as error:
                log.warning("not_deleted", job_id=job, reason=str(error))
