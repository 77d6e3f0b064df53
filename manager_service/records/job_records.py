"""Records of jobs: what never changes, and the state, which only the owner writes."""

import math
from collections.abc import Collection
from typing import Any, Literal

import msgspec

from common.tasks.environments import SUPERVISED, grader_in
from common.tasks.graders import model_graders, tuned_version
from common.wire.messages import MAX_TOKENS, TEMPERATURE, AdapterRef, EnvSpec, Failure, LoraSpec, LossSpec, OptimSpec
from manager_service.records.receivers import Integration
from manager_service.records.run_records import Leaving
from manager_service.records.sample_records import Kept

MAX_DRAWN = 3
"""Groups that dynamic sampling draws at most for one step, as a multiple of `batch_size`."""
Status = Literal["validating_files", "queued", "running", "paused", "succeeded", "failed", "cancelled"]
FINAL: frozenset[Status] = frozenset({"succeeded", "failed", "cancelled"})
LEDGER = ("issued", "trained", "filtered", "stale", "failed", "cancelled")
"""`stale` stays 0: the version gate issues no group that could become too old (`owner/jobs/job.py`)."""


def tuned_model(base_model: str, tenant: str, suffix: str, job: str) -> str:
    """The name of a job's model."""
    return f"ft:{base_model}:{tenant}:{suffix}:{job}"


class Hyper(msgspec.Struct, frozen=True, kw_only=True):
    """Hyperparameters with every default filled in."""

    batch_size: int = 16  # groups in a step
    group_size: int = 8
    num_steps: int  # the smaller of max_steps and what n_epochs give
    eval_interval: int = 0  # steps between evaluations; 0: only at version 0 and at the end
    eval_samples: int = 1
    lora: LoraSpec
    loss: LossSpec
    optim: OptimSpec
    temperature: float = TEMPERATURE
    max_tokens: int = MAX_TOKENS
    max_turns: int = 8
    max_staleness: int = 0
    dynamic_sampling: bool = False
    tool_timeout_s: float = 10.0
    priority: int = 0  # larger first among the tenant's jobs
    keep_versions: int | None = None  # of all its versions; see owner/jobs/job_retention.py; None: all
    max_context: int | None = (
        None  # tokens of a trajectory over all of its turns, the prompt included; None: what is served
    )
    deadline_s: float | None = None  # after creation; earlier first among the tenant's jobs of one priority
    target_reward: float | None = None  # at which training ends early
    plateau_steps: int | None = None  # without a new best, after which training ends early
    plateau_delta: float = 0.0  # by which a new best must be better
    max_tokens_total: int | None = None  # prompt, sampled and trained; training ends before it uses more


class JobSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about a job that never changes."""

    id: str  # `ftjob-…`
    tenant: str
    base_model: str
    created_at: int  # seconds since 1970
    seed: int
    suffix: str = ""
    metadata: dict[str, str] = {}
    training_file: str | None = None
    validation_file: str | None = None
    method: dict[str, Any]  # as the user gave it, for the API's answers
    env: EnvSpec
    hyper: Hyper
    num_items: int  # rows of the training file; 0: the environment makes its own
    num_eval_items: int = 0
    weight: float = 1.0  # the tenant's at creation
    model: str = ""  # that it begins with, as its user named it, and with a tuned one's version; empty, of older jobs: base_model
    source: AdapterRef | None = None  # version 0 is a copy of this one; None: it is drawn from the seed
    adapter_file: str | None = None  # version 0 is the adapter in this file
    adapter_base: str = ""  # digest of the base model that the file says it was trained on; empty: it says none
    integrations: tuple[Integration, ...] = ()
    notes: tuple[str, ...] = ()  # what the job's first events say
    webhooks: bool = True  # do the tenant's webhooks hear of its end?

    @property
    def is_drawn(self) -> bool:
        """Is version 0 drawn from the seed, so that it changes nothing?"""
        return self.source is None and not self.adapter_file

    @property
    def is_supervised(self) -> bool:
        """Is it trained on its file's own answers, which nobody samples?"""
        return self.env.name == SUPERVISED

    @property
    def tuned_model(self) -> str:
        return tuned_model(self.base_model, self.tenant, self.suffix, self.id)

    @property
    def urgency(self) -> tuple[float, float]:
        """Smaller first among a tenant's jobs: by priority, then earliest deadline (seconds since 1970)."""
        deadline_s = self.hyper.deadline_s
        return -self.hyper.priority, math.inf if deadline_s is None else self.created_at + deadline_s


