"""Chooses the context that `marlaas up` serves where nobody has: what the memory for keys and values holds."""

from collections.abc import Mapping
from pathlib import Path

from common.errors import InvalidInput
from common.served_context import context_that_fits
from common.settings import dtype_on, parse_base_models, resolve_config

DEFAULT_KV_BYTES = 1 << 30
"""As rollout's own setting has it."""


def default_context(environment: Mapping[str, str]) -> tuple[int, str] | None:
    """(MARLAAS_MAX_CONTEXT for all services, a line that says so) if a base model's own context does not fit; None if all do.

    What is wrong with a setting or a base model is left to the service that it is for, whose error says it.
    """
    if "MARLAAS_MAX_CONTEXT" in environment or environment.get("MARLAAS_ENGINE", "torch") != "torch":
        return None
    try:
        kv_bytes = int(environment.get("MARLAAS_ROLLOUT_KV_BYTES", DEFAULT_KV_BYTES))
        bases = parse_base_models(environment.get("MARLAAS_BASE_MODELS", "tiny"))
        folders = {name: resolve_config(where) for name, where in bases.items()}
    except (ValueError, InvalidInput):
        return None
    element_bytes = 2 if _dtype(environment) == "bfloat16" else 4
    short = {name: found for name, folder in folders.items() if (found := _fitting(folder, kv_bytes, element_bytes))}
    if not short or min(fits for fits, _ in short.values()) == 0:
        return None
    name, (fits, own) = min(short.items(), key=lambda item: item[1][0])
    line = (
        f"context {fits:,} of the {own:,} tokens of {name!r}: what {kv_bytes / (1 << 30):.3g} GiB for keys and values hold;"
        " MARLAAS_ROLLOUT_KV_BYTES gives more memory, MARLAAS_MAX_CONTEXT chooses"
    )
    return fits, line


def _dtype(environment: Mapping[str, str]) -> str:
    """As rollout's own settings have it."""
    chosen = environment.get("MARLAAS_ROLLOUT_DTYPE", "auto")
    return dtype_on(environment.get("MARLAAS_ROLLOUT_DEVICE", "cpu")) if chosen == "auto" else chosen


def _fitting(folder: Path, kv_bytes: int, element_bytes: int) -> tuple[int, int] | None:
    try:
        return context_that_fits(folder, kv_bytes, element_bytes)
    except (OSError, ValueError, KeyError):  # a configuration that its service refuses by name
        return None
