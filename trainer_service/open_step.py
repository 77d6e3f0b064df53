"""Holds one adapter's batch while its micro-batches are under way, and computes the metrics of a TrainStep.

Axes: R rows of the batch, M targets of a row, P all values of the adapter.
"""

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from base_model.adapter import Adapter
from common.errors import InvalidInput, MarlaasError, TrainingFailed
from common.wire.messages import Failure, FailureKind, LoraSpec, OptimSpec, TrainStep
from trainer_service.batch import Batch, Floats, SampledRows
from trainer_service.lora import AdapterLayout, AdapterStack, flatten, unflatten
from trainer_service.losses import RowTerms
from trainer_service.optimiser import Moments
from trainer_service.packing import Tree

MAX_LEARNING_RATE = 1e4  # far beyond use, far from overflow


@dataclass(frozen=True, slots=True)
class TrainState:
    """The state that a job's next step needs. Never changed in place: a failed step leaves it as it was."""

    values_P: Tensor
    moments: Moments
    layout: AdapterLayout
    spec: LoraSpec

    @classmethod
    def of(cls, adapter: Adapter, moments: Moments) -> "TrainState":
        return cls(flatten(adapter).to(moments.mean_P.device), moments, AdapterLayout.of(adapter), adapter.spec)

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.values_P, self.moments.mean_P, self.moments.square_P))

    @property
    def adapter(self) -> Adapter:
        return unflatten(self.values_P, self.layout, self.spec)


@dataclass(frozen=True, slots=True)
class Trained:
    """The result of one step."""

    state: TrainState
    metrics: dict[str, float | None]
    trained_tokens: int
    train_s: float


FIGURES = ("loss", "kl", "clipped", "gap", "num_gap", "num_trained", "sampling_kl", "ratio", "ratio_square")
"""The figures that are summed over a step's tokens and micro-batches."""


@dataclass(slots=True)
class Sums:
    """The sums to which each micro-batch adds."""

    figures_K: Floats = field(default_factory=lambda: np.zeros(len(FIGURES)))
    num_forward: int = 0
    num_padding: int = 0
    seconds: float = 0.0


@dataclass(slots=True, eq=False)
class OpenBatch:
    """A batch with its open sequences and its sums so far; the gradient lies in the stack."""

    state: TrainState
    batch: Batch
    stack: AdapterStack
    place: int
    queue: list[Tree]  # open sequences, in order
    sums: Sums = field(default_factory=Sums)
    losses: dict[int, float] = field(default_factory=dict[int, float])  # by part: the weighted sum
    logprobs: dict[int, Floats] = field(default_factory=dict[int, Floats])  # by row: float32 [M], where asked for
    failures: dict[int, str] = field(default_factory=dict[int, str])  # by part: why it failed

    @property
    def done(self) -> bool:
        return not self.queue

    @property
    def tokens_left(self) -> int:
        return sum(map(len, self.queue))

    def fail(self, part: int, reason: str) -> None:
        """Makes a part fail; nothing of it needs to be computed any more."""
        self.failures[part] = reason
        self.queue = [tree for tree in self.queue if tree.part != part]


@dataclass(slots=True, eq=False)
class OpenStep:
    """A TrainStep under way."""

    message: TrainStep
    rows: SampledRows
    terms: RowTerms
    opened: OpenBatch

    @property
    def done(self) -> bool:
        return self.opened.done

    def metrics(self, grad_norm: float) -> dict[str, float | None]:
        about = batch_metrics(self.rows, self.terms, self.message)
        return about | _step_metrics(self.opened.sums, self.message, grad_norm)


def failure_of(error: MarlaasError) -> Failure:
    """The failure that the owner hears of an error that would come again."""
    kinds: dict[type[MarlaasError], FailureKind] = {TrainingFailed: "non_finite", InvalidInput: "invalid"}
    return Failure(kinds.get(type(error), "corrupt_adapter"), str(error))


def check_spec(message: TrainStep) -> None:
    """Raises InvalidInput for a step that makes no sense, whatever its batch."""
    if not message.loss.temperature > 0:
        raise InvalidInput("training needs a temperature above 0", param="temperature")
    check_rate(message.optim)


def check_rate(optim: OptimSpec) -> None:
    """Raises InvalidInput for a learning rate beyond all use."""
    if not 0 <= optim.learning_rate <= MAX_LEARNING_RATE:
        raise InvalidInput(f"the learning rate must lie in [0, {MAX_LEARNING_RATE:g}]", param="learning_rate")


def batch_metrics(batch: SampledRows, terms: RowTerms, message: TrainStep) -> dict[str, float | None]:
    """Metrics that need no forward."""
    if not len(batch):
        return {"no_signal": 1.0, "num_rows": 0.0, "num_groups": 0.0}
    about: dict[str, float | None] = {
        "num_rows": float(len(batch)),
        "num_groups": float(len(np.unique(batch.groups_R))),
        "trained_tokens": float(batch.num_tokens()),
        "written_tokens": float(batch.num_written_R().sum()),
        "learning_rate": message.optim.learning_rate,
    }
    return about if message.loss.name == "cross_entropy" else about | _sampled_metrics(batch, terms, message)


def _sampled_metrics(batch: SampledRows, terms: RowTerms, message: TrainStep) -> dict[str, float | None]:
    """The metrics of sampled rows. `entropy`: of that policy for a token, estimated by its own samples."""
    sampled = np.concatenate([values[mask] for values, mask in zip(batch.logprobs, batch.written, strict=True)])
    return {
        "reward_mean": float(batch.rewards_R.mean()),
        "reward_std": float(batch.rewards_R.std()),
        "advantage_std": float(terms.advantages_R.std()),
        "entropy": -float(sampled.mean()) if len(sampled) else None,
        "staleness": float((message.adapter.version - batch.versions_R).mean()),
        "num_signal_rows": float(terms.active_R.sum()),
        "truncated_share": float(batch.truncated_R.mean()),
    }


def _step_metrics(sums: Sums, message: TrainStep, grad_norm: float) -> dict[str, float | None]:
    """Metrics of the forwards; None where there was nothing to measure.

    `ess_share`: Kish's effective sample size of the trained tokens, weighed by their ratios to the sampling policy, as a
    share of their number: (Σr)² / (n Σr²). 1: equal weights.
    """
    sum_of = dict(zip(FIGURES, sums.figures_K.tolist(), strict=True))
    trained, forward = max(sum_of["num_trained"], 1), max(sums.num_forward, 1)
    about: dict[str, float | None] = {
        "loss": sum_of["loss"],
        "forward_tokens": float(sums.num_forward),
        "padding_share": sums.num_padding / forward,
        "grad_norm": grad_norm,
    }
    if message.loss.name == "cross_entropy":
        return about
    return about | {
        "kl": sum_of["kl"] / trained if message.loss.kl_coef else None,
        "clip_fraction": sum_of["clipped"] / trained,
        "sampling_gap": sum_of["gap"] / sum_of["num_gap"] if sum_of["num_gap"] else None,
        "sampling_kl": sum_of["sampling_kl"] / trained if sum_of["num_trained"] else None,
        "ess_share": sum_of["ratio"] ** 2 / (trained * sum_of["ratio_square"]) if sum_of["ratio_square"] else None,
    }