class Training(msgspec.Struct, frozen=True):
    """A TrainStep under way: it is published and not yet answered."""

    batch: str  # the message's id
    keys: tuple[str, ...]  # its trajectories, in flight until the answer
    first_group: int  # of the window before; the window returns to it if the step is lost
    versions: tuple[int, ...]  # that sampled its trajectories
    num_failed: int = 0  # trajectories that failed since the step before
    failed_reason: str = ""  # the commonest
    tokens: int = 0  # of all its rows, prompts included


class EvalTally(msgspec.Struct):
    """A running evaluation of one version: sampled answers, and one greedy answer an item."""

    units: int  # Start messages in all: two an item, of a supervised job one
    issued: int = 0  # Start messages sent
    expected: int = 0  # trajectories in all
    settled: int = 0
    failed: int = 0
    failed_reason: str = ""  # of the first that failed
    num: int = 0  # scored sampled answers, their sum and sum of squares
    total: float = 0.0
    squares: float = 0.0
    greedy_num: int = 0
    greedy_total: float = 0.0
    tokens: int = 0  # of a supervised job: learned ones, over which `total` adds up log-probs

    @property
    def done(self) -> bool:
        return self.settled >= self.expected


class ScoreProgress(msgspec.Struct):
    """Scores that early stopping compares; more is better."""

    recent: list[float] = []  # of the newest steps
    score: float | None = None  # newest, and the step that it is of
    step: int = 0
    best: float | None = None  # and the step that it is of
    best_step: int = 0
    tokens: int = 0  # that the job had used when the newest version was committed, without evaluations
    step_tokens: int = 0  # of a step: the mean, without what was sampled for later ones
    eval_tokens: int = 0  # of all evaluations so far, and their trajectories
    num_evaluated: int = 0


class Stop(msgspec.Struct, frozen=True):
    """Training ends early."""

    version: int  # the last
    reason: Literal["target_reward", "plateau", "max_tokens_total"]

    @property
    def evaluates(self) -> bool:
        """May the last version be evaluated?"""
        return self.reason != "max_tokens_total"


MAX_REASONS = 20
"""Different reasons of failures that are counted apart between two steps."""
OTHER_REASONS = "other: reasons beyond the first"


class JobError(msgspec.Struct, frozen=True):
    code: str
    message: str
    param: str | None = None


