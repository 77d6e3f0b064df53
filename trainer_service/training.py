"""Runs batches of many adapters at once: for a job, version v and a TrainStep in, version v+1 and its metrics out.

    open ─► micro_batch, micro_batch, ... ─► gradient, log-probs ─► apply        (or `discard` on the way)
    begin ─────────── of a TrainStep: all of it ─────────────────► finish

Rows of all open batches go through the base model in the same forward and backward, each through its own adapter. Jobs
share only the base model: factors, gradients, clipping and optimiser state are each job's own. Every product has the
rows of one job, and no number of one meets another's, so that a NaN stays where it is.

Axes: R rows and M targets of a micro-batch, T its positions, W places for the targets of a row.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from base_model.adapter import init_adapter
from base_model.device import compute_clock, is_out_of_memory
from common.errors import TrainingFailed
from common.wire.messages import Init, OptimSpec, TrainStep
from trainer_service import lora, optimiser
from trainer_service.backbone.interface import AdapterPlace, Backbone, Sequences
from trainer_service.batch import Batch, Floats, Ints, parse_rows
from trainer_service.losses import batch_of, k3, micro_terms, off_policy, row_terms, token_losses
from trainer_service.open_step import OpenBatch, OpenStep, Trained, TrainState, batch_metrics, check_spec
from trainer_service.optimiser import Moments
from trainer_service.packing import PAD_MULTIPLE, Budget, Tree, in_order, next_micro_batch, next_pack, pack

QUEUED = 1
"""Micro-batches that a GPU computes while the host prepares the next one: more would make small steps wait."""

Taken = Sequence[tuple[OpenBatch, Sequence[Tree]]]
"""A micro-batch: the sequences of each batch, those of one stack side by side."""


@dataclass(eq=False)
class DoesNotFit(Exception):
    """Memory ran out in a micro-batch; the gradients of its batches are good for nothing."""

    tokens: int  # padding included
    is_least: bool  # it cannot be made smaller
    reason: str

    def __str__(self) -> str:
        return f"a micro-batch of {self.tokens} tokens: {self.reason}"


@dataclass(slots=True)
class Trainer:
    """Computes on one base model. Of jobs it holds only open batches' adapters. One call at a time."""

    backbone: Backbone
    budget: Budget = field(default_factory=Budget)
    deterministic: bool = False
    share_prefixes: bool = True
    _stacks: dict[lora.AdapterLayout, lora.AdapterStack] = field(
        default_factory=dict[lora.AdapterLayout, lora.AdapterStack]
    )
    _queued: list["_Queued"] = field(default_factory=list["_Queued"], init=False)  # a copy's are its own

    def init(self, message: Init) -> TrainState:
        """Makes version 0. Raises InvalidInput for targets that the base does not have."""
        adapter = init_adapter(message.lora, self.backbone.linear_shapes(), message.seed)
        return TrainState.of(adapter, Moments.zeros(lora.AdapterLayout.of(adapter).num_values, self.backbone.device))

    def clock(self) -> float:
        """Seconds of the computing thread's clock: what two threads are charged adds up to what they took."""
        return compute_clock(self.backbone.device)()

    # ---- a batch of one adapter -------------------------------------------------------------------------------------

    def open(self, state: TrainState, batch: Batch, grad_P: Tensor | None = None) -> OpenBatch:
        """Opens a batch whose gradient is added to `grad_P`; without wanted rows it is done."""
        start = self.clock()
        cost = self.backbone.cost() if self.share_prefixes else None
        most = math.inf if self.deterministic else self.budget.most_branched  # bits depend on no machine's memory
        queue = in_order(pack(batch, cost, most), exact=self.deterministic)
        stack = self._stack(state.layout)
        place = stack.put(state.values_P, state.spec.alpha / state.spec.rank, grad_P)
        opened = OpenBatch(state, batch, stack, place, queue)
        opened.sums.seconds = self.clock() - start
        return opened

    def cut(self, opened: OpenBatch, tokens: int) -> None:
        """Gives each row its own sequence, if rows that share a beginning have more tokens together than so many. Not in
        deterministic mode: their gradient would have other bits."""
        if not self.deterministic and any(tree.branched and len(tree) > tokens for tree in opened.queue):
            opened.queue = in_order(pack(opened.batch, None), exact=False)

    def gradient(self, opened: OpenBatch) -> Tensor:
        """The batch's summed gradient, [P]; valid until the next call."""
        return opened.stack.gradient(opened.place)

    def discard(self, opened: OpenBatch) -> None:
        """Forgets an open batch."""
        opened.stack.remove(opened.place)

    def apply(self, state: TrainState, grad_P: Tensor, optim: OptimSpec) -> tuple[TrainState, float]:
        """Clips the gradient, in place, and runs AdamW; returns the new state and the gradient's norm before. Raises
        TrainingFailed if the gradient or the new weights are not finite."""
        values_P = state.values_P.clone()
        norm = optimiser.clip_gradient(grad_P, optim.grad_clip)
        moments = optimiser.update(values_P, grad_P, state.moments, optim)
        found, total = torch.stack([norm, values_P.sum()]).tolist()  # one transfer
        if not math.isfinite(found):
            raise TrainingFailed("the gradient is not finite")
        if not math.isfinite(total):
            raise TrainingFailed("the new weights are not finite")
        return replace(state, values_P=values_P, moments=moments), found

    # ---- a TrainStep ------------------------------------------------------------------------------------------------

    def step(self, message: TrainStep, state: TrainState, beat: Callable[[], None]) -> Trained:
        """Runs one step; `beat` is called after each micro-batch. Raises as `begin` and `finish`."""
        step = self.begin(message, state)
        while not step.done:
            self.micro_batch([step.opened])
            beat()
        return self.finish(step)

    def begin(self, message: TrainStep, state: TrainState) -> OpenStep:
        """Opens a step of `state` on the message's rows; without rows that can have a gradient it is done. Raises InvalidInput
        for a batch that cannot be trained on, TrainingFailed for numbers that are not finite."""
        start, base, version = self.clock(), self.backbone, message.adapter.version
        check_spec(message)
        rows = parse_rows(message.rows, version=version, vocab=base.vocab, context=base.context)
        terms = row_terms(rows, message.loss)
        opened = self.open(state, batch_of(rows, terms, message.loss, version))
        opened.sums.seconds = self.clock() - start
        return OpenStep(message, rows, terms, opened)

    def finish(self, step: OpenStep) -> Trained:
        """Makes the next version. Raises TrainingFailed if loss, gradient or new weights are not finite."""
        self.settle()
        start, opened = self.clock(), step.opened
        try:
            if opened.failures:
                raise TrainingFailed(opened.failures[0])
            if not len(step.rows):
                return Trained(opened.state, batch_metrics(step.rows, step.terms, step.message), 0, 0.0)
            state, norm = self.apply(opened.state, self.gradient(opened), step.message.optim)
        finally:
            self.discard(opened)
        seconds = opened.sums.seconds + self.clock() - start
        return Trained(state, step.metrics(norm) | {"train_s": seconds}, step.rows.num_tokens(), seconds)

    # ---- micro-batches ----------------------------------------------------------------------------------------------

    def _stack(self, layout: lora.AdapterLayout) -> lora.AdapterStack:
        """The stack of a layout; empty stacks are kept until another layout needs the room."""
        if layout not in self._stacks:
            self._stacks = {other: stack for other, stack in self._stacks.items() if not stack.empty}
            self._stacks[layout] = self.backbone.stack(layout)
        return self._stacks[layout]

    def micro_batch(self, opened: Sequence[OpenBatch], budget: Budget | None = None) -> None:
        """Runs one forward and backward over some of these batches' open sequences, first ones first; no batch is done.
        `budget`: instead of its own. Raises DoesNotFit when memory runs out.

        A part whose loss is not finite fails, and only that one.
        """
        taken = self._take(opened, budget or self.budget)
        try:
            self._compute(taken)
            return
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            reason = str(error).partition("\n")[0] or type(error).__name__
        trees = [tree for _, own in taken for tree in own]  # the error is gone, and the memory that it held
        num_tokens = len(trees) * max(map(len, trees)) if self.backbone.pads else sum(map(len, trees))
        raise DoesNotFit(num_tokens, len(trees) == 1 and (self.deterministic or not trees[0].branched), reason)

    def _compute(self, taken: Taken) -> None:
        start = self.clock()
        sequences = self._sequences(taken)
        learns = taken[0][1][0].learns
        with torch.set_grad_enabled(learns):
            logprobs_M = self.backbone.logprobs(sequences, _adapters(taken))
            base_M = self._base_logprobs(taken, logprobs_M.detach())
            loss, figures_KR = _loss(taken, sequences.width, logprobs_M, base_M)
        if learns:
            loss.backward()  # pyright: ignore[reportUnknownMemberType]
        _keep_logprobs(taken, logprobs_M.detach())
        width = sequences.width if self.backbone.pads else None
        _count(taken, width)
        self._queued.append(_Queued.of(taken, figures_KR, width, self.clock() - start))
        self.settle(all_but=0 if figures_KR.device.type == "cpu" else QUEUED)

    def settle(self, all_but: int = 0) -> None:
        """Waits for micro-batches, the oldest first, and adds up their figures and failures. Call it before those are read."""
        while len(self._queued) > all_but:
            self._queued.pop(0).credit(self.clock)

    def _take(self, opened: Sequence[OpenBatch], budget: Budget) -> Taken:
        """Takes the next micro-batch out of the batches' queues."""
        queues = [one.queue for one in opened]
        padded = partial(next_micro_batch, exact=self.deterministic)
        found = padded(queues, budget) if self.backbone.pads else next_pack(queues, budget, self.backbone.num_ranks)
        taken = [(one, sequences) for one, sequences in zip(opened, found, strict=True) if sequences]
        for one, sequences in taken:
            gone = {id(tree) for tree in sequences}
            one.queue = [tree for tree in one.queue if id(tree) not in gone]
        return sorted(taken, key=lambda t: id(t[0].stack))

    def _sequences(self, taken: Taken) -> Sequences:
        rows = [*_rows(taken)]
        return Sequences(
            trees=[tree for _, own in taken for tree in own],
            targets=[batch.targets[row] for batch, row in rows],
            temperatures=[batch.temperature for batch, _ in rows],
            learned=[batch.terms.learned[row] for batch, row in rows],
            multiple=PAD_MULTIPLE if self.deterministic else 1,
        )

    def _base_logprobs(self, taken: Taken, logprobs_M: Tensor) -> Tensor:
        """Log-probs under the bare base model where the batch's loss needs them; else the policy's."""
        asking = [(one, sequences) for one, sequences in taken if one.batch.kl_coef]
        if not asking:
            return logprobs_M
        with torch.no_grad():
            base = self.backbone.logprobs(self._sequences(asking), None)
        asked_M = [np.full(len(batch.targets[row]), batch.kl_coef > 0) for batch, row in _rows(taken)]
        return logprobs_M.masked_scatter(torch.from_numpy(np.concatenate(asked_M)).to(logprobs_M.device), base)


