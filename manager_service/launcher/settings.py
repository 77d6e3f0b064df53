"""Settings that only `marlaas up` has."""

from collections.abc import Mapping

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from common.settings import PREFIX, Bytes


class LocalSettings(BaseSettings):
    """Environment variables `MARLAAS_<NAME>`."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="ignore")

    devices: str = ""
    """The GPUs of each kind of worker, by nvidia-smi's numbers: rollout:0-3,trainer:4-7. Empty: rollouts, then trainers."""
    disk_reserve_bytes: Bytes = Field(default=1 << 30, ge=0)
    """Bytes that stay free on the disk of a local store, and of the Redis of `marlaas up`: with fewer, no step is trained."""
    rollout_share: float | None = Field(default=None, gt=0, lt=1)
    """The part of a memory that rollouts have where a trainer shares it. None: by what both take of the base model."""

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "LocalSettings":
        """Raises ValueError."""
        values = {
            name: environment[PREFIX + name.upper()]
            for name in cls.model_fields
            if PREFIX + name.upper() in environment
        }
        return cls.model_validate(values)
