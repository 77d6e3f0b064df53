"""Chooses the kernels of a transformers backbone by their names, and refuses those that cannot run."""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch

from common.errors import InvalidInput
from trainer_service.backbone.attention import NAME
from trainer_service.backbone.grouped import LoraLinear
from trainer_service.backbone.modules import ModulesBackbone
from trainer_service.settings import AUTO, TrainerSettings


def chosen_kernels(settings: TrainerSettings, device: torch.device) -> tuple[str, ...]:
    """The kernels of a process on this device. Raises InvalidInput for named ones that cannot run."""
    dtype = getattr(torch, settings.dtype)
    if settings.trainer_kernels == AUTO:
        return () if _hindrance("varlen", device, dtype) else ("varlen",)
    refuse_kernels(settings.kernels, device, dtype)
    return settings.kernels


def refuse_kernels(names: Sequence[str], device: torch.device, dtype: torch.dtype) -> None:
    """Raises InvalidInput for kernels that cannot run on this device, or in the base model's dtype."""
    for name in names:
        if reason := _hindrance(name, device, dtype):
            raise InvalidInput(f"MARLAAS_TRAINER_KERNELS={name}: {reason}")


def _hindrance(name: str, device: torch.device, dtype: torch.dtype) -> str:
    if device.type != "cuda":
        return f"it runs on CUDA only, and MARLAAS_TRAINER_DEVICE is {device.type}"
    if name == "liger" and not find_spec("liger_kernel"):
        return "install liger-kernel (pip install 'marlaas[liger]')"
    if name == "varlen" and dtype != torch.bfloat16:
        return "flash attention needs MARLAAS_TRAINER_DTYPE=bfloat16"
    if name == "varlen" and torch.cuda.get_device_capability(device) < (8, 0):
        return "flash attention needs a GPU of capability 8.0 or newer"
    return ""


def use_kernels(backbone: ModulesBackbone, names: Sequence[str]) -> None:
    """Lets a backbone compute with these kernels from now on, and plainly where none is named."""
    backbone.model.set_attn_implementation(_attention(names))
    if "liger" in names:
        from trainer_service.backbone.device_kernels.liger import use_liger  # here: few have it

        use_liger(backbone.model)
    if "compile" in names:
        compile_layers(backbone.layers)


def compile_layers(layers: Sequence[Any], backend: Any = "inductor") -> None:
    """Compiles each layer at its first forward: norms, RoPE, activations and residuals become a few kernels. Attention and
    adapters' layers, which depend on each pack's rows, stay. `backend`: of torch's compiler."""
    for layer in layers:
        for module in layer.modules():
            if isinstance(module, LoraLinear):
                uncompiled: Any = torch.compiler.disable(module.forward)
                module.forward = uncompiled
        layer.forward = torch.compile(layer.forward, dynamic=True, backend=backend)


def _attention(names: Sequence[str]) -> str:
    """The name by which transformers knows the attention."""
    if "varlen" in names:
        from trainer_service.backbone.device_kernels import varlen

        return varlen.NAME
    return NAME
