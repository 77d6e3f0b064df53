"""What later lets several jobs share a forward: sequences of one micro-batch go through adapters of their own."""

import numpy as np
import pytest
import torch
from trainer_support import TINY, load_tiny, make_init, make_rows, make_step, nothing

from base_model.decoder import Decoder
from common.messages import LoraSpec
from trainer_service import lora
from trainer_service.batch import parse_rows
from trainer_service.lora import Piece, Projection, Trainable
from trainer_service.model import logprobs, make_inputs
from trainer_service.packing import Tree, trees
from trainer_service.training import Trainer


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return load_tiny()


def some_adapter(decoder: Decoder, spec: LoraSpec, seed: int) -> Trainable:
    state = Trainer(decoder).init(make_init(lora=spec))
    weights = lora.trainable(state.adapter, decoder.device)
    weights.values_P.add_(0.02 * torch.randn(len(weights.values_P), generator=torch.Generator().manual_seed(seed)))
    return weights


def backward(decoder: Decoder, sequences: list[Tree], targets: list[np.ndarray], pieces: list[Piece]) -> torch.Tensor:
    values_M = logprobs(decoder, make_inputs(sequences, targets, decoder, multiple=1), 1.0, Projection(pieces))
    (
        values_M * torch.linspace(-1, 1, len(targets)).repeat_interleave(torch.tensor([len(t) for t in targets]))
    ).sum().backward()
    return values_M.detach()


def test_two_adapters_in_one_forward_get_the_gradients_that_each_gets_alone(decoder: Decoder) -> None:
    # Given rows of two jobs whose adapters differ in rank, scale and targets
    config = decoder.config
    batch = parse_rows(make_rows(), version=0, vocab=config.vocab, context=config.context)
    sequences = trees(batch, np.ones(len(batch), bool), None)
    targets = [batch.tokens[row][batch.written[row]] for tree in sequences for row in tree.rows]
    specs = [LoraSpec(rank=4), LoraSpec(rank=7, alpha=3.0, targets=("q_proj", "up_proj"))]
    fused = [some_adapter(decoder, spec, i) for i, spec in enumerate(specs)]
    alone = [some_adapter(decoder, spec, i) for i, spec in enumerate(specs)]

    # When they go through the model together, and each with its neighbours' rows on the bare base
    n = len(sequences)
    together = backward(decoder, sequences, targets, [Piece(0, 6, fused[0]), Piece(6, n, fused[1])])
    first = backward(decoder, sequences, targets, [Piece(0, 6, alone[0])])
    backward(decoder, sequences, targets, [Piece(6, n, alone[1])])

    # Then log-probs and gradients are the same
    num_first = sum(len(t) for t in targets[:6])
    assert torch.allclose(together[:num_first], first[:num_first], atol=1e-5)
    for one, other in zip(fused, alone, strict=True):
        assert float((one.grad_P - other.grad_P).norm() / other.grad_P.norm()) < 1e-5


def test_a_bfloat16_base_trains_float32_adapters() -> None:
    exact, half = load_tiny(), Decoder.load(TINY, dtype=torch.bfloat16)
    step = make_step(0, make_rows())

    trained = [Trainer(decoder).step(step, Trainer(decoder).init(make_init()), nothing) for decoder in (exact, half)]

    values = [lora.flatten(result.state.adapter) for result in trained]
    assert values[1].dtype == torch.float32
    norms = [result.metrics["grad_norm"] for result in trained]
    assert norms[1] == pytest.approx(norms[0], rel=0.1)
