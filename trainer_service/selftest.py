"""What deterministic mode relies on, checked on the machine at hand before any work is taken."""

import numpy as np
import torch
from torch import Tensor

from common.errors import InvalidInput
from common.messages import AdapterRef, Init, LoraSpec, LossSpec, OptimSpec, Rows, Step, f32, i32, u8
from common.rng import bits
from trainer_service import lora
from trainer_service.optimiser import load_moments, save_moments
from trainer_service.training import Trainer, TrainState

NUM_GROUPS, GROUP_SIZE, NUM_PROMPT, NUM_WRITTEN = 3, 4, 21, 14


def selftest(trainer: Trainer) -> None:
    """Two steps give the same bits again, with other work between, and after the state went through bytes.

    Raises InvalidInput, naming what differed.
    """
    state = trainer.init(Init(id="", tenant="", job="", partition=0, adapter=_ref(0), seed=0, lora=LoraSpec(rank=3)))
    first = _two_steps(trainer, state, between=False)
    if not torch.equal(first, _two_steps(trainer, state, between=False)):
        raise InvalidInput("deterministic mode: the same training step gives other bits the second time")
    if not torch.equal(first, _two_steps(trainer, state, between=True)):
        raise InvalidInput("deterministic mode: a training step's bits depend on the work before it")


def _two_steps(trainer: Trainer, state: TrainState, *, between: bool) -> Tensor:
    for version in range(2):
        state = trainer.step(_step(version, seed=version), state, lambda: None).state
        if between:
            trainer.step(_step(version, seed=version + 7), state, lambda: None)
            moments = load_moments(save_moments(state.moments), len(state.moments.mean_P), trainer.decoder.device)
            state = TrainState(state.adapter, moments)
    return lora.flatten(state.adapter)


def _ref(version: int) -> AdapterRef:
    return AdapterRef("selftest", "selftest", version)


def _step(version: int, seed: int) -> Step:
    num_rows = NUM_GROUPS * GROUP_SIZE
    width = NUM_PROMPT + NUM_WRITTEN
    tokens = (bits(seed, "selftest", *np.ogrid[:num_rows, :width]) % np.uint64(200)).astype(np.int32)
    tokens[:, :NUM_PROMPT] = tokens[:1, :NUM_PROMPT]
    written = np.tile(np.arange(width) >= NUM_PROMPT, (num_rows, 1))
    rows = Rows(
        tokens=i32(tokens.ravel()),
        logprobs=f32(np.where(written, -5.0, 0.0).ravel()),
        written=u8(written.ravel()),
        lengths=i32([width] * num_rows),
        groups=i32(np.arange(num_rows) // GROUP_SIZE),
        samples=i32(np.arange(num_rows) % GROUP_SIZE),
        rewards=f32(np.arange(num_rows) % 3),
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
