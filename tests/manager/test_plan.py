"""`marlaas plan`: its arithmetic is held to what trainers measure and engines take."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from base_model.decoder import Decoder, DecoderConfig
from common.errors import InvalidInput
from common.models.base_shape import BaseShape
from common.models.footprint import kept_per_token, training_bytes, weights_of_rank
from common.models.weight_files import read_weights
from common.settings import KNOWN, TINY
from harness.bases import QWEN3_06B, make_random_base
from manager_service.http.openai.jobs.hyperparameters import parse_hyperparameters
from manager_service.launcher import engines, fitting
from manager_service.launcher.commands.main import app
from manager_service.launcher.commands.plan_command import plan_for, settings_of
from manager_service.launcher.engines import GPUS, LAUNCH_S, REACHED, Load, max_lora_rank, parse_gpu, trained_flops
from manager_service.launcher.gpus import Needs, chosen_placement, parse_devices
from manager_service.launcher.plan import DeviceSplit, Plan, PlannedRow, make_plan
from rollout_service.embedded.backbone.interface import ModelShape
from rollout_service.embedded.pools import EngineLimits, Pools
from rollout_service.process import vllm_engine
from rollout_service.settings import LORA_RANKS, RolloutSettings
from tests.support.families import save_family
from tests.support.trainer_cases import measured
from trainer_service import memory
from trainer_service.backbone.interface import Backbone
from trainer_service.backbone.loading import load_modules
from trainer_service.backbone.sequences import DecoderBackbone
from trainer_service.packing import Budget
from trainer_service.settings import TrainerSettings
from trainer_service.training import Trainer

GUIDE = (Path(__file__).resolve().parents[2] / "docs" / "real-models.md").read_text()
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
    found = probe(backbone).bytes_per_token
    assert kept_per_token(shape_of(folder), itemsize=dtype.itemsize, rank=3, modules=modules) == pytest.approx(
        found, rel=0.03
    )


def probe(backbone: Backbone) -> Budget:
    return measured(Trainer(backbone), 1 << 30)


@pytest.mark.parametrize("experts", [(8, 2, 128), (64, 4, 64)])
def test_what_a_token_keeps_in_a_mixture_of_experts_is_what_trainers_measure(
    tmp_path: Path, experts: tuple[int, int, int]
) -> None:
    num, active, width = experts
    more = {"num_experts": num, "num_experts_per_tok": active, "moe_intermediate_size": width}
    folder = save_family("qwen3_moe", tmp_path, **SIZES, **more)
    shape = shape_of(folder)
    assert shape.num_weights == read_weights(folder).num and shape.num_active < shape.num_weights
    found = probe(load_modules(folder))
    assert kept_per_token(shape, itemsize=4, rank=3, modules=True) == pytest.approx(found.bytes_per_token, rel=0.03)


def test_what_masks_keep_is_what_trainers_measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "WIDTH", 512)  # at the few positions of a probe, more than masks grows with pairs
    folder = make_random_base(tmp_path / "base", last_word=300, **SIZES | {"max_position_embeddings": 1024})
    found = probe(DecoderBackbone(Decoder.load(folder))).bytes_per_pair
    assert found == pytest.approx(4, rel=0.05), "a number in float32, once for all layers"


def plan_of(folder: Path, gpu: str, **changes: Any) -> list[PlannedRow]:
    return make_plan(shape_of(folder), parse_gpu(gpu), rank=16, **changes).rows


def test_the_engine_takes_the_rows_that_are_planned(qwen: Path) -> None:
    rows = [row for row in plan_of(qwen, "24GB") if row.rows]
    assert len(rows) > 3
    for row in rows:
        config = ModelShape.of(DecoderConfig.load(qwen, row.context))
        pools = Pools(config, torch.zeros(1, dtype=torch.bfloat16), EngineLimits(kv_bytes=row.rollout.kv).pools)
        assert pools.tokens >= row.rows * row.context


def test_a_plan_stays_below_the_memory_and_more_memory_holds_more(qwen: Path) -> None:
    small, large = plan_of(qwen, "16GB"), plan_of(qwen, "80GB")
    assert all(row.trainer.trainer + row.rollout.rollout < 16e9 for row in small if row.rows)
    assert (
        all(less.rows <= more.rows for less, more in zip(small, large, strict=True)) and small[0].rows < large[0].rows
    )
    assert sorted(row.rows for row in small) == [row.rows for row in reversed(small)], "a longer context, fewer rows"


def test_a_gpu_is_a_name_or_a_size_as_slow_as_the_slowest_known(qwen: Path) -> None:
    assert [parse_gpu(text).memory for text in ("24GB", "40 GiB", "H100")] == [24e9, 40 * 2**30, 80e9]
    assert parse_gpu("24GB") == GPUS["l4"]
    assert parse_gpu("1000GB").bandwidth == max(gpu.bandwidth for gpu in GPUS.values())
    with pytest.raises(InvalidInput, match="24GB, or one of l4, a10"):
        parse_gpu("big")


def test_experts_whose_sizes_are_not_known_are_refused_by_name(qwen: Path) -> None:
    config = json.loads((qwen / "config.json").read_text())
    with pytest.raises(ValueError, match=r"n_routed_experts.*'deepseek_v3'.*only qwen3_moe"):
        BaseShape.of(config | {"model_type": "deepseek_v3", "n_routed_experts": 8})
    moe = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    with pytest.raises(ValueError, match="mlp_only_layers"):
        BaseShape.of(config | moe | {"mlp_only_layers": [0]})
    with pytest.raises(ValueError, match="hidden_size"):
        BaseShape.of({"num_attention_heads": 1})


QWEN3_8B = {
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
QWEN3_32B = {
    "hidden_size": 5120,
    "intermediate_size": 25_600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "tie_word_embeddings": False,
}


def larger(qwen: Path, sizes: dict[str, Any]) -> BaseShape:
    """The sizes of another base model."""
    file = qwen / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | sizes))
    return shape_of(qwen)


def vllm_plan(shape: BaseShape, gpu: str, num_devices: int, **changes: Any) -> Plan:
    device = parse_gpu(gpu)
    return make_plan(shape, device, rank=16, engine="vllm", num_devices=num_devices, **changes)


def test_experts_that_a_token_does_not_take_are_held_but_not_computed(qwen: Path) -> None:
    shape = larger(qwen, QWEN3_30B_A3B)
    assert (shape.num_weights, shape.num_active) == (
        30_532_122_624,
        3_353_032_704,
    )  # as its card has them: 30.5 B and 3.3 B
    assert shape.adapter_weights(1) == 48 * (2 * (2048 + 4096) + 2 * (2048 + 512)), "on attention alone"

    def speed(rows: int) -> float:
        return Load(shape, GPUS["h200"], "vllm", 2, 16, 1024).tokens_per_s(rows)

    dense = replace(shape, experts=None, ffn=128 * 768)
    beside = Load(dense, GPUS["h200"], "vllm", 2, 16, 1024)
    assert speed(1) == pytest.approx(4800e9 / (2 * shape.num_active), rel=0.1), (
        "one row reads the experts that it takes"
    )
    assert speed(256) == pytest.approx(beside.tokens_per_s(256), rel=0.05), "many rows read all"


def test_a_rank_holds_its_part_and_what_is_gathered(qwen: Path) -> None:
    shape = larger(qwen, QWEN3_32B)
    assert weights_of_rank(shape, 1) == shape.num_weights == pytest.approx(32.8e9, rel=0.01)
    table = shape.vocab * shape.hidden
    assert weights_of_rank(shape, 4) == shape.num_weights / 4 + 2 * table

    def of(num_ranks: int) -> float:
        known: dict[str, Any] = {"itemsize": 2, "rank": 16, "gpu": True, "num_checkpointed": 64}
        return training_bytes(shape, tokens=4096, num_ranks=num_ranks, **known).total

    assert of(1) - of(4) == pytest.approx(2 * (shape.num_weights * 3 / 4 - 2 * table))


@pytest.mark.parametrize(("number", "expected"), [(1, 256 * 1024), (4, 64 * 1024), (8, 32 * 1024), (16, 32 * 1024)])
def test_devices_that_share_the_heads_share_keys_and_values(qwen: Path, number: int, expected: int) -> None:
    assert larger(qwen, QWEN3_32B).kv_bytes(2, number) == expected, "and where heads are fewer, each has one"


def test_a_base_that_one_gpu_holds_but_once_is_split_over_two(qwen: Path) -> None:
    shape = larger(qwen, QWEN3_32B)
    assert vllm_plan(shape, "h100", 1).chosen is None
    fit = vllm_plan(shape, "h200", 2).chosen
    assert fit is not None and fit.split == DeviceSplit(workers=1, parallel=1, ranks=1, shared=False)


def test_on_many_gpus_heads_are_spread_and_the_trainer_has_ranks(qwen: Path) -> None:
    shape = larger(qwen, QWEN3_32B)
    plan = vllm_plan(shape, "80GB", 8)
    fit = plan.chosen
    assert fit is not None and fit.split.parallel > 1 and fit.split.ranks > 1 and fit.rows >= 16
    assert fit.split.for_rollouts + fit.split.ranks <= 8
    assert fit.trainer.trainer < 80e9 and fit.rollout.rollout <= 0.9 * 80e9
    assert fit.rollout.rows * fit.split.workers == fit.rows
    others = [other for other in plan.rows if other.context == fit.context]
    assert others == [fit], "one split a context"


def test_a_trained_token_attends_to_half_of_its_row(qwen: Path) -> None:
    # By hand: 28 layers of 16 heads of 128, and half of 40,960 positions
    whole, again = (trained_flops(shape_of(qwen), 40_960, again=part) for part in (False, True))
    assert whole == pytest.approx(2 * 1.19e9 + 3 * 4.70e9, rel=0.01)
    assert again - whole == pytest.approx(1.19e9 + 4.70e9, rel=0.01), "a forward"
    short, *_, long = plan_of(qwen, "h100", num_devices=8)
    assert long.trained_per_s / long.split.ranks < short.trained_per_s / short.split.ranks / 5


def test_one_gpu_says_how_sampling_and_training_share_it(qwen: Path) -> None:
    found = plan_for(str(qwen), gpu="24GB")
    fit = found.chosen
    assert fit is not None
    seconds = [1 / fit.tokens_per_s, 1 / fit.trained_per_s]  # of a token
    assert fit.sampling_share == pytest.approx(seconds[0] / sum(seconds))
    printed = " ".join(run(str(qwen), "--gpu", "24GB")[1].split())
    assert f"{fit.sampling_share:.0%} of its time sampling" in printed
    assert f"{1 / sum(seconds):,.0f} tokens/s go through both" in printed
    assert "a core" not in printed and "one core" in " ".join(run(str(qwen))[1].split())


def test_one_gpu_for_both_gives_vllm_what_the_trainer_leaves(qwen: Path) -> None:
    plan = vllm_plan(shape_of(qwen), "24GB", 1)
    for row in plan.rows:
        fraction = float(settings_of(plan, row)["MARLAAS_VLLM_MEMORY_FRACTION"])
        assert row.trainer.training.total + fraction * 24e9 <= 0.95 * 24e9
        assert row.rows and row.rollout.rollout <= fraction * 24e9 < row.rollout.rollout + 24e6


def test_vllm_is_started_for_ranks_that_it_takes() -> None:
    assert [max_lora_rank(rank) for rank in (1, 32, 33, 300, 512)] == [32, 32, 64, 320, 512]


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
    status, printed = run(str(qwen), "--gpu", "8GB", "--context", "40960")
    assert status == 1 and "a context of 40,960 does not fit" in printed and "a shorter --context" in printed


def test_vllm_on_a_cpu_is_planned_for_what_it_computes_there_alone(qwen: Path) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    for case, reason in ((sizes, "head_dim 16"), (QWEN3_30B_A3B, "a mixture of experts")):
        larger(qwen, case)
        with pytest.raises(InvalidInput, match=f"on a CPU vLLM does not compute {reason}"):
            plan_for(str(qwen), gpu=None, engine="vllm")


def test_a_context_below_the_least_setting_is_served_without_one(qwen: Path) -> None:
    larger(qwen, {"max_position_embeddings": 32})
    plan = plan_for(str(qwen), gpu="24GB")
    assert plan.chosen is not None and plan.chosen.context == 32
    assert "MARLAAS_MAX_CONTEXT" not in settings_of(plan, plan.chosen)


@pytest.mark.parametrize(
    ("model", "gpu", "reason"),
    [("/nowhere", "24GB", "neither a folder nor"), ("", "0GB", "0GB"), ("", "0.0 GiB", "a size such as 24GB")],
)
def test_nonsense_is_refused(qwen: Path, model: str, gpu: str, reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        plan_for(model or str(qwen), gpu=gpu)


def test_a_rank_is_one_that_jobs_may_have(qwen: Path) -> None:
    assert run(str(qwen), "--gpu", "24GB", "--rank", "512")[0] == 0
    assert run(str(qwen), "--gpu", "24GB", "--rank", "513")[0] == 2
    assert parse_hyperparameters({"lora_rank": 512}).lora_rank == 512
    with pytest.raises(InvalidInput, match="lora_rank"):
        parse_hyperparameters({"lora_rank": 513})


def limited(monkeypatch: pytest.MonkeyPatch, num_bytes: float) -> None:
    """Runs what follows in a container of so much memory."""

    def limit() -> float:
        return num_bytes

    monkeypatch.setattr("manager_service.launcher.commands.plan_command.host_limit", limit)


@pytest.mark.parametrize(
    ("sizes", "options"),
    [({}, "--gpu 24GB"), ({}, ""), (QWEN3_8B, "--gpu 80GB"), (QWEN3_32B, "--gpu h100 --gpus 8 --engine vllm")],
)
def test_the_guide_has_what_the_command_prints(
    qwen: Path, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, Any], options: str
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    limited(monkeypatch, 24e9)
    larger(qwen, sizes)
    rows = [line for line in run(str(qwen), *options.split())[1].splitlines() if re.match(r" *[0-9]+,[0-9]{3} ", line)]
    assert len(rows) == 7
    assert not [row for row in rows if f"    {row.rstrip()}\n" not in GUIDE]


def test_the_command_prints_how_several_gpus_are_split(qwen: Path) -> None:
    larger(qwen, QWEN3_32B)
    status, printed = run(str(qwen), "--gpu", "h100", "--gpus", "8", "--engine", "vllm", "--json")
    found = json.loads(printed)
    settings = found["settings"]
    chosen = next(fit for fit in found["contexts"] if str(fit["context"]) == settings["MARLAAS_MAX_CONTEXT"])
    for_rollouts = chosen["rollout_workers"] * chosen["tensor_parallel"]
    last = for_rollouts + chosen["trainer_ranks"] - 1
    assert status == 0
    assert settings["MARLAAS_DEVICES"] == f"rollout:0-{for_rollouts - 1},trainer:{for_rollouts}-{last}"
    needs = {
        "rollout": Needs([f"rollout-{n}" for n in range(chosen["rollout_workers"])], chosen["tensor_parallel"]),
        "trainer": Needs(["trainer-0"], chosen["trainer_ranks"]),
    }
    placement = chosen_placement(needs, parse_devices(settings["MARLAAS_DEVICES"], 8))
    assert sorted(number for numbers in placement.values() for number in numbers) == list(range(last + 1))
    assert settings["MARLAAS_TRAINER_RANKS"] == str(chosen["trainer_ranks"])
    assert settings["MARLAAS_VLLM_TENSOR_PARALLEL"] == str(chosen["tensor_parallel"])
    assert (settings["MARLAAS_ENGINE"], settings["MARLAAS_VLLM_MEMORY_FRACTION"]) == ("vllm", "0.9")
    assert {name.removeprefix("MARLAAS_").lower() for name in settings} <= KNOWN
    status, printed = run(str(qwen), "--gpu", "h100", "--gpus", "8", "--engine", "vllm")
    assert status == 0 and "is assumed" in " ".join(printed.split())
    assert f"--rollout {chosen['rollout_workers']}" in printed or chosen["rollout_workers"] == 1


def test_what_our_decoder_lacks_is_planned_for_both_engines(qwen: Path) -> None:
    larger(qwen, QWEN3_30B_A3B)
    assert plan_for(str(qwen), gpu="h200", gpus=2).chosen is not None
    status, printed = run(str(qwen), "--gpu", "h200", "--gpus", "2", "--engine", "vllm")
    assert status == 0 and "3,353 M of them for a token" in printed


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e6}},
            "rope_parameters of type 'dynamic'",
        ),
        ({"model_type": "nobody_knows"}, "transformers cannot read it"),
    ],
)
def test_the_command_names_what_trainers_refuse(qwen: Path, sizes: dict[str, Any], reason: str) -> None:
    larger(qwen, sizes)
    for engine in ("torch", "vllm"):
        with pytest.raises(InvalidInput, match=reason) as refused:
            plan_for(str(qwen), gpu="80GB", engine=engine)
        assert "\n" not in str(refused.value)


def test_the_embedded_engine_samples_no_faster_than_kernels_start(qwen: Path) -> None:
    shape = shape_of(qwen)
    load = Load(shape, GPUS["h100"], "torch", 2, 8, 1024)
    assert load.expected_tokens_per_s(64) == pytest.approx(64 / (LAUNCH_S * shape.num_layers))
    assert load.expected_tokens_per_s(64) < REACHED["torch", True] * load.tokens_per_s(64)


def test_several_cpus_are_one_device(qwen: Path) -> None:
    with pytest.raises(InvalidInput, match="--gpus"):
        plan_for(str(qwen), gpu=None, gpus=2)


def test_its_constants_are_the_workers_defaults() -> None:
    trainer, rollout = TrainerSettings.model_fields, RolloutSettings.model_fields
    assert trainer["trainer_micro_batch_tokens"].default == fitting.MICRO_BATCH_TOKENS
    assert memory.LEAST_CACHE == fitting.LEAST_CACHE and rollout["rollout_kv_bytes"].default == fitting.LEAST_KV
    assert rollout["rollout_slots"].default == engines.slots_of("torch", gpu=True)
    assert rollout["rollout_idle_adapter_bytes"].default == engines.IDLE_ADAPTERS
    assert RolloutSettings(engine="vllm", rollout_device="cuda").rollout_slots == engines.slots_of("vllm", gpu=True)
    assert rollout["vllm_max_loras"].default == engines.MAX_LORAS
    assert rollout["vllm_max_lora_rank"].default == engines.MAX_LORA_RANK and engines.LORA_RANKS == LORA_RANKS
    assert (
        rollout["vllm_memory_fraction"].default == fitting.VLLM_FRACTION
        and vllm_engine.CHUNK_TOKENS == engines.STEP_TOKENS
    )
