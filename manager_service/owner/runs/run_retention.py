"""Decides which versions of a run's or a job's adapter stay in the store, and has a trainer delete the others.

    stored ─► marked ─► asked for ─► gone          (marked ─► stored: it is used after all)

A job's rule is in owner/jobs/job_retention.py. A run's version stays while the run, a name or a reader needs it:

    the run         its newest two versions: it goes on from them, and a trainer may have to compute them again; until UNNAMED_KEPT_S
                    after its end
    a checkpoint    that has not expired; `weights/…` keep the optimiser's state too
    a use           `use:<run>:<version>`: a turn, a sampler, a download, a request for a copy, for USED_S after it was noted
    a copy          a run or a job that begins with it, or an operation that loads it, until it is made
    a grader        of an unfinished job, that asks it

The optimiser's state goes as soon as no one needs it, the adapter later. Of an ended run without versions the manifests go too;
then it leaves Redis.

Nothing that is needed is ever deleted, whatever happens at the same time:

- `versions:<run>` lists what may be used. Whoever means to read a version notes a use by a script that refuses what is not listed.
  The owner first takes a version off the list (marks it), by its fenced script, and looks at the uses again before it asks a trainer
  to delete it. It sees uses from before the mark, and takes the mark back; behind the mark none can be noted.
- A save names the newest version, and only this owner carries out saves. The newest two are never marked, so no name is given to a
  version that goes. A name that expires is gone before the mark.
- Who asks for a copy notes a use first. Long before it lapses, this owner has read the request: runs and jobs of one tenant have one
  owner. From then on the copy itself keeps the version, for days if need be.
- Marks stand in the run's state. A next owner looks at the uses again before it asks, and repeats earlier requests if no stream has
  anything. To delete twice is harmless; manifests stay as long as the run, so no version is made again.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Generic, TypeVar

from common.bus.streams import Cell, partition_of
from common.wire.messages import AdapterRef
from common.wire.operations import Forget
from manager_service.owner.jobs.changes import KEEP_RESULTS_S, Changes
from manager_service.records.job_records import JobSpec, JobState
from manager_service.records.run_records import UNNAMED_KEPT_S, Leaving, RunSpec, RunState, count_names

Spec = TypeVar("Spec", RunSpec, JobSpec)
State = TypeVar("State", RunState, JobState)
VersionNeeds = dict[int, bool]
"""Version -> is its optimiser's state needed too?"""

MAX_LEAVING = 256
"""Versions that are deleted by one message."""
LOOK_AGAIN_S = 60.0
"""An ended run of which something is used is looked at again after this time."""


class Retention(ABC, Generic[Spec, State]):
    """The versions of one run or job that are in the store."""

    def __init__(self, cell: Cell, spec: Spec, state: State, versions: VersionNeeds) -> None:
        """`versions`: as `versions:<run>` says; the value is whether the optimiser's state is there."""
        self.spec = spec
        self.state = state
        self.versions = versions
        self.asked_at = 0.0
        """Time at which a trainer was asked to delete: seconds since 1970."""
        self._cell = cell

    @property
    def under_way(self) -> bool:
        """Is a trainer to delete something?"""
        return self.state.leaving is not None and self.state.leaving.asked

    def committed(self, version: int, size: tuple[int, int], changes: Changes) -> None:
        """Lists a new version."""
        self.state.size = size
        changes.stored[self.spec.tenant, self.spec.id] += sum(size)
        self._list(version, True, changes)

    def doubtful(self, copied: VersionNeeds, now: float) -> list[int]:
        """Versions whose use `look` must know. `copied`: what copies still to be made need."""
        leaving = self.state.leaving
        if leaving is not None:
            return [] if leaving.asked else [*leaving.versions, *leaving.optimizers]
        needs = self._needs(copied, now)
        return [version for version, whole in self.versions.items() if version not in needs or whole > needs[version]]

    def look(self, needed: Iterable[VersionNeeds], now: float, changes: Changes) -> None:
        """Goes one step on. `needed`: by copies still to be made, and by uses as read after the last step was committed."""
        needs = self._needs(_together(needed), now)
        # Two steps with a commit between them, never one: after the mark is committed no use can be noted, so the uses read then are
        # complete. Who deletes in the step that marks may delete what was noted a moment ago.
        leaving = self.state.leaving
        if leaving is None:
            self._mark(needs, now, changes)
        elif not leaving.asked:
            self._take_back(leaving, needs, changes)
            leaving.everything = not self.versions and self._is_forgotten(now)
            if leaving.versions or leaving.optimizers or leaving.everything:
                self.ask(now, changes)
            else:
                self.state.leaving = None
                self._dirty(changes)

    def ask(self, now: float, changes: Changes) -> None:
        """Asks a trainer to delete what is marked; once more, if the message was lost."""
        leaving = self.state.leaving
        assert leaving is not None
        leaving.asked, self.asked_at = True, now
        run = self.spec.id
        message = Forget(
            id=leaving.id,
            tenant=self.spec.tenant,
            job=run,
            partition=partition_of(self.spec.tenant),
            adapter=AdapterRef(self.spec.tenant, run, self.state.version),
            versions=tuple(leaving.versions),
            optimizers=tuple(leaving.optimizers),
            everything=leaving.everything,
        )
        changes.published.append((self._cell.train, message))
        self._dirty(changes)

    def forgotten(self, forget: str, changes: Changes) -> None:
        """Takes in that a `Forget` was carried out, or is unreadable: then the files stay, and cost only space."""
        if self.state.leaving is not None and self.state.leaving.id == forget:
            changes.stored[self.spec.tenant, self.spec.id] -= self.state.leaving.num_bytes(self.state.size)
            self.state.leaving = None
            self._dirty(changes)

    # ---- what runs and jobs differ in -------------------------------------------------------------------------------

    @abstractmethod
    def _own(self, now: float) -> VersionNeeds:
        """Versions that it needs itself."""

    def _is_forgotten(self, now: float) -> bool:
        """Does everything go with its last versions?"""
        return False

    @abstractmethod
    def _dirty(self, changes: Changes) -> None:
        """Has the state written."""

    def _needs(self, others: VersionNeeds, now: float) -> VersionNeeds:
        return _together([self._own(now), others])

    def _mark(self, needs: VersionNeeds, now: float, changes: Changes) -> None:
        """Unlists versions that nobody needs. A forgotten run's last mark may be empty; then all that is left goes."""
        gone = [version for version in self.versions if version not in needs][:MAX_LEAVING]
        bare = [version for version, whole in self.versions.items() if whole and not needs.get(version, True)]
        is_last = not self.versions and self._is_forgotten(now)
        if not (gone or bare or is_last):
            return
        self.state.num_left += 1
        leaving = Leaving(f"{self.spec.id}/forget-{self.state.num_left}", {}, bare[:MAX_LEAVING])
        for version in gone:
            leaving.versions[version] = self.versions.pop(version)
            changes.close(self._cell.versions(self.spec.id), str(version))
        for version in leaving.optimizers:
            self._list(version, False, changes)
        self.state.leaving = leaving
        self._dirty(changes)

    def _take_back(self, leaving: Leaving, needs: VersionNeeds, changes: Changes) -> None:
        """Lists again what is needed after all."""
        for version in [version for version in leaving.versions if version in needs]:
            self._list(version, leaving.versions.pop(version), changes)
        for version in [version for version in leaving.optimizers if needs.get(version)]:
            leaving.optimizers.remove(version)
            self._list(version, True, changes)

    def _list(self, version: int, whole: bool, changes: Changes) -> None:
        self.versions[version] = whole
        changes.open(self._cell.versions(self.spec.id), str(version), str(int(whole)))
        self._dirty(changes)


