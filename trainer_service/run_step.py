"""Carries out a segment of a run's operations: outputs, and a gradient to go on with or to apply.

Operations add to the gradient in order of their numbers and never merged: one segment, three, or a replay give the same
bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from torch import Tensor

from common.errors import InvalidInput, TrainingFailed
from common.wire.messages import Failure, OptimSpec, Usage, f32
from common.wire.operations import STAND_IN, OperationResult, Outputs, RunOperation
from trainer_service.data import CheckedDatum, OperationRows, batch_of_parts, parse_forward
from trainer_service.open_step import OpenBatch, TrainState, check_rate, failure_of
from trainer_service.training import Trainer


@dataclass(frozen=True, slots=True)
class Gradient:
    """The sum of the operations of a log, up to one of them. Never changed in place."""

    first_seq: int  # of the log
    num_operations: int
    grad_P: Tensor | None = None  # None: nothing has been added
    failure: str = ""  # why the log cannot be applied: an operation's part is missing
    stands_in: bool = False  # see `STAND_IN`: some operation's part does

    @property
    def num_bytes(self) -> int:
        """Bytes in memory; the object itself counts too, for many have nothing else."""
        return 1024 + (0 if self.grad_P is None else self.grad_P.numel() * self.grad_P.element_size())


@dataclass(frozen=True, slots=True)
class Parsed:
    """An operation as the trainer computes it."""

    seq: int
    action: str
    answered: bool
    rows: Sequence[CheckedDatum] = ()
    optim: OptimSpec | None = None
    failure: Failure | None = None
    stands_in: bool = False  # see `STAND_IN`

    @property
    def part(self) -> OperationRows:
        return OperationRows(self.rows, learns=self.action == "forward_backward", answers=not self.answered)

    @property
    def num_tokens(self) -> int:
        return sum(len(row.tokens) for row in self.rows)


@dataclass(slots=True, eq=False)
class OpenRun:
    """A segment of a run's operations under way."""

    operations: Sequence[Parsed]
    gradient: Gradient  # before them
    opened: OpenBatch


@dataclass(frozen=True, slots=True)
class Computed:
    """The result of a segment."""

    results: tuple[OperationResult, ...]  # of those not answered before, except what made the next version
    gradient: Gradient | None  # of the log up to here; None: it ended
    state: TrainState | None  # the next version, if one was made
    metrics: dict[str, float]  # of the optimiser's step
    usage: Usage  # what is charged: what was answered before was charged before
    forward_tokens: int
    padding_tokens: int

    @property
    def seconds(self) -> float:
        return self.usage.train_s


def parse(operation: RunOperation, trainer: Trainer) -> Parsed:
    """An operation that cannot be carried out has a failure."""
    seq, action, answered, base = operation.seq, operation.action, operation.answered, trainer.backbone
    try:
        if action == "optim_step":
            return Parsed(seq, action, answered, optim=_parse_optim(operation.payload))
        loss, rows = parse_forward(operation.payload, vocab=base.vocab, context=base.context)
    except (InvalidInput, TrainingFailed) as error:
        return Parsed(seq, action, answered, failure=failure_of(error))
    return Parsed(seq, action, answered, rows, stands_in=loss == "stable_reinforce")


def _parse_optim(payload: bytes) -> OptimSpec:
    try:
        optim = msgspec.msgpack.decode(payload, type=OptimSpec)
    except (msgspec.DecodeError, ValueError) as error:
        raise InvalidInput(f"not the parameters of an optimiser's step: {error}") from error
    check_rate(optim)
    if not (0 <= optim.beta1 < 1 and 0 <= optim.beta2 < 1):
        raise InvalidInput("beta1 and beta2 must lie in [0, 1)")
    if not all(0 <= value < float("inf") for value in (optim.eps, optim.weight_decay, optim.grad_clip)):
        raise InvalidInput("eps, weight_decay and grad_clip_norm must be finite numbers from 0")
    return optim


def begin(trainer: Trainer, operations: Sequence[RunOperation], state: TrainState, gradient: Gradient) -> OpenRun:
    """Opens a segment whose operations add to `gradient`."""
    parsed = [parse(operation, trainer) for operation in operations]
    batch = batch_of_parts([operation.part for operation in parsed])
    return OpenRun(parsed, gradient, trainer.open(state, batch, gradient.grad_P))


