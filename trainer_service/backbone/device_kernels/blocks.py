"""transformers' layers compiled by torch: norms, RoPE, activations and residuals become a few kernels.

Attention and linear layers with adapters stay as they are: what they do depends on each pack's rows.
"""

from collections.abc import Sequence
from typing import Any

import torch

from trainer_service.backbone.grouped import LoraLinear


def compile_blocks(layers: Sequence[Any], backend: Any = "inductor") -> None:
    """Compiles each layer when it first computes. `backend`: of torch's compiler, by its name, or a function."""
    for layer in layers:
        for module in layer.modules():
            if isinstance(module, LoraLinear):
                uncompiled: Any = torch.compiler.disable(module.forward)
                module.forward = uncompiled
        layer.forward = torch.compile(layer.forward, dynamic=True, backend=backend)
