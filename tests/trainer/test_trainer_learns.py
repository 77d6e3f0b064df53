"""A toy run: sampling, GRPO and AdamW together make a reward rise."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from base_model.adapter import Adapter
from base_model.decoder import Attend, Decoder, DecoderConfig
from common.wire.messages import LossSpec, OptimSpec, Rows, f32, i32, u8
from common.wire.transcript import transcript
from tests.support.trainer_cases import make_init, make_step, nothing
from trainer_service import lora
from trainer_service.backbone.projection import Projection
from trainer_service.backbone.sequences import DecoderBackbone
from trainer_service.losses import RULES
from trainer_service.training import Trainer

NUM_PROMPT, NUM_SAMPLED, GROUP_SIZE, NUM_GROUPS = 5, 6, 8, 4
VOCAB = 32


def random_decoder() -> Decoder:
    """A Llama of 2 layers with random weights."""
    torch.set_num_threads(1)
    config = DecoderConfig(2, 32, 4, 2, 8, VOCAB, 64, 10_000.0, 1e-6, False)
    generator = torch.Generator().manual_seed(0)
    weights: dict[str, Tensor] = {"norm.weight": torch.ones(32)}

    def add(name: str, out: int, width: int) -> None:
        weights[f"{name}.weight"] = torch.randn(out, width, generator=generator) / width**0.5

    add("embed_tokens", VOCAB, 32)
    add("lm_head", VOCAB, 32)
    for at in ("layers.0", "layers.1"):
        weights |= {f"{at}.{norm}_layernorm.weight": torch.ones(32) for norm in ("input", "post_attention")}
        for name, out, width in (("q", 32, 32), ("k", 16, 32), ("v", 16, 32), ("o", 32, 32)):
            add(f"{at}.self_attn.{name}_proj", out, width)
        for name, out, width in (("gate", 64, 32), ("up", 64, 32), ("down", 32, 64)):
            add(f"{at}.mlp.{name}_proj", out, width)
    return Decoder(config, weights)


def causal_attend(num_groups: int) -> Attend:
    """Attention over a whole sequence, each position on itself and what stands before. `num_groups`: H / K."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=num_groups > 1)
        return out.transpose(1, 2)

    return attend


@torch.no_grad()
def sample(decoder: Decoder, adapter: Adapter, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """tokens [R, T] and the log-prob of each, naively: the whole sequence again for every token."""
    prompts = torch.randint(0, VOCAB, (NUM_GROUPS, NUM_PROMPT), generator=generator)
    tokens = prompts.repeat_interleave(GROUP_SIZE, 0)
    logprobs = torch.zeros(tokens.shape)
    stack = lora.AdapterStack(lora.AdapterLayout.of(adapter), decoder.device)
    places = [stack.put(lora.flatten(adapter), adapter.scale)] * len(tokens)
    project = Projection.of([(stack, place) for place in places])
    for _ in range(NUM_SAMPLED):
        positions = torch.arange(tokens.shape[1]).expand(tokens.shape)
        hidden = decoder.forward(tokens, positions, causal_attend(2), project)
        scores = decoder.logits(hidden[:, -1]).log_softmax(-1)
        chosen = torch.multinomial(scores.exp(), 1, generator=generator)
        tokens, logprobs = torch.cat([tokens, chosen], 1), torch.cat([logprobs, scores.gather(1, chosen)], 1)
    return tokens, logprobs


def as_rows(tokens: Tensor, logprobs: Tensor, version: int) -> Rows:
    """The reward is the share of odd tokens among the sampled."""
    num_rows, width = tokens.shape
    rewards = (tokens[:, NUM_PROMPT:] % 2).float().mean(1)
    return Rows(
        transcript=transcript(tokens.flatten(), logprobs.flatten(), np.tile(np.arange(width) >= NUM_PROMPT, num_rows)),
        lengths=i32([width] * num_rows),
        groups=i32(np.arange(num_rows) // GROUP_SIZE),
        samples=i32(np.arange(num_rows) % GROUP_SIZE),
        rewards=f32(rewards),
        versions=i32([version] * num_rows),
        truncated=u8([0] * num_rows),
    )


@pytest.mark.parametrize("name", sorted(RULES))
def test_the_reward_rises_under_every_loss(name: str) -> None:
    decoder, generator = random_decoder(), torch.Generator().manual_seed(1)
    trainer = Trainer(DecoderBackbone(decoder))
    state = trainer.init(make_init())
    loss = LossSpec(name=name, max_tokens=NUM_SAMPLED)  # pyright: ignore[reportArgumentType]
    rewards: list[float] = []
    for version in range(15):
        rows = as_rows(*sample(decoder, state.adapter, generator), version)
        trained = trainer.step(make_step(version, rows, loss=loss, optim=OptimSpec(0.02)), state, nothing)
        state = trained.state
        rewards.append(float(rows.rewards.numpy().mean()))
        gap = trained.metrics["sampling_gap"]
        assert gap is not None and gap < 1e-5  # the sampler and the trainer compute the same log-probs
        assert trained.metrics["sampling_kl"] == pytest.approx(0, abs=1e-9)
        assert trained.metrics["ess_share"] == pytest.approx(1, abs=1e-9)

    assert rewards[0] < 0.65
    assert np.mean(rewards[-3:]) > 0.85
