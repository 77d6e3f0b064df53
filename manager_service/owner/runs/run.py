"""The state machine of one run: operations and answers come in, Changes go out. No input or output; the time is an argument.

    queued ─► creating ─► ready ─► ended          (or: creating ─► failed)

    ready:  [ operations in order of their numbers ─► a segment to a trainer ─► results ] ... optim_step or load ─► version + 1

One message is under way at a time: the longest segment of operations, up to a quantum. Operations that only name versions are
answered here, in their turn. The entries of the *log*, the answered `forward_backward`s since the newest version, stay pending,
so that another trainer or owner can begin the gradient again.
"""

from collections.abc import Collection
from typing import Any

import msgspec

from common.bus.streams import Cell, partition_of
from common.wire.messages import AdapterRef, AdapterUpdate, DeadLetter, Failure, Init
from common.wire.operations import Operation, OperationResult, Operations, OperationsDone, Saved, SaveWeights
from manager_service.owner.jobs.changes import Changes
from manager_service.owner.runs.pending import PendingOperation, for_trainer, is_for_trainer, load_of, num_tokens
from manager_service.owner.runs.run_retention import RunRetention, VersionNeeds
from manager_service.records.job_records import JobError
from manager_service.records.run_records import (
    HOLE_S,
    SAVES,
    USED_S,
    RunSpec,
    RunState,
    Sampler,
    count_names,
    give_name,
    held_bytes,
)
from manager_service.scheduling.members import View

MAX_TOKENS = 16_384
"""Positions in one message to a trainer: what tenants take turns by. One operation may have more."""
MAX_BYTES = 512 << 10
"""Bytes of payloads in one message to a trainer, so that it travels itself. One operation may have more."""
HAS_FAILED = "has failed"
NEVER_CAME = "never came: it was refused, or its client gave it up"


