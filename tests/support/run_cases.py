"""Operations of runs, for the trainer's tests."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from common.wire.messages import AdapterRef, Init, LoraSpec, OptimSpec, f32, i32
from common.wire.operations import Datum, Forward, LossFn, OperationResult, Operations, Outputs, RunOperation
from trainer_service import run_step
from trainer_service.open_step import TrainState
from trainer_service.run_step import Computed, Gradient
from trainer_service.training import Trainer

RUN_LORA = LoraSpec(rank=32, alpha=32.0)
ADAM = OptimSpec(1e-3, grad_clip=0.0, eps=1e-12)


def make_datum(loss: LossFn, seed: int, *, num_prompt: int = 6, num_answer: int = 7, **changes: Any) -> Datum:
    """A prompt without weight, then an answer; targets are the next tokens, the last of them no token of the datum."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 250, num_prompt + num_answer + 1)
    learned = np.repeat([0.0, 1.0], [num_prompt, num_answer])
    fields: dict[str, Any] = {"tokens": i32(tokens[:-1]), "targets": i32(tokens[1:])}
    if loss == "cross_entropy":
        fields["weights"] = f32(learned * rng.uniform(0.5, 1.5, len(learned)))
    else:
        fields["logprobs"] = f32(learned * rng.normal(-5.5, 0.4, len(learned)))
        fields["advantages"] = f32(learned * rng.normal(0, 1, len(learned)))
    if loss == "gspo":
        fields["mask"] = f32(learned)
    return Datum(**(fields | changes))


def forward_backward(seq: int, loss: LossFn = "cross_entropy", *data: Datum, **changes: Any) -> RunOperation:
    """A pass over three data of unlike lengths, unless some are given."""
    made = data or tuple(make_datum(loss, 10 * seq + i, num_prompt=4 + 3 * i, num_answer=9 - 2 * i) for i in range(3))
    action, answered = changes.pop("action", "forward_backward"), changes.pop("answered", False)
    payload = msgspec.msgpack.encode(Forward(made, loss, **changes))
    return RunOperation(seq, action, payload, answered, sum(len(datum.tokens) for datum in made))


def forward(seq: int, loss: LossFn = "cross_entropy", *data: Datum, **changes: Any) -> RunOperation:
    return forward_backward(seq, loss, *data, action="forward", **changes)


def optim_step(seq: int, optim: OptimSpec = ADAM) -> RunOperation:
    return RunOperation(seq, "optim_step", msgspec.msgpack.encode(optim))


def make_run(job: str = "run-1", lora: LoraSpec = RUN_LORA, **changes: Any) -> Init:
    ref = AdapterRef("t", job, 0)
    return Init(id=f"{job}/0", tenant="t", job=job, partition=3, adapter=ref, seed=11, lora=lora, **changes)


def segment(
    *operations: RunOperation, version: int = 0, job: str = "run-1", first: int = 0, attempt: int = 0
) -> Operations:
    return Operations(
        id=f"{job}:{operations[-1].seq}",
        tenant="t",
        job=job,
        partition=3,
        adapter=AdapterRef("t", job, version),
        seed=11,
        lora=RUN_LORA,
        first=first,
        operations=operations,
        attempt=attempt,
    )


def outputs(result: OperationResult) -> Outputs:
    assert result.failure is None, result.failure
    return msgspec.msgpack.decode(result.outputs, type=Outputs)


def noisy(trainer: Trainer, job: str = "run-1", lora: LoraSpec = RUN_LORA) -> TrainState:
    """A run's state whose B is not zero any more."""
    state = trainer.init(make_run(job, lora))
    noise_P = torch.randn(len(state.values_P), generator=torch.Generator().manual_seed(len(job)))
    return dataclasses.replace(state, values_P=state.values_P + 0.005 * noise_P)


def carry_out(
    trainer: Trainer, operations: Sequence[RunOperation], state: TrainState, gradient: Gradient | None = None
) -> Computed:
    """A segment alone."""
    run = run_step.begin(trainer, operations, state, gradient or Gradient(operations[0].seq, 0))
    while not run.opened.done:
        trainer.micro_batch([run.opened])
    return run_step.finish(trainer, run)
