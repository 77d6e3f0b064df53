"""A step on rows that nobody sampled: cross-entropy, the mean over the learned tokens of the batch."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from base_model.adapter import Adapter
from base_model.decoder import Decoder
from common.wire.messages import LossSpec, OptimSpec, Rows, f32, i32, u8
from common.wire.transcript import transcript
from tests.support.trainer_cases import make_init, make_step, nothing
from tests.trainer.test_trainer_learns import causal_attend, random_decoder
from trainer_service import lora
from trainer_service.backbone.projection import Projection
from trainer_service.backbone.sequences import DecoderBackbone
from trainer_service.training import Trainer

LOSS = LossSpec(name="cross_entropy")
LENGTHS, NUM_PROMPT, VOCAB = (6, 9, 7), 3, 32


def examples(seed: int = 0, version: int = 0) -> Rows:
    """Three of different lengths, of which all but the first tokens are learned; each is a group of its own."""
    total = sum(LENGTHS)
    tokens = np.random.default_rng(seed).integers(0, VOCAB, total)
    return Rows(
        transcript=transcript(tokens, [0.0] * total, [at >= NUM_PROMPT for length in LENGTHS for at in range(length)]),
        lengths=i32(LENGTHS),
        groups=i32([0, 1, 2]),
        samples=i32([0, 0, 0]),
        rewards=f32([0.0] * 3),
        versions=i32([version] * 3),
        truncated=u8([0] * 3),
    )


@torch.no_grad()
def naive_loss(decoder: Decoder, adapter: Adapter, rows: Rows) -> float:
    """Row by row, by torch's own cross-entropy."""
    stack = lora.AdapterStack(lora.AdapterLayout.of(adapter), decoder.device)
    place = stack.put(lora.flatten(adapter), adapter.scale)
    losses: list[Tensor] = []
    for row in np.split(rows.tokens.numpy().astype(np.int64), np.cumsum(LENGTHS)[:-1]):
        tokens = torch.from_numpy(row)[None]
        project = Projection.of([(stack, place)])
        hidden = decoder.forward(tokens, torch.arange(len(row))[None], causal_attend(2), project)
        scores = decoder.logits(hidden[0, NUM_PROMPT - 1 : -1])
        losses.append(F.cross_entropy(scores, tokens[0, NUM_PROMPT:], reduction="none"))
    return float(torch.cat(losses).mean())


def test_the_loss_is_the_mean_cross_entropy_of_the_learned_tokens_and_falls() -> None:
    decoder, rows, losses = random_decoder(), examples(), list[float]()
    trainer = Trainer(DecoderBackbone(decoder))
    state = trainer.init(make_init())
    for version in range(12):
        expected = naive_loss(decoder, state.adapter, rows)
        trained = trainer.step(make_step(version, rows, loss=LOSS, optim=OptimSpec(0.05)), state, nothing)
        state = trained.state
        assert trained.metrics["loss"] == pytest.approx(expected, rel=1e-5)
        losses.append(trained.metrics["loss"] or 0.0)
    assert losses[-1] < 0.5 * losses[0]


def test_the_version_that_was_newest_when_rows_were_made_changes_no_bits() -> None:
    made: list[Tensor] = []
    for version in (0, 1):
        trainer = Trainer(DecoderBackbone(random_decoder()), deterministic=True)
        state = trainer.init(make_init())
        made.append(trainer.step(make_step(1, examples(version=version), loss=LOSS), state, nothing).state.values_P)
    assert torch.equal(*made)