class Run:
    """One run that has not ended, in the memory of its partition's owner."""

    def __init__(self, cell: Cell, spec: RunSpec, state: RunState, versions: VersionNeeds) -> None:
        """`versions`: those in the store, as `versions:<run>` says."""
        self.cell = cell
        self.spec = spec
        self.state = state
        self.partition = partition_of(spec.tenant)
        self.retention = RunRetention(cell, spec, state, versions)
        self.changed_at = 0.0
        """Time at which something last came back or was sent: seconds since 1970."""
        self._inbox = cell.ops(self.partition)
        self._waiting: dict[int, PendingOperation] = {}  # by number: those without a result
        self._log: dict[int, PendingOperation] = {}  # in order
        self._waiting_since: dict[int, float] = {}  # number -> when `look` first found it

    # ---- what others ask --------------------------------------------------------------------------------------------

    @property
    def id(self) -> str:
        return self.spec.id

    @property
    def under_way(self) -> bool:
        """Is a message of the run with a trainer?"""
        return self.state.status == "creating" or self.state.sent > 0

    @property
    def settled(self) -> bool:
        return self.state.status == "ended"

    @property
    def pending_entries(self) -> set[str]:
        """Entries that stay pending because this run holds them."""
        return {pending.entry for pending in (*self._waiting.values(), *self._log.values())}

    @property
    def log_bytes(self) -> int:
        return sum(held_bytes(pending.operation.payload) for pending in self._log.values())

    @property
    def pending_bytes(self) -> int:
        """The `held_bytes` that stay in Redis because of this run."""
        return self.log_bytes + sum(held_bytes(pending.operation.payload) for pending in self._waiting.values())

    @property
    def oldest_operation(self) -> int:
        """The number of the first operation that is in the log or has no result."""
        return min(self._log, default=self.state.head)

    @property
    def trainer_stream(self) -> str:
        """The stream of the trainer that has the gradient; empty if none has."""
        return self.cell.trainer(self.state.holder) if self.state.holder else ""

    def view(self) -> View:
        return View(
            tenant=self.spec.tenant,
            queued=self.state.status == "queued",
            active=self.state.status in ("creating", "ready"),
            training=self.under_way,
            training_tokens=self.state.sent_tokens if self.state.sent else 0,
            ready=bool(self._next()),
        )

    def commits_next(self) -> bool:
        """Does the next message to a trainer make a version?"""
        return bool(segment := self._next()) and segment[-1].action in ("optim_step", "load")

    def ready_tokens(self) -> int:
        """Positions of the next message to a trainer, at least 1."""
        return num_tokens(self._next())

    def copies(self) -> list[tuple[AdapterRef, bool]]:
        """Versions that this run is to copy, and whether with the optimiser's state."""
        begins = self.state.version < 0 and self.state.status in ("queued", "creating")
        found = [(self.spec.source, self.spec.with_optimizer)] if begins and self.spec.source else []
        waiting = (pending.operation for pending in self._waiting.values())
        loads = [load_of(operation) for operation in waiting if operation.action == "load" and not operation.failure]
        return [*found, *((load.source, load.with_optimizer) for load in loads)]

    # ---- beginning and end ------------------------------------------------------------------------------------------

    def start(self, now: float, changes: Changes) -> None:
        """Leads from queued to creating: asks for version 0."""
        self.state.status = "creating"
        self._publish_init(f"{self.id}/init", self.spec.source, self.spec.with_optimizer, changes)

    def _publish_init(self, name: str, source: AdapterRef | None, with_optimizer: bool, changes: Changes) -> None:
        """Asks any trainer for the next version: a copy of `source`, or drawn from the seed."""
        spec = self.spec
        message = Init(
            id=name,
            **self._about(),
            adapter=AdapterRef(spec.tenant, spec.id, self.state.version + 1),
            seed=spec.seed,
            lora=spec.lora,
            source=source,
            with_optimizer=with_optimizer,
        )
        changes.published.append((self.cell.train, message))
        self._dirty(changes)

    def on_adapter(self, message: AdapterUpdate, changes: Changes) -> None:
        """Takes in that version 0 was made, copied or refused. A repeat changes nothing."""
        if message.adapter.version != self.state.version + 1:
            return
        if self.state.status == "creating":
            self._on_created(message, changes)
        elif (pending := self._waiting.get(self.state.sent)) and pending.operation.action == "load":
            self._on_loaded(pending.operation, message, changes)

    def _on_created(self, message: AdapterUpdate, changes: Changes) -> None:
        if message.failure is None:
            self.state.status, self.state.version = "ready", 0
            self.retention.committed(0, message.size, changes)
            self._answer(OperationResult(0, msgspec.msgpack.encode(Saved(0))), changes)
        else:
            self._refuse_all(message.failure, changes)

    def _on_loaded(self, operation: Operation, message: AdapterUpdate, changes: Changes) -> None:
        state, number, failure = self.state, operation.seq, message.failure
        if failure is not None and not message.batch.endswith(f"/{state.attempt}"):
            return  # of an earlier try
        if failure is None and not message.batch.startswith(f"{operation.id}/"):
            failure = Failure("infrastructure", f"version {message.adapter.version} was made by {message.batch}")
        state.sent = 0
        if failure is not None:
            self._refuse(number, failure, changes)
            return
        state.version, state.failed_at = message.adapter.version, None
        self.retention.committed(state.version, message.size, changes)
        self._drop_log(changes)
        saved = Saved(state.version, load_of(operation).path)
        self._settle(number, OperationResult(number, msgspec.msgpack.encode(saved)), changes)

    def fail(self, error: JobError, now: float, changes: Changes) -> None:
        """Refuses everything from now on but to be unloaded. Call for a trouble of ours."""
        self._refuse_all(Failure("infrastructure", error.message), changes)
        self.advance(now, changes)

    def _refuse_all(self, failure: Failure, changes: Changes) -> None:
        self._drop_log(changes)
        self.state.status, self.state.failure, self.state.sent = "failed", failure, 0
        if self.state.version < 0:
            self._answer(OperationResult(0, failure=failure), changes)
        self._dirty(changes)

    def end(self, reason: str, now: float, changes: Changes) -> None:
        """Ends the run: its versions and their names stay. What is not answered fails."""
        self.state.ended_at = int(now)
        self._drop_log(changes)
        if self.state.status in ("queued", "creating"):
            ended = Failure("cancelled", "the run was ended before it was created")
            self._answer(OperationResult(0, failure=ended), changes)
        for number in sorted(self._waiting):
            self._refuse(number, Failure("cancelled", reason), changes)
        self.state.status, self.state.sent = "ended", 0
        self._dirty(changes)

    # ---- operations -------------------------------------------------------------------------------------------------

    def take_in(self, entry: str, operation: Operation, changes: Changes) -> None:
        """Takes in an operation that the API published. A repeat of one is acknowledged."""
        number = operation.seq
        known = self._waiting.get(number) or self._log.get(number)
        if number >= self.state.head and (known is None or known.entry == entry):
            self._waiting[number] = PendingOperation(entry, operation)
        elif known is None or known.entry != entry:
            changes.ack(self._inbox, entry)

    def restore(self, entry: str, operation: Operation, changes: Changes) -> None:
        """Takes in an operation that the last owner had: if it has a result, it is of the log."""
        if operation.seq >= self.state.head or operation.seq in self._log:
            self.take_in(entry, operation, changes)
        else:
            self._log[operation.seq] = PendingOperation(entry, operation)
            self._log = dict(sorted(self._log.items()))

    def advance(self, now: float, changes: Changes) -> None:
        """Answers the operations, up to the first that is a trainer's."""
        while self.state.status in ("ready", "failed") and not self.state.sent:
            pending = self._waiting.get(self.state.head)
            if pending is None or not self._answered_here(pending.operation, now, changes):
                return

    def _answered_here(self, operation: Operation, now: float, changes: Changes) -> bool:
        state, number = self.state, operation.seq
        failure = (None if operation.action == "unload" else state.failure) or operation.failure
        if failure is None and operation.action == "optim_step" and state.failed_at is not None:
            told = f"the gradient is not whole: operation {state.failed_at} of this step {state.failed_why}"
            failure = Failure("invalid", told)
        if failure is not None:
            self._refuse(number, failure, changes)
        elif operation.action in SAVES:
            self._save(operation, now, changes)
        elif operation.action == "unload":
            self._settle(number, OperationResult(number, msgspec.msgpack.encode(Saved(state.version))), changes)
            self.end("the model was unloaded", now, changes)
        else:
            return False
        return True

    def _save(self, operation: Operation, now: float, changes: Changes) -> None:
        """Names the newest version."""
        wanted, number = msgspec.msgpack.decode(operation.payload, type=SaveWeights), operation.seq
        fault = give_name(self.state, wanted, SAVES[operation.action], now) if wanted.name else ""
        if fault:
            self._refuse(number, Failure("invalid", fault), changes)
            return
        version, spec = self.state.version, self.spec
        changes.stored[spec.tenant, spec.id] += count_names(self.state)
        if wanted.inflight:
            self.state.inflight = version
        if wanted.sampler:
            adapter = AdapterRef(spec.tenant, spec.id, version)
            sampler = Sampler(wanted.sampler, spec.tenant, spec.asked_model, USED_S, adapter, wanted.inflight)
            changes.samplers.append(sampler)
        saved = Saved(version, wanted.name, wanted.sampler)
        self._settle(number, OperationResult(number, msgspec.msgpack.encode(saved)), changes)

    # ---- trainers ---------------------------------------------------------------------------------------------------

    def _next(self) -> list[Operation]:
        """The next message: logged operations that the trainer's gradient lacks, then waiting ones up to the next optim_step."""
        state = self.state
        if state.status != "ready" or state.sent or state.head not in self._waiting:
            return []
        first = self._waiting[state.head].operation
        if first.action == "load":
            return [first] if first.failure is None else []
        found: list[Operation] = []
        # The part of the log that no trainer has goes first: a gradient is the sum of all of it, in the order of the numbers.
        bytes_left, tokens_left = MAX_BYTES, MAX_TOKENS
        known = [pending.operation for pending in self._log.values()][state.in_log :]
        waiting = (pending.operation for pending in self._segment())
        for operation in (*known, *waiting):
            bytes_left, tokens_left = bytes_left - len(operation.payload), tokens_left - operation.tokens
            if found and (bytes_left < 0 or tokens_left < 0):
                break
            found.append(operation)
            if operation.action == "optim_step":
                break
        return found

    def _segment(self) -> list[PendingOperation]:
        """The waiting operations from the head on that trainers carry out."""
        found: list[PendingOperation] = []
        number = self.state.head
        while (pending := self._waiting.get(number)) and is_for_trainer(pending.operation):
            if pending.operation.action == "optim_step" and self.state.failed_at is not None:
                break
            found.append(pending)
            number += 1
        return found

    def publish(self, changes: Changes) -> None:
        """Sends the next segment: to the trainer with the gradient, or to any if it begins with the log's first."""
        operations, state, spec = self._next(), self.state, self.spec
        if not operations:
            return
        state.attempt += 1
        state.sent, state.sent_tokens = operations[-1].seq, num_tokens(operations)
        if operations[0].action == "load":
            load, state.sent_to = load_of(operations[0]), ""
            name = f"{operations[0].id}/{state.attempt}"
            self._publish_init(name, load.source, load.with_optimizer, changes)
            return
        state.sent_to = state.holder if state.held else ""
        message = Operations(
            id=f"{spec.id}:{state.head}/{state.attempt}",
            **self._about(),
            adapter=AdapterRef(spec.tenant, spec.id, state.version),
            seed=spec.seed,
            lora=spec.lora,
            first=state.held,
            operations=tuple(for_trainer(operation, state.head) for operation in operations),
            attempt=state.attempt,
            weight=spec.weight,
        )
        changes.published.append((self.cell.trainer(state.sent_to) if state.sent_to else self.cell.train, message))
        self._dirty(changes)

    def on_done(self, message: OperationsDone, changes: Changes) -> None:
        """Takes in a trainer's answer. An unexpected one changes nothing but the tenant's usage."""
        changes.add_usage(self.spec.tenant, self.id, message.usage)
        state = self.state
        # A message is sent again when its trainer seems dead. The first trainer may answer all the same: the next message does not build
        # on its gradient, so only the answer to the newest attempt counts.
        if not state.sent or message.attempt != state.attempt:
            return
        last, state.sent = state.sent, 0
        self._dirty(changes)
        if message.absent:
            self._forget_gradient()
            return
        committed = message.adapter.version == state.version + 1
        if not committed:
            state.holder, state.held = (message.holder, message.held) if message.held else ("", 0)
        for result in sorted(message.results, key=lambda result: result.seq):
            self._take_result(result, changes)
        state.in_log = sum(number <= last for number in self._log) if state.held else 0
        if committed:
            state.version += 1
            self.retention.committed(state.version, message.size, changes)
            self._drop_log(changes)
        elif state.failed_at is not None:
            self._forget_gradient()

    def _take_result(self, result: OperationResult, changes: Changes) -> None:
        pending = self._waiting.get(result.seq)
        if pending is None or result.seq != self.state.head:
            return
        action = pending.operation.action
        if result.failure is not None:
            self._refuse(result.seq, result.failure, changes)
        elif action == "forward_backward" and self.state.failed_at is None:
            self._log[result.seq] = pending
            del self._waiting[result.seq]
            self.state.head += 1
            self._answer(result, changes)
        else:
            self._settle(result.seq, result, changes)

    def look(self, live_trainers: Collection[str], now: float, changes: Changes) -> None:
        """Takes in which trainers live: a dead one's gradient must begin again. A number that never comes counts as failed."""
        state = self.state
        self._waiting_since = {number: self._waiting_since.get(number, now) for number in self._waiting}
        # Clients send in any order, and try one number for five minutes: it is given up only when others have waited behind it for longer.
        # These times are in memory only, so another owner waits once more: a hole then costs time, and never an operation.
        if self._waiting and state.head not in self._waiting and now - min(self._waiting_since.values()) > HOLE_S:
            self._pass_over(changes)
        if state.holder and state.holder not in live_trainers:
            if state.sent_to == state.holder:
                state.sent = 0
            self._forget_gradient()
            self._dirty(changes)

    def _pass_over(self, changes: Changes) -> None:
        """Gives up the numbers before the first that is there: others have long come behind them."""
        state = self.state
        self._drop_log(changes)
        if state.failed_at is None:
            state.failed_at, state.failed_why = state.head, NEVER_CAME
        state.head = min(self._waiting)
        self._dirty(changes)

    def on_dead_letter(self, letter: DeadLetter, changes: Changes) -> None:
        """Takes in that no trainer can read the message under way: what it asked for has failed."""
        failure = Failure("dead_letter", f"a message could not be read: {letter.reason}")
        if self.state.status == "creating":
            self._refuse_all(failure, changes)
        elif self.state.sent and letter.id.endswith(f"/{self.state.attempt}"):
            last, self.state.sent = self.state.sent, 0
            for number in range(self.state.head, last + 1):
                self._refuse(number, failure, changes)

    def resend(self, now: float, changes: Changes) -> None:
        """Sends again what the run waits for. Call when nothing of it is in any stream."""
        if self.state.status == "creating":
            self.start(now, changes)
        else:
            self.state.sent = 0
            self._forget_gradient()
            self._dirty(changes)

    # ---- helpers ----------------------------------------------------------------------------------------------------

    def _refuse(self, number: int, failure: Failure, changes: Changes) -> None:
        """Answers an operation with a failure. A step with a failed operation comes to nothing: its gradient goes."""
        operation = self._waiting[number].operation
        if operation.action == "forward_backward" and self.state.status == "ready":
            if self.state.failed_at is None:
                self.state.failed_at, self.state.failed_why = number, HAS_FAILED
            self._drop_log(changes)
        elif operation.action == "optim_step":
            self._drop_log(changes)
            self.state.failed_at = None
        self._settle(number, OperationResult(number, failure=failure), changes)

    def _settle(self, number: int, result: OperationResult, changes: Changes) -> None:
        """Answers an operation that the gradient does not need."""
        changes.ack(self._inbox, self._waiting.pop(number).entry)
        self.state.head = max(self.state.head, number + 1)
        self._answer(result, changes)

    def _answer(self, result: OperationResult, changes: Changes) -> None:
        changes.results.setdefault(self.id, []).append(result)
        self._dirty(changes)

    def _drop_log(self, changes: Changes) -> None:
        for pending in self._log.values():
            changes.ack(self._inbox, pending.entry)
        self._log = {}
        self._forget_gradient()

    def _forget_gradient(self) -> None:
        self.state.holder, self.state.held, self.state.in_log, self.state.sent_to = "", 0, 0, ""

    def _about(self) -> dict[str, Any]:
        return {"tenant": self.spec.tenant, "job": self.id, "partition": self.partition}

    def _dirty(self, changes: Changes) -> None:
        changes.runs[self.id] = self.state
