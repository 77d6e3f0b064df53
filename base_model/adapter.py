"""Makes, checks, loads and saves the LoRA weights of one adapter version, in PEFT's file layout.

LoRA: Hu et al. 2021, arXiv 2106.09685. y = W x + (alpha / rank) B A x, with A [rank, in] and B [out, rank]; B starts at 0.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from torch import Tensor

from common.errors import CorruptObject, InvalidInput
from common.models.base_digest import DIGEST_FIELD
from common.rng import uniform
from common.wire.messages import LoraSpec

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
PEFT_PREFIX = "base_model.model.model."


@dataclass(frozen=True, slots=True)
class Adapter:
    """Float32 weights of one version. `a[name]` [rank, in], `b[name]` [out, rank]; name as `layers.3.mlp.up_proj`."""

    spec: LoraSpec
    a: Mapping[str, Tensor]
    b: Mapping[str, Tensor]

    @property
    def scale(self) -> float:
        return self.spec.alpha / self.spec.rank

    def names(self) -> list[str]:
        """Targeted modules in a fixed order."""
        return sorted(self.a)


def target_names(spec: LoraSpec, shapes: Mapping[str, tuple[int, int]]) -> list[str]:
    """Lists the modules that `spec` targets, by default all. Raises InvalidInput for one that the base lacks."""
    known = {name.rsplit(".", 1)[-1] for name in shapes}
    leaves = set(spec.targets) or known
    unknown = leaves - known
    if unknown:
        raise InvalidInput(
            f"lora_targets: the base model has no layer {', '.join(sorted(unknown))}; it has {', '.join(sorted(known))}"
        )
    return sorted(name for name in shapes if name.rsplit(".", 1)[-1] in leaves)


def init_adapter(spec: LoraSpec, shapes: Mapping[str, tuple[int, int]], seed: int) -> Adapter:
    """Makes version 0, a pure function: A uniform as in PEFT (Kaiming, a = sqrt 5: bound 1/sqrt(in)), B zero."""
    names = target_names(spec, shapes)
    a: dict[str, Tensor] = {}
    for number, name in enumerate(names):
        width = shapes[name][1]
        drawn = uniform(seed, "lora_init", number, np.arange(spec.rank * width))
        bound = 1.0 / math.sqrt(width)
        a[name] = torch.from_numpy(((2.0 * drawn - 1.0) * bound).astype(np.float32).reshape(spec.rank, -1))
    return Adapter(spec, a, {name: torch.zeros(shapes[name][0], spec.rank) for name in names})


def save_adapter(adapter: Adapter, base_model: str, base_digest: str = "") -> dict[str, bytes]:
    """Returns file name -> content, in PEFT's layout, which `PeftModel.from_pretrained` and vLLM load."""
    config = _peft_config(adapter, base_model) | ({DIGEST_FIELD: base_digest} if base_digest else {})
    tensors: dict[str, np.ndarray] = {}
    for name in adapter.names():
        tensors[f"{PEFT_PREFIX}{name}.lora_A.weight"] = adapter.a[name].detach().cpu().contiguous().numpy()
        tensors[f"{PEFT_PREFIX}{name}.lora_B.weight"] = adapter.b[name].detach().cpu().contiguous().numpy()
    weights = safetensors.numpy.save(tensors, metadata={"format": "pt"})  # a third of the time of their tensors
    return {WEIGHTS_FILE: weights, CONFIG_FILE: json.dumps(config, indent=2).encode()}


def load_adapter(files: Mapping[str, bytes]) -> Adapter:
    """The inverse of `save_adapter`. Raises CorruptObject if the files are not such an adapter."""
    try:
        config: dict[str, Any] = json.loads(files[CONFIG_FILE])
        tensors = safetensors.torch.load(files[WEIGHTS_FILE])
        spec = LoraSpec(config["r"], float(config["lora_alpha"]), tuple(sorted(config["target_modules"])))
    except (KeyError, ValueError, TypeError, safetensors.SafetensorError) as error:
        raise CorruptObject(f"not an adapter in PEFT layout: {error}") from error
    a = _factors(tensors, ".lora_A.weight")
    b = _factors(tensors, ".lora_B.weight")
    if a.keys() != b.keys() or any(t.shape[0] != spec.rank for t in a.values()):
        raise CorruptObject("adapter factors do not match each other or the rank in adapter_config.json")
    if not all(bool(torch.isfinite(t).all()) for t in (*a.values(), *b.values())):
        raise CorruptObject("adapter holds values that are not finite numbers")
    return Adapter(spec, a, b)


def check_fits(adapter: Adapter, shapes: Mapping[str, tuple[int, int]]) -> None:
    """Raises CorruptObject unless the adapter has exactly its configuration's modules, in the base's shapes."""
    try:
        names = target_names(adapter.spec, shapes)
    except InvalidInput as error:
        raise CorruptObject(f"adapter does not fit the base model: {error}") from error
    if adapter.names() != names:
        odd = sorted(set(adapter.names()) ^ set(names))[0]
        raise CorruptObject(f"adapter does not fit the base model: {odd} is missing, or not targeted")
    for name in names:
        if (adapter.b[name].shape[0], adapter.a[name].shape[1]) != shapes[name]:
            raise CorruptObject(f"adapter does not fit the base model at {name}")


def _factors(tensors: Mapping[str, Tensor], suffix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(PEFT_PREFIX).removesuffix(suffix): tensor.float()
        for name, tensor in tensors.items()
        if name.endswith(suffix)
    }


def _peft_config(adapter: Adapter, base_model: str) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": adapter.spec.rank,
        "lora_alpha": adapter.spec.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted({name.rsplit(".", 1)[-1] for name in adapter.a}),
    }
