"""Computes how much context of a base model is served: the model's own, or as much of it as a setting or the memory allows."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.text.model_folder import read_config

GRAIN = 256
"""A default is a multiple of this."""
ROWS_PART = 11 / 16
"""The part of the memory for keys and values that the embedded engine has for rows at least: `EngineLimits.pools` says exactly."""


def cache_bytes(config: Mapping[str, Any], element_bytes: int) -> int:
    """Bytes of keys and values of one token, of a model with this `config.json`."""
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return 2 * config["num_hidden_layers"] * heads * head_dim * element_bytes


def cache_room(kv_bytes: int, num_layers: int) -> int:
    """Bytes for rows of the memory for keys and values; the rest is for one layer that is resized."""
    return kv_bytes * num_layers // (num_layers + 1)


def fitting_context(kv_bytes: int, num_layers: int, token_bytes: int) -> int:
    """The longest context, of GRAIN tokens or a multiple, of which a row fits; 0 if none does."""
    return cache_room(kv_bytes, num_layers) // token_bytes // GRAIN * GRAIN


def context_that_fits(folder: Path, kv_bytes: int, element_bytes: int) -> tuple[int, int] | None:
    """(what fits, the model's own) if the embedded engine cannot hold the model's own context; None if it can."""
    config = read_config(folder)
    own = config["max_position_embeddings"]
    token_bytes, num_layers, rows = (
        cache_bytes(config, element_bytes),
        config["num_hidden_layers"],
        int(ROWS_PART * kv_bytes),
    )
    if cache_room(rows, num_layers) >= own * token_bytes:
        return None
    return fitting_context(rows, num_layers, token_bytes), own
