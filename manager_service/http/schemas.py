"""The objects of the API's answers: OpenAI's shapes with our extras; and what all bodies are."""

from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from manager_service.records.job_records import Status
from manager_service.records.receivers import WebhookEvent

T = TypeVar("T")


class Given(BaseModel):
    """A body, or an object in one: unknown fields are refused by name."""

    model_config = ConfigDict(extra="forbid")


class Page(BaseModel, Generic[T]):
    """A list, newest first; `after=last_id` continues it."""

    object: Literal["list"] = "list"
    data: list[T]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False


class Identified(BaseModel):
    id: str


class Deleted(Identified):
    object: str
    deleted: bool = True


class FileObject(Identified):
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"
    expires_at: int | None = None
    status_details: str | None = None
    num_items: int


class ErrorObject(BaseModel):
    code: str
    message: str
    param: str | None = None


class JobObject(Identified):
    """OpenAI's fine-tuning job; our fields follow `metadata`."""

    object: Literal["fine_tuning.job"] = "fine_tuning.job"
    created_at: int
    finished_at: int | None
    estimated_finish: int | None = None
    model: str
    fine_tuned_model: str | None
    organization_id: str
    status: Status
    training_file: str | None
    validation_file: str | None
    adapter_file: str | None = None  # with the adapter that it goes on from
    hyperparameters: dict[str, Any]
    method: dict[str, Any]
    result_files: list[str] = []
    trained_tokens: int
    error: ErrorObject | None
    seed: int
    integrations: list[dict[str, Any]] = []
    user_provided_suffix: str | None
    metadata: dict[str, str]
    # ours
    started_at: int | None
    version: int  # newest committed adapter version; -1: none yet
    num_steps: int  # of the whole job, should it not end early
    stopped_early: Literal["target_reward", "plateau", "max_tokens_total"] | None = None  # why training ends early
    tokens: int = 0  # prompt, sampled and trained, so far
    num_items: int
    last_reward: float | None  # reward_mean of the newest step
    last_loss: float | None  # of the newest step
    last_eval_loss: float | None  # of a supervised job's newest version on the validation file: nats a token
    first_eval_reward: float | None  # of version 0 on the validation file
    last_eval_reward: float | None
    best_version: int | None  # of the largest eval_reward_mean so far; of a supervised job: of the smallest eval_loss
    dropped_events: int = 0  # the oldest, because there were too many bytes
    dropped_samples: int = 0  # versions whose samples are gone, for the same reason


class EstimateObject(BaseModel):
    """The needs of a job."""

    object: Literal["fine_tuning.job.estimate"] = "fine_tuning.job.estimate"
    num_steps: int
    num_trajectories: int  # to train on
    num_evaluated: int  # answers, or examples, of all evaluations
    sampled_tokens: int  # expected
    trained_tokens: int  # expected
    tokens: int  # expected: prompt, sampled and trained, as `max_tokens_total` and quotas count them
    max_tokens: int  # the same, if every answer is as long as it may be
    steps_within_limit: int | None  # that `max_tokens_total` allows; None: there is no such limit
    seconds: float | None  # if the workers that there are work only for this job; None: their speed is not known yet
    num_like: int  # the tenant's earlier jobs whose lengths are expected; 0: every answer is as long as it may be


class EventObject(Identified):
    # id: the job's own sequence number
    object: Literal["fine_tuning.job.event"] = "fine_tuning.job.event"
    created_at: int
    level: Literal["info", "warn", "error"]
    message: str
    type: Literal["message", "metrics"]
    data: dict[str, Any]


class CheckpointObject(Identified):
    object: Literal["fine_tuning.job.checkpoint"] = "fine_tuning.job.checkpoint"
    created_at: int
    fine_tuned_model_checkpoint: str
    fine_tuning_job_id: str
    step_number: int
    metrics: dict[str, float | None]


