"""The list of a partition's unfinished jobs. Who keeps anything else of each job follows it: see `JobTable.take_changed`."""

from collections.abc import Iterator, Mapping

from manager_service.jobs.job import Job


class JobTable(Mapping[str, Job]):
    """Jobs by id."""

    def __init__(self) -> None:
        self._jobs: dict[str, Job] = {}
        self._changed: dict[str, None] = {}  # in order of the last change

    def __getitem__(self, job_id: str) -> Job:
        return self._jobs[job_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._jobs)

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, job: Job) -> None:
        self._jobs[job.id] = job
        self.touch(job.id)

    def touch(self, job_id: str) -> None:
        """Something happened to the job."""
        self._changed.pop(job_id, None)
        self._changed[job_id] = None

    def remove(self, job_id: str) -> None:
        del self._jobs[job_id]
        self.touch(job_id)

    def take_changed(self) -> list[tuple[str, Job | None]]:
        """Jobs that were added, touched or removed (None) since the last call."""
        changed, self._changed = self._changed, {}
        return [(job_id, self._jobs.get(job_id)) for job_id in changed]
