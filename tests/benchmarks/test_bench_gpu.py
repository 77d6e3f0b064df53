"""The benchmark for GPUs, tried on a CPU."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from base_model.decoder import Decoder
from benchmarks import _gpu_parts
from benchmarks._gpu_bases import SHAPES_OF_BASES, Shape, random_decoder, random_modules, sampling_backbone
from benchmarks._gpu_parts import measure_gap, measure_plan
from trainer_service.backbone.interface import Sequences
from trainer_service.backbone.modules import ModulesBackbone
from trainer_service.backbone.sequences import DecoderBackbone
from trainer_service.packing import Budget, Tree
from trainer_service.training import Trainer


def tiny(dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> Decoder:
    torch.set_num_threads(1)
    return random_decoder(SHAPES_OF_BASES["tiny"], torch.device(device), dtype)


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_modules_have_the_decoders_weights(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given both over the same weights in float32
    shape = SHAPES_OF_BASES["tiny"]
    monkeypatch.setitem(SHAPES_OF_BASES, "tiny", replace(shape, config=replace(shape.config, tied=tied)))
    decoder = tiny(torch.float32)
    tokens = np.arange(20)
    tree = Tree(0, (0,), tokens, tokens, np.zeros(20, np.int64), (np.arange(5, 19),))
    sequences = Sequences([tree], [tokens[6:]], [1.0])

    # When both compute the same row, then their log-probs agree
    found = [each.logprobs(sequences, None) for each in (DecoderBackbone(decoder), random_modules(decoder))]
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)


def planned(shape: Shape, device: str, *, num_checkpointed: int = 0) -> dict[str, float]:
    """The plan of micro-batches of four rows on transformers' modules."""
    backbone = random_modules(random_decoder(shape, torch.device(device), torch.bfloat16))
    assert isinstance(backbone, ModulesBackbone)
    return measure_plan(Trainer(backbone.checkpointing(num_checkpointed), Budget(16_384)), shape)


@pytest.mark.gpu
@pytest.mark.parametrize("num_checkpointed", [0, 2])
def test_the_memory_of_a_step_is_what_was_planned(num_checkpointed: int) -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device here")
    known = SHAPES_OF_BASES["qwen3-0.6b"]
    shape = replace(known, config=replace(known.config, num_layers=2))
    found = planned(shape, "cuda", num_checkpointed=num_checkpointed)
    assert abs(found["planned_bytes"] / found["peak_bytes"] - 1) < 0.15


def test_the_gap_in_float32_is_rounding_and_in_bfloat16_is_not(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ROWS", "PROMPT"):
        monkeypatch.setattr(_gpu_parts, name, 8)
    gaps = [
        measure_gap(Trainer(random_modules(decoder)), sampling_backbone(decoder, "transformers"))
        for decoder in (tiny(torch.float32, device), tiny(torch.bfloat16, device))
    ]
    assert gaps[0]["gap"] < 1e-4 and gaps[1]["gap"] < 0.1
    assert gaps[1]["gap"] > 1e-4 or device == "cuda"  # there both ends round alike in a model as small as this
    assert gaps[0]["tokens"] > 32
