"""Runs optimiser steps of many jobs at once: version v and a batch in, version v+1 and its metrics out, job by job.

    begin ─► micro_batch, micro_batch, ... ─► finish        (or `discard` on the way)

Rows of all open steps go through the base model in the same forward and backward, each through its own adapter. Jobs
share the base model alone: factors, gradients, clipping and optimiser state are each job's own, every product has
the rows of one job, and no number of one job ever meets a number of another's, so that a NaN stays where it is.

Axes: R rows and M trained tokens of a micro-batch, T its positions, W places for the trained tokens of a row.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from base_model.adapter import init_adapter
from base_model.decoder import Decoder, RunLayer, directly
from common.errors import TrainingFailed
from common.messages import Init, TrainStep
from trainer_service import lora, optimiser
from trainer_service.batch import Floats, parse_rows
from trainer_service.losses import RowTerms, column, k3, off_policy, row_terms, token_losses
from trainer_service.model import Inputs, logprobs, make_inputs, sequence_cost
from trainer_service.open_step import OpenStep, Trained, TrainState, batch_metrics, check_spec
from trainer_service.optimiser import Moments
from trainer_service.packing import PAD_MULTIPLE, Budget, Tree, in_order, next_micro_batch, trees

Taken = Sequence[tuple[OpenStep, Sequence[Tree]]]
"""A micro-batch: the sequences of each step, those of one stack side by side."""


@dataclass(slots=True)
class Trainer:
    """Computes steps on one base model. Holds open steps' adapters and nothing else of a job. One call at a time."""

    decoder: Decoder
    budget: Budget = field(default_factory=Budget)
    deterministic: bool = False
    share_prefixes: bool = True
    run_layer: RunLayer = directly
    _stacks: dict[lora.AdapterLayout, lora.AdapterStack] = field(
        default_factory=dict[lora.AdapterLayout, lora.AdapterStack]
    )

    def init(self, message: Init) -> TrainState:
        """Makes version 0. Raises InvalidInput for targets that the base does not have."""
        adapter = init_adapter(message.lora, self.decoder.linear_shapes(), message.seed)
        return TrainState.of(adapter, Moments.zeros(lora.AdapterLayout.of(adapter).num_values, self.decoder.device))

    def step(self, message: TrainStep, state: TrainState, beat: Callable[[], None]) -> Trained:
        """Runs one step alone; `beat` is called after every micro-batch. Raises as `begin` and `finish`."""
        step = self.begin(message, state)
        while not step.done:
            self.micro_batch([step])
            beat()
        return self.finish(step)

    def begin(self, message: TrainStep, state: TrainState) -> OpenStep:
        """Opens a step of `state` on the message's rows; without rows, or with none that can have a gradient, it is done.

        Raises InvalidInput for a batch that cannot be trained on, TrainingFailed for one that holds no finite numbers.
        """
        start, config = time.perf_counter(), self.decoder.config
        check_spec(message)
        batch = parse_rows(message.rows, version=message.adapter.version, vocab=config.vocab, context=config.context)
        terms = row_terms(batch, message.loss)
        cost = sequence_cost(self.decoder) if self.share_prefixes else None
        queue = in_order(trees(batch, terms.active_R, cost), exact=self.deterministic)
        stack = self._stack(state.layout)
        place = stack.put(state.values_P, state.spec.alpha / state.spec.rank)
        step = OpenStep(message, state, batch, terms, stack, place, queue)
        step.sums.seconds = time.perf_counter() - start
        return step

    def finish(self, step: OpenStep) -> Trained:
        """Makes the next version. Raises TrainingFailed if the loss, the gradient or the new weights are not finite."""
        start = time.perf_counter()
        try:
            if step.failure is not None:
                raise step.failure
            if not len(step.batch):
                return Trained(step.state, batch_metrics(step.batch, step.terms, step.message), 0, 0.0)
            state, norm = _advance(step)
        finally:
            self.discard(step)
        seconds = step.sums.seconds + time.perf_counter() - start
        return Trained(state, step.metrics(norm) | {"train_s": seconds}, step.batch.num_tokens(), seconds)

    def discard(self, step: OpenStep) -> None:
        """Forgets an open step."""
        step.stack.remove(step.place)

    def _stack(self, layout: lora.AdapterLayout) -> lora.AdapterStack:
        """The stack of a layout; empty stacks are kept until another layout needs the room."""
        if layout not in self._stacks:
            self._stacks = {other: stack for other, stack in self._stacks.items() if not stack.empty}
            self._stacks[layout] = lora.AdapterStack(layout, self.decoder.device)
        return self._stacks[layout]

    def micro_batch(self, steps: Sequence[OpenStep]) -> None:
        """Runs one forward and backward over some of the open sequences of these steps, oldest first; none of them is done.

        A step whose loss is not finite fails, and only that one.
        """
        start = time.perf_counter()
        taken = self._take(steps)
        inputs = self._inputs(taken)
        project = lora.Projection(_parts(taken))
        logprobs_M = logprobs(self.decoder, inputs, project, self.run_layer)
        base_M = self._base_logprobs(taken, logprobs_M.detach())
        loss, sums_KR = _loss(taken, inputs, logprobs_M, base_M)
        loss.backward()  # pyright: ignore[reportUnknownMemberType]
        _credit(taken, sums_KR.cpu().numpy(), inputs.tokens_BT.shape[1], start)

    def _take(self, steps: Sequence[OpenStep]) -> Taken:
        """Takes the next micro-batch out of the steps' queues."""
        found = next_micro_batch([step.queue for step in steps], self.budget, exact=self.deterministic)
        taken = [(step, sequences) for step, sequences in zip(steps, found, strict=True) if sequences]
        for step, sequences in taken:
            gone = {id(tree) for tree in sequences}
            step.queue = [tree for tree in step.queue if id(tree) not in gone]
        return sorted(taken, key=lambda t: id(t[0].stack))

    def _inputs(self, taken: Taken) -> Inputs:
        sequences = [tree for _, own in taken for tree in own]
        targets = [step.batch.tokens[row][step.batch.written[row]] for step, row in _rows(taken)]
        temperatures = [step.message.loss.temperature for step, _ in _rows(taken)]
        multiple = PAD_MULTIPLE if self.deterministic else 1
        return make_inputs(sequences, targets, temperatures, self.decoder, multiple=multiple)

    def _base_logprobs(self, taken: Taken, logprobs_M: Tensor) -> Tensor:
        """Log-probs under the bare base model where the job's loss asks for them; elsewhere those of the policy."""
        asking = [(step, sequences) for step, sequences in taken if step.message.loss.kl_coef]
        if not asking:
            return logprobs_M
        with torch.no_grad():
            base = logprobs(self.decoder, self._inputs(asking))
        asked_M = [np.full(step.batch.written[row].sum(), step.message.loss.kl_coef > 0) for step, row in _rows(taken)]
        return logprobs_M.masked_scatter(torch.from_numpy(np.concatenate(asked_M)).to(logprobs_M.device), base)


