"""Settings of one trainer process, read once at its start."""

from typing import Literal

from pydantic import Field

from common.settings import Settings


class TrainerSettings(Settings):
    """Environment variables `MARLAAS_<NAME>`."""

    trainer_device: str = "cpu"
    """A torch device: cpu, cuda, cuda:1."""
    trainer_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the base model; adapters and moments are always float32."""
    trainer_threads: int = Field(default=1, ge=1)
    """Of torch. Deterministic mode needs 1."""
    trainer_micro_batch_tokens: int = Field(default=4096, ge=1)
    """Tokens in one forward and backward, padding included. Bounds memory. Results depend on it by rounding
    only; in deterministic mode all trainers need the same value, for a group that exceeds it is cut."""
    trainer_cached_states: int = Field(default=16, ge=0)
    """Adapters with optimiser state kept in memory between their steps."""
