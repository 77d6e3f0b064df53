"""Loads a base model into the backbone of devices, and compares a few packed tokens with transformers."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from base_model.adapter import init_adapter
from base_model.modules import check_computed, context_of, load_model, target_layers, written_logprobs
from common.errors import InvalidInput
from common.wire.messages import LoraSpec
from trainer_service.backbone.attention import Pack
from trainer_service.backbone.device_kernels.kernel_choice import use_kernels
from trainer_service.backbone.interface import Sequences
from trainer_service.backbone.modules import ModulesBackbone
from trainer_service.lora import AdapterLayout, flatten
from trainer_service.packing import Tree

GRADIENTS_APART = 0.3
"""Bound of the relative error of kernels' gradients in the norm: rounding makes it 0.03, a wrong factor's gradient 0.5 and more."""


def load_modules(
    folder: Path,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    max_context: int | None = None,
    checked: bool = False,
    kernels: Sequence[str] = (),
) -> ModulesBackbone:
    """Loads a local folder in Hugging Face layout. `max_context`: the longest context served. `checked`: another process has
    compared a few tokens. `kernels`: see `device_kernels`.

    Raises InvalidInput for a model that it does not compute as transformers does, and for kernels that do not run here.
    """
    model = load_model(folder, device=device, dtype=dtype)
    backbone = ModulesBackbone.of(model, target_layers(model), context_of(model, max_context))
    if checked:
        use_kernels(backbone, kernels)
        return backbone
    try:
        _check_packed(folder, backbone, kernels)
    except Exception as error:  # compilers raise errors of many kinds
        if not kernels or isinstance(error, InvalidInput):
            raise
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise InvalidInput(f"MARLAAS_TRAINER_KERNELS={','.join(kernels)}: it does not run here ({reason})") from error
    return backbone


def _check_packed(folder: Path, backbone: ModulesBackbone, kernels: Sequence[str]) -> None:
    """Compares log-probs of a few packed tokens with those of transformers' model, row by row, and what kernels give two adapters
    with what the plain path does.

    Leaves our attention and the kernels in the model. Raises InvalidInput for one that does not treat packed rows apart.
    """
    begin_T, *owns = np.split(np.arange(11) * 7919 % backbone.vocab, [4, 8])
    rows = [(np.concatenate([begin_T, own]), len(own)) for own in (*owns, owns[1])]
    theirs_M = torch.cat([written_logprobs(backbone.model, *row) for row in rows])
    branched = Tree(
        group=0,
        rows=(0, 1),
        tokens=np.concatenate([begin_T, *owns]),
        positions=np.array([0, 1, 2, 3, 4, 5, 6, 7, 4, 5, 6]),
        branches=np.repeat([0, 1, 2], [4, 4, 3]),
        predictors=(np.array([3, 4, 5, 6]), np.array([3, 8, 9])),
    )
    lone = Tree(1, (2,), rows[2][0], np.arange(7), np.zeros(7, np.int64), (np.array([3, 4, 5]),))
    pack = Pack.of([lone], backbone.device)
    sequences = Sequences([branched, lone], [*owns, owns[1]], [1.0] * 3)
    plain = None
    if kernels:
        use_kernels(backbone, ())
        plain = _learned(backbone, sequences)
    use_kernels(backbone, kernels)
    with torch.no_grad():
        backbone.hidden(pack, None)
        ours_M = backbone.logprobs(sequences, None)
    check_computed(folder, backbone.model, ours_M - theirs_M, pack.windows)
    if plain:
        apart_M, apart_2P = (found - exact for found, exact in zip(_learned(backbone, sequences), plain, strict=True))
        check_computed(folder, backbone.model, apart_M, pack.windows)
        apart = float(apart_2P.norm() / plain[1].norm())
        if not apart <= GRADIENTS_APART:
            raise InvalidInput(
                f"MARLAAS_TRAINER_KERNELS={','.join(kernels)}: gradients are off by {apart:.3g} of their norm"
            )


def _learned(backbone: ModulesBackbone, sequences: Sequences) -> tuple[Tensor, Tensor]:
    """Log-probs of two sequences, of an adapter each, and the gradients of their sum, [2, P]."""
    adapter = init_adapter(LoraSpec(), backbone.linear_shapes(), 0)
    for b in adapter.b.values():
        b.copy_(torch.arange(b.numel()).sin().mul(0.02).view_as(b))
    stack = backbone.stack(AdapterLayout.of(adapter))
    places = [stack.put(flatten(adapter), sign * adapter.scale) for sign in (1, -1)]
    logprobs_M = backbone.logprobs(sequences, [(stack, place) for place in places])
    logprobs_M.sum().backward()  # pyright: ignore[reportUnknownMemberType]
    return logprobs_M.detach(), torch.stack([stack.gradient(place).clone() for place in places])
