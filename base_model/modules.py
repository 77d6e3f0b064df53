"""A base model as transformers' own modules: loads it, and finds the layers that adapters may target.

Trainers and the embedded engine replace linear layers and attention; `check_computed` then compares a few tokens with
transformers. Refuses by name what would be computed differently.

Axes: T tokens of a row, M of them its own, V vocabulary.
"""

import contextlib
import logging
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar, get_verbosity, set_verbosity

from base_model.decoder import check_finite
from common.errors import InvalidInput
from common.models.families import unsupported_by_modules
from common.models.weight_files import LINEAR_MODULES
from common.text.model_folder import read_config

T = TypeVar("T")
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.3}
"""Bound of the mean difference between log-probs computed here and by transformers."""
NOT_COMPUTED = ("softcap", "s_aux", "position_bias")
"""Additions of other families' attention to scores."""


def load_model(folder: Path, *, device: str, dtype: torch.dtype) -> Any:
    """Loads a Hugging Face folder. Raises InvalidInput for a model computed differently, or non-finite weights."""
    read_config(folder)
    try:
        with _silent():
            model, about = _loaded(folder, dtype)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise InvalidInput(f"{folder}: transformers cannot load it: {reason}") from error
    refuse(folder, _incomplete(about))
    refuse(folder, _unknown_parts(model))
    model = model.to(device).eval().requires_grad_(False)
    check_finite(folder, model.named_parameters())
    return model


@contextlib.contextmanager
def _silent() -> Generator[None]:
    """Keeps transformers from telling what the caller refuses in a line."""
    disable_progress_bar()
    before = get_verbosity()
    set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        set_verbosity(before)


def _loaded(folder: Path, dtype: torch.dtype) -> Any:
    """The model, and transformers' report on its weights, which lists those of a wrong shape: they are drawn."""
    config: Any = AutoConfig.from_pretrained(folder, local_files_only=True)
    refuse(folder, unsupported_by_modules(config))
    return AutoModelForCausalLM.from_pretrained(
        folder,
        config=config,
        dtype=dtype,
        local_files_only=True,
        use_safetensors=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )


def refuse(folder: Path, reasons: Iterable[str]) -> None:
    """Raises InvalidInput, if there are reasons to."""
    if found := list(reasons):
        raise InvalidInput(f"{folder}: the transformers backbone does not compute {', nor '.join(found)}")


def passed_on(what: T | None, arguments: Mapping[str, Any]) -> T:
    """Passes attention what the model was called with for it. `arguments`: the others of transformers' layer.

    Raises InvalidInput for layers that do not pass it on, and for an attention that adds to its scores.
    """
    if what is None:
        raise InvalidInput("the transformers backbone does not compute layers that keep arguments from their attention")
    if odd := [name for name in NOT_COMPUTED if arguments.get(name) is not None]:
        raise InvalidInput(f"the transformers backbone does not compute attention with {', '.join(odd)}")
    return what


def context_of(model: Any, max_context: int | None) -> int:
    """Tokens of a sequence at most. `max_context`: serve no longer context than this."""
    own = model.config.get_text_config().max_position_embeddings
    return min(own, max_context or own)


def target_layers(model: Any) -> dict[str, tuple[Any, str]]:
    """The linear layers that an adapter may target, by name: module and attribute. All layers have them, in one shape.

    Raises InvalidInput for a base model without any.
    """
    found: dict[str, tuple[Any, str]] = {}
    for path in LINEAR_MODULES:
        part, leaf = path.split(".")
        parts = [getattr(layer, part, None) for layer in model.get_decoder().layers]
        modules = [getattr(each, leaf, None) for each in parts]
        if len({m.weight.shape if type(m) is torch.nn.Linear else None for m in modules} - {None}) != 1:
            continue
        if all(type(module) is torch.nn.Linear for module in modules):
            found |= {f"layers.{number}.{path}": (each, leaf) for number, each in enumerate(parts)}
    if not found:
        raise InvalidInput(
            f"the transformers backbone finds no linear layers to adapt in model_type {model.config.model_type!r}"
        )
    return found


@torch.no_grad()
def written_logprobs(model: Any, tokens_T: np.ndarray, num_own: int) -> Tensor:
    """Log-probs of a row's last tokens, [M], as the model computes them with its own attention."""
    tokens_1T = torch.from_numpy(tokens_T)[None].to(model.device)
    logits_TV = model(input_ids=tokens_1T, use_cache=False).logits[0].float()
    return logits_TV[-num_own - 1 : -1].log_softmax(-1).gather(1, tokens_1T[0, -num_own:, None]).squeeze(1)


def check_computed(folder: Path, model: Any, apart_M: Tensor, windows: Collection[int | None]) -> None:
    """Raises InvalidInput for a model that is computed otherwise than transformers does.

    `apart_M`: differences of log-probs of a few tokens; `windows`: the sliding windows its layers asked for.
    """
    kind, apart = model.config.model_type, float(apart_M.abs().mean())
    if not apart <= TOLERANCE[model.dtype]:
        refuse(folder, [f"model_type {kind!r}: log-probs of rows beside each other are off by {apart:.3g}"])
    text = model.config.get_text_config()
    window, types = getattr(text, "sliding_window", None), getattr(text, "layer_types", None)
    if window is not None and (not types or "sliding_attention" in types) and window not in windows:
        refuse(folder, [f"model_type {kind!r}: its layers do not say their sliding window"])


def _incomplete(about: dict[str, Any]) -> Iterator[str]:
    """`about`: what transformers tells of the weights that it loaded."""
    mismatched: list[tuple[str, Any, Any]] = sorted(about.get("mismatched_keys") or ())
    if mismatched:
        name, has, asked = mismatched[0]
        what = f"{len(mismatched)} weights of other shapes, such as {name}"
        yield f"a base model with {what}: {[*has]}, where config.json asks for {[*asked]}"
    for kind in ("missing", "unexpected"):
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