def _rows(taken: Taken) -> Iterator[tuple[Batch, int]]:
    """The rows of a micro-batch in order, each with its batch."""
    return ((one.batch, row) for one, sequences in taken for tree in sequences for row in tree.rows)


def _adapters(taken: Taken) -> list[AdapterPlace]:
    """The adapter of each sequence."""
    return [(one.stack, one.place) for one, sequences in taken for _ in sequences]


def _loss(taken: Taken, width: int, logprobs_M: Tensor, base_M: Tensor) -> tuple[Tensor, Tensor]:
    """The micro-batch's share of all its batches' losses, a scalar, and each row's figures, [len(FIGURES), R]."""
    parts = [(one.batch, [row for tree in own for row in tree.rows]) for one, own in taken]
    terms, written_RW = micro_terms(parts, width, logprobs_M)

    def spread(values_M: Tensor) -> Tensor:
        return logprobs_M.new_zeros(written_RW.shape).masked_scatter(written_RW, values_M)

    logprobs_RW, sampled_RW = spread(logprobs_M), terms.sampled_RW
    loss_RW, clipped_RW = token_losses(terms, logprobs_RW, written_RW)
    kl_RW = k3(logprobs_RW, spread(base_M))
    loss_RW = (loss_RW + terms.kl_coefs_R1 * kl_RW) * terms.weights_RW * written_RW
    current_RW = (terms.is_current_R1 > 0) & written_RW
    gap_RW = (logprobs_RW - sampled_RW).abs() * current_RW
    apart = off_policy(logprobs_RW, sampled_RW, written_RW)
    figures = (loss_RW, kl_RW, clipped_RW, gap_RW, current_RW, written_RW, *apart)
    return loss_RW.sum(), torch.stack([figure.detach().double().sum(1) for figure in figures])


