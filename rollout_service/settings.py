"""Settings of one rollout process, read once at its start."""

from typing import Literal

from pydantic import Field

from common.settings import Settings


class RolloutSettings(Settings):
    """Environment variables `MARLAAS_<NAME>`."""

    engine: Literal["torch"] = "torch"
    """Who computes the tokens."""
    rollout_device: str = "cpu"
    """A torch device: cpu, cuda, cuda:1."""
    rollout_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the base model and the adapters; log-probs are always float32."""
    rollout_threads: int = Field(default=1, ge=1)
    """Of torch. Deterministic mode needs 1."""
    rollout_slots: int = Field(default=64, ge=1)
    """Turns generated at once."""
    rollout_kv_bytes: int = Field(default=1 << 30, ge=1)
    """Memory for keys and values of the turns under way; turns that do not fit wait."""
    rollout_prefix_bytes: int = Field(default=64 << 20, ge=0)
    """Memory for keys and values of prompts, kept for the other samples of a group."""
    rollout_idle_adapter_bytes: int = Field(default=64 << 20, ge=0)
    """Memory for adapters that no request names at the moment."""
