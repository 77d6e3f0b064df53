"""One job's state machine: events in, Changes out. No input or output, no clock: both are arguments.

    validating_files ─► queued ─► running ⇄ paused ─► succeeded | failed | cancelled

    running:  Init ─► version 0 ─► [ issue groups ─► scored ─► TrainStep ─► version + 1 ] x num_steps ─► last evaluation

The version gate (I1): a group is issued for the newest version, used while `version - group.version <= max_staleness`,
and at most `(max_staleness + 1) * batch_size` groups are issued and not yet trained.
"""

from typing import Any

import msgspec

from common.messages import AdapterRef, AdapterUpdate, Failure, Parked, ScoredTrajectory, TurnRequest, trajectory_key
from common.streams import Cell, partition_of
from manager_service.jobs.changes import Changes
from manager_service.jobs.evaluation import EvalKey, count, new_tally, next_unit, summary
from manager_service.jobs.groups import Group, Scored, is_sound, next_batch
from manager_service.jobs.items import Items
from manager_service.jobs.lengths import Lengths
from manager_service.jobs.orders import Orders
from manager_service.records import (
    FINAL,
    CheckpointRecord,
    EventRecord,
    JobError,
    JobSpec,
    JobState,
    SampleRecord,
    Training,
)
from manager_service.scheduling.policies import capacity

MAX_DRAWN = 3  # times batch_size: what dynamic sampling draws at most for one step
SAMPLED_GROUPS = 2  # groups a step whose texts are kept for the user
MAX_TEXT = 4000  # characters of a text that are kept
MAX_REASONS = 20
METRICS = (
    *("reward_mean", "reward_std", "loss", "kl", "grad_norm", "staleness"),
    *("sampling_gap", "sampling_kl", "ess_share", "clip_fraction"),
)
"""What an event of a step says at least, null where there is no signal."""


