"""Holds the open trajectories of a job, in memory and in Redis: those issued and not settled.

    issue ─► waiting ─┬─ score ─► scored ─┬─ take (a batch) ─► with a trainer ─ settle
                      ├─ park ─► waiting  └─ drop ─ settle
                      └─ fail, end ─ settle

Each change goes to both at once: to this table, and through `Changes` to `open:<job>` (training) and `evals:<job>`
(evaluation). A trainer's batch is open only in Redis; the job's `Training` names its trajectories.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

import msgspec

from common.bus.streams import Cell, partition_of
from common.errors import InvalidInput
from common.suggestions import quoted
from common.wire.messages import Purpose, ScoredTrajectory, TrajectoryRef, TurnRequest, trajectory_key
from manager_service.owner.jobs.changes import Changes
from manager_service.owner.jobs.groups import Group, Scored, next_batch
from manager_service.records.job_records import JobSpec, JobState


class TrajectoryKey(NamedTuple):
    """Names a trajectory within its job. As text it is a field in Redis: `3/0`, or `eval@3.17/0`."""

    group: int  # for evaluations the index of the item
    sample: int
    purpose: Purpose = "train"
    version: int = 0  # that an evaluation measures; 0 for training

    @classmethod
    def of(cls, trajectory: TrajectoryRef, version: int) -> "TrajectoryKey":
        """`version`: that samples the trajectory."""
        train = trajectory.purpose == "train"
        return cls(trajectory.group, trajectory.sample, trajectory.purpose, 0 if train else version)

    @classmethod
    def parse(cls, text: str) -> "TrajectoryKey":
        name, sample = text.split("/")
        purpose, _, rest = name.rpartition("@")
        if not purpose:
            return cls(int(name), int(sample))
        version, index = rest.split(".")
        return cls(int(index), int(sample), cast(Purpose, purpose), int(version))

    def __str__(self) -> str:
        return trajectory_key(*self)


class OpenTrajectory(msgspec.Struct, frozen=True, gc=False):
    """The state of a trajectory in `open:<job>`, as text `attempt:version`, then `:scored` with its result."""

    attempt: int  # that may settle it
    version: int  # that samples it
    scored: bool = False

    @classmethod
    def parse(cls, text: str) -> "OpenTrajectory":
        attempt, version, *scored = text.split(":")
        return cls(int(attempt), int(version), bool(scored))

    def __str__(self) -> str:
        return f"{self.attempt}:{self.version}{':scored' if self.scored else ''}"


class ParkedTurn(NamedTuple):
    """A turn that a pause has stopped."""

    entry: str  # stays pending until the turn goes on
    request: TurnRequest


class OpenTrajectories:
    """The open trajectories of one job."""

    def __init__(self, cell: Cell, spec: JobSpec) -> None:
        self.groups: dict[int, Group] = {}
        """Groups by number, without those that a batch has used or that were dropped."""
        self.decided: set[int] = set()
        """The decided groups: nothing of them is waited for."""
        self.num_in_groups = 0
        """Trajectories for training that were issued and are not back yet."""
        self._undropped: set[int] = set()  # decided groups that may have to be dropped
        self.evals: dict[TrajectoryKey, int] = {}
        """Trajectories of evaluations -> the attempt that may settle them."""
        self.parked: dict[TrajectoryKey, ParkedTurn] = {}
        """Turns of waiting trajectories."""
        self._counted: set[TrajectoryKey] = set()  # while loading: waiting ones whose result the last owner had counted
        self._job, self._batch_size = spec.id, spec.hyper.batch_size
        self._open, self._evals = cell.open(spec.id), cell.evals(spec.id)
        self._inbox = cell.scored(partition_of(spec.tenant))

    @property
    def num_waiting(self) -> int:
        """Trajectories issued and not back yet, evaluations included."""
        return self.num_in_groups + len(self.evals)

    @property
    def held_entries(self) -> set[str]:
        """Entries that stay pending because this table holds what they say."""
        scored = {scored.entry for group in self.groups.values() for scored in group.scored.values()}
        return scored | {turn.entry for turn in self.parked.values()}

    def attempt_of(self, key: TrajectoryKey, version: int) -> int | None:
        """The attempt that may settle a trajectory of this version. None: the job does not wait for it."""
        if key.purpose != "train":
            return self.evals.get(key)
        group = self.groups.get(key.group)
        return group.waiting.get(key.sample) if group is not None and group.version == version else None

    def named_by(self, identity: str) -> list[tuple[TrajectoryKey, int, int]]:
        """The waiting trajectories that a message is about, by its id, each with its version and attempt.

        A turn's id names one, a Start's (see `Orders.start`) all of its group. Raises InvalidInput for another id.
        """
        try:
            _, name, sample, *turn, tried = identity.split("/")
            named, attempt = TrajectoryKey.parse(f"{name}/{sample}"), int(tried)
        except ValueError as error:
            raise InvalidInput(f"its id {quoted(identity)} names none of the job's trajectories") from error
        alike = [named] if turn else [named._replace(sample=other) for other in self._samples_like(named)]
        version = (
            self.groups[named.group].version
            if named.purpose == "train" and named.group in self.groups
            else named.version
        )
        return [(key, version, attempt) for key in alike if self.attempt_of(key, version) == attempt]

    def _samples_like(self, key: TrajectoryKey) -> list[int]:
        """Samples that are waited for, of the same group."""
        if key.purpose == "train":
            return list(self.groups[key.group].waiting) if key.group in self.groups else []
        return [other.sample for other in self.evals if other == key._replace(sample=other.sample)]

    # ---- transitions ------------------------------------------------------------------------------------------------

    def wait_for(self, key: TrajectoryKey, version: int, attempt: int) -> None:
        """Marks as waiting, only in memory, a trajectory that is open in Redis already."""
        if key.group not in self.groups:
            self.groups[key.group] = Group(version)
        waiting = self.groups[key.group].waiting
        self.num_in_groups += key.sample not in waiting
        self.decided.discard(key.group)
        waiting[key.sample] = attempt

    def _came(self, number: int, sample: int) -> Group:
        """Takes a trajectory out of those that its group waits for."""
        group = self.groups[number]
        del group.waiting[sample]
        self.num_in_groups -= 1
        if group.decided:
            self.decided.add(number)
            self._undropped.add(number)
        return group

    def take_undropped(self) -> list[int]:
        """Groups decided and not looked at since then, in order."""
        if not self._undropped:
            return []
        taken, self._undropped = sorted(self._undropped & self.decided), set()
        return taken

    def next_batch(self, window: int, end: int) -> list[int] | None:
        """See `groups.next_batch`."""
        if len(self.decided) < self._batch_size:
            return None
        return next_batch(self.groups, window=window, end=end, batch_size=self._batch_size)

    def issue(self, key: TrajectoryKey, version: int, attempt: int, changes: Changes) -> None:
        """Marks a trajectory as sent out, for the first time or again."""
        if key.purpose == "train":
            self.wait_for(key, version, attempt)
            changes.open(self._open, str(key), str(OpenTrajectory(attempt, version)))
        else:
            self.evals[key] = attempt
            changes.open(self._evals, str(key), str(attempt))

    def score(self, entry: str, message: ScoredTrajectory, changes: Changes) -> None:
        """Takes a result into its group. The entry stays pending."""
        ref, version = message.trajectory, message.adapter.version
        self._came(ref.group, ref.sample).scored[ref.sample] = Scored(entry, message)
        changes.open(self._open, ref.key(), str(OpenTrajectory(ref.attempt, version, scored=True)))

    def fail(self, key: TrajectoryKey, changes: Changes) -> None:
        """Settles a trajectory that has no usable result."""
        self._came(key.group, key.sample)
        self.settle("failed", [str(key)], changes)

    def end_eval(self, key: TrajectoryKey, changes: Changes) -> None:
        """Closes a trajectory of an evaluation."""
        del self.evals[key]
        changes.close(self._evals, str(key))

    def park(self, key: TrajectoryKey, entry: str, request: TurnRequest) -> None:
        """Keeps a stopped turn until the job goes on."""
        self.parked[key] = ParkedTurn(entry, request)

    def unpark(self, key: TrajectoryKey, changes: Changes) -> TurnRequest | None:
        """Hands out the parked turn of a trajectory. None: there is none."""
        turn = self.parked.pop(key, None)
        if turn is None:
            return None
        self.ack(turn.entry, changes)
        return turn.request

    def drop(self, number: int, outcome: str, changes: Changes) -> None:
        """Removes a decided group, and settles its results."""
        group = self._removed(number)
        self.settle(outcome, [trajectory_key(number, sample) for sample in group.scored], changes)
        self._ack_results(group, changes)

    def take(self, number: int, changes: Changes) -> Group:
        """Removes a group for a trainer. Its trajectories stay open in Redis until the answer."""
        group = self._removed(number)
        self._ack_results(group, changes)
        return group

    def _removed(self, number: int) -> Group:
        self.decided.discard(number)
        return self.groups.pop(number)

    def cancel(self, changes: Changes) -> None:
        """Settles everything but the batch that a trainer has."""
        for number, group in self.groups.items():
            samples = (*group.waiting, *group.scored)
            self.settle("cancelled", [trajectory_key(number, sample) for sample in samples], changes)
            self._ack_results(group, changes)
        for turn in self.parked.values():
            self.ack(turn.entry, changes)
        changes.close(self._evals, *map(str, self.evals))
        self.groups, self.evals, self.parked = {}, {}, {}
        self.decided, self.num_in_groups = set(), 0

    def settle(self, outcome: str, fields: Sequence[str], changes: Changes) -> None:
        """Moves trajectories from in_flight to another count of the ledger. `fields`: of `open:<job>`."""
        if fields:
            changes.close(self._open, *fields)
            changes.ledger[self._job, outcome] += len(fields)

    def ack(self, entry: str, changes: Changes) -> None:
        changes.ack(self._inbox, entry)

    def _ack_results(self, group: Group, changes: Changes) -> None:
        for scored in group.scored.values():
            self.ack(scored.entry, changes)

    # ---- a new owner ------------------------------------------------------------------------------------------------

    def load(self, state: JobState, unsettled: Mapping[bytes, bytes], evals: Mapping[bytes, bytes]) -> None:
        """Reads the table from `open:<job>` and `evals:<job>`. The results follow through `restore`."""
        trained = set(state.training.keys) if state.training else set[str]()
        self.groups = {n: Group(state.version) for n in range(state.window, state.next_group) if n not in state.dropped}
        for name, value in unsettled.items():
            field, trajectory = name.decode(), OpenTrajectory.parse(value.decode())
            key = TrajectoryKey.parse(field)
            if field in trained or key.group not in self.groups:
                continue
            self.groups[key.group].version = trajectory.version
            self.groups[key.group].waiting[key.sample] = trajectory.attempt
            if trajectory.scored:
                self._counted.add(key)
        self.decided = {number for number, group in self.groups.items() if group.decided}
        self.num_in_groups = sum(len(group.waiting) for group in self.groups.values())
        self._undropped = set(self.decided)
        self.evals = {TrajectoryKey.parse(name.decode()): int(attempt) for name, attempt in evals.items()}

    def restore(self, entry: str, message: ScoredTrajectory) -> bool:
        """Takes back a result that the last owner had counted. False: it had not."""
        ref, version = message.trajectory, message.adapter.version
        key = TrajectoryKey.of(ref, version)
        if key not in self._counted or self.attempt_of(key, version) != ref.attempt:
            return False
        self._counted.remove(key)
        self._came(ref.group, ref.sample).scored[ref.sample] = Scored(entry, message)
        return True

    def expect_counted(self) -> None:
        """Waits again for counted results that are missing. Call when all pending entries were read."""
        self._counted = set()
