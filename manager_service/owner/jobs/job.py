"""The state machine of one job: events come in, Changes go out. No input or output; the time is an argument.

    validating_files ─► queued ─► running ⇄ paused ─► succeeded | failed | cancelled

    running:  (Init ─►) version 0 ─► [ issue groups ─► scored ─► TrainStep ─► version + 1 ] x num_steps ─► last evaluation

The version gate (I1): a group is issued for the newest version, and only while fewer than S = (max_staleness + 1) * B groups
are issued and not yet trained; B is `batch_size`, and a batch with a trainer counts as B. So no lag, `version - group.version`,
exceeds `max_staleness`: for each open group, lag * B + the groups before it, those with a trainer included, stays below S.

    issue     the lag is 0, and fewer than S groups are before it
    publish   takes the first B open groups to the trainer, or all: as many as before are before each of the others
    commit    the lag grows by 1, and the B groups with the trainer are gone
    drop      fewer groups are before the later ones; what replaces a group comes last
    lost      a trainer's groups come back, first and sampled anew by the newest version (`resend`); pauses change no order

A group is trained once fewer than B are before it, so by a version with lag * B < S.
"""

from common.bus.streams import Cell, partition_of
from common.wire.messages import AdapterUpdate, DeadLetter, Failure, Parked, ScoredTrajectory, TrainStep, Usage
from manager_service.owner.jobs.changes import Changes
from manager_service.owner.jobs.evaluation import begin, count, leave_out, next_unit
from manager_service.owner.jobs.groups import MIN_USABLE, sound
from manager_service.owner.jobs.items import Items
from manager_service.owner.jobs.job_retention import JobRetention
from manager_service.owner.jobs.journal import Journal
from manager_service.owner.jobs.open_trajectories import OpenTrajectories, TrajectoryKey
from manager_service.owner.jobs.orders import Orders
from manager_service.owner.jobs.stopping import end_of, note_step
from manager_service.records.job_records import FINAL, MAX_DRAWN, JobError, JobSpec, JobState, Status, Stop, Training
from manager_service.records.sample_records import LIMITS, Limits
from manager_service.scheduling.members import Lengths
from manager_service.scheduling.policies import capacity


