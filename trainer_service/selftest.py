"""What deterministic mode relies on, checked on the machine at hand before any work is taken."""

import numpy as np
import torch
from torch import Tensor

from common.errors import InvalidInput
from common.messages import AdapterRef, Init, LoraSpec, LossSpec, OptimSpec, Rows, Step, f32, i32, u8
from common.rng import bits
from trainer_service.open_step import TrainState
from trainer_service.optimiser import load_moments, save_moments
from trainer_service.training import Trainer


def selftest(trainer: Trainer) -> None:
    """Two steps give the same bits again, among other jobs' steps, and after the state went through bytes.

    Raises InvalidInput, naming what differed.
    """
    state = initial_state(trainer)
    first = _two_steps(trainer, state, between=False)
    if not torch.equal(first, _two_steps(trainer, state, between=False)):
        raise InvalidInput("deterministic mode: the same training step gives other bits the second time")
    if not torch.equal(first, _two_steps(trainer, state, between=True)):
        raise InvalidInput("deterministic mode: a training step's bits depend on what is trained beside it")


def initial_state(trainer: Trainer) -> TrainState:
    return trainer.init(Init(id="", tenant="", job="", partition=0, adapter=_ref(0), seed=0, lora=LoraSpec(rank=3)))


def _two_steps(trainer: Trainer, state: TrainState, *, between: bool) -> Tensor:
    for version in range(2):
        message = random_step(version, seed=version)
        if between:
            other = random_step(version, seed=version + 7, num_groups=2, num_written=9)
            state = _among(trainer, message, state, other)
            moments = load_moments(save_moments(state.moments), len(state.values_P), trainer.decoder.device)
            state = TrainState.of(state.adapter, moments)
        else:
            state = trainer.step(message, state, lambda: None).state
    return state.values_P


def _among(trainer: Trainer, message: Step, state: TrainState, other: Step) -> TrainState:
    """The state after a step that shares its micro-batches with those of two other jobs, one before and one behind it."""
    steps = [trainer.begin(m, state) for m in (other, message, other)]
    while open_steps := [step for step in steps if not step.done]:
        trainer.micro_batch(open_steps)
    return [trainer.finish(step).state for step in steps][1]


def _ref(version: int) -> AdapterRef:
    return AdapterRef("selftest", "selftest", version)


def random_step(
    version: int, seed: int, *, num_groups: int = 3, group_size: int = 4, num_prompt: int = 21, num_written: int = 14
) -> Step:
    """A step on random tokens; the rows of a group begin alike."""
    num_rows = num_groups * group_size
    width = num_prompt + num_written
    tokens = (bits(seed, "selftest", *np.ogrid[:num_rows, :width]) % np.uint64(200)).astype(np.int32)
    tokens[:, :num_prompt] = tokens[:1, :num_prompt]
    written = np.tile(np.arange(width) >= num_prompt, (num_rows, 1))
    rows = Rows(
        tokens=i32(tokens.ravel()),
        logprobs=f32(np.where(written, -5.0, 0.0).ravel()),
        written=u8(written.ravel()),
        lengths=i32([width] * num_rows),
        groups=i32(np.arange(num_rows) // group_size),
        samples=i32(np.arange(num_rows) % group_size),
        rewards=f32(np.arange(num_rows) % group_size % 3),
        versions=i32([version] * num_rows),
        truncated=u8([0] * num_rows),
    )
    return Step(
        id=f"selftest/{version}",
        tenant="selftest",
        job="selftest",
        partition=0,
        adapter=_ref(version),
        seed=0,
        lora=LoraSpec(rank=3),
        loss=LossSpec(),
        optim=OptimSpec(1e-3),
        rows=rows,
        next_group=0,
    )
