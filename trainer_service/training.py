"""One optimiser step of one adapter: version v and a batch in, version v+1 and its metrics out.

Axes: R rows of the batch, M trained tokens of a micro-batch, P all values of the adapter.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from base_model.adapter import Adapter, init_adapter
from base_model.decoder import Decoder
from common.errors import InvalidInput, TrainingFailed
from common.messages import Init, LossSpec, Step
from trainer_service import lora, optimiser
from trainer_service.batch import Batch, parse_rows
from trainer_service.losses import RowTerms, k3, row_terms, token_losses
from trainer_service.model import Inputs, logprobs, make_inputs, sequence_cost
from trainer_service.optimiser import Moments
from trainer_service.packing import Tree, micro_batches, trees

PAD_MULTIPLE = 32  # of a sequence's length in deterministic mode
MAX_LEARNING_RATE = 1e4  # far beyond use, far from overflow


@dataclass(frozen=True, slots=True)
class TrainState:
    """All that the next step of a job needs. Never changed in place: a failed step leaves it as it was."""

    adapter: Adapter
    moments: Moments


@dataclass(frozen=True, slots=True)
class Trained:
    """The result of one step."""

    state: TrainState
    metrics: dict[str, float | None]
    trained_tokens: int
    train_s: float


@dataclass(slots=True)
class _Sums:
    """What micro-batches add up."""

    loss: float = 0.0
    kl: float = 0.0
    clipped: float = 0.0
    gap: float = 0.0
    num_gap: int = 0
    num_trained: int = 0
    num_forward: int = 0
    num_padding: int = 0


@dataclass(slots=True)
class Trainer:
    """Computes steps on one base model. Holds nothing of a job. One call at a time."""

    decoder: Decoder
    micro_batch_tokens: int = 4096
    deterministic: bool = False
    share_prefixes: bool = True
    _device: torch.device = field(init=False)

    def __post_init__(self) -> None:
        self._device = self.decoder.device

    def init(self, message: Init) -> TrainState:
        """Version 0. Raises InvalidInput for targets that the base does not have."""
        adapter = init_adapter(message.lora, self.decoder.linear_shapes(), message.seed)
        return TrainState(adapter, Moments.zeros(lora.flatten(adapter).numel(), self._device))

    def step(self, message: Step, state: TrainState, beat: Callable[[], None]) -> Trained:
        """Train `state` on the message's rows; `beat` is called after every micro-batch and may raise to stop.

        Without rows the state comes back unchanged, with the metric `no_signal`. Raises InvalidInput for a batch that
        cannot be trained on, TrainingFailed if the loss, the gradient or the new weights are not finite.
        """
        start = time.perf_counter()
        config = self.decoder.config
        _check_spec(message)
        batch = parse_rows(message.rows, version=message.adapter.version, vocab=config.vocab, context=config.context)
        if not len(batch):
            return Trained(state, {"no_signal": 1.0, "num_rows": 0.0, "num_groups": 0.0}, 0, 0.0)
        terms = row_terms(batch, message.loss)
        weights = lora.trainable(state.adapter, self._device)
        sums = self._gradient(batch, terms, message, weights, beat)
        moments, grad_norm = _advance(weights, state.moments, message, sums.loss)
        adapter = lora.unflatten(weights.values_P, state.adapter)
        seconds = time.perf_counter() - start
        metrics = _batch_metrics(batch, terms, message) | _step_metrics(sums, message) | {"grad_norm": grad_norm}
        metrics["train_s"] = seconds
        return Trained(TrainState(adapter, moments), metrics, batch.num_tokens(), seconds)

    def _gradient(
        self, batch: Batch, terms: RowTerms, message: Step, weights: lora.Trainable, beat: Callable[[], None]
    ) -> _Sums:
        """Adds the loss's gradient into `weights.grad_P`, micro-batch by micro-batch."""
        sums = _Sums()
        cost = sequence_cost(self.decoder) if self.share_prefixes else None
        sequences = trees(batch, terms.active_R, cost)
        for part in micro_batches(sequences, self.micro_batch_tokens, by_group=self.deterministic):
            self._micro_batch(batch, part, terms, message, weights, sums)
            beat()
        return sums

    def _micro_batch(
        self, batch: Batch, part: list[Tree], terms: RowTerms, message: Step, weights: lora.Trainable, sums: _Sums
    ) -> None:
        rows = [row for tree in part for row in tree.rows]
        targets = [batch.tokens[row][batch.written[row]] for row in rows]
        inputs = make_inputs(part, targets, self.decoder, multiple=PAD_MULTIPLE if self.deterministic else 1)
        project = lora.Projection([lora.Piece(0, len(part), weights)])
        logprobs_M = logprobs(self.decoder, inputs, message.loss.temperature, project)
        base_M = self._base_logprobs(inputs, message.loss)
        tokens = _Tokens.gather(batch, rows, terms, message.adapter.version, self._device)
        loss = _loss(message.loss, logprobs_M, base_M, tokens, sums)
        if not torch.isfinite(loss):
            raise TrainingFailed("the loss is not a finite number")
        loss.backward()  # pyright: ignore[reportUnknownMemberType]
        sums.num_forward += inputs.tokens_BT.numel()
        sums.num_padding += inputs.num_padding

    def _base_logprobs(self, inputs: Inputs, spec: LossSpec) -> Tensor | None:
        if not spec.kl_coef:
            return None
        with torch.no_grad():
            return logprobs(self.decoder, inputs, spec.temperature)


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Constants of the trained tokens of a micro-batch, [M] each."""

    rows_M: Tensor
    sampled_M: Tensor  # log-prob at sampling
    advantages_M: Tensor
    weights_M: Tensor
    current_M: Tensor  # sampled by the version that is trained

    @classmethod
    def gather(cls, batch: Batch, rows: list[int], terms: RowTerms, version: int, device: torch.device) -> "_Tokens":
        counts = [int(batch.written[row].sum()) for row in rows]
        row_M = np.repeat(rows, counts)
        sampled_M = np.concatenate([batch.logprobs[row][batch.written[row]] for row in rows])
        return cls(
            rows_M=torch.from_numpy(row_M).to(device),
            sampled_M=torch.from_numpy(sampled_M).float().to(device),
            advantages_M=torch.from_numpy(terms.advantages_R[row_M]).float().to(device),
            weights_M=torch.from_numpy(terms.weights_R[row_M]).float().to(device),
            current_M=torch.from_numpy(batch.versions_R[row_M] == version).to(device),
        )


def _loss(spec: LossSpec, logprobs_M: Tensor, base_M: Tensor | None, tokens: _Tokens, sums: _Sums) -> Tensor:
    """This micro-batch's share of the batch's loss, a scalar; figures for the metrics are added to `sums`."""
    loss_M, clipped_M = token_losses(spec, logprobs_M, tokens.sampled_M, tokens.advantages_M, tokens.rows_M)
    if base_M is not None:
        kl_M = k3(logprobs_M, base_M)
        loss_M = loss_M + spec.kl_coef * kl_M
        sums.kl += float(kl_M.detach().sum())
    loss = (loss_M * tokens.weights_M).sum()
    gap_M = (logprobs_M.detach() - tokens.sampled_M).abs()
    sums.loss += float(loss.detach())
    sums.clipped += float(clipped_M.sum())
    sums.gap += float(gap_M[tokens.current_M].sum())
    sums.num_gap += int(tokens.current_M.sum())
    sums.num_trained += len(logprobs_M)
    return loss


def _advance(weights: lora.Trainable, moments: Moments, message: Step, loss: float) -> tuple[Moments, float]:
    """Clip and apply the gradient, in place on `weights`; returns new moments and the gradient's norm."""
    norm = optimiser.clip_gradient(weights.grad_P, message.optim.grad_clip)
    if not (math.isfinite(norm) and math.isfinite(loss)):
        raise TrainingFailed("the gradient is not finite")
    advanced = moments.clone()
    optimiser.update(weights.values_P, weights.grad_P, advanced, message.optim)
    if not bool(torch.isfinite(weights.values_P).all()):
        raise TrainingFailed("the new weights are not finite")
    return advanced, norm