class Job:
    """One unfinished job, in the memory of its partition's owner."""

    def __init__(
        self, cell: Cell, spec: JobSpec, state: JobState, items: Items, eval_items: Items, limits: Limits = LIMITS
    ) -> None:
        self.cell = cell
        self.spec = spec
        self.state = state
        self.orders = Orders(cell, spec, items, eval_items)
        self.partition = partition_of(spec.tenant)
        self.open = OpenTrajectories(cell, spec)
        self.retention = JobRetention(cell, spec, state, self.open)
        self.journal = Journal(spec, state, limits)
        self.lengths = Lengths(spec.hyper.max_tokens, spec.hyper.max_context)
        self.changed_at = 0.0  # time at which something last came back or was sent: seconds since 1970

    # ---- what others ask --------------------------------------------------------------------------------------------

    @property
    def id(self) -> str:
        return self.spec.id

    @property
    def num_waiting(self) -> int:
        """Trajectories issued and not back yet, evaluations included."""
        return self.open.num_waiting

    @property
    def under_way(self) -> bool:
        """Is something of the job in a stream or with a worker?"""
        return bool(self.num_waiting or self.state.training or self.state.initialising)

    @property
    def settled(self) -> bool:
        """Has the job ended, and is nothing of it with a trainer, nor to be deleted?"""
        ended = self.state.status in FINAL and self.state.training is None and not self.state.initialising
        return ended and self.retention.is_tidy

    @property
    def steps_sent(self) -> int:
        return max(0, self.state.version) + (1 if self.state.training else 0)

    @property
    def num_steps(self) -> int:
        """Steps of the whole job, as far as is known."""
        return self.state.stop.version if self.state.stop else self.spec.hyper.num_steps

    def wants_group(self) -> bool:
        """May a group for training be issued now?"""
        return self.groups_wanted() > 0

    def groups_wanted(self) -> int:
        """Groups for training that may be issued now."""
        state, hyper = self.state, self.spec.hyper
        drawn_out = hyper.dynamic_sampling and state.drawn >= MAX_DRAWN * hyper.batch_size
        if drawn_out or state.status != "running" or state.version < 0:
            return 0
        # The version gate (I1). A batch with a trainer still counts: its version is not there yet
        untrained = len(self.open.groups) + (hyper.batch_size if state.training else 0)
        room = capacity(eta=hyper.max_staleness, batch_size=hyper.batch_size, num_untrained=untrained)
        return max(0, min(room, (self.num_steps - self.steps_sent) * hyper.batch_size - len(self.open.groups)))

    def wants_eval(self) -> bool:
        """May a part of an evaluation be issued now?"""
        return self.state.status == "running" and any(t.issued < t.units for t in self.state.evals.values())

    def groups_missing(self) -> int:
        """Groups that must still be issued for the next batch."""
        return max(0, self.spec.hyper.batch_size - len(self.open.groups))

    # ---- commands ---------------------------------------------------------------------------------------------------

    def queue(self, now: float, changes: Changes) -> None:
        self.state.status = "queued"
        self.journal.queued(now, changes)

    def start(self, now: float, changes: Changes) -> None:
        """Leads from queued to running: asks for version 0, unless it is drawn, which needs no trainer."""
        self.state.status = "running"
        self.state.started_at = int(now)
        self.journal.tell(now, changes, "Job started")
        self.state.initialising = not self.spec.is_drawn
        if not self.state.initialising:
            return self._reach(0, now, changes)
        changes.published.append(self.orders.init(self.state))

    def pause(self, now: float, changes: Changes) -> None:
        """Voids what is under way. Finished turns come back as Parked, and wait until the job goes on."""
        if self.state.status not in ("queued", "running"):
            return
        self.state.status = "paused"
        self._void(changes, park=True)
        self.journal.tell(now, changes, "Job paused")

    def resume(self, now: float, changes: Changes) -> None:
        """Issues again what the pause made void, from the last finished turn where there is one."""
        if self.state.status != "paused":
            return
        self.state.status = "queued" if self.state.started_at is None else "running"
        self.journal.start_clock(now)
        self.journal.tell(now, changes, "Job resumed")
        self._reissue(changes)

    def _reissue(self, changes: Changes) -> None:
        """Issues every waiting trajectory again, as a new attempt. Results of the old one will be dropped."""
        # Two numbers: workers drop messages of an older epoch, which only saves work; `attempt_of` refuses late results, so that they
        # do not count twice
        self.state.epoch += 1
        self.state.attempt += 1
        for number, group in self.open.groups.items():
            keys = [TrajectoryKey(number, sample) for sample in sorted(group.waiting)]
            if lost := [key for key in keys if not self._unpark(key, changes)]:
                self._sample(group.version, lost, changes)
        for key in list(self.open.evals):
            if not self._unpark(key, changes):
                self._sample(key.version, [key], changes)
        self._dirty(changes)

    def resend(self, now: float, changes: Changes) -> None:
        """Sends again what the job waits for. Call when nothing of the job is in any stream."""
        if self.state.status in FINAL:
            self._give_up(changes)
        elif training := self.state.training:  # its groups are sampled again, because their results were lost with it
            self.journal.warn(now, "A training step was lost and is made again", changes)
            for key in map(TrajectoryKey.parse, training.keys):
                self.open.wait_for(key, self.state.version, self.state.attempt)
            self.state.reopen_window(training, self.open.groups.keys())
            self._reissue(changes)
        elif self.state.initialising:
            self.start(now, changes)
        elif self.num_waiting:
            self.journal.warn(now, f"{self.num_waiting} trajectories were lost and are sampled again", changes)
            self._reissue(changes)

    def _give_up(self, changes: Changes) -> None:
        """Settles the lost TrainStep or Init of a job that has ended."""
        if self.state.training is not None:
            self.open.settle("cancelled", self.state.training.keys, changes)
        self.state.training, self.state.initialising = None, False
        self._dirty(changes)

    def cancel(self, now: float, changes: Changes) -> None:
        """Ends the job. A TrainStep under way stays in flight until its answer comes."""
        if self.state.status in FINAL:
            return
        self._finish("cancelled", now, changes)
        self.journal.tell(now, changes, "Job cancelled")

    def fail(self, error: JobError, now: float, changes: Changes) -> None:
        if self.state.status in FINAL:
            return
        self.state.error = error
        self.journal.keep_failed(changes)
        self._finish("failed", now, changes)
        self.journal.tell(now, changes, f"Job failed: {error.message}", level="error", data={"code": error.code})

    # ---- issuing ----------------------------------------------------------------------------------------------------

    def issue_group(self, changes: Changes) -> None:
        """Publishes the next group. Call only if `wants_group`."""
        number, size = self.state.next_group, self.spec.hyper.group_size
        self.state.next_group += 1
        self.state.drawn += 1
        keys = [TrajectoryKey(number, sample) for sample in range(size)]
        self._sample(self.state.version, keys, changes)
        changes.ledger[self.id, "issued"] += size
        self._dirty(changes)

    @property
    def next_kv_tokens(self) -> float:
        """Tokens whose keys and values rollout workers need for the next group, or item of an evaluation; estimated."""
        hyper, sampled = self.spec.hyper, self.wants_group() and not self.spec.is_supervised
        return self.lengths.kv_tokens * (hyper.group_size if sampled else hyper.eval_samples)

    def issue_eval(self, changes: Changes) -> None:
        """Publishes the next part of an evaluation: an item's sampled answers, or its greedy one."""
        version, tally = next((int(v), t) for v, t in self.state.evals.items() if t.issued < t.units)
        self._sample(version, next_unit(tally, version, self.spec), changes)
        self._dirty(changes)

    def _sample(self, version: int, keys: list[TrajectoryKey], changes: Changes) -> None:
        """Publishes trajectories of one item and purpose."""
        changes.published.append(self.orders.start(self.state, version, keys))
        if version == 0:
            changes.begun.append(self.id)
        for key in keys:
            self.open.issue(key, version, self.state.attempt, changes)

    def _unpark(self, key: TrajectoryKey, changes: Changes) -> bool:
        """Lets a parked turn go on where it stopped. False: nothing is parked under this key."""
        request = self.open.unpark(key, changes)
        if request is None:
            return False
        changes.published.append(self.orders.again(self.state, request))
        self.open.issue(key, request.trajectory_adapter.version, self.state.attempt, changes)
        return True

    # ---- results ----------------------------------------------------------------------------------------------------

    def on_scored(self, entry: str, message: ScoredTrajectory, changes: Changes) -> None:
        """Takes in a trajectory's result. Drops one that the job does not wait for, and counts it as wasted."""
        key = TrajectoryKey.of(message.trajectory, message.adapter.version)
        if not self._awaits(key, message.adapter.version, message.trajectory.attempt):
            return self._waste(entry, message.usage, changes)
        self.journal.charge(message.usage, changes)
        (self.lengths.learn_example if self.spec.is_supervised else self.lengths.learn)(message)
        message = sound(message)
        if key.purpose != "train":
            self._on_eval(entry, key, message, changes)
        elif message.failure is None:
            self.open.score(entry, message, changes)
        else:
            self.journal.note_failed(message, self.orders.item(key.group))
            self._on_failed(entry, key, message.failure, changes)

    def _awaits(self, key: TrajectoryKey, version: int, attempt: int) -> bool:
        """May this attempt, sampled by this version, still settle the trajectory?"""
        return self.open.attempt_of(key, version) == attempt and self.state.status not in FINAL

    def _waste(self, entry: str, usage: Usage, changes: Changes) -> None:
        self.journal.charge(usage, changes, wasted=True)
        self.open.ack(entry, changes)

    def _on_failed(self, entry: str, key: TrajectoryKey, failure: Failure, changes: Changes) -> None:
        self.state.note_failure(failure)
        self.open.fail(key, changes)
        self.open.ack(entry, changes)
        self._dirty(changes)

    def _on_eval(self, entry: str, key: TrajectoryKey, message: ScoredTrajectory, changes: Changes) -> None:
        self.open.end_eval(key, changes)
        self.open.ack(entry, changes)
        self._dirty(changes)
        if str(key.version) in self.state.evals:
            self.journal.keep_answer(key, message, self.orders)
        count(self.spec, self.state, key.version, message)

    def on_parked(self, entry: str, message: Parked, changes: Changes) -> None:
        """Takes in a turn that a pause has stopped, to go on from there later."""
        request = message.request
        key = TrajectoryKey.of(request.trajectory, request.trajectory_adapter.version)
        if self._awaits(key, request.trajectory_adapter.version, request.trajectory.attempt):
            self.open.park(key, entry, request)
        else:
            self._waste(entry, request.usage, changes)

    def on_dead_letter(self, entry: str, letter: DeadLetter, now: float, changes: Changes) -> None:
        """Handles an unreadable message of this job: what it asked for has failed. Raises InvalidInput for a strange id."""
        failure = Failure("dead_letter", f"a message could not be read: {letter.reason}")
        if letter.stream == self.cell.train:
            self.retention.forgotten(letter.id, changes)
            self._on_refused(letter.id, self.state.version + 1, failure, now, changes)
            self._dirty(changes)
            return
        for key, version, attempt in self.open.named_by(letter.id):
            self.on_scored(entry, self.orders.failed(self.state, key, version, attempt, failure), changes)

    # ---- batches ----------------------------------------------------------------------------------------------------

    def advance(self, now: float, changes: Changes) -> None:
        """Does what follows from the state: drops groups, finishes evaluations, finishes the job."""
        if self.state.status in FINAL:
            return
        state = self.state
        self._drop_groups(changes)
        for version in [v for v, tally in state.evals.items() if tally.done]:
            self.journal.evaluated(int(version), state.evals.pop(version), now, changes)
        if state.status == "running" and (ending := end_of(self.spec, state, self.steps_sent)):
            self._stop(*ending, now, changes)
        if state.status == "running" and (left_out := leave_out(self.spec, state)):
            self.journal.not_evaluated(left_out, now, changes)
            if any(tally.issued for tally in left_out.values()):
                self._take_back(changes)
        if state.failed_groups >= self.spec.hyper.batch_size:
            self.fail(state.unanswerable(), now, changes)
        elif state.status == "running" and state.version >= self.num_steps and not state.evals:
            self._finish("succeeded", now, changes)
            self.journal.completed(now, changes)

    def _drop_groups(self, changes: Changes) -> None:
        hyper, state = self.spec.hyper, self.state
        for number in self.open.take_undropped():
            group = self.open.groups[number]
            if len(group.scored) < min(MIN_USABLE, hyper.group_size):
                state.failed_groups += 1
                self._drop(number, "failed", changes)
            elif hyper.dynamic_sampling and group.all_equal:
                self._drop(number, "filtered", changes)

    def _drop(self, number: int, outcome: str, changes: Changes) -> None:
        self.open.drop(number, outcome, changes)
        self.state.dropped.append(number)
        self._dirty(changes)

    def next_batch(self) -> list[int] | None:
        """Numbers of the groups of the next TrainStep. None: it cannot be published yet; empty: no signal."""
        state, hyper = self.state, self.spec.hyper
        if state.status != "running" or state.training or state.version < 0 or state.version >= self.num_steps:
            return None
        if (numbers := self.open.next_batch(state.window, state.next_group)) is not None:
            return numbers
        exhausted = hyper.dynamic_sampling and state.drawn >= MAX_DRAWN * hyper.batch_size
        return sorted(self.open.groups) if exhausted and len(self.open.decided) == len(self.open.groups) else None

    def next_step(self, numbers: list[int]) -> TrainStep:
        """The message that hands these groups to the trainers."""
        end = numbers[-1] + 1 if numbers else self.state.next_group
        return self.orders.step(self.state, [(number, self.open.groups[number]) for number in numbers], end)

    def publish_step(self, numbers: list[int], changes: Changes) -> None:
        """Hands a batch to the trainers. The same script acknowledges its scored entries."""
        state = self.state
        step = self.next_step(numbers)
        batch = [(number, self.open.take(number, changes)) for number in numbers]
        keys = tuple(scored.message.trajectory.key() for _, group in batch for scored in group.rows())
        changes.published.append((self.cell.train, step))
        self.journal.keep_samples(batch, self.orders, changes)
        versions = tuple(sorted({group.version for _, group in batch}))
        failed, why = sum(state.reasons.values()), state.commonest_reason
        state.training = Training(step.id, keys, state.window, versions, failed, why, len(step.rows.tokens))
        state.move_window(step.next_group)
        self._dirty(changes)

    # ---- versions ---------------------------------------------------------------------------------------------------

    def on_adapter(self, message: AdapterUpdate, now: float, changes: Changes) -> None:
        """Takes in that a version was committed or refused. A repeat changes nothing."""
        if message.failure is not None:
            self._on_refused(message.batch, message.adapter.version, message.failure, now, changes)
        elif self.state.initialising and message.adapter.version == 0:
            self.state.initialising = False
            self._commit(message, now, changes)
        elif self.state.training is not None and message.adapter.version == self.state.version + 1:
            self._on_trained(message, self.state.training, now, changes)
        self._dirty(changes)

    def _on_trained(self, message: AdapterUpdate, training: Training, now: float, changes: Changes) -> None:
        self.open.settle("trained", training.keys, changes)
        self.state.training = None
        self.journal.charge(message.usage, changes)
        self._commit(message, now, changes)
        self.journal.trained(message, training, now, changes)
        note_step(self.spec, self.state, ahead=sum(group.tokens_used for group in self.open.groups.values()))

    def _on_refused(self, batch: str, version: int, failure: Failure, now: float, changes: Changes) -> None:
        training = self.state.training
        if training is not None and training.batch == batch:
            self.open.settle("failed", training.keys, changes)
            self.state.training = None
        elif not (self.state.initialising and version == 0):
            return
        self.state.initialising = False
        self.fail(JobError(failure.kind, f"version {version} was not made: {failure.reason}"), now, changes)

    def _commit(self, message: AdapterUpdate, now: float, changes: Changes) -> None:
        self._reach(message.adapter.version, now, changes)
        changes.published.append(self.orders.new_version(self.state, message.adapter))
        self.journal.committed(message, now, changes)

    def _reach(self, version: int, now: float, changes: Changes) -> None:
        """Samples by this version from now on."""
        state, hyper = self.state, self.spec.hyper
        state.version = version
        self.retention.reached(version, changes)
        if version == 0:
            self.journal.start_clock(now)
        if state.version in (0, self.num_steps) or (hyper.eval_interval and state.version % hyper.eval_interval == 0):
            begin(self.spec, self.state)
        versions = {group.version for group in self.open.groups.values()}.union(map(int, state.evals))
        changes.oldest_in_use[self.id] = min(versions, default=state.version)

    def _stop(self, stop: Stop, why: str, now: float, changes: Changes) -> None:
        """Ends training after the step under way. What is sampled for later ones is taken back."""
        if stop.version == 0:
            return self.fail(JobError(stop.reason, f"before the first step was trained: {why}"), now, changes)
        evals = list(self.open.evals) if stop.evaluates else []
        self.state.stop = stop
        self.journal.stopped(stop, why, now, changes)
        self._take_back(changes)
        self.state.close_window()
        if not stop.evaluates:
            self.state.evals = {}
        elif self.state.version == stop.version:
            begin(self.spec, self.state)
        for key in evals:
            self._sample(key.version, [key], changes)
        self._dirty(changes)

    # ---- helpers ----------------------------------------------------------------------------------------------------

    def _finish(self, status: Status, now: float, changes: Changes) -> None:
        """Ends the job, and settles everything but a TrainStep under way."""
        self._take_back(changes)
        self.state.evals = {}
        self.state.status, self.state.finished_at = status, int(now)
        changes.ended.append(self.id)
        self._dirty(changes)

    def _take_back(self, changes: Changes) -> None:
        """Settles everything but a TrainStep under way."""
        for turn in self.open.parked.values():
            self.journal.charge(turn.request.usage, changes, wasted=True)
        if self.open.num_waiting:
            self._void(changes, park=False)
        self.open.cancel(changes)

    def _void(self, changes: Changes, *, park: bool) -> None:
        """Tells the workers that everything up to this epoch is void."""
        changes.published.append(self.orders.cancel(self.state, park=park))
        self.state.epoch += 1

    def _dirty(self, changes: Changes) -> None:
        changes.states[self.id] = self.state