def _rows(taken: Taken) -> Iterator[tuple[OpenStep, int]]:
    """The rows of a micro-batch in order, each with its step."""
    return ((step, row) for step, sequences in taken for tree in sequences for row in tree.rows)


def _parts(taken: Taken) -> list[lora.Part]:
    parts: list[lora.Part] = []
    for stack, group in itertools.groupby(taken, key=lambda t: t[0].stack):
        places = [step.place for step, sequences in group for _ in sequences]
        parts.append(lora.Part.make(parts[-1].stop if parts else 0, stack, places))
    return parts


def _loss(taken: Taken, inputs: Inputs, logprobs_M: Tensor, base_M: Tensor) -> tuple[Tensor, Tensor]:
    """The micro-batch's share of all its jobs' losses, a scalar, and the figures of each row, [len(FIGURES), R]."""
    rows = [(step.batch, row, step.message.adapter.version) for step, row in _rows(taken)]
    terms = RowTerms.join([(step.terms, [row for tree in own for row in tree.rows]) for step, own in taken])
    counts = [int(batch.written[row].sum()) for batch, row, _ in rows]
    width = inputs.tokens_BT.shape[1]
    written_RW = torch.from_numpy(np.arange(width) < np.array(counts)[:, None]).to(logprobs_M.device)
    sampled_M = torch.from_numpy(np.concatenate([batch.logprobs[row][batch.written[row]] for batch, row, _ in rows]))
    current_R = np.array([batch.versions_R[row] == version for batch, row, version in rows])

    def spread(values_M: Tensor) -> Tensor:
        return logprobs_M.new_zeros(written_RW.shape).masked_scatter(written_RW, values_M.to(logprobs_M))

    logprobs_RW, sampled_RW = spread(logprobs_M), spread(sampled_M)
    loss_RW, clipped_RW = token_losses(terms, logprobs_RW, sampled_RW, written_RW)
    kl_RW = k3(logprobs_RW, spread(base_M))
    loss_RW = (loss_RW + column(terms.kl_coefs_R, loss_RW) * kl_RW) * column(terms.weights_R, loss_RW) * written_RW
    gap_RW = (logprobs_RW - sampled_RW).abs() * torch.from_numpy(current_R).to(written_RW.device)[:, None]
    current_RW = torch.from_numpy(current_R).to(written_RW.device)[:, None] & written_RW
    apart = off_policy(logprobs_RW, sampled_RW, written_RW)
    figures = (loss_RW, kl_RW, clipped_RW, gap_RW, current_RW, written_RW, *apart)
    return loss_RW.sum(), torch.stack([figure.detach().double().sum(1) for figure in figures])


def _credit(taken: Taken, figures_KR: Floats, width: int, start: float) -> None:
    """Adds a micro-batch's figures up by step, its time by each one's share of the tokens."""
    num_sequences = sum(len(sequences) for _, sequences in taken)
    row = 0
    for step, sequences in taken:
        num_rows = sum(len(tree.rows) for tree in sequences)
        sums, own_K = step.sums, figures_KR[:, row : row + num_rows].sum(1)
        sums.figures_K += own_K
        sums.num_forward += len(sequences) * width
        sums.num_padding += len(sequences) * width - sum(len(tree) for tree in sequences)
        sums.seconds += (time.perf_counter() - start) * len(sequences) / num_sequences
        row += num_rows
        if not math.isfinite(own_K[0]):
            step.fail("the loss is not a finite number")


def _advance(step: OpenStep) -> tuple[TrainState, float]:
    """Clips and applies the gradient; returns the new state and the gradient's norm."""
    values_P, grad_P = step.stack.take(step.place)
    norm = optimiser.clip_gradient(grad_P, step.message.optim.grad_clip)
    if not math.isfinite(norm):
        raise TrainingFailed("the gradient is not finite")
    moments = optimiser.update(values_P, grad_P, step.state.moments, step.message.optim)
    if not math.isfinite(values_P.sum()):
        raise TrainingFailed("the new weights are not finite")
    return replace(step.state, values_P=values_P, moments=moments), norm
