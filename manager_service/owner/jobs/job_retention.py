"""Decides which versions of a job's adapter stay in the store. How the others go: owner/runs/run_retention.py.

    newest two     the job goes on from them, and a trainer may have to compute them again; they have their optimiser's state
    every n-th     n: the smallest power of two that makes these at most `keep_versions`
    the best       by its evaluations
    in use         by groups that are open or with a trainer, which samples of an older version need; by evaluations that run

So do uses, copies and graders keep a version. Those that somebody uses when the job ends stay. Without `keep_versions`, all do.
"""

from collections.abc import Iterable

from common.bus.streams import Cell
from common.wire.messages import AdapterRef
from manager_service.owner.jobs.changes import Changes
from manager_service.owner.jobs.open_trajectories import OpenTrajectories
from manager_service.owner.runs.run_retention import Retention, VersionNeeds
from manager_service.records.job_records import FINAL, JobSpec, JobState, asked_versions


class JobRetention(Retention[JobSpec, JobState]):
    """The versions of one unfinished job. Of one that keeps all, none is listed."""

    def __init__(self, cell: Cell, spec: JobSpec, state: JobState, open_work: OpenTrajectories) -> None:
        super().__init__(cell, spec, state, {})
        self._open = open_work
        self._asked = asked_versions(spec)
        self._is_tidy = False

    def copies(self) -> list[AdapterRef]:
        """Others' versions that the job needs: its source, until it is copied, and those that its graders ask."""
        source = self.spec.source
        return self._asked if source is None or self.state.version >= 0 else [*self._asked, source]

    @property
    def is_tidy(self) -> bool:
        """Is there nothing to delete of an ended job?"""
        return self.state.leaving is None and (self._is_tidy or not self.doubtful({}, 0.0))

    def reached(self, version: int, changes: Changes) -> None:
        """Lists a new version. Its trainer deletes the optimiser's state of the last but one."""
        if self.spec.hyper.keep_versions is None:
            return
        self._is_tidy = False
        self._list(version, True, changes)
        if version - 2 in self.versions:
            self._list(version - 2, False, changes)

    def look(self, needed: Iterable[VersionNeeds], now: float, changes: Changes) -> None:
        super().look(needed, now, changes)
        if self.state.status in FINAL and self.state.leaving is None:
            self._is_tidy = True
            self._dirty(changes)

    def forgotten(self, forget: str, changes: Changes) -> None:
        if self.state.leaving is not None and self.state.leaving.id == forget:
            changes.close(self._cell.checkpoints(self.spec.id), *map(str, self.state.leaving.versions))
        super().forgotten(forget, changes)

    def _own(self, now: float) -> VersionNeeds:
        state, keep = self.state, self.spec.hyper.keep_versions
        if keep is None:
            return {}
        n = spacing(state.version, keep)
        needed = [version for version in self.versions if version % n == 0]
        needed += [group.version for group in self._open.groups.values()]
        needed += [*map(int, state.evals), *(state.training.versions if state.training else ())]
        needed += [] if state.best_version is None else [state.best_version]
        return dict.fromkeys(needed, False) | {state.version: True, state.version - 1: True}

    def _dirty(self, changes: Changes) -> None:
        changes.states[self.spec.id] = self.state


def spacing(newest: int, keep: int) -> int:
    """The smallest power of two of which at most `keep` multiples lie in [1, newest]."""
    n = 1
    while newest // n > keep:
        n *= 2
    return n