class RunRetention(Retention[RunSpec, RunState]):
    """The versions of one run."""

    def look(self, needed: Iterable[VersionNeeds], now: float, changes: Changes) -> None:
        kept = self.state.kept(now)
        if self.state.leaving is None and len(kept) < len(self.state.checkpoints):
            self.state.checkpoints = kept
            changes.stored[self.spec.tenant, self.spec.id] += count_names(self.state)
            self._dirty(changes)
        super().look(needed, now, changes)

    def forgotten(self, forget: str, changes: Changes) -> None:
        if self.state.leaving is not None and self.state.leaving.id == forget:
            self.state.erased = self.state.leaving.everything
        super().forgotten(forget, changes)

    def due_at(self, now: float, *, wait_s: float) -> float | None:
        """Time to look at an ended run: seconds since 1970; None: never again. `wait_s`: seconds until the next look at uses."""
        if self.state.leaving is not None or self.doubtful({}, now):
            return now + wait_s
        expiries = (known.expires_at for known in self.state.checkpoints)
        ends = self._forgotten_at() if not self.state.checkpoints else None
        return min((moment for moment in (*expiries, ends) if moment is not None), default=None)

    def is_over(self, now: float) -> bool:
        """May an ended run leave Redis? Nothing of it is in the store, and nobody can come to need it."""
        return self._is_forgotten(now) and not self.versions and self.state.erased

    def _own(self, now: float) -> VersionNeeds:
        newest = self.state.version
        named = {} if self._is_forgotten(now) else {newest: True, newest - 1: True}
        for checkpoint in self.state.kept(now):
            named[checkpoint.version] = named.get(checkpoint.version, False) or checkpoint.kind == "weights"
        return named

    def _is_forgotten(self, now: float) -> bool:
        """Has the run ended so long ago that its newest versions stay no longer without a name?"""
        ends = self._forgotten_at()
        return ends is not None and ends <= now and not self.state.kept(now)

    def _forgotten_at(self) -> float | None:
        """Time at which an ended run without checkpoints is forgotten."""
        if self.state.status != "ended":
            return None
        return self.state.ended_at + (UNNAMED_KEPT_S if self.state.version >= 0 else KEEP_RESULTS_S)

    def _dirty(self, changes: Changes) -> None:
        changes.runs[self.spec.id] = self.state


def _together(needed: Iterable[VersionNeeds]) -> VersionNeeds:
    """The versions that all of these need."""
    found: VersionNeeds = {}
    for needs in needed:
        for version, whole in needs.items():
            found[version] = found.get(version, False) or whole
    return found


def read_versions(record: Mapping[bytes, bytes]) -> VersionNeeds:
    """The versions in `versions:<run>`."""
    return {int(version): whole == b"1" for version, whole in record.items()}
