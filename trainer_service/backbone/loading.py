"""Loads a base model into the backbone of devices, and compares a few packed tokens with transformers."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from base_model.adapter import init_adapter
from base_model.modules import check_computed, context_of, load_model, target_layers, written_logprobs
from common.errors import InvalidInput
from common.wire.messages import LoraSpec
from trainer_service.backbone.attention import Pack
from trainer_service.backbone.device_kernels.kernel_choice import use_kernels
from trainer_service.backbone.interface import AdapterPlace, Sequences
from trainer_service.backbone.modules import ModulesBackbone
from trainer_service.lora import AdapterLayout, flatten
from trainer_service.packing import Tree


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
    except (ImportError, RuntimeError) as error:
        if not kernels:
            raise
        reason = str(error).partition("\n")[0]
        raise InvalidInput(f"MARLAAS_TRAINER_KERNELS={','.join(kernels)}: it does not run here ({reason})") from error
    return backbone


def _check_packed(folder: Path, backbone: ModulesBackbone, kernels: Sequence[str]) -> None:
    """Compares log-probs of a few packed tokens with those of transformers' model, row by row, in a pass with a backward too.

    Leaves our attention and the kernels in the model. Raises InvalidInput for one that does not treat packed rows apart.
    """
    begin_T, *owns = np.split(np.arange(11) * 7919 % backbone.vocab, [4, 8])
    rows = [(np.concatenate([begin_T, own]), len(own)) for own in (*owns, owns[1])]
    theirs_M = torch.cat([written_logprobs(backbone.model, *row) for row in rows])
    use_kernels(backbone, kernels)
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
    with torch.no_grad():
        backbone.hidden(pack, None)
        ours_M = backbone.logprobs(sequences, None)
    learning_M = backbone.logprobs(sequences, [_at_zero(backbone)] * 2)
    learning_M.sum().backward()  # pyright: ignore[reportUnknownMemberType]
    for found_M in (ours_M, learning_M.detach()):
        check_computed(folder, backbone.model, found_M - theirs_M, pack.windows)


def _at_zero(backbone: ModulesBackbone) -> AdapterPlace:
    """An adapter that changes nothing yet."""
    adapter = init_adapter(LoraSpec(), backbone.linear_shapes(), 0)
    stack = backbone.stack(AdapterLayout.of(adapter))
    return stack, stack.put(flatten(adapter), adapter.scale)