class Job:
    """State in memory of one unfinished job. Only its partition's owner has one."""

    def __init__(self, cell: Cell, spec: JobSpec, state: JobState, items: Items, eval_items: Items) -> None:
        self.cell = cell
        self.spec = spec
        self.state = state
        self.orders = Orders(cell, spec, items, eval_items)
        self.partition = partition_of(spec.tenant)
        self.groups: dict[int, Group] = {}  # in the window, not dropped
        self.eval_open: dict[str, int] = {}  # trajectory key -> attempt
        self.counted: dict[tuple[int, int], int] = {}  # while loading: (group, sample) -> attempt, result not read yet
        self.parked: dict[str, tuple[str, TurnRequest]] = {}  # trajectory key -> pending entry, request
        self.last_commit_at: float | None = None
        self.last_progress_at: float | None = None
        self.told_stall = False
        self.lengths = Lengths(spec.hyper.max_tokens)

    # ---- what others ask --------------------------------------------------------------------------------------------

    @property
    def id(self) -> str:
        return self.spec.id

    @property
    def num_waiting(self) -> int:
        """Trajectories issued and not back yet, evaluations included."""
        return sum(len(group.waiting) for group in self.groups.values()) + len(self.eval_open)

    @property
    def under_way(self) -> bool:
        """Something of it is in a stream or with a worker."""
        return bool(self.num_waiting or self.state.training or self.state.initialising)

    @property
    def adapter(self) -> AdapterRef:
        return AdapterRef(self.spec.tenant, self.id, self.state.version)

    @property
    def settled(self) -> bool:
        """Final, and nothing of it is under way."""
        return self.state.status in FINAL and self.state.training is None and not self.state.initialising

    @property
    def steps_sent(self) -> int:
        return max(0, self.state.version) + (1 if self.state.training else 0)

    def wants_group(self) -> bool:
        """May a group for training be issued now?"""
        state, hyper = self.state, self.spec.hyper
        if state.status != "running" or state.version < 0 or self.steps_sent >= hyper.num_steps:
            return False
        if hyper.dynamic_sampling and state.drawn >= MAX_DRAWN * hyper.batch_size:
            return False
        untrained = len(self.groups) + (hyper.batch_size if state.training else 0)
        room = capacity(eta=hyper.max_staleness, batch_size=hyper.batch_size, num_untrained=untrained)
        left = (hyper.num_steps - self.steps_sent) * hyper.batch_size
        return room > 0 and len(self.groups) < left

    def wants_eval(self) -> bool:
        """May a part of an evaluation be issued now?"""
        return self.state.status == "running" and any(t.issued < t.units for t in self.state.evals.values())

    def groups_missing(self) -> int:
        """Until the next batch is complete; small ones go first."""
        return max(0, self.spec.hyper.batch_size - len(self.groups))

    # ---- commands ---------------------------------------------------------------------------------------------------

    def queue(self, now: float, changes: Changes) -> None:
        self.state.status = "queued"
        self._event(now, changes, "Job queued")
        self._dirty(changes)

    def start(self, now: float, changes: Changes) -> None:
        """queued → running: have version 0 made."""
        self.state.status = "running"
        self.state.started_at = int(now)
        self.state.initialising = True
        changes.published.append(self.orders.init(self.state))
        self._event(now, changes, "Job started")
        self._dirty(changes)

    def pause(self, now: float, changes: Changes) -> None:
        """Void what is under way; finished turns come back as Parked and wait here."""
        if self.state.status not in ("queued", "running"):
            return
        self.state.status = "paused"
        self._void(changes, park=True)
        self._event(now, changes, "Job paused")
        self._dirty(changes)

    def resume(self, now: float, changes: Changes) -> None:
        """Issue again what the pause voided, from its last finished turn where there is one."""
        if self.state.status != "paused":
            return
        self.state.status = "queued" if self.state.started_at is None else "running"
        self._event(now, changes, "Job resumed")
        self.reissue(changes)

    def reissue(self, changes: Changes) -> None:
        """Everything that waits, once more, under a new attempt; results of the old one will be dropped."""
        self.state.epoch += 1
        self.state.attempt += 1
        for number, group in self.groups.items():
            waiting = sorted(group.waiting)
            lost = [sample for sample in waiting if not self._reissue_parked(trajectory_key(number, sample), changes)]
            if lost:
                self._publish_group(number, group.version, lost, changes)
            for sample in group.waiting:
                group.waiting[sample] = self.state.attempt
        for key in list(self.eval_open):
            if not self._reissue_parked(key, changes):
                self._publish_eval([EvalKey.parse(key)], changes)
            self._open_eval(key, changes)
        self._dirty(changes)

    def restart_step(self, changes: Changes) -> None:
        """The TrainStep under way is lost for good (Redis lost it, the store has no version): sample its groups again."""
        training = self.state.training
        if training is None:
            return
        state = self.state
        for key in training.keys:
            number, sample = (int(part) for part in key.split("/"))
            group = self.groups.setdefault(number, Group(state.version))
            group.waiting[sample] = state.attempt
        unused = set(range(training.first_group, state.window)) - self.groups.keys()
        state.dropped = sorted({*state.dropped, *unused})
        state.window, state.drawn = training.first_group, state.next_group - training.first_group
        state.training = None
        self.reissue(changes)

    def give_up(self, changes: Changes) -> None:
        """The job has ended, and what it still had with a trainer is lost for good."""
        if self.state.training is not None:
            self._settle(changes, "cancelled", list(self.state.training.keys))
        self.state.training, self.state.initialising = None, False
        self._dirty(changes)

    def cancel(self, now: float, changes: Changes) -> None:
        """Ends the job. A TrainStep under way stays in flight until its answer."""
        if self.state.status in FINAL:
            return
        self._finish("cancelled", now, changes)
        self._event(now, changes, "Job cancelled")

    def fail(self, error: JobError, now: float, changes: Changes) -> None:
        if self.state.status in FINAL:
            return
        self.state.error = error
        self._finish("failed", now, changes)
        self._event(now, changes, f"Job failed: {error.message}", level="error", data={"code": error.code})

    # ---- issuing ----------------------------------------------------------------------------------------------------

    def issue_group(self, changes: Changes) -> int:
        """Publish the next group. Returns its number of trajectories. Call only if `wants_group`."""
        number, size = self.state.next_group, self.spec.hyper.group_size
        self.state.next_group += 1
        self.state.drawn += 1
        attempt = self.state.attempt
        self.groups[number] = Group(self.state.version, dict.fromkeys(range(size), attempt))
        self._publish_group(number, self.state.version, list(range(size)), changes)
        changes.ledger[self.id, "issued"] += size
        self._dirty(changes)
        return size

    def issue_eval(self, changes: Changes) -> int:
        """Publish the next part of an evaluation: an item's sampled answers, or its greedy one. Returns how many."""
        version, tally = next((int(v), t) for v, t in self.state.evals.items() if t.issued < t.units)
        keys = next_unit(tally, version, self.spec.hyper.eval_samples)
        self._publish_eval(keys, changes)
        self._dirty(changes)
        return len(keys)

    def _publish_eval(self, keys: list[EvalKey], changes: Changes) -> None:
        """Trajectories of one item and purpose."""
        one, samples = keys[0], [key.sample for key in keys]
        changes.published.append(self.orders.evaluation(self.state, one.purpose, one.version, one.index, samples))
        for key in keys:
            self._open_eval(str(key), changes)

    def _open_eval(self, key: str, changes: Changes) -> None:
        self.eval_open[key] = self.state.attempt
        changes.open(self.cell.evals(self.id), key, str(self.state.attempt))

    def _publish_group(self, number: int, version: int, samples: list[int], changes: Changes) -> None:
        changes.published.append(self.orders.group(self.state, number, version, samples))
        for sample in samples:
            changes.open(self.cell.open(self.id), trajectory_key(number, sample), f"{self.state.attempt}:{version}")

    def _reissue_parked(self, key: str, changes: Changes) -> bool:
        """A parked turn goes on where it was. False: nothing is parked under this key."""
        parked = self.parked.pop(key, None)
        if parked is None:
            return False
        entry, request = parked
        changes.published.append(self.orders.again(self.state, request))
        changes.ack(self.cell.scored(self.partition), entry)
        if request.trajectory.purpose == "train":
            value = f"{self.state.attempt}:{request.adapter.version}"
            changes.open(self.cell.open(self.id), key, value)
        return True

    # ---- results ----------------------------------------------------------------------------------------------------

    def on_scored(self, entry: str, message: ScoredTrajectory, changes: Changes) -> None:
        """A trajectory settled. Results that nobody waits for are counted as wasted and dropped."""
        expected = self._expected(message)
        if expected is None or expected != message.trajectory.attempt or self.state.status in FINAL:
            changes.add_usage(self.spec.tenant, self.id, message.usage, wasted=True)
            changes.ack(self.cell.scored(self.partition), entry)
            return
        changes.add_usage(self.spec.tenant, self.id, message.usage)
        self.lengths.learn(message)
        if message.failure is None and not is_sound(message):
            broken = Failure("grader", f"reward {message.reward} or a log-prob is not a finite number of sensible size")
            message = msgspec.structs.replace(message, failure=broken, reward=None)
        if message.trajectory.purpose == "train":
            self._on_train(entry, message, changes)
        else:
            self._on_eval(entry, message, changes)

    def _expected(self, message: ScoredTrajectory) -> int | None:
        """The attempt that may settle this trajectory."""
        trajectory = message.trajectory
        if trajectory.purpose != "train":
            return self.eval_open.get(trajectory.key(message.adapter.version))
        group = self.groups.get(trajectory.group)
        if group is None or group.version != message.adapter.version:
            return None
        return group.waiting.get(trajectory.sample)

    def _on_train(self, entry: str, message: ScoredTrajectory, changes: Changes) -> None:
        ref = message.trajectory
        group, key = self.groups[ref.group], ref.key()
        del group.waiting[ref.sample]
        if message.failure is not None:
            self._count_reason(message.failure)
            self._settle(changes, "failed", [key])
            changes.ack(self.cell.scored(self.partition), entry)
            self._dirty(changes)
            return
        group.scored[ref.sample] = Scored(entry, message)
        changes.open(self.cell.open(self.id), key, f"{ref.attempt}:{group.version}:scored")

    def restore(self, entry: str, message: ScoredTrajectory) -> bool:
        """A new owner reads a result again that the last one had counted. False: it had not."""
        ref = message.trajectory
        if ref.purpose != "train" or self.counted.get((ref.group, ref.sample)) != ref.attempt:
            return False
        del self.counted[ref.group, ref.sample]
        self.groups[ref.group].scored[ref.sample] = Scored(entry, message)
        return True

    def restored(self) -> None:
        """All pending entries were read. Results that were counted and are gone must be sampled again."""
        for (number, sample), attempt in self.counted.items():
            self.groups[number].waiting[sample] = attempt
        self.counted = {}

    def on_parked(self, entry: str, message: Parked, changes: Changes) -> None:
        request = message.request
        key = request.trajectory.key(request.adapter.version)
        if self._waiting_attempt(key) != request.trajectory.attempt or self.state.status in FINAL:
            changes.add_usage(self.spec.tenant, self.id, request.usage, wasted=True)
            changes.ack(self.cell.scored(self.partition), entry)
            return
        self.parked[key] = (entry, request)

    def _waiting_attempt(self, key: str) -> int | None:
        if key in self.eval_open:
            return self.eval_open[key]
        number, _, sample = key.partition("/")
        group = self.groups.get(int(number)) if number.isdigit() else None
        return group.waiting.get(int(sample)) if group else None

    def _on_eval(self, entry: str, message: ScoredTrajectory, changes: Changes) -> None:
        version = message.adapter.version
        key = message.trajectory.key(version)
        del self.eval_open[key]
        changes.close(self.cell.evals(self.id), key)
        changes.ack(self.cell.scored(self.partition), entry)
        self._dirty(changes)
        tally = self.state.evals.get(str(version))
        if tally is not None:
            count(tally, message)

    # ---- batches ----------------------------------------------------------------------------------------------------

    def advance(self, now: float, changes: Changes) -> None:
        """Everything that follows from the state alone: drop groups, finish evaluations, finish the job."""
        if self.state.status in FINAL:
            return
        self._drop_groups(changes)
        for version in [v for v, tally in self.state.evals.items() if tally.done]:
            self._finish_eval(int(version), now, changes)
        if self.state.failed_groups >= self.spec.hyper.batch_size:
            self._fail_unanswerable(now, changes)
        elif self._has_trained_all() and self.state.status == "running":
            self._finish("succeeded", now, changes)
            self._event(now, changes, "The job has successfully completed")

    def _drop_groups(self, changes: Changes) -> None:
        hyper, state = self.spec.hyper, self.state
        for number in sorted(self.groups):
            group = self.groups[number]
            if not group.decided:
                continue
            if not group.usable:
                state.failed_groups += 1
                self._drop(number, "failed", changes)
            elif hyper.dynamic_sampling and group.all_equal:
                self._drop(number, "filtered", changes)
            elif state.version - group.version > hyper.max_staleness:
                self._drop(number, "stale", changes)

    def _drop(self, number: int, name: str, changes: Changes) -> None:
        group = self.groups.pop(number)
        self._settle(changes, name, [trajectory_key(number, sample) for sample in group.scored])
        for scored in group.scored.values():
            changes.ack(self.cell.scored(self.partition), scored.entry)
            if name == "stale":
                usage = scored.message.usage
                changes.usage[self.spec.tenant, self.id, "wasted_tokens"] += usage.prompt_tokens + usage.sampled_tokens
        self.state.dropped.append(number)
        self._dirty(changes)

    def next_batch(self) -> list[int] | None:
        """Numbers of the groups of the next TrainStep, if it can be published now. An empty list: there is no signal."""
        state, hyper = self.state, self.spec.hyper
        if state.status != "running" or state.training or state.version < 0 or state.version >= hyper.num_steps:
            return None
        found = next_batch(self.groups, window=state.window, end=state.next_group, batch_size=hyper.batch_size)
        if found is not None:
            return found
        exhausted = hyper.dynamic_sampling and state.drawn >= MAX_DRAWN * hyper.batch_size
        if exhausted and all(group.decided for group in self.groups.values()):
            return sorted(self.groups)
        return None

    def publish_step(self, numbers: list[int], changes: Changes) -> None:
        """Hand the batch to a trainer; its scored entries are acknowledged by the same script."""
        state = self.state
        batch = [(number, self.groups.pop(number)) for number in numbers]
        rows = [scored for _, group in batch for scored in group.rows()]
        keys = tuple(scored.message.trajectory.key() for scored in rows)
        end = numbers[-1] + 1 if numbers else state.next_group
        step = self.orders.step(state, batch, end)
        changes.published.append((self.cell.train, step))
        for scored in rows:
            changes.ack(self.cell.scored(self.partition), scored.entry)
        self._keep_samples(batch, changes)
        versions = tuple(sorted({group.version for _, group in batch}))
        state.training = Training(step.id, keys, state.window, versions)
        state.window = end
        state.dropped = [number for number in state.dropped if number >= end]
        state.drawn = max(0, state.next_group - end)
        state.failed_groups, state.reasons = 0, {}
        self._dirty(changes)

    def _keep_samples(self, batch: list[tuple[int, Group]], changes: Changes) -> None:
        records = [
            SampleRecord(
                version=scored.message.adapter.version,
                group=number,
                sample=scored.message.trajectory.sample,
                text=scored.message.output_text[:MAX_TEXT],
                reward=scored.message.reward,
                stop_reason=scored.message.stop_reason,
                prompt=_prompt(self.orders.item(number)),
            )
            for number, group in batch[:SAMPLED_GROUPS]
            for scored in group.rows()
        ]
        changes.samples.append((self.id, self.state.version + 1, records))

    # ---- versions ---------------------------------------------------------------------------------------------------

    def on_adapter(self, message: AdapterUpdate, now: float, changes: Changes) -> None:
        """A version was committed, or refused. A repeat changes nothing."""
        if message.failure is not None:
            self._on_refused(message, message.failure, now, changes)
        elif self.state.initialising and message.adapter.version == 0:
            self.state.initialising = False
            self._commit(message, now, changes)
        elif self.state.training is not None and message.adapter.version == self.state.version + 1:
            self._on_trained(message, self.state.training, now, changes)
        self._dirty(changes)

    def _on_trained(self, message: AdapterUpdate, training: Training, now: float, changes: Changes) -> None:
        self._settle(changes, "trained", list(training.keys))
        self.state.training = None
        self.state.trained_tokens += message.usage.trained_tokens
        changes.add_usage(self.spec.tenant, self.id, message.usage)
        self._commit(message, now, changes)
        step, reward = message.adapter.version, message.metrics.get("reward_mean")
        self.state.last_reward = reward
        gap = message.metrics.get("sampling_gap")
        self.state.sampling_gap = self.state.sampling_gap if gap is None else gap
        data = {
            **dict.fromkeys(METRICS),
            **message.metrics,
            "step": step,
            "version": step,
            "sampled_versions": list(training.versions),
            "trained_tokens": self.state.trained_tokens,
            "step_tokens": message.usage.trained_tokens,
            "step_s": None if self.last_commit_at is None else now - self.last_commit_at,
        }
        self.last_commit_at = now
        shown = "no signal" if reward is None else f"reward {reward:.3f}"
        text = f"Step {step}/{self.spec.hyper.num_steps}: {shown}"
        self._event(now, changes, text, type="metrics", data=data)

    def _has_trained_all(self) -> bool:
        return self.state.version >= self.spec.hyper.num_steps and not self.state.evals

    def _on_refused(self, message: AdapterUpdate, failure: Failure, now: float, changes: Changes) -> None:
        training = self.state.training
        if training is not None and training.batch == message.batch:
            self._settle(changes, "failed", list(training.keys))
            self.state.training = None
        elif not (self.state.initialising and message.adapter.version == 0):
            return
        self.state.initialising = False
        reason = f"version {message.adapter.version} was not made: {failure.reason}"
        self.fail(JobError(failure.kind, reason), now, changes)

    def _commit(self, message: AdapterUpdate, now: float, changes: Changes) -> None:
        state, hyper = self.state, self.spec.hyper
        state.version = message.adapter.version
        changes.published.append(self.orders.new_version(state, message.adapter))
        if state.version == 0:
            self.last_commit_at = now
        else:
            changes.checkpoints.append((self.id, CheckpointRecord(state.version, int(now), message.metrics)))
        last = state.version >= hyper.num_steps
        due = state.version == 0 or last or (hyper.eval_interval and state.version % hyper.eval_interval == 0)
        if due and self.spec.num_eval_items and state.status not in FINAL:
            state.evals[str(state.version)] = new_tally(self.spec.num_eval_items, hyper.eval_samples)

    def _finish_eval(self, version: int, now: float, changes: Changes) -> None:
        tally = self.state.evals.pop(str(version))
        data = summary(version, tally)
        mean = data["eval_reward_mean"]
        if version == 0:
            self.state.first_eval = mean
        self.state.last_eval = mean
        shown = "every answer failed" if mean is None else f"reward {mean:.3f} over {tally.num} answers"
        self._event(now, changes, f"Evaluation of version {version}: {shown}", type="metrics", data=data)
        self._dirty(changes)

    # ---- helpers ----------------------------------------------------------------------------------------------------

    def _fail_unanswerable(self, now: float, changes: Changes) -> None:
        reasons = self.state.reasons
        reason = max(reasons, key=lambda r: reasons[r]) if reasons else "fewer than two usable answers"
        kind, _, text = reason.partition(": ")
        count = self.state.failed_groups
        self.fail(JobError(kind, f"{count} groups failed in one step; the commonest reason: {text}"), now, changes)

    def _finish(self, status: Any, now: float, changes: Changes) -> None:
        """Settle all that is open but a TrainStep under way."""
        for number, group in self.groups.items():
            keys = [trajectory_key(number, sample) for sample in (*group.waiting, *group.scored)]
            self._settle(changes, "cancelled", keys)
            for scored in group.scored.values():
                changes.ack(self.cell.scored(self.partition), scored.entry)
        for entry, request in self.parked.values():
            changes.add_usage(self.spec.tenant, self.id, request.usage, wasted=True)
            changes.ack(self.cell.scored(self.partition), entry)
        changes.close(self.cell.evals(self.id), *self.eval_open)
        if any(group.waiting for group in self.groups.values()) or self.eval_open:
            self._void(changes, park=False)
        self.groups, self.eval_open, self.parked = {}, {}, {}
        self.state.evals = {}
        self.state.status, self.state.finished_at = status, int(now)
        changes.ended.append(self.id)
        self._dirty(changes)

    def _void(self, changes: Changes, *, park: bool) -> None:
        """Tell workers that everything up to this epoch is void."""
        changes.published.append(self.orders.cancel(self.state, park=park))
        self.state.epoch += 1

    def _settle(self, changes: Changes, name: str, keys: list[str]) -> None:
        """Move trajectories from in_flight to where they end."""
        if keys:
            changes.close(self.cell.open(self.id), *keys)
            changes.ledger[self.id, name] += len(keys)

    def _count_reason(self, failure: Failure) -> None:
        reason = f"{failure.kind}: {failure.reason[:300]}"
        reasons = self.state.reasons
        if reason in reasons or len(reasons) < MAX_REASONS:
            reasons[reason] = reasons.get(reason, 0) + 1

    def _event(
        self,
        now: float,
        changes: Changes,
        message: str,
        *,
        level: Any = "info",
        type: Any = "message",
        data: Any = None,
    ) -> None:
        self.state.num_events += 1
        record = EventRecord(self.state.num_events, int(now), level, message, type, data or {})
        changes.events.append((self.id, record))
        self._dirty(changes)

    def progressed(self, now: float, changes: Changes) -> None:
        """Something of it came back."""
        self.last_progress_at = now
        if self.told_stall:
            self.told_stall = False
            self._event(now, changes, "The job goes on")

    def check_stall(self, now: float, limit_s: float, diagnosis: str, changes: Changes) -> None:
        """One warning for each stretch in which nothing came back for `limit_s`."""
        self.last_progress_at = self.last_progress_at or now
        if self.state.status != "running" or self.told_stall or now - self.last_progress_at < limit_s:
            return
        self.told_stall = True
        self.warn(now, f"Nothing has come back for {limit_s:.0f} s: {diagnosis}", changes)

    def check_sampling_gap(self, now: float, bound: float, changes: Changes) -> None:
        """Beyond the bound, the next steps truncate importance weights, whatever the loss. One warning a job."""
        gap = self.state.sampling_gap
        if gap is None or gap <= bound or self.state.truncate_ratios:
            return
        self.state.truncate_ratios = True
        what = f"sampling_gap {gap:.4f} is beyond {bound:g}: rollout and trainer compute different log-probs"
        limit = self.spec.hyper.loss.is_clip
        self.warn(now, f"{what}; importance weights are truncated at is_clip = {limit:g} from now on", changes)

    def warn(self, now: float, message: str, changes: Changes) -> None:
        self._event(now, changes, message, level="warn")

    def _dirty(self, changes: Changes) -> None:
        changes.states[self.id] = self.state


def _prompt(item: dict[str, Any] | None) -> str:
    messages = (item or {}).get("messages") or []
    content = messages[-1].get("content") if messages else ""
    return content[:MAX_TEXT] if isinstance(content, str) else ""