def finish(trainer: Trainer, run: OpenRun) -> Computed:
    """Closes a segment."""
    try:
        return _finish(trainer, run)
    finally:
        trainer.discard(run.opened)


def _finish(trainer: Trainer, run: OpenRun) -> Computed:
    trainer.settle()
    since = trainer.clock()
    results = [_result(run, part) for part in range(len(run.operations))]
    gradient = _sum(trainer, run, results)
    state, metrics, last = None, {}, run.operations[-1]
    if last.action == "optim_step":
        try:
            state, metrics = _apply(trainer, last, run.opened.state, gradient)
            results.pop()
        except (InvalidInput, TrainingFailed) as error:
            results[-1] = OperationResult(last.seq, failure=failure_of(error))
        gradient = None
    wanted = [result for result, one in zip(results, run.operations, strict=False) if not one.answered]
    sums = run.opened.sums
    sums.seconds += trainer.clock() - since
    return Computed(tuple(wanted), gradient, state, metrics, _usage(run), sums.num_forward, sums.num_padding)


def _usage(run: OpenRun) -> Usage:
    def tokens(action: str) -> int:
        return sum(one.num_tokens for one in run.operations if one.action == action and not one.answered)

    seconds = run.opened.sums.seconds
    return Usage(prompt_tokens=tokens("forward"), trained_tokens=tokens("forward_backward"), train_s=seconds)


def encoded(outputs: Outputs) -> bytes:
    return msgspec.msgpack.encode(outputs)


def _result(run: OpenRun, part: int) -> OperationResult:
    """The result of a `forward` or `forward_backward`; without outputs if it was answered before."""
    operation, opened = run.operations[part], run.opened
    reason = opened.failures.get(part)
    failure = operation.failure or (Failure("non_finite", reason) if reason else None)
    if failure is not None or operation.answered:
        return OperationResult(operation.seq, failure=failure)
    if operation.action == "optim_step":
        return OperationResult(operation.seq)
    rows = np.flatnonzero(opened.batch.parts_R == part).tolist()
    logprobs = tuple(f32(opened.logprobs[row]) for row in rows)
    metrics = {"loss:sum": opened.losses.get(part, 0.0)} | ({f"{STAND_IN}:max": 1.0} if operation.stands_in else {})
    return OperationResult(operation.seq, encoded(Outputs(logprobs, metrics)))


def _sum(trainer: Trainer, run: OpenRun, results: Sequence[OperationResult]) -> Gradient:
    """The gradient of the log up to here. A log one of whose parts failed has none."""
    before, opened = run.gradient, run.opened
    failure = before.failure or next(
        (
            f"operation {one.seq} of its gradient failed: {result.failure.reason}"
            for one, result in zip(run.operations, results, strict=True)
            if one.action == "forward_backward" and result.failure is not None
        ),
        "",
    )
    grad_P = before.grad_P
    learns = any(learned_M.any() for learned_M in opened.batch.terms.learned)
    if failure:
        grad_P = None
    elif learns:
        grad_P = trainer.gradient(opened).clone()
    stands_in = before.stands_in or any(one.stands_in and one.part.learns for one in run.operations)
    return Gradient(before.first_seq, before.num_operations + len(run.operations), grad_P, failure, stands_in)


def _apply(
    trainer: Trainer, operation: Parsed, state: TrainState, gradient: Gradient
) -> tuple[TrainState, dict[str, float]]:
    """Raises TrainingFailed for a gradient with a missing part, or a gradient or weights that are not finite."""
    if operation.failure is not None:
        raise InvalidInput(operation.failure.reason)
    assert operation.optim is not None
    if gradient.failure:
        raise InvalidInput(f"not applied, and the gradient is dropped: {gradient.failure}")
    grad_P = state.values_P.new_zeros(len(state.values_P)) if gradient.grad_P is None else gradient.grad_P.clone()
    new, norm = trainer.apply(state, grad_P, operation.optim)
    metrics = {"grad_norm": norm, "learning_rate": operation.optim.learning_rate}
    return new, metrics | ({STAND_IN: 1.0} if gradient.stands_in else {})
