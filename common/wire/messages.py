"""The message types: all that services say to each other about jobs (about runs: `common/wire/operations.py`).

A message is a frozen struct, msgpack on the wire, tagged by its class name. Unknown fields are ignored and missing ones take
their default, so old and new workers can run together. A changed meaning or default needs a new class name, since a field
with its default is not sent. Arrays travel as raw little-endian bytes, tokens and their authors as a `Transcript`.

    Start ─► env ─► TurnRequest ─► rollout ─► TurnResult ─► env ─► TurnRequest | ScoredTrajectory ─► manager
    manager ─► Init | TrainStep ─► trainer ─► AdapterUpdate ─► manager

Axes: T tokens of one trajectory, N tokens of one turn, R rows of a batch.
"""

from typing import Any, Literal

import msgspec

from common.wire.reported import InPool
from common.wire.reported import Outside as Outside
from common.wire.reported import Span as Span
from common.wire.transcript import EMPTY, Array, Tops, Transcribed, Transcript, f32, i32
from common.wire.transcript import u8 as u8

Purpose = Literal["train", "eval", "eval_greedy", "chat"]
LossName = Literal["grpo", "dr_grpo", "dapo", "rloo", "cispo", "gspo", "ppo"]
JobLoss = LossName | Literal["cross_entropy"]
"""The loss of a TrainStep: the last is that of rows which nobody sampled, a supervised job's."""
StopReason = Literal["stop", "length", "context", "max_turns", "tool_error", "failed", "cancelled"]
FailureKind = Literal[
    "grader",  # the grader raised, hung, or gave something that is not a number
    "tool",  # a tool's process failed (a tool that answers with an error message has not failed)
    "environment",  # the environment's own code raised
    "infrastructure",  # a wall-clock limit, a lost worker, a full disk
    "dead_letter",  # delivered too often without a result
    "corrupt_adapter",  # an adapter's files do not match their manifest
    "non_finite",  # loss or gradient is not a number
    "invalid",  # the message asks for something that cannot be done
    "cancelled",
]

MAX_REWARD = 1e6
"""Rewards are finite numbers of at most this size: squares and sums stay exact enough, in float32 too."""
TEMPERATURE, MAX_TOKENS = 1.0, 64
"""Sampling values of a job whose hyperparameters give no others."""
LEAST_TEMPERATURE = 1e-5
"""Smaller ones are greedy, as with vLLM: scores that are divided by 1e-38 are no finite numbers."""

EMPTY_I32, EMPTY_F32 = i32([]), f32([])


class AdapterRef(msgspec.Struct, frozen=True, gc=False, order=True):
    """One version of one job's adapter. Every generation names one, and the engine echoes it."""

    tenant: str
    job: str
    version: int

    @property
    def is_base(self) -> bool:
        return self == BASE

    def path(self) -> str:
        """Its folder in the adapter store."""
        return f"adapters/{self.tenant}/{self.job}/{self.version:08d}"

    def next(self) -> "AdapterRef":
        return AdapterRef(self.tenant, self.job, self.version + 1)

    def __str__(self) -> str:
        return "base" if self.is_base else f"{self.job}@{self.version}"


BASE = AdapterRef("-", "base", 0)
"""The bare base model, which must be named like any adapter: there is no default."""


class Failure(msgspec.Struct, frozen=True, gc=False):
    kind: FailureKind
    reason: str  # one line for the job's owner; never another tenant's data


