"""liger-kernel's RMSNorm and gated products of feed-forward layers, in the modules of one model.

Its RoPE is not used: transformers' layers call theirs by a global of the family's module, which all models share.
"""

from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from transformers.activations import ACT2FN

CENTRED = ("GemmaRMSNorm", "Gemma2RMSNorm", "Gemma3RMSNorm")
"""Norms whose weights are counted from 1, and that multiply in float32."""
PARTS = ("gate_proj", "up_proj", "down_proj", "act_fn")


class LigerNorm(NamedTuple):
    """A norm in liger's words."""

    eps: float
    offset: float
    casting: str


def use_liger(model: Any) -> None:
    """Replaces the norms and gated products that liger has. Loading compares the results."""
    from liger_kernel import ops  # pyright: ignore[reportMissingImports]  # here: an extra brings it

    silu, gelu = type(ACT2FN["silu"]), type(ACT2FN["gelu_pytorch_tanh"])
    gates: dict[type, Any] = {silu: ops.LigerSiLUMulFunction, gelu: ops.LigerGELUMulFunction}
    for module in model.modules():
        if norm := _norm_of(module):
            module.forward = partial(_normed, module, ops.LigerRMSNormFunction, norm)
        elif all(hasattr(module, part) for part in PARTS) and type(module.act_fn) in gates:
            module.forward = partial(_fed_forward, module, gates[type(module.act_fn)])


def _norm_of(module: Any) -> LigerNorm | None:
    kind = type(module).__name__
    if kind in CENTRED:
        return LigerNorm(module.eps, 1.0, "gemma")
    if kind.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
        return LigerNorm(module.variance_epsilon, 0.0, "llama")
    return None


def _normed(module: Any, kernel: Any, norm: LigerNorm, hidden: Tensor) -> Tensor:
    in_place = False  # layers may need what comes to the norm's backward for their residuals
    return kernel.apply(hidden, module.weight, norm.eps, norm.offset, norm.casting, in_place)


def _fed_forward(module: Any, gated: Any, hidden: Tensor) -> Tensor:
    return module.down_proj(gated.apply(module.gate_proj(hidden), module.up_proj(hidden)))
