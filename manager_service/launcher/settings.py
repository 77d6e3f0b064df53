"""Settings that only `marlaas up` has."""

import contextlib
from collections.abc import Callable, Mapping, MutableMapping

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from common.errors import InvalidInput
from common.settings import PREFIX, Bytes, parse_base_models, pinned


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


def pin_bases(environment: MutableMapping[str, str], tell: Callable[[str], None]) -> None:
    """Names the hub's models by their commits, for all services, and tells these. Errors are left to the services."""
    with contextlib.suppress(InvalidInput, ValueError):
        bases = parse_base_models(environment.get("MARLAAS_BASE_MODELS", "tiny"))
        found = dict(bases)
        for name, where in bases.items():
            with contextlib.suppress(InvalidInput):
                found[name] = pinned(where)
        if found != bases:
            environment["MARLAAS_BASE_MODELS"] = ",".join(f"{name}={where}" for name, where in found.items())
            for name, where in found.items():
                tell(f"base model {name}: {where}")
