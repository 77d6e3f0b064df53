"""Decides which versions of a job's adapter stay: the newest `keep_versions`, the best by evaluation, and those in use.

A version 0 that is drawn changes nothing, so that its turns are the base model's. Its job samples by it at once; its files come
with version 1.
"""

from collections.abc import Iterable

from manager_service.records import JobSpec, JobState


def droppable(spec: JobSpec, state: JobState, in_use: Iterable[int]) -> tuple[int, ...]:
    """Versions that nobody needs once the next one is committed; none if the job keeps all.

    `in_use`: versions that open groups were sampled by.
    """
    keep = spec.hyper.keep_versions
    if keep is None:
        return ()
    needed = {state.best_version, *in_use, *map(int, state.evals)}
    return tuple(v for v in state.stored if v <= state.version + 1 - keep and v not in needed)


def has_version(spec: JobSpec, state: JobState, version: int) -> bool:
    """Is a version in the store?"""
    return 0 <= version <= newest_stored(spec, state) and (spec.hyper.keep_versions is None or version in state.stored)


def newest_stored(spec: JobSpec, state: JobState) -> int:
    """The newest version that is surely in the store; -1: none."""
    return -1 if is_untrained(spec, state.version) else state.version


def is_untrained(spec: JobSpec, version: int) -> bool:
    """Is it a version 0 that was drawn from the seed, and so changes nothing?"""
    return version == 0 and spec.is_drawn
