"""`marlaas up` serves as much of a base model's context as its memory holds, and says so."""

import json
from pathlib import Path

import pytest
import torch

from base_model.decoder import DecoderConfig
from common.errors import InvalidInput
from common.settings import TINY
from manager_service.local.context import default_context
from rollout_service.embedded.pools import EngineLimits, Pools

GIB = 1 << 30


@pytest.fixture
def qwen(tmp_path: Path) -> Path:
    """A configuration with the sizes of Qwen3-0.6B."""
    sizes = {
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_size": 1024,
        "num_attention_heads": 16,
    }
    config = (
        json.loads((TINY / "config.json").read_text())
        | sizes
        | {"max_position_embeddings": 40_960, "layer_types": None}
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def pools(folder: Path, kv_bytes: int, context: int | None, dtype: torch.dtype = torch.float32) -> Pools:
    limits = EngineLimits(kv_bytes=kv_bytes)
    return Pools(DecoderConfig.load(folder, context), torch.zeros(1, dtype=dtype), limits.pools)


@pytest.mark.parametrize(
    ("kv_bytes", "dtype", "fits"), [(GIB, "float32", 3072), (GIB, "bfloat16", 6144), (4 * GIB, "float32", 12_288)]
)
def test_what_fits_is_what_the_engine_takes(qwen: Path, kv_bytes: int, dtype: str, fits: int) -> None:
    bases = {
        "MARLAAS_BASE_MODELS": f"tiny,qwen={qwen}",
        "MARLAAS_ROLLOUT_KV_BYTES": str(kv_bytes),
        "MARLAAS_ROLLOUT_DTYPE": dtype,
    }
    chosen = default_context(bases)
    assert chosen is not None and chosen[0] == fits
    assert f"context {fits:,} of the 40,960 tokens of 'qwen'" in chosen[1] and "MARLAAS_MAX_CONTEXT" in chosen[1]
    assert pools(qwen, kv_bytes, fits, getattr(torch, dtype)).tokens >= fits


def test_on_a_gpu_keys_and_values_take_half(qwen: Path) -> None:
    gpu = {"MARLAAS_BASE_MODELS": f"qwen={qwen}", "MARLAAS_ROLLOUT_DEVICE": "cuda"}
    assert (default_context(gpu) or (0,))[0] == 6144
    assert (default_context(gpu | {"MARLAAS_ROLLOUT_DTYPE": "float32"}) or (0,))[0] == 3072


def test_nothing_is_chosen_where_all_fits_or_somebody_has_chosen(qwen: Path) -> None:
    large = {"MARLAAS_BASE_MODELS": f"qwen={qwen}"}
    assert default_context({}) is None
    assert default_context(large | {"MARLAAS_MAX_CONTEXT": "1024"}) is None
    assert default_context(large | {"MARLAAS_ENGINE": "vllm"}) is None
    assert default_context(large | {"MARLAAS_ROLLOUT_KV_BYTES": str(16 * GIB)}) is None
    for wrong in (
        {"MARLAAS_BASE_MODELS": "x"},
        {"MARLAAS_ROLLOUT_KV_BYTES": "much"},
        {"MARLAAS_BASE_MODELS": "x=/nowhere"},
    ):
        assert default_context(large | wrong) is None, "the service that it is for says what is wrong"


def test_a_worker_that_cannot_hold_the_context_says_what_it_can(qwen: Path) -> None:
    with pytest.raises(InvalidInput, match=r"40960 tokens.*or set MARLAAS_MAX_CONTEXT=3072 for all services"):
        pools(qwen, GIB, None)
    with pytest.raises(InvalidInput, match=r"MARLAAS_ROLLOUT_KV_BYTES$"):
        pools(qwen, 1 << 20, None)
