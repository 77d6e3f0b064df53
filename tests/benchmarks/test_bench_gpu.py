"""The benchmark for GPUs, tried on a CPU."""

import math

import numpy as np
import pytest
import torch

from base_model.decoder import Decoder
from benchmarks.fused import SHAPES, make_jobs
from benchmarks.gpu import (
    PROMPT,
    SHAPES_OF_BASES,
    bytes_read,
    measure,
    measure_training,
    notes,
    random_adapters,
    random_decoder,
    random_modules,
    rows_of,
    tables,
)
from benchmarks.paper.lengths import answer_tokens
from common.messages import TrajectoryRef
from common.settings import TINY
from trainer_service.backbone.interface import Sequences
from trainer_service.backbone.sequences import DecoderBackbone
from trainer_service.packing import Tree
from trainer_service.training import Trainer


def tiny() -> Decoder:
    torch.set_num_threads(1)
    return random_decoder(SHAPES_OF_BASES["tiny"], torch.device("cpu"), torch.bfloat16)


def test_the_shape_tiny_is_that_of_the_model() -> None:
    assert tiny().linear_shapes() == Decoder.load(TINY).linear_shapes()


def test_transformers_modules_have_the_decoders_weights() -> None:
    # Given both over the same weights in float32
    torch.set_num_threads(1)
    decoder = random_decoder(SHAPES_OF_BASES["tiny"], torch.device("cpu"), torch.float32)
    tokens = np.arange(20)
    tree = Tree(0, (0,), tokens, tokens, np.zeros(20, np.int64), (np.arange(5, 19),))
    sequences = Sequences([tree], [tokens[6:]], [1.0])

    # When both compute the same row, then their log-probs agree
    found = [each.logprobs(sequences, None) for each in (DecoderBackbone(decoder), random_modules(decoder))]
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)


def test_bytes_of_a_row_are_weights_adapter_and_its_own_keys_and_values_at_each_step() -> None:
    decoder = tiny()
    (adapter,) = random_adapters(decoder, 1)
    row = rows_of([adapter])[0]
    steps = answer_tokens(TrajectoryRef("train", 1, 0, 0)) - 1
    weights = 2 * (sum(out * width for out, width in decoder.linear_shapes().values()) + 272 * 128)
    keys_and_values = 2 * 2 * 4 * 2 * 32 * sum(PROMPT + t for t in range(1, steps + 1))
    assert bytes_read(decoder, [row]) == (weights + adapter.num_bytes) * steps + keys_and_values


def test_it_says_why_columns_are_empty_and_goals_are_not_judged() -> None:
    unknown, goals = notes((math.nan, 1e12), judged=False)
    assert "--peak-tflops" in unknown and "GPU with 32 jobs" in goals
    assert notes((1e12, 1e12), judged=True) == []


def test_transformers_modules_train_without_padding() -> None:
    trainer = Trainer(random_modules(tiny()))
    found = measure_training(trainer, make_jobs(trainer, SHAPES[0], 2), 1)
    assert found["padding"] == 0 and found["flops_per_s"] > 0 and math.isnan(found["peak_bytes"])


@pytest.mark.slow
def test_it_measures_training_and_decoding() -> None:
    found = measure(tiny(), [2], 1, 2048)
    for n in found["training"]:
        training, decoding = found["training"][n], found["decoding"][n]
        assert training["tokens"] >= n * 32 * PROMPT
        assert min(training["flops_per_s"], training["to_separate"], decoding["bytes_per_s"]) > 0
    assert len(tables(found, (1e12, 1e9))) == 4
    assert found["small"]["tokens"] == 2 * 2 * 16
