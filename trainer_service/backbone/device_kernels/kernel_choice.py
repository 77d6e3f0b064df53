"""Chooses the kernels of a transformers backbone by their names, and refuses those that cannot run."""

from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.fx.experimental._config as symbols

from common.errors import InvalidInput
from trainer_service.backbone.attention import NAME
from trainer_service.backbone.modules import ModulesBackbone
from trainer_service.settings import AUTO, DEVICE_KERNELS, TrainerSettings


def chosen_kernels(settings: TrainerSettings, device: torch.device) -> tuple[str, ...]:
    """The kernels of a process on this device. Raises InvalidInput for named ones that cannot run."""
    dtype = getattr(torch, settings.dtype)
    if settings.trainer_kernels == AUTO:
        return tuple(name for name in DEVICE_KERNELS if not _hindrance(name, device, dtype))
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
    if dtype != torch.bfloat16:
        return "flash attention needs MARLAAS_TRAINER_DTYPE=bfloat16"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "flash attention needs a GPU of capability 8.0 or newer"
    if name != "varlen" and not find_spec("triton"):
        return "it needs Triton, which torch brings on CUDA"
    return ""


def use_kernels(backbone: ModulesBackbone, names: Sequence[str]) -> None:
    """Lets a backbone compute with these kernels from now on, and plainly where none is named."""
    backbone.model.set_attn_implementation(_attention(names))
    backbone.current.fused = "lora" in names
    if "compile" in names:
        compile_layers(backbone)


def compile_layers(backbone: ModulesBackbone, backend: Any = "inductor") -> None:
    """Compiles the layers' passes with a backward, at the first of them: one graph for layers of a kind, whatever the tokens and
    adapters of a pass. Attention and adapters' layers are operators in it. `backend`: of torch's compiler."""
    backbone.current.one_graph = True
    symbols.use_duck_shape = False  # 8 adapters of rank 8 are two sizes
    for layer in backbone.layers:
        compiled: Any = torch.compile(layer.forward, fullgraph=True, dynamic=True, backend=backend)
        layer.forward = partial(_where_it_learns, compiled, layer.forward)


def _where_it_learns(compiled: Any, plain: Any, *given: Any, **named: Any) -> Any:
    return (compiled if torch.is_grad_enabled() else plain)(*given, **named)


def _attention(names: Sequence[str]) -> str:
    """The name by which transformers knows the attention."""
    if {"varlen", "compile"} & {*names}:
        from trainer_service.backbone.device_kernels import varlen

        return varlen.NAME
    return NAME
