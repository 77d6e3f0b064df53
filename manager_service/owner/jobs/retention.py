"""Decides which versions of a job's adapter stay: the newest `keep_versions`, the best by evaluation, and those in use.

A version 0 that is drawn changes nothing, so that its turns are the base model's. Its job samples by it at once; its files come
with version 1.
"""

from collections.abc import Iterable

from manager_service.records.job_records import JobSpec, JobState


def droppable(spec: JobSpec, state: JobState, in_use: Iterable[int]) -> tuple[int, ...]:
    """Versions that nobody needs once the next one is committed; none if the job keeps all.

    `in_use`: versions that open groups were sampled by.
    """
    keep = spec.hyper.keep_versions
    if keep is None:
        return ()
    needed = {state.best_version, *in_use, *map(int, state.evals)}
    return tuple(v for v in state.stored if v <= state.version + 1 - keep and v not in needed)
