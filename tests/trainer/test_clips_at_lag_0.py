"""At lag 0 the policy has not moved: what sampler and trainer compute otherwise, in bfloat16, must not clip what is learned."""

from functools import cache

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from base_model.decoder import Decoder
from common.settings import TINY
from common.tasks.skills import generate
from common.text.tokens import ChatTokenizer
from common.wire.messages import LossName, LossSpec, Rows, f32, i32, u8
from common.wire.transcript import transcript
from tests.support.trainer_cases import load_tiny, make_init, make_step
from trainer_service.backbone.sequences import DecoderBackbone
from trainer_service.training import Trainer

NUM_ROWS, GROUP_SIZE, NUM_WRITTEN = 48, 8, 16
SEEN = 1e-3
"""The share of tokens beyond which clips would be felt."""


@cache
def recorded_in_bfloat16() -> Rows:
    """Groups of answers by the base model, with both signs of advantages; their log-probs differ from float32's by 0.006 in the mean."""
    decoder, tokenizer = load_tiny(), ChatTokenizer.load(TINY)
    prompts = [tokenizer.render(item["messages"]) for item in generate("sort", 1, NUM_ROWS // GROUP_SIZE, "train")]
    num_prompt = min(map(len, prompts))
    tokens_BT = torch.tensor([prompt[:num_prompt] for prompt in prompts]).repeat_interleave(GROUP_SIZE, dim=0)
    drawn = torch.Generator().manual_seed(0)
    for _ in range(NUM_WRITTEN):
        new_B1 = torch.multinomial(logprobs(decoder, tokens_BT)[:, -1].exp(), 1, generator=drawn)
        tokens_BT = torch.cat([tokens_BT, new_B1], dim=1)
    of_all_BTV = logprobs(Decoder.load(TINY, dtype=torch.bfloat16), tokens_BT[:, :-1])
    recorded_BT = F.pad(of_all_BTV.gather(2, tokens_BT[:, 1:, None]).squeeze(2), (1, 0))
    written, numbers = [0] * num_prompt + [1] * NUM_WRITTEN, np.arange(NUM_ROWS)
    return Rows(
        transcript=transcript(tokens_BT.flatten().numpy(), recorded_BT.flatten().numpy(), written * NUM_ROWS),
        lengths=i32([len(written)] * NUM_ROWS),
        groups=i32(numbers // GROUP_SIZE),
        samples=i32(numbers % GROUP_SIZE),
        rewards=f32(numbers % 2),
        versions=i32([0] * NUM_ROWS),
        truncated=u8([0] * NUM_ROWS),
    )


@torch.inference_mode()
def logprobs(decoder: Decoder, tokens_BT: Tensor) -> Tensor:
    """[B, T, V] of the token after each."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

    positions_BT = torch.arange(tokens_BT.shape[1]).expand_as(tokens_BT)
    return decoder.logits(decoder.forward(tokens_BT, positions_BT, attend)).float().log_softmax(-1)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "ppo", "cispo", "gspo"])
def test_what_the_sampler_rounds_otherwise_clips_nothing(name: LossName) -> None:
    trainer = Trainer(DecoderBackbone(load_tiny()))
    step = make_step(0, recorded_in_bfloat16(), loss=LossSpec(name))
    metrics = trainer.step(step, trainer.init(make_init()), lambda: None).metrics
    clipped, gap = metrics["clip_fraction"], metrics["sampling_gap"]
    assert clipped is not None and clipped <= (0 if name == "gspo" else SEEN)
    assert gap is not None and 0.003 < gap < 0.012
