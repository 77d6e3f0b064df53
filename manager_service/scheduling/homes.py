"""Names a rollout worker that should have all turns of a job, where engines batch fewer adapters than there are jobs.

Where they batch rows of all jobs, as the torch engine does, no job has a home: each worker takes what it has room for.
"""

import hashlib
from collections.abc import Collection


def home_of(job: str, workers: Collection[str]) -> str:
    """Chooses by rendezvous hashing: a worker that comes or goes moves no job between two others."""
    return max(workers, key=lambda worker: hashlib.sha256(f"{worker} {job}".encode()).digest())
