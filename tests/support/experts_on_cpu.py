"""Has vLLM's CPU build compute a mixture of experts beside adapters of attention: it would take Triton's kernels, which it lacks.

vLLM's processes import this when the engine is started with it.
"""

from typing import Any

from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig  # pyright: ignore[reportMissingImports]

from rollout_service.process.vllm_guard import Guard

_checked: Any = FusedMoEConfig.__post_init__


def _without_adapters(self: Any) -> None:
    _checked(self)
    self.is_lora_enabled = False  # of experts: they have none


FusedMoEConfig.__post_init__ = _without_adapters


class ExpertsOnCpu(Guard):
    """vLLM's `worker_extension_cls`, as the engine's own is."""
