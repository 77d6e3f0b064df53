"""Runs: jobs whose loop their user keeps, through the Tinker protocol. What the services say about them.

    API ─ Operation ─► owner ─ Operations ─► trainer ─ OperationsDone ─► owner ─ OperationsAnswered ─► all API replicas
                       owner ─ Forget ─► trainer ─ Forgotten ─► owner

A run's operations are numbered from 1 (creation is 0). An `optim_step` makes the next version of its adapter, as a
`TrainStep` does; a `load` as an `Init` does. The operations since the newest version are its *log*: their entries stay
pending until the next is committed. Their gradient is a cache in one trainer, which any other can rebuild from the log.

Axes: N positions of a datum.
"""

from typing import Literal

import msgspec

from common.wire.messages import AdapterRef, Array, Failure, LoraSpec, Message, Usage

LossFn = Literal["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo", "stable_reinforce"]
STAND_IN = "stable_reinforce_is_stand_in"
"""The metric, 1, of what was trained with our formula in place of Tinker's own, which is not public."""
Action = Literal[
    "forward", "forward_backward", "optim_step", "load", "save_weights", "save_for_sampler", "save_external", "unload"
]
Kind = Literal["weights", "sampler_weights", "external_weights"]


class Datum(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A sequence with what is learned at each position. Arrays that the loss does not use are None."""

    tokens: Array  # i4 [N] read by the model
    targets: Array  # i4 [N] the token whose log-prob is meant at each position: for plain text, the next one
    weights: Array | None = None  # f4 [N] cross_entropy: factor of each position; None: 1
    logprobs: Array | None = None  # f4 [N] q: of the targets at sampling, temperature applied
    advantages: Array | None = None  # f4 [N]
    mask: Array | None = None  # f4 [N] gspo: positions over which the sequence's ratio is averaged, 1 or 0
    low: Array | None = None  # f4 [N] gspo: bounds of the ratio by position, in place of the loss's own
    high: Array | None = None


class Forward(msgspec.Struct, frozen=True, omit_defaults=True):
    """The payload of `forward` and `forward_backward`."""

    data: tuple[Datum, ...]
    loss: LossFn
    clip_low: float | None = None  # bounds of the ratio itself, as 0.8 and 1.2; None: the loss's own
    clip_high: float | None = None
    beta: float | None = None  # dro, stable_reinforce


class SaveWeights(msgspec.Struct, frozen=True, omit_defaults=True):
    """The payload of saves: which name the newest version gets."""

    name: str = ""  # of a checkpoint; empty: none, only `sampler`
    sampler: str = ""  # id of the sampler that samples with it
    inflight: bool = False  # that sampler follows the run's later saves of the same kind
    ttl_s: int | None = None
    overwrite: bool = False


class LoadWeights(msgspec.Struct, frozen=True, omit_defaults=True):
    """The payload of `load`: the next version is a copy. The gradient so far is dropped."""

    path: str  # as its user named the source
    source: AdapterRef  # of the run's rank and targets
    with_optimizer: bool = False


class Outputs(msgspec.Struct, frozen=True, omit_defaults=True):
    """The result of an operation that trainers carry out, as bytes in `OperationResult.outputs`."""

    logprobs: tuple[Array, ...] = ()  # f4 [N] each: of every target, one array a datum
    metrics: dict[str, float] = {}


class OperationResult(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    seq: int
    outputs: bytes = b""  # msgpack of Outputs, or of Saved for saves and loads
    failure: Failure | None = None


class Saved(msgspec.Struct, frozen=True, omit_defaults=True):
    """The result of a save or a load: what was named, or loaded."""

    version: int
    name: str = ""  # of a checkpoint; of a load the source's path
    sampler: str = ""


class Operation(Message, frozen=True, kw_only=True):
    """One request of a run's user, in `ops:<p>`. API → the partition's owner. `job`: the run; `id`: `<run>:<seq>`.

    Pending until its result is recorded and, if it adds to a gradient, until the version made of it is committed.
    """

    seq: int
    action: Action
    payload: bytes = b""  # msgpack of Forward, OptimSpec, SaveWeights or LoadWeights, checked by the API; the owner reads the last two
    tokens: int = 0  # positions of a Forward
    failure: Failure | None = None  # it makes no sense, and fails when its turn comes


class RunOperation(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """An `Operation` as a trainer gets it."""

    seq: int
    action: Literal["forward", "forward_backward", "optim_step"]
    payload: bytes
    answered: bool = False  # its result was published before: only its part of the gradient is wanted
    tokens: int = 0  # as in `Operation`


class Operations(Message, frozen=True, kw_only=True):
    """A segment of a run's log. owner → any trainer, by `train`, if `first` is 0; else the gradient's, by `train:<worker>`.

    Carried out in order, one by one, so one message or three give the same bits. An `optim_step` can only come last.
    """

    adapter: AdapterRef  # version v, whose gradient it is
    seed: int
    lora: LoraSpec
    first: int  # operations of the log before these, `forward_backward` and `forward` alike
    operations: tuple[RunOperation, ...]
    attempt: int = 0
    weight: float = 1.0  # as in TrainStep

    @property
    def num_tokens(self) -> int:
        return sum(operation.tokens for operation in self.operations)


class OperationsDone(Message, frozen=True, kw_only=True):
    """The answer to `Operations`. trainer → owner, in `adapters:<p>`."""

    adapter: AdapterRef  # v, or v + 1 if it was committed
    attempt: int
    results: tuple[OperationResult, ...] = ()
    held: int = 0  # operations of v's log that this trainer's gradient stands for
    holder: str = ""  # that trainer
    absent: bool = False  # the gradient is not here: nothing was done; send the whole log to any trainer
    usage: Usage = Usage()
    size: tuple[int, int] = (0, 0)  # of v + 1 if it was committed: see AdapterUpdate


class Forget(Message, frozen=True, kw_only=True):
    """Delete versions of a run: nobody needs them, and nobody can come to. owner → trainer."""

    adapter: AdapterRef  # the newest version, which stays
    versions: tuple[int, ...] = ()  # whose files are deleted; the manifests stay
    optimizers: tuple[int, ...] = ()  # of which only the optimiser's state is deleted
    everything: bool = False  # the run is forgotten: its manifests go too


class Forgotten(Message, frozen=True, kw_only=True):
    """The answer to `Forget`. trainer → owner, in `adapters:<p>`."""

    forget: str  # id of the message


class OperationsAnswered(Message, frozen=True, kw_only=True):
    """Broadcast: results of these operations are in `results:<run>`. owner → API replicas, in `done`."""

    seqs: tuple[int, ...]  # 0: the run's creation, or a change of its names


class NameChange(Message, frozen=True, kw_only=True):
    """Sets when a checkpoint expires, or deletes it. API → the partition's owner, in `jobs:<p>`. `job`: the run, ended or not.

    What it says of the checkpoint must still be true: a name that was saved again meanwhile stays.
    """

    checkpoint: Kind
    name: str
    version: int
    created_at: int  # seconds since 1970
    expires_at: int | None = None  # the new one; None: never
    deletes: bool = False
