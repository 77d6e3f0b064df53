"""`marlaas plan`: its arithmetic is held to what trainers measure and engines take."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from base_model.decoder import Decoder, DecoderConfig
from common.base_shape import BaseShape
from common.errors import InvalidInput
from common.footprint import kept_per_token, training_bytes
from common.settings import TINY
from common.weight_files import read_weights
from harness.bases import QWEN3_06B, make_random_base
from manager_service.cli.main import app
from manager_service.local.plan import (
    CORE,
    GPUS,
    IDLE_ADAPTERS,
    MICRO_BATCH_TOKENS,
    SLOTS,
    TRAINER_CACHE,
    Fit,
    make_plan,
    parse_gpu,
)
from rollout_service.embedded.pools import EngineLimits, Pools
from rollout_service.settings import RolloutSettings
from trainer_service.backbone.interface import Backbone
from trainer_service.backbone.loading import load_modules
from trainer_service.backbone.sequences import DecoderBackbone
from trainer_service.memory import measured
from trainer_service.settings import TrainerSettings
from trainer_service.training import Trainer

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}


def shape_of(folder: Path) -> BaseShape:
    return BaseShape.of(json.loads((folder / "config.json").read_text()))


@pytest.fixture
def qwen(tmp_path: Path) -> Path:
    """A configuration with the sizes of Qwen3-0.6B."""
    config = json.loads((TINY / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | QWEN3_06B | {"layer_types": None}))
    return tmp_path


def test_the_weights_are_counted_from_the_configuration(qwen: Path) -> None:
    assert shape_of(TINY).num_weights == read_weights(TINY).num
    assert shape_of(qwen).num_weights == 596_049_920


@pytest.mark.parametrize("modules", [False, True], ids=["decoder", "transformers"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_pass_keeps_is_what_trainers_measure(tmp_path: Path, modules: bool, dtype: torch.dtype) -> None:
    folder = make_random_base(tmp_path / "base", last_word=300, **SIZES)
    backbone: Backbone = (
        load_modules(folder, device="cpu", dtype=dtype)
        if modules
        else DecoderBackbone(Decoder.load(folder, dtype=dtype))
    )
    found = measured(Trainer(backbone), 1 << 30).bytes_per_token
    assert kept_per_token(shape_of(folder), itemsize=dtype.itemsize, rank=3, modules=modules) == pytest.approx(
        found, rel=0.03
    )


def plan_of(folder: Path, gpu: str, **changes: Any) -> list[Fit]:
    return make_plan(shape_of(folder), parse_gpu(gpu), itemsize=2, rank=16, **changes).fits


def test_the_engine_takes_the_rows_that_are_planned(qwen: Path) -> None:
    fits = [fit for fit in plan_of(qwen, "24GB") if fit.fits]
    assert len(fits) > 3
    for fit in fits:
        config = DecoderConfig.load(qwen, fit.context)
        pools = Pools(config, torch.zeros(1, dtype=torch.bfloat16), EngineLimits(kv_bytes=fit.kv).pools)
        assert pools.tokens >= fit.rows * fit.context


def test_a_plan_stays_below_the_memory_and_more_memory_holds_more(qwen: Path) -> None:
    small, large = plan_of(qwen, "16GB"), plan_of(qwen, "80GB")
    assert all(fit.training.total + fit.kv < 16e9 for fit in small if fit.fits)
    assert (
        all(less.rows <= more.rows for less, more in zip(small, large, strict=True)) and small[0].rows < large[0].rows
    )
    assert sorted(fit.rows for fit in small) == [fit.rows for fit in reversed(small)], "a longer context, fewer rows"


def test_layers_are_computed_again_where_memory_is_short(qwen: Path) -> None:
    (short,), (long,) = plan_of(qwen, "24GB", context=1024), plan_of(qwen, "24GB", context=32_768)
    assert (short.num_checkpointed, long.num_checkpointed) == (0, 28)
    whole, again = (
        training_bytes(shape_of(qwen), tokens=4096, itemsize=2, rank=16, gpu=True, num_checkpointed=number)
        for number in (0, 28)
    )
    assert again.kept < whole.kept / 10 and replace(again, kept=0, holes=0) == replace(whole, kept=0, holes=0)


@pytest.mark.parametrize(("text", "memory"), [("24GB", 24e9), ("40 GiB", 40 * 2**30), ("H100", 80e9)])
def test_a_gpu_is_a_size_or_a_name(text: str, memory: float) -> None:
    assert parse_gpu(text).memory == memory


def test_a_gpu_of_a_size_is_as_slow_as_the_slowest_known(qwen: Path) -> None:
    assert parse_gpu("24GB") == GPUS["l4"]
    assert parse_gpu("1000GB").bandwidth == max(gpu.bandwidth for gpu in GPUS.values())
    with pytest.raises(InvalidInput, match="24GB, or one of l4, a10"):
        parse_gpu("big")


def test_a_mixture_of_experts_is_refused_by_name(qwen: Path) -> None:
    config = json.loads((qwen / "config.json").read_text())
    with pytest.raises(ValueError, match="num_experts"):
        BaseShape.of(config | {"num_experts": 8})
    with pytest.raises(ValueError, match="hidden_size"):
        BaseShape.of({"num_attention_heads": 1})


def run(*argv: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["plan", *argv])
    return result.exit_code, result.stdout


def test_the_command_prints_settings_that_make_services_take_that(qwen: Path) -> None:
    status, printed = run(str(qwen), "--gpu", "24GB", "--json")
    found = json.loads(printed)
    chosen = next(fit for fit in found["contexts"] if str(fit["context"]) == found["settings"]["MARLAAS_MAX_CONTEXT"])
    assert status == 0 and found["settings"]["MARLAAS_ROLLOUT_KV_BYTES"] == str(chosen["kv_bytes"])
    status, printed = run(str(qwen), "--gpu", "24GB")
    assert status == 0 and f"MARLAAS_MAX_CONTEXT={chosen['context']}" in printed and "596 M weights" in printed


def test_the_command_says_what_helps_where_nothing_fits(qwen: Path) -> None:
    status, printed = run(str(qwen), "--gpu", "2GB")
    assert status == 1 and "two copies of the weights are more than the memory" in printed
    status, printed = run(str(qwen), "--gpu", "6GB", "--context", "40960")
    assert status == 1 and "a context of 40,960 does not fit" in printed and "cuda:1" in printed


def test_a_cpu_is_planned_in_float32(qwen: Path) -> None:
    cpu = CORE._replace(memory=24e9)
    whole = make_plan(shape_of(qwen), cpu, itemsize=4, rank=16)
    assert whole.chosen is not None and whole.weights == pytest.approx(2.38e9, rel=0.01)


def test_its_constants_are_the_workers_defaults() -> None:
    trainer, rollout = TrainerSettings.model_fields, RolloutSettings.model_fields
    assert trainer["trainer_micro_batch_tokens"].default == MICRO_BATCH_TOKENS
    assert 2 * trainer["trainer_cache_bytes"].default == TRAINER_CACHE
    assert rollout["rollout_slots"].default == SLOTS
    assert rollout["rollout_idle_adapter_bytes"].default == IDLE_ADAPTERS
