"""Loads a base model into transformers' modules for generation, and compares a few tokens with transformers'.

Axes: n rows, T tokens of each, V vocabulary.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from base_model.modules import check_computed, load_model, written_logprobs
from rollout_service.embedded import kv
from rollout_service.embedded.backbone.interface import ForwardPart
from rollout_service.embedded.backbone.modules import ModulesDecoder
from rollout_service.embedded.pools import MIN_LENGTH, Pool

ROWS, LENGTH = 2, 9


def load_modules(
    folder: Path, *, device: str = "cpu", dtype: torch.dtype = torch.float32, max_context: int | None = None
) -> ModulesDecoder:
    """Loads a local folder in Hugging Face layout. `max_context`: serve no longer context than this.

    Raises InvalidInput for a model that the engine would not compute as transformers does.
    """
    model = load_model(folder, device=device, dtype=dtype)
    vocab = model.config.get_text_config().vocab_size
    tokens_nT = np.arange(ROWS * LENGTH).reshape(ROWS, LENGTH) * 7919 % vocab
    theirs_nT = torch.stack([written_logprobs(model, row, LENGTH - 1) for row in tokens_nT])
    decoder = ModulesDecoder(model, max_context)
    ours_nT = _logprobs(decoder, torch.from_numpy(tokens_nT).to(theirs_nT.device))
    check_computed(folder, model, ours_nT - theirs_nT, decoder.windows)
    return decoder


@torch.no_grad()
def _logprobs(decoder: ModulesDecoder, tokens_nT: Tensor) -> Tensor:
    """Log-probs of all tokens but the first: the last by a step of decoding, the others by a prefill."""
    num, width = len(tokens_nT), tokens_nT.shape[1] - 2
    pool = Pool.empty(decoder.config, MIN_LENGTH, decoder.embedding)
    pool.resize(num)
    pool.slots += range(num)
    at_T = torch.arange(width, device=tokens_nT.device).repeat(num)
    prefill = kv.PrefillAttend(decoder.config, [(pool, row) for row in range(num)], [width] * num, width)
    before = decoder.forward(tokens_nT[:, :width].flatten(), at_T, [ForwardPart(len(at_T), prefill, ())])
    at_n = torch.full((num,), width, device=tokens_nT.device)
    step = kv.DecodeAttend(decoder.config, kv.slices([pool], at_n, [width + 1]), exact=False)
    last = decoder.forward(tokens_nT[:, width], at_n, [ForwardPart(num, step, ())])
    hidden = torch.cat([before.unflatten(0, (num, width)), last[:, None]], dim=1)
    return decoder.logits(hidden).log_softmax(-1).gather(2, tokens_nT[:, 1:, None]).squeeze(2)