def _check_spec(message: Step) -> None:
    if not message.loss.temperature > 0:
        raise InvalidInput("training needs a temperature above 0", param="temperature")
    if not 0 <= message.optim.learning_rate <= MAX_LEARNING_RATE:
        raise InvalidInput(f"the learning rate must lie in [0, {MAX_LEARNING_RATE:g}]", param="learning_rate")


def _batch_metrics(batch: Batch, terms: RowTerms, message: Step) -> dict[str, float | None]:
    """What is known without a forward. `entropy`: of the sampling policy a token, estimated by its own samples."""
    sampled = np.concatenate([values[mask] for values, mask in zip(batch.logprobs, batch.written, strict=True)])
    return {
        "reward_mean": float(batch.rewards_R.mean()),
        "reward_std": float(batch.rewards_R.std()),
        "advantage_std": float(terms.advantages_R.std()),
        "entropy": -float(sampled.mean()) if len(sampled) else None,
        "staleness": float((message.adapter.version - batch.versions_R).mean()),
        "num_rows": float(len(batch)),
        "num_groups": float(len(np.unique(batch.groups_R))),
        "num_signal_rows": float(terms.active_R.sum()),
        "truncated_share": float(batch.truncated_R.mean()),
        "trained_tokens": float(batch.num_tokens()),
        "written_tokens": float(batch.num_written_R().sum()),
        "learning_rate": message.optim.learning_rate,
    }


def _step_metrics(sums: _Sums, message: Step) -> dict[str, float | None]:
    """What the forwards showed; None where there was nothing to measure."""
    trained, forward = max(sums.num_trained, 1), max(sums.num_forward, 1)
    return {
        "loss": sums.loss,
        "kl": sums.kl / trained if message.loss.kl_coef else None,
        "clip_fraction": sums.clipped / trained,
        "sampling_gap": sums.gap / sums.num_gap if sums.num_gap else None,
        "forward_tokens": float(sums.num_forward),
        "padding_share": sums.num_padding / forward,
    }