class LedgerObject(BaseModel):
    """issued = trained + filtered + stale + failed + cancelled + in_flight."""

    object: Literal["fine_tuning.job.ledger"] = "fine_tuning.job.ledger"
    fine_tuning_job_id: str
    issued: int
    trained: int
    filtered: int
    stale: int
    failed: int
    cancelled: int
    in_flight: int


class FailureObject(BaseModel):
    kind: str
    reason: str


class WrittenObject(BaseModel):
    """The tokens of a sample, of the first few of a group."""

    tokens: list[int]
    lengths: list[int]  # of the prompt, the model's turn, the environment's reply, the model's turn, …
    logprobs: list[float]  # of the model's tokens; none of a supervised job's
    num_dropped: int


class VerdictObject(BaseModel):
    """A question to a grader's model, and its answer: the first 4,000 characters of each."""

    grader: str  # its name in a `multi`, else its type
    prompt: str
    reply: str


class SampleObject(BaseModel):
    object: Literal["fine_tuning.job.sample"] = "fine_tuning.job.sample"
    step: int  # that trained on it, or left it out since it failed; the version that an evaluation measures
    version: int  # that sampled it
    item: int | None = None  # of an evaluation: the item's place in the held-out file, from 0
    group: int  # of an evaluation: its item
    sample: int
    prompt: str
    text: str
    reward: float | None
    advantage: float | None = None  # by which each of its tokens is learned from
    stop_reason: str
    reward_parts: dict[str, float] = {}
    verdicts: list[VerdictObject] = []
    failure: FailureObject | None = None
    written: WrittenObject | None = None
    kept: Literal["first", "best", "worst", "failed", "evaluation"] = "first"
    """The reason why it was kept: as one of the step's first groups, or of its others; or as the answer of an evaluation."""


class TurnObject(BaseModel):
    """A stretch of a conversation that one side wrote."""

    by: Literal["prompt", "model", "environment"]
    tokens: list[str]  # the text that each adds, special tokens included; empty where it ends no character
    logprobs: list[float] | None  # of the model's tokens, when they were sampled; null in a supervised job


class ConversationObject(BaseModel):
    """A sample as it was written, token by token."""

    object: Literal["fine_tuning.job.conversation"] = "fine_tuning.job.conversation"
    step: int  # as the sample's
    sample: SampleObject  # without `written`
    turns: list[TurnObject]
    num_dropped: int  # tokens at the end that are not kept


class CurvesObject(BaseModel):
    """The figures of a job's steps, as columns of the same length."""

    object: Literal["fine_tuning.job.metrics"] = "fine_tuning.job.metrics"
    fine_tuning_job_id: str
    step: list[int]  # the last that each point is of
    metrics: dict[str, list[float | None]]  # means over the point's steps
    evaluations: list[dict[str, Any]]  # the data of their events, oldest first
    steps_a_point: int
    last_event: str | None  # id of the newest event that was read: a stream goes on behind it


class HyperparameterObject(Identified):
    object: Literal["hyperparameter"] = "hyperparameter"
    default: Any  # None: it depends on the rest, or on the base model
    default_text: str  # in words where no value says it
    schema_: dict[str, Any] = Field(serialization_alias="schema")  # JSON Schema of its values


class ModelObject(Identified):
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    root: str  # the base model
    version: int | None = None  # newest committed version of a tuned model
    base: "BaseObject | None" = None  # only of a base model


class BaseObject(BaseModel):
    source: str  # the hub's name, or that of a folder
    num_weights: int | None  # None: not known
    dtype: str | None  # of the weights in their files
    context: int  # tokens that are served
    learning_rate: float  # of a job that names none
    rules_out: list[str]  # what the chat template does not allow
    state: Literal[
        "open", "closed", "away", "refused", "absent"
    ]  # at the rollout workers; closed: others have their turn
    tier: (
        Literal["device", "host", "disk", "away"] | None
    )  # of a closed one: in a process, in memory, on disk, to be downloaded
    opens_in_s: float  # once it is its turn
    waiting_s: float  # that its oldest unread work has waited