class Usage(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The cost of a piece of work; counted when its result settles."""

    prompt_tokens: int = 0  # tokens prefilled that the model did not write
    sampled_tokens: int = 0
    trained_tokens: int = 0
    rollout_s: float = 0.0  # engine busy seconds, split between the rows of a forward by their tokens
    env_s: float = 0.0
    train_s: float = 0.0
    grader_tokens: int = 0  # of graders' models outside of this service, as they say themselves

    def __add__(self, other: "Usage") -> "Usage":
        pairs = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True)
        return Usage(*(a + b if b else a for a, b in pairs))


class Sampling(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    temperature: float = TEMPERATURE  # 0 is greedy: evaluation and inference only; so is less than LEAST_TEMPERATURE
    max_tokens: int = MAX_TOKENS  # bounds each turn
    top_p: float = 1.0  # inference only
    stop: tuple[str, ...] = ()  # strings; the tokens that complete one are kept, text is cut by the reader
    num_top_logprobs: int = 0  # inference only; for the prompt's tokens too, where they have log-probs
    top_k: int = 0  # inference only, applied before top_p; 0: all tokens
    stop_ids: tuple[int, ...] | None = None  # any of them ends the turn as its last token; None: the model's own
    seeded: bool = False  # a user named the seed: also an engine that draws for all from one stream gives it its own
    prompt_logprobs: int = 0  # log-probs of so many of the last tokens before the turn; -1: of all
    max_context: int = 0  # bounds the trajectory over all turns, the prompt included; 0: only the service's own bound
    grammar: str = ""  # in llguidance's Lark, which the turn follows to its end; completions only

    def __post_init__(self) -> None:
        if 0 < self.temperature < LEAST_TEMPERATURE:
            msgspec.structs.force_setattr(self, "temperature", 0.0)

    def context(self, served: int) -> int:
        """The most tokens of the trajectory, where the service takes `served`."""
        return min(served, self.max_context or served)


class EnvSpec(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The environment of a job. A grader is the environment `single_turn` with args {"grader": …}."""

    name: str
    args: dict[str, Any] = {}
    chat_template_kwargs: dict[str, Any] = {}  # values of the chat template's own variables


class LoraSpec(msgspec.Struct, frozen=True, gc=False):
    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = ()  # leaf module names such as "q_proj"; empty: all linear layers but lm_head


class LossSpec(msgspec.Struct, frozen=True, gc=False):
    """A loss with its clips. None: the loss's default."""

    name: JobLoss = "grpo"
    clip_low: float | None = None
    clip_high: float | None = None
    is_clip: float = 2.0  # truncated importance sampling: the largest importance weight, for losses without a ratio
    truncate_ratios: bool = False  # is_clip bounds all other losses' ratios too: the job's sampling gap was too wide
    kl_coef: float = 0.0
    mask_truncated: bool = False
    max_tokens: int = MAX_TOKENS  # dr_grpo's denominator: the most that the model can write in a trajectory
    temperature: float = TEMPERATURE


class OptimSpec(msgspec.Struct, frozen=True, gc=False):
    learning_rate: float
    weight_decay: float = 0.0
    grad_clip: float = 1.0  # the gradient's largest Euclidean norm; 0: any
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8


class Message(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True, tag_field="kind", tag=True):
    """Plain fields of every message; they stand next to a payload's path in object storage too."""

    tenant: str
    job: str  # for inference an id of the request, `chat-…`, so that it can be cancelled like a job
    partition: int
    epoch: int = 0  # raised by pause, resume and cancel
    id: str  # derived from its cause, so that a repeat has the same id; behind what neighbours have in common

    def about(self) -> dict[str, Any]:
        """The owner of the work: the fields that each message which follows from this one takes over."""
        return {"tenant": self.tenant, "job": self.job, "partition": self.partition, "epoch": self.epoch}


# ---- rollouts -------------------------------------------------------------------------------------------------------


class TrajectoryRef(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One trajectory of a job. All of its random numbers are functions of these and `seed`, not of `attempt`."""

    purpose: Purpose
    seed: int  # the job's
    group: int  # over the job's life; for evaluations the index of the item
    sample: int  # in [0, group_size)
    attempt: int = 0

    def key(self, version: int = 0) -> str:
        """See `trajectory_key`."""
        return trajectory_key(self.group, self.sample, self.purpose, version)

    @property
    def sampling_stream(self) -> tuple[int, str]:
        """Seed and purpose of the random numbers that its tokens are drawn with (see `common.rng`)."""
        return self.seed & 0xFFFFFFFFFFFFFFFF, f"sample/{self.purpose}"


def trajectory_key(group: int, sample: int, purpose: Purpose = "train", version: int = 0) -> str:
    """`group/sample`, the field in `open:<job>`; evaluations name the version they measure: `eval@3.17/0`."""
    name = str(group) if purpose == "train" else f"{purpose}@{version}.{group}"
    return f"{name}/{sample}"


def turn_id(job: str, ref: TrajectoryRef, version: int, turn: int) -> str:
    """`job/group/sample/turn/attempt`."""
    return f"{job}/{ref.key(version)}/{turn}/{ref.attempt}"


class Start(Message, frozen=True, kw_only=True):
    """Begin the trajectories `samples` of one group. manager → env."""

    adapter: AdapterRef
    purpose: Purpose
    seed: int
    group: int
    samples: tuple[int, ...]
    attempt: int = 0
    item: dict[str, Any] | None  # a row of the training file; None: the environment makes its own from (seed, group)
    env: EnvSpec
    sampling: Sampling
    max_turns: int = 8
    tool_timeout_s: float = 10.0
    weight: float = 1.0  # the tenant's, where env workers share what they have
    untrained: bool = False  # `adapter` is a version 0 that changes nothing; the store need not have it yet
    home: str = ""  # the rollout worker that should have all turns of this adapter; "": any


class TurnRequest(Message, Transcribed, frozen=True, kw_only=True):
    """Continue a trajectory by one model turn. env or API → rollout.

    It is complete: any rollout worker can take it, and a half-sampled turn continues from `num_partial`.
    """

    trajectory: TrajectoryRef
    adapter: AdapterRef
    turn: int
    transcript: Transcript  # prompt, earlier turns, and the tokens of this turn sampled so far
    num_partial: int = 0  # how many of the last tokens belong to this turn
    sampling: Sampling
    context: bytes = b""  # the environment's own, not read by rollout
    usage: Usage = Usage()
    reply_to: str = ""  # a reply stream; "": the env stream
    session: str = ""  # `<env worker>/<number>` of a live environment: that worker gets the result; "": any
    stream: bool = False  # inference: send TurnDelta as tokens come
    chat: bool = False  # inference, but no sample in bulk: it goes before what waits in an engine
    judges: AdapterRef | None = None  # set if a grader's model answers: the version that sampled the trajectory
    untrained: bool = False  # as in Start

    @property
    def trajectory_adapter(self) -> AdapterRef:
        """The version that samples the trajectory."""
        return self.judges or self.adapter

    @property
    def num_prompt(self) -> int:
        """Tokens before this turn."""
        return len(self.transcript) - self.num_partial


class TurnResult(Message, frozen=True, kw_only=True):
    """One finished turn. rollout → env, or → the API replica that asked."""

    request: TurnRequest
    adapter: AdapterRef  # the version that sampled every token here, echoed by the engine
    tokens: Array  # i4 [N] all tokens of this turn, the end-of-turn token included
    logprobs: Array  # f4 [N]
    stop_reason: StopReason
    stop_string: str = ""  # the one that ended the turn, if one did
    top_logprobs: Tops = []  # [N][num_top_logprobs]
    prompt_logprobs: Array = EMPTY_F32  # f4 [num_prompt] of each token before the turn, NaN where none was asked for
    prompt_top_logprobs: Tops = []  # [num_prompt][num_top_logprobs], none where there is no log-prob
    usage: Usage  # of the trajectory, this turn included
    failure: Failure | None = None
    worker: str = ""  # that has the turn's keys and values, and should get the next; "": any

    @property
    def so_far(self) -> Transcript:
        """The trajectory with this turn. The request may have some of its tokens too."""
        request = self.request
        if not len(self.tokens):
            return request.transcript
        return request.transcript.first(request.num_prompt).going_on(self.tokens.data, self.logprobs.data)


class TurnDelta(Message, frozen=True, kw_only=True):
    """Tokens of an unfinished inference turn. rollout → API. `offset`: index of the first in the turn."""

    adapter: AdapterRef
    offset: int
    tokens: Array
    logprobs: Array


class ScoredTrajectory(Message, Transcribed, frozen=True, kw_only=True):
    """A settled trajectory: scored, or failed with a reason. env (or who failed) → the partition's owner."""

    trajectory: TrajectoryRef
    adapter: AdapterRef
    transcript: Transcript = EMPTY
    num_prompt: int = 0  # tokens before the first model turn
    reward: float | None = None  # None if and only if there is a failure
    reward_parts: dict[str, float] = {}
    stop_reason: StopReason
    num_turns: int = 0
    output_text: str = ""  # the last model turn without special tokens
    verdicts: list[dict[str, str]] = []  # of graders' models: `grader`, `prompt`, `reply`
    usage: Usage = Usage()
    failure: Failure | None = None


class Parked(Message, frozen=True, kw_only=True):
    """A trajectory that a pause put aside, at its last finished turn. rollout or env → the partition's owner."""

    request: TurnRequest


# ---- training -------------------------------------------------------------------------------------------------------


class Rows(msgspec.Struct, Transcribed, frozen=True, gc=False):
    """The batch: rows sorted by (group, sample), tokens of all rows end to end."""

    transcript: Transcript  # sum of T tokens
    lengths: Array  # i4 [R]
    groups: Array  # i4 [R]
    samples: Array  # i4 [R]
    rewards: Array  # f4 [R]
    versions: Array  # i4 [R] the version that sampled the row
    truncated: Array  # u1 [R] 1: the last turn ended with `length` or `context`


class Init(Message, frozen=True, kw_only=True):
    """Make version 0 of a job's adapter, or a later version of a run's as a copy. owner → trainer."""

    adapter: AdapterRef  # version 0; of a run that loads another's weights the next one
    seed: int
    lora: LoraSpec
    source: AdapterRef | None = None  # it is a copy of this version, whose rank `lora` gives; None: drawn from the seed
    with_optimizer: bool = False  # the source's optimiser state is copied too; else it starts empty
    file: str = ""  # object with the factors that it is made of, as PEFT has them, shaped as `lora` says; empty: none
    base_digest: str = ""  # of the base model that the file says it was trained on; empty: it says none


class TrainStep(Message, frozen=True, kw_only=True):
    """Train version v (`adapter`) into v+1. owner → trainer."""

    adapter: AdapterRef
    seed: int
    lora: LoraSpec
    loss: LossSpec
    optim: OptimSpec
    rows: Rows  # empty: nothing to learn from, the version is committed unchanged (`no_signal`)
    trajectories: tuple[str, ...] = ()  # ids of the rows
    next_group: int  # the data cursor, kept in the manifest
    weight: float = 1.0  # the tenant's, among those whose steps a trainer holds
    untrained: bool = False  # `adapter` is a version 0 to be drawn from `seed`, unless a trainer has done so


class AdapterUpdate(Message, frozen=True, kw_only=True):
    """A version was committed, or the operation refused. trainer → owner."""

    adapter: AdapterRef  # the new version; with a failure, the one that could not be made
    batch: str  # id of the Init or TrainStep
    next_group: int = 0
    metrics: dict[str, float | None] = {}
    usage: Usage = Usage()
    size: tuple[int, int] = (0, 0)  # bytes of its files in the store: the adapter, and the optimiser's state
    failure: Failure | None = None


# ---- jobs, graders, control -----------------------------------------------------------------------------------------


class JobCommand(Message, frozen=True, kw_only=True):
    """API replica, exporter → the partition's owner. The same script writes the job's record for `create`."""

    action: Literal["create", "pause", "resume", "cancel", "warn"]
    text: str = ""  # of `warn`: what the job's events are to say


class GradeRequest(Message, frozen=True, kw_only=True):
    """Run a grader once on behalf of a user. API → env."""

    env: EnvSpec
    item: dict[str, Any]
    output_text: str
    reply_to: str
    weight: float = 1.0  # as in Start


class GradeResult(Message, frozen=True, kw_only=True):
    reward: float | None
    reward_parts: dict[str, float] = {}
    seconds: float = 0.0
    failure: Failure | None = None
    usage: Usage = Usage()  # of graders' models


class Cancel(Message, frozen=True, kw_only=True):
    """Broadcast: messages of the job up to `epoch` are void. Resume returns parked ones; others are dropped."""

    park: bool = False


class AdapterNew(Message, frozen=True, kw_only=True):
    """Broadcast hint: a version exists and will soon be named; rollout workers may fetch it."""

    adapter: AdapterRef


class DeadLetter(Message, frozen=True, kw_only=True):
    """A message that could not be worked on. `payload`: the original, msgpack. Its owner gets unreadable ones."""

    stream: str
    entry: str
    reason: str
    deliveries: int
    payload: bytes


class WorkerReport(Message, frozen=True, kw_only=True):
    """Broadcast once a second by every worker; also says goodbye with state `stopped`."""

    service: str
    pid: int
    host: str
    state: str  # "starting", "refused", "closed", "idle", "busy", "draining", "stopped"
    busy: float  # share of the last period, 0 to 1
    base_model: str
    resident: tuple[str, ...] = ()  # adapters in memory, as `job@version`
    slots: int = 0  # how much it can work on at once
    in_use: int = 0
    kv_tokens: int | None = None  # whose keys and values it holds at once; None: it does not say
    kv_used: int | None = None  # of these, by its turns now
    max_lora_rank: int | None = None
    lora_slots: int | None = None  # adapters in one batch; None: as many as rows, or it has no stream of its own
    outside: Outside | None = None  # None: it does not say
    dtype: str = ""  # that a rollout worker samples in: float32, bfloat16
    fingerprint: str = ""  # of the bits that it computes in deterministic mode
    reason: str = ""  # why it was refused, or what it waits for
    disk_full: bool = False  # the store's disk has less than its reserve free
    pool: InPool | None = None  # None: it serves its base model alone
    waiting: dict[str, str] = {}  # job -> what its work waits for, outside of this worker
    spans: tuple[Span, ...] = ()
    counters: dict[str, float] = {}  # totals since its start, for /metrics
