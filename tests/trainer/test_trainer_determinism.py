"""Deterministic mode: an adapter's bytes depend on its job's batches and on nothing else."""

import hashlib
from typing import Any

import pytest
from torch import Tensor

from base_model.adapter import WEIGHTS_FILE, load_adapter, save_adapter
from base_model.decoder import Decoder
from base_model.kernels import NotDeterministic
from common.wire.messages import LoraSpec, LossSpec
from tests.support.trainer_cases import load_shallow, make_init, make_rows, make_step, nothing
from trainer_service.backbone.interface import Sequences
from trainer_service.backbone.sequences import DecoderBackbone
from trainer_service.open_step import TrainState
from trainer_service.optimiser import load_moments, save_moments
from trainer_service.packing import Budget
from trainer_service.selftest import selftest
from trainer_service.training import Trainer

pytestmark = pytest.mark.exact
NUM_STEPS = 3
RANK = 3


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return load_shallow()


def digest(state: TrainState) -> str:
    return hashlib.sha256(save_adapter(state.adapter, "tiny")[WEIGHTS_FILE] + save_moments(state.moments)).hexdigest()


def through_bytes(state: TrainState) -> TrainState:
    """The state as a trainer would read it from the store."""
    adapter = load_adapter(save_adapter(state.adapter, "tiny"))
    moments = load_moments(save_moments(state.moments), len(state.values_P), state.moments.mean_P.device)
    return TrainState.of(adapter, moments)


def train(decoder: Decoder, *, tokens: int = 4096, reload: bool = False, others: int = 0) -> str:
    """Hash after NUM_STEPS steps of one job, with steps of `others` other jobs before each."""
    trainer = Trainer(DecoderBackbone(decoder), Budget(tokens), deterministic=True)
    state = trainer.init(make_init(lora=LoraSpec(rank=RANK)))
    for version in range(NUM_STEPS):
        for other in range(others):
            neighbour = trainer.init(make_init(lora=LoraSpec(rank=8 + other)))
            trainer.step(make_step(0, make_rows(50 + other, num_groups=3)), neighbour, nothing)
        step = make_step(version, make_rows(version, num_groups=5, version=version), loss=LossSpec(kl_coef=0.05))
        state = trainer.step(step, through_bytes(state) if reload else state, nothing).state
    return digest(state)


def test_a_state_from_the_store_and_other_jobs_in_between_change_no_byte(decoder: Decoder) -> None:
    assert train(decoder, reload=True) == train(decoder, others=3) == train(decoder)


def test_the_selftest_passes_here_and_would_see_a_difference(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    assert selftest(Trainer(DecoderBackbone(decoder), deterministic=True))
    computed = DecoderBackbone.logprobs

    def by_sequences(self: DecoderBackbone, sequences: Sequences, adapters: Any) -> Tensor:
        return computed(self, sequences, adapters) * (1 + 1e-6 * len(sequences.trees))

    monkeypatch.setattr(DecoderBackbone, "logprobs", by_sequences)
    with pytest.raises(NotDeterministic):
        selftest(Trainer(DecoderBackbone(decoder), deterministic=True))