class PoolObject(BaseModel):
    """The worker, serving several base models in turn, that this one belongs to."""

    worker: str
    tier: Literal["device", "host", "disk", "away"]
    opens_in_s: float
    waiting_s: float


class WorkerObject(Identified):
    object: Literal["worker"] = "worker"
    service: str
    pid: int
    host: str
    state: str
    busy: float  # share of the last second
    base_model: str
    resident: list[str]  # adapters in memory, `job@version`
    slots: int
    in_use: int
    max_lora_rank: int | None
    fingerprint: str  # of the bits that it computes in deterministic mode, else empty
    reason: str  # why its cell refuses it, with the state `refused`
    pool: PoolObject | None  # None: it serves its base model alone
    working_for: list[dict[str, str]]  # tenant, job and phase in the last second
    counters: dict[str, float]


class WantedTotal(BaseModel):
    workers: int


class SpanObject(BaseModel):
    object: Literal["span"] = "span"
    worker: str
    service: str
    tenant: str
    job: str
    phase: str
    start: float  # seconds since 1970
    end: float


class DeadLetterObject(Identified):
    object: Literal["dead_letter"] = "dead_letter"
    base_model: str
    created_at: float
    tenant: str
    job: str
    stream: str
    entry: str
    reason: str
    deliveries: int
    num_bytes: int


class UsageObject(BaseModel):
    """The use of a tenant, or of one of its jobs."""

    object: Literal["usage"] = "usage"
    job: str | None  # None: the tenant's total; `inference`: completions; `archived`: jobs that finished long ago
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    trained_tokens: int = 0
    wasted_tokens: int = 0
    rollout_s: float = 0.0
    env_s: float = 0.0
    train_s: float = 0.0
    grader_tokens: int = 0  # of graders' models outside of this service


class UsageReport(BaseModel):
    object: Literal["list"] = "list"
    tenant: str
    tokens_today: int
    max_tokens_per_day: int | None
    stored_bytes: int  # files, versions, samples and archived records
    max_stored_bytes: int
    total: UsageObject
    data: list[UsageObject]  # one a job
    days: dict[str, int] = {}  # tokens by day of UTC, such as 2026-11-22
    has_more: bool = False


class TenantObject(Identified):
    object: Literal["tenant"] = "tenant"
    name: str
    created_at: int
    weight: float
    max_jobs: int
    max_tokens_per_day: int | None
    max_stored_bytes: int | None


class KeyObject(Identified):
    object: Literal["api_key"] = "api_key"
    tenant: str
    created_at: int
    hint: str  # the last four characters
    key: str | None = None  # only in the answer that makes it


class LoggerObject(Identified):
    """A logger's server that a tenant's jobs report to, without the key."""

    # id: the logger's name
    object: Literal["logger"] = "logger"
    base_url: str
    created_at: int  # when the key was given


class WebhookObject(Identified):
    object: Literal["webhook"] = "webhook"
    url: str
    events: list[WebhookEvent]
    created_at: int


class NewWebhookObject(WebhookObject):
    """With the secret that signs what is sent, which no other answer has."""

    secret: str


class EnvironmentObject(Identified):
    object: Literal["environment"] = "environment"
    package: str | None  # that was installed, with its version; None: it is built in
    entry_point: str | None  # of that package
    args: dict[str, Any] | None  # a JSON Schema; None: they are not known
    makes_items: bool = False  # it needs no training file
    live: bool = False  # its trajectories have sessions
    error: str | None = None  # why an installed one cannot be used


class Health(BaseModel):
    status: Literal["ok"] = "ok"


class Readiness(BaseModel):
    status: Literal["ready", "not_ready"]
    waiting_for: list[str]
    refused: list[str]  # workers that do not join their cell, each with the reason
    starting: list[str] = []  # workers that download or load their base model, each with how far it is
