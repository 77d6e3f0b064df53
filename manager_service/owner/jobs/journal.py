"""Writes what the user reads of a job: its events, the figures of its steps, and texts of some samples."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from common.wire.messages import AdapterUpdate, ScoredTrajectory, Usage
from manager_service.owner.jobs.changes import Changes, KeptSamples
from manager_service.owner.jobs.evaluation import loss_summary, summary
from manager_service.owner.jobs.groups import Group
from manager_service.owner.jobs.open_trajectories import TrajectoryKey
from manager_service.owner.jobs.orders import Orders
from manager_service.owner.jobs.samples import MAX_TEXT, advantages, chosen, record_of
from manager_service.owner.jobs.stopping import note_evaluation
from manager_service.records.job_records import EvalTally, JobSpec, JobState, Stop, Training
from manager_service.records.keys import JSON
from manager_service.records.sample_records import CheckpointRecord, EventRecord, Kept, Limits, SampleKind, SampleRecord
from manager_service.records.stored import records_of

WHOLE_SAMPLES = 8
"""Trajectories of a step's first groups that are kept token by token; of the others, all that are kept."""
GAPS = ("sampling_gap", "lagged_gap")
"""Metrics of how far rollout's and trainer's log-probs differ, over rows of the trained version and of older ones."""
METRICS = (
    *("reward_mean", "reward_std", "loss", "kl", "grad_norm", "staleness"),
    *(*GAPS, "sampling_kl", "ess_share", "clip_fraction"),
)
"""Metrics that every step's event has, null where there is no signal."""
WARN_FAILED_SHARE = 0.05
WARN_STEPS = 2
"""Steps in a row after which the job warns of what no single step shows."""
WARN_AGAIN_STEPS = 10
LEAST_ESS_SHARE, MOST_SAMPLING_KL = 0.3, 0.1
"""Beyond them few of the trained tokens carry the gradient, or the policy has moved far from the one that sampled."""
MUCH_TRUNCATED = 0.5
AVERAGED_STEPS = 8
"""Newest steps that the time of a step is averaged over, the newest of them most."""