class JobState(msgspec.Struct, kw_only=True):
    """Everything about a job that changes; written only by the partition's owner, under its lease."""

    status: Status = "validating_files"
    epoch: int = 0  # raised by pause, resume and cancel
    attempt: int = 0  # of trajectories issued from now on
    version: int = -1  # newest committed, or a drawn version 0; -1: version 0 is still being made
    initialising: bool = False  # an Init is under way
    window: int = 0  # first group that no batch has used yet
    next_group: int = 0  # first group that was not issued yet
    dropped: list[int] = []  # groups in the window that failed or were filtered
    drawn: int = 0  # groups issued for the coming step, replacements included
    failed_groups: int = 0  # since the last step
    reasons: dict[str, int] = {}  # of failures since the last step
    training: Training | None = None
    evals: dict[str, EvalTally] = {}  # version -> running evaluation
    num_events: int = 0
    kept: dict[str, Kept] = {}  # `events` and `samples`: what is kept of them, and how many were dropped
    trained_tokens: int = 0
    started_at: int | None = None
    finished_at: int | None = None
    error: JobError | None = None
    first_eval: float | None = None  # eval_reward_mean at version 0, and the newest
    last_eval: float | None = None
    best_eval: float | None = None  # the largest eval_reward_mean, or -eval_loss, and the version that had it first
    best_version: int | None = None
    size: tuple[int, int] = (0, 0)  # bytes of each version: of the adapter, of the optimiser's state
    leaving: Leaving | None = None
    num_left: int = 0  # messages to trainers that had them delete versions
    last_reward: float | None = None  # reward_mean of the newest step
    last_loss: float | None = None  # of the newest step
    last_eval_loss: float | None = None  # of a supervised job: eval_loss of the newest evaluation
    gaps: dict[str, float] = {}  # `sampling_gap` and `lagged_gap`, each of the newest step that measured it
    steps_without_signal: int = 0  # the newest ones in a row
    steps_far: int = 0  # that trained far from the policy that sampled: the newest ones in a row
    warns_far_from: int = 0  # the first version at which that is warned of again
    truncate_ratios: bool = False  # a gap exceeded its bound, so is_clip bounds the ratios of every loss
    tokens: int = 0  # prompt, sampled and trained; what was used since the state was last written may be missing
    evaluated: int = -1  # the version of the newest evaluation
    progress: ScoreProgress = msgspec.field(default_factory=ScoreProgress)
    stop: Stop | None = None  # training ends early
    stepped_at: float | None = None  # when the newest version was committed, or the job went on: seconds since 1970
    step_s: float | None = None  # of a step, averaged over the newest

    @property
    def learned_nothing(self) -> bool:
        """Has no step had anything to learn from?"""
        return 0 < self.version <= self.steps_without_signal

    def move_window(self, first: int) -> None:
        """A batch has used the groups below `first`."""
        self.window = first
        self.dropped = [number for number in self.dropped if number >= first]
        self.drawn = max(0, self.next_group - first)
        self.failed_groups, self.reasons = 0, {}

    def reopen_window(self, training: Training, open_groups: Collection[int]) -> None:
        """The batch of a step is lost; of its groups these are open again."""
        unused = set(range(training.first_group, self.window)) - set(open_groups)
        self.dropped = sorted({*self.dropped, *unused})
        self.window, self.drawn = training.first_group, self.next_group - training.first_group
        self.training = None

    def close_window(self) -> None:
        """No batch will use what has been issued up to now, nor will any result of it count."""
        self.move_window(self.next_group)
        self.attempt += 1

    def unanswerable(self) -> JobError:
        """The error of a job whose groups of one step failed."""
        kind, _, text = (self.commonest_reason or "other: too few usable trajectories").partition(": ")
        return JobError(kind, f"{self.failed_groups} groups failed in one step; the commonest reason: {text}")

    def note_failure(self, failure: Failure) -> None:
        """Counts the reason of a failure."""
        reason = f"{failure.kind}: {failure.reason[:300]}"
        counted = reason if reason in self.reasons or len(self.reasons) < MAX_REASONS else OTHER_REASONS
        self.reasons[counted] = self.reasons.get(counted, 0) + 1

    @property
    def commonest_reason(self) -> str:
        """The commonest telling failure since the last step; empty if there was none."""
        return max(self.reasons, key=lambda reason: (reason != OTHER_REASONS, self.reasons[reason]), default="")


DELETED, MOVING = "deleted", "moving"
"""Fields of `job:<job>` that stand there only if they are true."""
SUFFIX, VERSION = "suffix", "version"
"""Fields of `job:<job>` that repeat a little of its specification and state, for lists."""


def asked_versions(spec: JobSpec) -> list[AdapterRef]:
    """The versions of tuned models that the job's graders ask."""
    models = (str(part["model"]) for _, part in model_graders(grader_in(spec.env) or {}))
    return [found for model in models if (found := tuned_version(model))]


def newest_stored(spec: JobSpec, state: JobState) -> int:
    """The newest version that is surely in the store; -1: none."""
    return -1 if is_untrained(spec, state.version) else state.version


def is_untrained(spec: JobSpec, version: int) -> bool:
    """Is it a version 0 that was drawn from the seed, and so changes nothing?"""
    return version == 0 and spec.is_drawn


def steps_left(spec: JobSpec, state: JobState) -> int:
    """Steps that are still to be trained, as far as is known."""
    left = (state.stop.version if state.stop else spec.hyper.num_steps) - state.version
    limit, progress = spec.hyper.max_tokens_total, state.progress
    if limit is not None and progress.step_tokens and state.stop is None:
        left = min(left, (limit - progress.tokens - progress.eval_tokens) // progress.step_tokens)
    return max(0, left)