def _keep_logprobs(taken: Taken, logprobs_M: Tensor) -> None:
    """Copies the log-probs of the rows whose batch asks for them."""
    if not any(one.batch.keeps_logprobs for one, _ in taken):
        return
    values_M, start = logprobs_M.cpu().numpy(), 0
    for one, sequences in taken:
        for row in (row for tree in sequences for row in tree.rows):
            stop = start + len(one.batch.targets[row])
            if one.batch.keeps_logprobs:
                one.logprobs[row] = values_M[start:stop].copy()
            start = stop


def _places(sequences: Sequence[Tree], width: int | None) -> int:
    """Positions of sequences; `width`: of padded ones."""
    return sum(map(len, sequences)) if width is None else len(sequences) * width


def _count(taken: Taken, width: int | None) -> None:
    for one, sequences in taken:
        one.sums.num_forward += _places(sequences, width)
        one.sums.num_padding += _places(sequences, width) - sum(map(len, sequences))


@dataclass(frozen=True, slots=True)
class _Queued:
    """A micro-batch whose figures may still be under way from the device, so that the next one queues there meanwhile."""

    taken: Taken
    figures_KR: Tensor  # on the host
    ready: torch.cuda.Event | None
    width: int | None
    seconds: float  # that the host took

    @classmethod
    def of(cls, taken: Taken, figures_KR: Tensor, width: int | None, seconds: float) -> "_Queued":
        if figures_KR.device.type != "cuda":
            return cls(taken, figures_KR.cpu(), None, width, seconds)
        on_host = torch.empty(figures_KR.shape, dtype=figures_KR.dtype, pin_memory=True)
        on_host.copy_(figures_KR, non_blocking=True)
        ready = torch.cuda.Event()
        ready.record()
        return cls(taken, on_host, ready, width, seconds)

    def credit(self, clock: Callable[[], float]) -> None:
        """Adds the figures up by batch and part, the time by each batch's share of positions."""
        start = clock()
        if self.ready:
            self.ready.synchronize()
        seconds = self.seconds + clock() - start
        num_places, row = sum(_places(sequences, self.width) for _, sequences in self.taken), 0
        for one, sequences in self.taken:
            num_rows = [len(tree.rows) for tree in sequences]
            own_KR = self.figures_KR.numpy()[:, row : row + sum(num_rows)]
            one.sums.figures_K += own_KR.sum(1)
            one.sums.seconds += seconds * _places(sequences, self.width) / num_places
            _credit_parts(one, np.repeat([tree.part for tree in sequences], num_rows), own_KR[0])
            row += sum(num_rows)


def _credit_parts(one: OpenBatch, parts_R: Ints, losses_R: Floats) -> None:
    for part in np.unique(parts_R).tolist():
        loss = float(losses_R[parts_R == part].sum())
        one.losses[part] = one.losses.get(part, 0.0) + loss
        if not math.isfinite(loss):
            one.fail(part, "the loss is not a finite number")