class Journal:
    """Writes one job's events and samples, and keeps the figures in its state that the API shows."""

    def __init__(self, spec: JobSpec, state: JobState, limits: Limits) -> None:
        self._spec = spec
        self._state = state
        self._limits = limits
        self._last_progress_at: float | None = None
        self._told_stall, self._told_runs = False, False
        self._failed: list[SampleRecord] = []
        self._answers: dict[int, list[SampleRecord]] = {}  # by version, of evaluations that run

    def tell(
        self,
        now: float,
        changes: Changes,
        message: str,
        *,
        level: Literal["info", "warn", "error"] = "info",
        metrics: dict[str, Any] | None = None,
        data: dict[str, Any] | None = None,
    ) -> None:
        """Writes one event. `metrics`: the data of an event that shows figures."""
        self._state.num_events += 1
        kind = "message" if metrics is None else "metrics"
        record = EventRecord(self._state.num_events, int(now), level, message[:MAX_TEXT], kind, metrics or data or {})
        changes.events.append((self._spec.id, record))
        changes.states[self._spec.id] = self._state
        if dropped := self._kept("events").add(record.sequence, len(JSON.encode(record)), self._limits.events):
            changes.dropped_events[self._spec.id] = dropped[1]

    def _kept(self, kind: Literal["events", "samples"]) -> Kept:
        return self._state.kept.setdefault(kind, Kept())

    def queued(self, now: float, changes: Changes) -> None:
        """Writes a job's first events."""
        for message in ("Job queued", *self._spec.notes):
            self.tell(now, changes, message)

    def stopped(self, stop: Stop, why: str, now: float, changes: Changes) -> None:
        """Writes that training ends early."""
        data = {"code": stop.reason, "version": stop.version}
        self.tell(now, changes, f"Training ends early, with version {stop.version}: {why}", data=data)

    def not_evaluated(self, versions: Iterable[str], now: float, changes: Changes) -> None:
        """Writes that there are too few tokens left to evaluate some versions."""
        used = f"{self._state.tokens} of {self._spec.hyper.max_tokens_total} tokens are used"
        for version in versions:
            data = {"code": "max_tokens_total", "version": int(version)}
            self.tell(now, changes, f"Version {version} is not evaluated: {used}", data=data)

    def warn(self, now: float, message: str, changes: Changes) -> None:
        self.tell(now, changes, message, level="warn")

    # ---- figures ----------------------------------------------------------------------------------------------------

    def charge(self, usage: Usage, changes: Changes, *, wasted: bool = False) -> None:
        """Counts what the job has used. Writes the state for it only if the job's tokens are limited."""
        changes.add_usage(self._spec.tenant, self._spec.id, usage, wasted=wasted)
        self._state.tokens += usage.prompt_tokens + usage.sampled_tokens + usage.trained_tokens
        if self._spec.hyper.max_tokens_total is not None:
            changes.states[self._spec.id] = self._state

    def start_clock(self, now: float) -> None:
        """Begins to measure a step: the first, or one that a pause has stopped."""
        self._state.stepped_at = now

    def _step_took(self, now: float) -> float | None:
        """Seconds since the version before, or since the job went on; None: not known."""
        state, took = self._state, None
        if state.stepped_at is not None:
            took = now - state.stepped_at
            before = took if state.step_s is None else state.step_s
            state.step_s = before + (took - before) / min(max(1, state.version), AVERAGED_STEPS)
        state.stepped_at = now
        return took

    def committed(self, update: AdapterUpdate, now: float, changes: Changes) -> None:
        """Lists a new version, and counts its bytes. The first that is trained brings a drawn version 0 with it; from the second on,
        each takes the place of the optimiser's state of the last but one."""
        spec, version, (adapter, optimizer) = self._spec, update.adapter.version, update.size
        self._state.size = update.size
        if version > 0:
            changes.checkpoints.append((spec.id, CheckpointRecord(version, int(now), update.metrics)))
        brought = 2 if version == 1 and spec.is_drawn else 1
        changes.stored[spec.tenant, spec.id] += brought * adapter + (0 if version > 1 else brought * optimizer)

    def trained(self, update: AdapterUpdate, training: Training, now: float, changes: Changes) -> None:
        """Writes the event of a step, and keeps its figures."""
        state, metrics = self._state, update.metrics
        state.trained_tokens += update.usage.trained_tokens
        state.last_reward, state.last_loss = metrics.get("reward_mean"), metrics.get("loss")
        state.gaps |= {name: gap for name in GAPS if (gap := metrics.get(name)) is not None}
        step = update.adapter.version
        failed_share = training.num_failed / max(1, training.num_failed + len(training.keys))
        data = {
            **dict.fromkeys(METRICS),
            **metrics,
            "step": step,
            "version": step,
            "sampled_versions": list(training.versions),
            "failed_share": failed_share,
            "failed_reason": training.failed_reason or None,
            "trained_tokens": state.trained_tokens,
            "step_tokens": update.usage.trained_tokens,
            "step_s": self._step_took(now),
        }
        failures = f"its trajectories failed, most of them: {training.failed_reason}"
        text = f"Step {step}/{self._spec.hyper.num_steps}: {self._shown()}"
        self._tell_figures(text, data, failed_share, failures, now, changes)
        self._note_signal(metrics, now, changes)
        self._note_distance(metrics, now, changes)

    def _note_signal(self, metrics: Mapping[str, float | None], now: float, changes: Changes) -> None:
        """Warns when steps in a row have learned nothing."""
        state, zero = self._state, 0.0
        nothing = metrics.get("no_signal") or zero in (metrics.get("advantage_std"), metrics.get("num_signal_rows"))
        state.steps_without_signal = state.steps_without_signal + 1 if nothing else 0
        if state.steps_without_signal == WARN_STEPS:
            self.warn(now, f"For {WARN_STEPS} steps nothing was learned: {_why_nothing(metrics)}", changes)

    def _note_distance(self, metrics: Mapping[str, float | None], now: float, changes: Changes) -> None:
        """Warns when steps in a row have trained far from the policy that sampled, at most once in WARN_AGAIN_STEPS."""
        state, ess_share, kl = self._state, metrics.get("ess_share"), metrics.get("sampling_kl")
        far: list[str] = []
        if ess_share is not None and ess_share < LEAST_ESS_SHARE:
            far.append(f"ess_share {ess_share:.2f} is below {LEAST_ESS_SHARE}")
        if kl is not None and kl > MOST_SAMPLING_KL:
            far.append(f"sampling_kl {kl:.2f} is above {MOST_SAMPLING_KL}")
        state.steps_far = state.steps_far + 1 if far else 0
        if state.steps_far >= WARN_STEPS and state.version >= state.warns_far_from:
            state.warns_far_from = state.version + WARN_AGAIN_STEPS
            old = "lower max_staleness, or the learning rate" if metrics.get("staleness") else "see sampling_gap"
            what = f"For {WARN_STEPS} steps the trained policy was far from the one that sampled"
            self.warn(now, f"{what} ({', '.join(far)}): {old}", changes)

    def completed(self, now: float, changes: Changes) -> None:
        """Writes the last event of a job that has succeeded."""
        if not self._state.learned_nothing:
            return self.tell(now, changes, "The job has successfully completed")
        none = f"in none of its {self._state.version} steps did a trained group's rewards differ"
        text = f"The job has completed, but nothing was learned: {none}"
        self.tell(now, changes, text, level="warn", data={"code": "nothing_learned"})

    def _shown(self) -> str:
        """The newest step's figure."""
        state = self._state
        if self._spec.is_supervised:
            return "no example" if state.last_loss is None else f"loss {state.last_loss:.4f}"
        return "no signal" if state.last_reward is None else f"reward {state.last_reward:.3f}"

    def evaluated(self, version: int, tally: EvalTally, now: float, changes: Changes) -> None:
        """Writes the event of an evaluation that has ended."""
        answers = sorted(self._answers.pop(version, []), key=lambda one: one.item or 0)
        if answers and not self._kept("samples").has_dropped(version):
            self._keep("answers", version, answers, changes)
        state = self._state
        if self._spec.is_supervised:
            data = loss_summary(version, tally)
            figure = state.last_eval_loss = data["eval_loss"]
            score = None if figure is None else -figure
            shown = "every example failed" if figure is None else f"loss {figure:.4f} over {tally.num} examples"
        else:
            data = summary(version, tally)
            figure = score = state.last_eval = data["eval_reward_mean"]
            shown = "every answer failed" if figure is None else f"reward {figure:.3f} over {tally.num} answers"
            if version == 0:
                state.first_eval = figure
        note_evaluation(self._spec, state, version, figure)
        if score is not None and (state.best_eval is None or score > state.best_eval):
            state.best_eval, state.best_version = score, version
        failures = f"it failed, the first of them: {tally.failed_reason}"
        failed_share = tally.failed / max(1, tally.settled)
        self._tell_figures(f"Evaluation of version {version}: {shown}", data, failed_share, failures, now, changes)

    def _tell_figures(
        self, text: str, data: dict[str, Any], failed_share: float, failures: str, now: float, changes: Changes
    ) -> None:
        """Writes an event of figures, which warns if many trajectories failed. `failures`: counts and reasons."""
        if failed_share <= WARN_FAILED_SHARE:
            self.tell(now, changes, text, metrics=data)
        else:
            self.tell(now, changes, f"{text}; {failed_share:.0%} of {failures}", level="warn", metrics=data)

    def note_failed(self, message: ScoredTrajectory, item: dict[str, Any] | None) -> None:
        """Takes a trajectory that failed to the samples of the coming step, the first few of a step."""
        if len(self._failed) < self._limits.other_samples:
            self._failed.append(record_of(message, item, "failed", supervised=self._spec.is_supervised))

    def keep_samples(self, batch: Sequence[tuple[int, Group]], orders: Orders, changes: Changes) -> None:
        """Keeps what the batch's first groups wrote, the best and worst others, and failures since the last batch."""
        others = 0 if self._spec.is_supervised else self._limits.other_samples
        rows = chosen(batch, groups=self._limits.sample_groups, others=others)
        items = {number: orders.item(number) for number in {number for number, *_ in rows}}
        compared = advantages([each for each in batch if each[0] in items], self._spec.hyper.loss.name)
        records = [
            record_of(
                scored.message,
                items[number],
                kept,
                whole=kept != "first" or place < WHOLE_SAMPLES,
                advantage=compared[number][place],
                supervised=self._spec.is_supervised,
            )
            for number, place, scored, kept in rows
        ]
        self._keep_step(self._state.version + 1, records, changes)

    def keep_failed(self, changes: Changes) -> None:
        """Keeps what failed since the last batch, of a job that makes no further one."""
        if self._failed:
            self._keep_step(self._state.version + (1 if self._state.training is None else 2), [], changes)

    def _keep_step(self, version: int, records: list[SampleRecord], changes: Changes) -> None:
        self._keep("samples", version, records + self._failed, changes)
        self._failed = []

    def keep_answer(self, key: TrajectoryKey, message: ScoredTrajectory, orders: Orders) -> None:
        """Keeps the first of an evaluation's sampled answers to the first items, so that versions can be compared."""
        if key.purpose == "eval" and key.sample == 0 and key.group < self._limits.sample_items:
            record = record_of(message, orders.item_of(key), "evaluation", supervised=self._spec.is_supervised)
            self._answers.setdefault(key.version, []).append(msgspec.structs.replace(record, item=key.group))

    def _keep(self, kind: SampleKind, version: int, records: list[SampleRecord], changes: Changes) -> None:
        tenant, job = self._spec.tenant, self._spec.id
        encoded = JSON.encode([msgspec.structs.replace(record, step=version) for record in records])
        changes.samples.append(KeptSamples(kind, tenant, job, version, encoded))
        kept = self._kept("samples")
        before = kept.num_bytes
        if dropped := kept.add(version, len(encoded), self._limits.samples):
            changes.dropped_samples.append((tenant, job, range(*dropped)))
        changes.stored[tenant, records_of(job)] += kept.num_bytes - before

    def check_sampling_gap(self, now: float, bound: float, changes: Changes) -> None:
        """Lets later steps truncate importance weights, under any loss, once a gap exceeds the bound. Warns once."""
        name, gap = max(self._state.gaps.items(), key=lambda item: item[1], default=("", 0.0))
        if gap <= bound or self._state.truncate_ratios:
            return
        self._state.truncate_ratios = True
        what = f"{name} {gap:.4f} is beyond {bound:g}: rollout and trainer compute different log-probs"
        limit = self._spec.hyper.loss.is_clip
        self.warn(now, f"{what}; importance weights are truncated at is_clip = {limit:g} from now on", changes)

    def waits_for_runs(self, num: int, now: float, changes: Changes) -> None:
        """Writes once why a queued job does not start: its tenant's live runs, which no list of jobs shows, use up `max_jobs`."""
        if self._state.status == "queued" and not self._told_runs:
            self._told_runs = True
            told = f"The job waits: no more of your jobs and runs may be under way at once, and {num} of them are runs of the Tinker"
            self.tell(now, changes, f"{told} protocol. It starts once one is unloaded, or its session ends")

    # ---- stalls -----------------------------------------------------------------------------------------------------

    def progressed(self, now: float, changes: Changes) -> None:
        """Notes that something of the job came back."""
        self._last_progress_at = now
        if self._told_stall:
            self._told_stall = False
            self.tell(now, changes, "The job goes on")

    def check_stall(self, now: float, limit_s: float, diagnosis: Callable[[], str], changes: Changes) -> None:
        """Warns once if nothing has come back to a running job for `limit_s`. `diagnosis` says why."""
        self._last_progress_at = self._last_progress_at or now
        if self._state.status != "running" or self._told_stall or now - self._last_progress_at < limit_s:
            return
        self._told_stall = True
        self.warn(now, f"Nothing has come back for {limit_s:.0f} s: {diagnosis()}", changes)


def _why_nothing(metrics: Mapping[str, float | None]) -> str:
    """The reason why a step has learned nothing, and what to try."""
    truncated = metrics.get("truncated_share") or 0.0
    cut = f" ({truncated:.0%} of the answers were cut off)" if truncated > MUCH_TRUNCATED else ""
    if metrics.get("advantage_std"):
        return f"mask_truncated leaves out all answers whose rewards differ: raise max_tokens{cut}"
    mean = metrics.get("reward_mean")
    shown = "" if mean is None else f" (their mean is {mean:.2f})"
    return (
        f"no group's rewards differ{shown}. Read the samples. If every answer fails, try easier items, a grader with partial"
        f" credit, or a larger max_tokens{cut}; if every one succeeds, harder items; if they are alike, a higher temperature"
        " or a larger group_size"
    )
