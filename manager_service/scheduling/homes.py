"""Names a rollout worker that should have all turns of a job, where engines batch fewer adapters than there are jobs.

Where they batch rows of all jobs, as the torch engine does, no job has a home: each worker takes what it has room for.
"""

import hashlib
from collections.abc import Collection, Iterable, Mapping

import msgspec

from common.wire.messages import Start
from manager_service.owner.jobs.changes import Changes


def home_of(job: str, workers: Collection[str]) -> str:
    """Chooses by rendezvous hashing: a worker that comes or goes moves no job between two others."""
    return max(workers, key=lambda worker: hashlib.sha256(f"{worker} {job}".encode()).digest())


def give_homes(changes: Iterable[Changes], lora_slots: Mapping[str, int], *, num_jobs: int) -> None:
    """Gives all that begins a home. `lora_slots`: workers with the number of adapters that each batches. `num_jobs`: active ones."""
    if not lora_slots or num_jobs <= min(lora_slots.values()):
        return
    for change in changes:
        for index, (stream, message) in enumerate(change.published):
            if isinstance(message, Start):
                home = home_of(message.job, lora_slots)
                change.published[index] = stream, msgspec.structs.replace(message, home=home)
