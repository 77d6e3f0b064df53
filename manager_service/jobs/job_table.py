"""Lists the unfinished jobs of a partition. Other tables of jobs are derived from it: see `JobTable.take_changed`."""

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
        """Marks the job as changed."""
        self._changed.pop(job_id, None)
        self._changed[job_id] = None

    def remove(self, job_id: str) -> None:
        del self._jobs[job_id]
        self.touch(job_id)

    def take_changed(self) -> list[tuple[str, Job | None]]:
        """Jobs that were added or touched since the last call; None stands for those that were removed."""
        changed, self._changed = self._changed, {}
        return [(job_id, self._jobs.get(job_id)) for job_id in changed]
