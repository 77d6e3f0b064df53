"""A trainer over the transformers backbone: it learns what one over our decoder learns, and keeps within its memory."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from common.errors import InvalidInput
from tests.support.families import NUM_LAYERS, save_family
from tests.support.trainer_cases import TINY, load_tiny, nothing
from tests.trainer.test_trainer_fused import assert_each_learned_alone, job, together
from trainer_service.backbone.choice import load_backbone
from trainer_service.backbone.interface import Backbone
from trainer_service.backbone.loading import load_modules
from trainer_service.backbone.modules import ModulesBackbone
from trainer_service.backbone.sequences import DecoderBackbone
from trainer_service.memory import fit, kept_bytes
from trainer_service.open_step import TrainState
from trainer_service.packing import Budget
from trainer_service.settings import TrainerSettings
from trainer_service.training import Trainer


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    torch.set_num_threads(1)
    return load_modules(TINY)


@pytest.mark.parametrize(("tokens", "share"), [(100, True), (2048, False)])
def test_jobs_together_learn_what_each_learns_alone_on_the_decoder(
    backbone: Backbone, tokens: int, share: bool
) -> None:
    # Given jobs of several ranks, targets, losses, temperatures, one of them with KL to the base
    decoder = Trainer(DecoderBackbone(load_tiny()), share_prefixes=share)
    jobs = [job(decoder, number, num_groups=2, group_size=2) for number in range(6)]

    # When they are trained in the same passes
    found = together(Trainer(backbone, Budget(tokens), share_prefixes=share), jobs)

    # Then each has learned what it learns alone
    assert_each_learned_alone(jobs, found, decoder)


def on(device: str, state: TrainState) -> TrainState:
    moments = replace(state.moments, mean_P=state.moments.mean_P.to(device), square_P=state.moments.square_P.to(device))
    return replace(state, values_P=state.values_P.to(device), moments=moments)


def test_a_step_on_a_device_learns_what_one_on_the_decoder_learns(device: str) -> None:
    # Given a trainer on a device that chose by its memory what its layers keep
    decoder, trainer = Trainer(DecoderBackbone(load_tiny())), Trainer(load_modules(TINY, device=device), Budget(500))
    fit(trainer, 1 << 28)

    # When it trains whole steps of jobs with other losses and ranks, then each learns what it learns on a processor
    for number in (3, 4):
        step, state = job(decoder, number)
        trained = trainer.step(step, on(device, state), nothing)
        assert trained.state.values_P.device.type == device
        assert_each_learned_alone([(step, state)], [replace(trained, state=on("cpu", trained.state))], decoder)


def test_layers_are_checkpointed_as_memory_demands(backbone: Backbone) -> None:
    # Given the bytes that a micro-batch keeps when all is kept
    roomy = Trainer(backbone, Budget(500), share_prefixes=False)
    fit(roomy, 1 << 30)
    assert isinstance(roomy.backbone, ModulesBackbone) and roomy.backbone.num_checkpointed == 0
    whole = 500 * roomy.budget.bytes_per_token

    # When there is room for less
    tight = Trainer(backbone, Budget(500), share_prefixes=False)
    fit(tight, int(0.7 * whole))

    # Then some layers are computed again in the backward, and a full micro-batch fits
    assert isinstance(tight.backbone, ModulesBackbone)
    assert 0 < tight.backbone.num_checkpointed < len(tight.backbone.layers)
    assert tight.budget.bytes_per_token <= 0.7 * whole / 500
    steps = [trainer.begin(*job(trainer, 0, num_groups=20)) for trainer in (roomy, tight)]
    kept = [
        kept_bytes(lambda trainer=trainer, step=step: trainer.micro_batch([step.opened]))
        for trainer, step in zip((roomy, tight), steps, strict=True)
    ]
    assert [step.opened.sums.num_forward for step in steps] == [steps[0].opened.sums.num_forward] * 2
    assert kept[1] < kept[0]


def test_on_a_cpu_the_decoder_computes_the_families_that_it_knows(tmp_path: Path) -> None:
    gemma = save_family("gemma3", tmp_path / "gemma3")
    assert isinstance(load_backbone(TrainerSettings(), TINY), DecoderBackbone)
    assert isinstance(load_backbone(TrainerSettings(trainer_backbone="transformers"), TINY), ModulesBackbone)
    found = load_backbone(TrainerSettings(trainer_checkpointing=True, max_context=64), gemma)
    assert isinstance(found, ModulesBackbone)
    assert found.num_checkpointed == NUM_LAYERS and found.context == 64
    with pytest.raises(InvalidInput, match="model_type 'gemma3_text'"):
        load_backbone(TrainerSettings(trainer_backbone="decoder"), gemma)


class Waits(TorchDispatchMode):
    """Counts where the host needs a number of the device at once."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return func(*args, **kwargs or {})


def test_nothing_waits_for_the_device_but_one_transfer_when_a_step_ends(backbone: Backbone) -> None:
    trainer = Trainer(backbone, Budget(500))
    with Waits() as waits:
        trainer.step(*job(trainer, 0, num_groups=3), nothing)
    assert waits.number == 0  # a transfer of several numbers is none of these
