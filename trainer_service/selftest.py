"""Checks at start-up that on this machine a training step's bits depend on its job's batch only.

Steps of several jobs, with ranks, losses and lengths of every kind, are trained one by one and together, in micro-batches of
many sequences and of one, with and without shared prefixes: weights and moments must be the same bits.
`python -m trainer_service.selftest FOLDER MIN_ROWS` checks in a process of its own.
"""

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from base_model.decoder import Decoder
from base_model.kernels import CANDIDATES, DEFAULT, NotDeterministic, run_selftest
from common.rng import bits, uniform
from common.wire.messages import AdapterRef, Init, LoraSpec, LossSpec, OptimSpec, Rows, TrainStep, f32, i32, u8
from common.wire.transcript import transcript
from trainer_service.backbone.sequences import DecoderBackbone
from trainer_service.open_step import Trained, TrainState
from trainer_service.optimiser import load_moments, save_moments
from trainer_service.packing import Budget
from trainer_service.training import Trainer

KERNELS = tuple(kernels for kernels in CANDIDATES if kernels.min_rows == DEFAULT.min_rows)
"""A trainer's products have a sequence's rows, never so few that their number has to be raised."""
JOBS = (
    (LoraSpec(rank=3), LossSpec(), 3),
    (LoraSpec(rank=8), LossSpec(name="gspo", temperature=0.7), 4),
    (LoraSpec(rank=1, targets=("q_proj", "down_proj")), LossSpec(name="rloo", kl_coef=0.1), 2),
    (LoraSpec(rank=7), LossSpec(name="cispo"), 5),
)
"""Adapter, loss and group size of each."""
NUM_GROUPS = 3
BUDGETS = (1, 150, 2048)
"""Tokens of a micro-batch: one sequence, some, all."""


def selftest(trainer: Trainer) -> str:
    """The sha256 of what was trained; about a second for a small base. Raises NotDeterministic."""
    states = [_initial(trainer, number) for number in range(len(JOBS))]
    for version, share in enumerate((True, False)):
        steps = [_step(number, version) for number in range(len(JOBS))]
        alone = replace(trainer, share_prefixes=share)
        expected = [alone.step(*each, lambda: None).state for each in zip(steps, states, strict=True)]
        for tokens in BUDGETS:
            _compare(expected, _together(replace(alone, budget=Budget(tokens)), steps, states))
        states = [_through_bytes(state) for state in expected]
    return hashlib.sha256(b"".join(map(_bytes, states))).hexdigest()


def _compare(expected: list[TrainState], found: list[Trained]) -> None:
    for one, other in zip(expected, found, strict=True):
        if _bytes(one) != _bytes(other.state):
            raise NotDeterministic("a training step's bits depend on what is trained with it, or in how many parts")


def _bytes(state: TrainState) -> bytes:
    values = (state.values_P, state.moments.mean_P, state.moments.square_P)
    return b"".join(each.cpu().numpy().tobytes() for each in values)


def _together(trainer: Trainer, steps: list[TrainStep], states: list[TrainState]) -> list[Trained]:
    opened = [trainer.begin(*each) for each in zip(steps, states, strict=True)]
    while open_steps := [step for step in opened if not step.done]:
        trainer.micro_batch([step.opened for step in open_steps])
    return [trainer.finish(step) for step in opened]


def _through_bytes(state: TrainState) -> TrainState:
    """The state as another trainer would read it from the store."""
    moments = load_moments(save_moments(state.moments), len(state.values_P), state.values_P.device)
    return TrainState.of(state.adapter, moments)


def _initial(trainer: Trainer, number: int) -> TrainState:
    """An adapter whose B is not zero any more."""
    state = trainer.init(Init(**_ids(number, 0), seed=number, lora=JOBS[number][0]))
    noise_P = uniform(number, "selftest", np.arange(len(state.values_P))).astype(np.float32) - 0.5
    return replace(state, values_P=state.values_P + 0.05 * torch.from_numpy(noise_P).to(state.values_P))


def _ids(number: int, version: int) -> dict[str, Any]:
    job = str(number)
    ref = AdapterRef("selftest", job, version)
    return {"id": f"{job}/{version}", "tenant": "selftest", "job": job, "partition": 0, "adapter": ref}


def _step(number: int, version: int) -> TrainStep:
    """A step of a job; no two of its groups or answers are of one length."""
    lora, loss, group_size = JOBS[number]
    groups, samples = np.divmod(np.arange(NUM_GROUPS * group_size), group_size)
    rows = random_rows(
        num_prompt=5 + (bits(number, "prompt", version, groups) % np.uint64(25)).astype(int),
        num_written=1 + (bits(number, "written", version, groups, samples) % np.uint64(14)).astype(int),
        group_size=group_size,
        version=version,
    )
    optim = OptimSpec(1e-3, weight_decay=0.1 * (number % 2))
    return TrainStep(**_ids(number, version), seed=number, lora=lora, loss=loss, optim=optim, rows=rows, next_group=0)


def random_rows(*, num_prompt: np.ndarray, num_written: np.ndarray, group_size: int, version: int = 0) -> Rows:
    """Rows of random tokens, with these numbers of prompt and written tokens; only rows of a group begin alike."""
    groups, samples = np.divmod(np.arange(len(num_prompt)), group_size)
    tokens = [
        np.concatenate([bits(version, "asked", group, np.arange(p)), bits(version, "answer", row, np.arange(w))])
        for row, (group, p, w) in enumerate(zip(groups, num_prompt, num_written, strict=True))
    ]
    written = np.concatenate([np.repeat([0, 1], [p, w]) for p, w in zip(num_prompt, num_written, strict=True)])
    return Rows(
        transcript=transcript(np.concatenate(tokens) % np.uint64(200), np.where(written, -5.0, 0.0), written),
        lengths=i32(num_prompt + num_written),
        groups=i32(groups),
        samples=i32(samples),
        rewards=f32(samples % 3),
        versions=i32([version] * len(groups)),
        truncated=u8([0] * len(groups)),
    )


def _of(decoder: Decoder, _: int) -> None:
    selftest(Trainer(DecoderBackbone(decoder), deterministic=True))


if __name__ == "__main__":
    run_selftest(_of)
