"""Loads a base model into transformers' modules, and refuses by name what would be computed otherwise than meant."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from common.errors import InvalidInput
from common.modules_families import unsupported_by_modules
from trainer_service.backbone.attention import NAME, Pack
from trainer_service.backbone.interface import Sequences
from trainer_service.backbone.modules import ModulesBackbone
from trainer_service.batch import Ints
from trainer_service.packing import Tree

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.3}
"""Tolerance of the mean difference between log-probs of packed rows and of rows one by one."""


def load_modules(
    folder: Path,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    max_context: int | None = None,
    checked: bool = False,
) -> ModulesBackbone:
    """Loads a local folder in Hugging Face layout. `max_context`: serve no longer context than this. `checked`: another process has
    computed a few tokens with it, and found no difference.

    Raises InvalidInput for a model that this backbone does not compute as transformers does.
    """
    logging.disable_progress_bar()
    try:
        config: Any = AutoConfig.from_pretrained(folder, local_files_only=True)
        _refuse(folder, unsupported_by_modules(config))
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=dtype, local_files_only=True, use_safetensors=True, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise InvalidInput(f"{folder}: transformers cannot load it: {error}") from error
    model, about = loaded
    _refuse(folder, _incomplete(about))
    _refuse(folder, _unknown_parts(model))
    text = config.get_text_config()
    context = min(text.max_position_embeddings, max_context or text.max_position_embeddings)
    backbone = ModulesBackbone.of(model.to(device), context)
    if not backbone.linear_shapes():
        raise InvalidInput(
            f"{folder}: the transformers backbone finds no linear layers to adapt in {config.model_type!r}"
        )
    if checked:
        backbone.model.set_attn_implementation(NAME)
    else:
        _check_packed(folder, backbone)
    return backbone


def _refuse(folder: Path, reasons: Iterable[str]) -> None:
    if found := list(reasons):
        raise InvalidInput(f"{folder}: the transformers backbone does not compute {', nor '.join(found)}")


def _incomplete(about: dict[str, Any]) -> Iterator[str]:
    """`about`: what transformers tells of the weights that it loaded."""
    for kind in ("missing", "unexpected", "mismatched"):
        names = sorted(map(str, about.get(f"{kind}_keys") or ()))
        if names:
            yield f"a base model with {len(names)} {kind} weights, such as {names[0]}"


def _unknown_parts(model: Any) -> Iterator[str]:
    head = model.get_output_embeddings()
    if not getattr(model, "_supports_attention_backend", False):
        yield f"model_type {model.config.model_type!r} (its attention cannot be replaced)"
    if model.get_decoder() is not getattr(model, "model", None) or not hasattr(model.model, "layers"):
        yield f"model_type {model.config.model_type!r} (its layers are not `model.layers`, as adapters name them)"
    if getattr(head, "bias", None) is not None:
        yield "a head with a bias"


def _check_packed(folder: Path, backbone: ModulesBackbone) -> None:
    """Compares log-probs of packed rows with those of transformers' model, a row at a time, on a few tokens.

    Leaves our attention in the model. Raises InvalidInput for a model that does not treat rows of a pack apart.
    """
    begin_T, *owns = np.split(np.arange(11) * 7919 % backbone.vocab, [4, 8])
    theirs_M = torch.cat([_written_logprobs(backbone, begin_T, own) for own in (*owns, owns[1])])
    backbone.model.set_attn_implementation(NAME)
    branched = Tree(
        group=0,
        rows=(0, 1),
        tokens=np.concatenate([begin_T, *owns]),
        positions=np.array([0, 1, 2, 3, 4, 5, 6, 7, 4, 5, 6]),
        branches=np.repeat([0, 1, 2], [4, 4, 3]),
        predictors=(np.array([3, 4, 5, 6]), np.array([3, 8, 9])),
    )
    tokens_T = np.concatenate([begin_T, owns[1]])
    lone = Tree(1, (2,), tokens_T, np.arange(7), np.zeros(7, np.int64), (np.array([3, 4, 5]),))
    with torch.no_grad():
        ours_M = backbone.logprobs(Sequences([branched, lone], [*owns, owns[1]], [1.0] * 3), None)
    apart = float((ours_M - theirs_M).abs().mean())
    kind = backbone.model.config.model_type
    if not apart <= TOLERANCE[backbone.model.dtype]:
        _refuse(folder, [f"model_type {kind!r}: log-probs of packed rows are off by {apart:.3g}"])
    if not _window_is_asked_for(backbone, Pack.of([lone], backbone.device)):
        _refuse(folder, [f"model_type {kind!r}: its layers do not say their sliding window"])


@torch.no_grad()
def _written_logprobs(backbone: ModulesBackbone, begin_T: Ints, own_M: Ints) -> torch.Tensor:
    """Log-probs of a row's own tokens as transformers computes them."""
    tokens_1T = torch.from_numpy(np.concatenate([begin_T, own_M]))[None].to(backbone.device)
    logits_TV = backbone.model(input_ids=tokens_1T, use_cache=False).logits[0].float()
    chosen_M = tokens_1T[0, len(begin_T) :, None]
    return logits_TV[len(begin_T) - 1 : -1].log_softmax(-1).gather(1, chosen_M).squeeze(1)


@torch.no_grad()
def _window_is_asked_for(backbone: ModulesBackbone, pack: Pack) -> bool:
    """Says whether the layers tell our attention the sliding window that the configuration has, if it has one."""
    text = backbone.model.config.get_text_config()
    window, types = getattr(text, "sliding_window", None), getattr(text, "layer_types", None)
    if window is None or (types and "sliding_attention" not in types):
        return True
    backbone.hidden(pack, ())
    return window in {asked for _, asked in pack.masks}
