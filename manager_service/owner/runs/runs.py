"""The runs of one partition: the messages that concern them, and what a new owner must know of them."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import structlog

from common.bus.bus import Bus, Delivery
from common.bus.streams import Cell
from common.wire.messages import AdapterRef, AdapterUpdate, DeadLetter, Failure, JobCommand, Message, Usage
from common.wire.operations import Forgotten, NameChange, Operation, OperationResult, OperationsAnswered, OperationsDone
from manager_service.owner.jobs.changes import Changes, Moved
from manager_service.owner.runs.kept_results import KeptResults
from manager_service.owner.runs.run import Run
from manager_service.owner.runs.run_retention import LOOK_AGAIN_S, Retention, RunRetention, VersionNeeds, read_versions
from manager_service.records.job_records import JobError
from manager_service.records.keys import read_record
from manager_service.records.run_records import RunSpec, RunState, change_name, count_names
from manager_service.records.usage import usage_fields, usage_of
from manager_service.scheduling.members import MemberTable

AnyRetention = Retention[Any, Any]
GRACE_S = 30.0
"""Time for a silent session to show a sign of life: after a Redis that was away, none has shown one yet."""
RETIRE_EVERY_S = 10.0
"""Time between two looks at the versions of runs."""
LOAD_COUNT = 200
"""Ended runs whose versions are looked at together."""
READ_COUNT = 1000
"""Keys in one command at most."""
log = structlog.get_logger()


class RunRecords(NamedTuple):
    """The records of a run in Redis."""

    spec: RunSpec
    state: RunState
    versions: VersionNeeds


class Runs:
    """All methods fill `changes`; the owner commits them."""

    def __init__(self, number: int, bus: Bus) -> None:
        self.table: MemberTable[Run] = MemberTable()
        self._bus = bus
        self._cell: Cell = bus.cell
        self._number = number
        self._ended: dict[str, RunRetention] = {}  # ended runs, while something of them is deleted
        self._retired_at = 0.0  # seconds since 1970
        self._results = KeptResults()
        self._silent: dict[str, float] = {}  # session -> when it was first found without a sign of life

    @property
    def pending_entries(self) -> set[str]:
        """Entries of `ops:<p>` that stay pending because a run in memory holds them."""
        return {entry for run in self.table.values() for entry in run.pending_entries}

    @property
    def trainer_streams(self) -> set[str]:
        """The streams of single trainers in which something of these runs may be."""
        return {run.trainer_stream for run in self.table.values() if run.trainer_stream}

    # ---- a new owner ------------------------------------------------------------------------------------------------

    async def load(self, names: Sequence[str], now: float, changes: Changes) -> None:
        """Brings runs into memory; those that have ended, or whose records are gone, are left out."""
        for spec, state, versions in await self._read(names, changes):
            if state.status != "ended":
                run = Run(self._cell, spec, state, versions)
                run.changed_at = run.retention.asked_at = now
                self.table.add(run)

    async def _read(self, names: Sequence[str], changes: Changes) -> list[RunRecords]:
        of = (self._cell.run, self._cell.versions)
        records = await self._bus.read_hashes([key(name) for name in names for key in of])
        found: list[RunRecords] = []
        for number, name in enumerate(names):
            record, versions = records[2 * number : 2 * number + 2]
            if read := read_record(self._cell.run(name), record, RunSpec, RunState):
                found.append(RunRecords(*read, read_versions(versions)))
        changes.entered += [self._cell.run(records.spec.id) for records in found]
        return found

    def restore(self, delivery: Delivery, changes: Changes) -> bool:
        """Gives a pending operation back to its run. False: it is to be handled."""
        message = delivery.message
        run = self.table.get(message.job) if isinstance(message, Operation) else None
        if run is None or not isinstance(message, Operation):
            return False
        run.restore(delivery.entry, message, changes)
        self.table.touch(run.id)
        return True

    def advance_all(self, now: float, changes: Changes) -> None:
        for run in self.table.values():
            self._guarded(run, now, changes, lambda run: None)

    # ---- messages ---------------------------------------------------------------------------------------------------

    async def handle(self, delivery: Delivery, now: float, changes: Changes) -> None:
        """Applies one entry that names a run. An error of ours fails that run, and only that one."""
        message = _readable(delivery, self._cell.ops(self._number))
        if isinstance(message, NameChange):
            changes.ack(delivery.stream, delivery.entry)
            await self._change_name(message, now, changes)
            return
        if message.job not in self.table and isinstance(message, Operation | JobCommand):
            await self.load([message.job], now, changes)
        run = self.table.get(message.job)
        if isinstance(message, Forgotten) and self._retention(message.job) is None:
            await self._load_ended([message.job], now, changes)
        if isinstance(message, Forgotten | DeadLetter) and (keeping := self._retention(message.job)):
            keeping.forgotten(message.forget if isinstance(message, Forgotten) else message.id, changes)
        if run is None:
            changes.ack(delivery.stream, delivery.entry)
            self._for_nobody(message, changes)
        elif isinstance(message, Operation):
            self._guarded(run, now, changes, lambda run: run.take_in(delivery.entry, message, changes))
        else:
            changes.ack(delivery.stream, delivery.entry)
            self._guarded(run, now, changes, lambda run: _apply(run, message, changes))

    async def _change_name(self, change: NameChange, now: float, changes: Changes) -> None:
        """Changes a name of any run: what one that has ended saved can be deleted too."""
        keeping = self._retention(change.job)
        state = keeping.state if keeping else changes.runs.get(change.job)
        if state is None:
            state = next((record.state for record in await self._read([change.job], changes)), None)
        if state is not None:
            change_name(state, change, now)
            changes.stored[change.tenant, change.job] += count_names(state)
            changes.runs[change.job] = state
            self._tell(change.job, [0], changes)
            if state.status == "ended":
                changes.retire[change.job] = now  # the version may go now, or at another time

    def _for_nobody(self, message: Message, changes: Changes) -> None:
        """Answers what concerns a run that has ended."""
        changes.add_usage(message.tenant, message.job, getattr(message, "usage", Usage()), wasted=True)
        if isinstance(message, Operation):
            ended = Failure("cancelled", "the run has ended; go on from a checkpoint of it")
            changes.results.setdefault(message.job, []).append(OperationResult(message.seq, failure=ended))

    def _guarded(self, run: Run, now: float, changes: Changes, act: Callable[[Run], None]) -> None:
        try:
            act(run)
            run.advance(now, changes)
        except Exception as error:  # the boundary: one run's trouble must not stop the other tenants' owner
            log.exception("transition_failed", run_id=run.id)
            run.fail(JobError("internal_error", f"{type(error).__name__}: {error}"), now, changes)
        run.changed_at = now
        self.table.touch(run.id)

    # ---- time -------------------------------------------------------------------------------------------------------

    def look(self, live_trainers: Collection[str], silent: Collection[str], now: float, changes: Changes) -> None:
        """Takes in which trainers are alive, and which sessions are `silent`: their runs end."""
        self._silent = {session: self._silent.get(session, now) for session in silent}
        for run in list(self.table.values()):
            if now - self._silent.get(run.spec.session, now) > GRACE_S:
                self._guarded(run, now, changes, lambda run: run.end("its session has ended", now, changes))
                continue
            run.look(live_trainers, now, changes)
            if run.id in changes.runs:
                self._guarded(run, now, changes, lambda run: None)

    @property
    def num_open(self) -> int:
        """Runs for which something may be under way."""
        return len(self.table) + len(self._ended)

    def resend_quiet(self, jobs: Iterable[AnyRetention], since: float, now: float, changes: Changes) -> None:
        """Sends again what quiet runs wait for, and requests to delete versions, of these jobs too. Call when nothing is in any stream."""
        for keeping in (*self._retentions(), *jobs):
            if keeping.under_way and keeping.asked_at < since:
                keeping.ask(now, changes)
        for run in self.table.values():
            if run.under_way and run.changed_at < since:
                log.warning("operations_lost", run_id=run.id)
                self._guarded(run, now, changes, lambda run: run.resend(now, changes))

    # ---- versions ---------------------------------------------------------------------------------------------------

    def may_retire(self, now: float) -> bool:
        """Is it time for `retire`?"""
        return abs(now - self._retired_at) >= RETIRE_EVERY_S  # the clock may have gone back

    async def retire(
        self, jobs: Iterable[AnyRetention], copies: Iterable[AdapterRef], now: float, changes: Changes
    ) -> None:
        """Goes on with deleting versions of runs, and of these jobs, that nobody needs: calls `look_at`."""
        self._retired_at = now
        key, client = self._cell.retire(self._number), self._bus.client
        names: Any = await self._bus.retrying(
            lambda: client.zrange(key, 0, now, byscore=True, offset=0, num=LOAD_COUNT)
        )
        due = [name.decode() for name in names]
        await self._load_ended(due, now, changes)
        for name in due:
            if name not in self._ended:  # unreadable, or lost: it would always be among the first ones due
                log.error("not_retired", run_id=name)
                changes.retire[name] = None
        for name in [name for name, each in self._ended.items() if each.is_over(now)]:
            changes.over.append(await self._used_up(self._ended.pop(name).spec))
        await self.look_at((*self._retentions(), *jobs), copies, now, changes)
        for name, each in list(self._ended.items()):
            if each.state.leaving is None:
                changes.retire[name] = each.due_at(now, wait_s=LOOK_AGAIN_S)
                del self._ended[name]

    async def look_at(
        self, retentions: Iterable[AnyRetention], copies: Iterable[AdapterRef], now: float, changes: Changes
    ) -> None:
        """Takes each one step on. `changes` is committed before the next call. `copies`: versions that jobs of the partition need, besides
        their own."""
        copied: dict[str, VersionNeeds] = {}
        runs = (copy for run in self.table.values() for copy in run.copies())
        for source, whole in (*((source, False) for source in copies), *runs):
            needs = copied.setdefault(source.job, {})
            needs[source.version] = needs.get(source.version, False) or whole
        keeping = {each.spec.id: each for each in retentions}
        used = await self._used({name: each.doubtful(copied.get(name, {}), now) for name, each in keeping.items()})
        for name, each in keeping.items():
            each.look((copied.get(name, {}), used[name]), now, changes)

    async def _used_up(self, spec: RunSpec) -> Moved:
        """The whole usage of a run that leaves Redis, and the bytes of its versions that still count: they are deleted."""
        amounts, stored = await self._bus.pipelined(
            [
                ("HMGET", self._cell.usage(spec.tenant), *usage_fields(spec.id)),
                ("HGET", self._cell.stored(spec.tenant), spec.id),
            ]
        )
        return Moved(spec.id, spec.tenant, usage_of(amounts), -int(stored or 0))

    def _retentions(self) -> list[RunRetention]:
        return [*(run.retention for run in self.table.values()), *self._ended.values()]

    def _retention(self, name: str) -> RunRetention | None:
        run = self.table.get(name)
        return run.retention if run else self._ended.get(name)

    async def _load_ended(self, names: Sequence[str], now: float, changes: Changes) -> None:
        """Brings the versions of ended runs into memory."""
        for records in await self._read([name for name in names if name not in self._ended], changes):
            if records.state.status == "ended" and records.spec.id not in self.table:
                self._ended[records.spec.id] = keeping = RunRetention(self._cell, *records)
                keeping.asked_at = now

    async def _used(self, doubtful: Mapping[str, Sequence[int]]) -> dict[str, VersionNeeds]:
        """The versions of these runs that somebody uses."""
        wanted = [(name, version) for name, versions in doubtful.items() for version in versions]
        keys = [self._cell.use(*one, with_optimizer=whole) for one in wanted for whole in (False, True)]
        found: list[Any] = []
        for start in range(0, len(keys), READ_COUNT):
            some = keys[start : start + READ_COUNT]
            found += await self._bus.retrying(lambda some=some: self._bus.client.mget(some))
        used: dict[str, VersionNeeds] = {name: {} for name in doubtful}
        for (name, version), plain, whole in zip(wanted, found[::2], found[1::2], strict=True):
            if plain is not None or whole is not None:
                used[name][version] = whole is not None
        return used

    def note(self, changes: Changes, now: float) -> None:
        """Announces results, sets the changed runs' clocks, and removes the ended ones. Call before each commit."""
        for name, results in changes.results.items():
            self._tell(name, [result.seq for result in results], changes)
            if run := self.table.get(name):
                self._results.add(run.spec.tenant, name, results, changes)
        for name in changes.runs:
            if run := self.table.get(name):
                run.changed_at = now
                self._count(run, changes)
                changes.oldest_operations[name] = run.oldest_operation
                if run.settled:
                    changes.settled.append(name)
                    self.table.remove(name)
                    if run.retention.under_way:
                        self._ended[name] = run.retention
                    changes.retire[name] = run.retention.due_at(now, wait_s=0)

    def _count(self, run: Run, changes: Changes) -> None:
        """Says what of a run counts towards its tenant's limits."""
        held, num_bytes = self._cell.held(run.spec.tenant), run.pending_bytes
        changes.open(self._cell.run(run.id), "log", str(run.log_bytes))
        if num_bytes and not run.settled:
            changes.open(held, run.id, str(num_bytes))
        else:
            changes.close(held, run.id)
        if run.settled:
            changes.close(self._cell.unfinished(run.spec.tenant), run.id)

    def _tell(self, run: str, seqs: Sequence[int], changes: Changes) -> None:
        answered = OperationsAnswered(
            id=f"{run}/{seqs[0]}", tenant="", job=run, partition=self._number, seqs=tuple(seqs)
        )
        changes.published.append((self._cell.done, answered))


def _apply(run: Run, message: Message, changes: Changes) -> None:
    if isinstance(message, OperationsDone):
        run.on_done(message, changes)
    elif isinstance(message, AdapterUpdate):
        run.on_adapter(message, changes)
    elif isinstance(message, DeadLetter):
        run.on_dead_letter(message, changes)


def _readable(delivery: Delivery, ops: str) -> Message:
    """The message; for an unreadable operation, one that fails in its turn. Raises ValueError for a strange id."""
    message = delivery.message
    assert isinstance(message, Message), "the partition makes dead letters of what it cannot read"
    if not isinstance(message, DeadLetter) or message.stream != ops:
        return message
    failure = Failure("dead_letter", f"the operation could not be read: {message.reason}")
    seq = int(message.id.rpartition(":")[2])
    return Operation(**message.about(), id=message.id, seq=seq, action="forward_backward", failure=failure)
