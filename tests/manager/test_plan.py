"""`marlaas plan`: its arithmetic is held to what trainers measure and engines take."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from base_model.decoder import Decoder, DecoderConfig
from common.errors import InvalidInput
from common.models.base_shape import BaseShape
from common.models.footprint import SCORES_SHARE, kept_per_token, training_bytes
from common.models.weight_files import read_weights
from common.settings import KNOWN, TINY
from harness.bases import QWEN3_06B, make_random_base
from manager_service.launcher import engines, fitting
from manager_service.launcher.commands.main import app
from manager_service.launcher.commands.plan_command import plan_for, settings_of
from manager_service.launcher.engines import GPUS, parse_gpu
from manager_service.launcher.gpus import Needs, chosen_placement, parse_devices
from manager_service.launcher.plan import PlannedRow, make_plan
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


def test_experts_that_a_token_does_not_take_are_held_but_not_computed(qwen: Path) -> None:
    shape = larger(qwen, QWEN3_30B_A3B)  # its card says 30.5 B, and 3.3 B for a token
    assert (shape.num_weights, shape.num_active) == (30_532_122_624, 3_353_032_704)
    assert shape.adapter_weights(1) == 48 * (2 * (2048 + 4096) + 2 * (2048 + 512)), "on attention alone"


def run(*argv: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["plan", *argv])
    return result.exit_code, result.stdout


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


@pytest.mark.parametrize(
    ("model", "gpu", "reason"),
    [("/nowhere", "24GB", "neither a folder nor"), ("", "0GB", "0GB"), ("", "0.0 GiB", "a size such as 24GB")],
)
def test_nonsense_is_refused(qwen: Path, model: str, gpu: str, reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        plan_for(model or str(qwen), gpu=gpu)


def limited(monkeypatch: pytest.MonkeyPatch, num_bytes: float) -> None:
    """Runs what follows in a container of so much memory."""

    def limit() -> float:
        return num_bytes

    monkeypatch.setattr("manager_service.launcher.commands.plan_command.host_limit", limit)


@pytest.mark.parametrize(
    ("sizes", "options"),
    [({}, "--gpu 24GB"), (QWEN3_8B, "--gpu 80GB"), (QWEN3_32B, "--gpu h100 --gpus 8")],
)
def test_the_guide_has_what_the_command_prints(
    qwen: Path, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, Any], options: str
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    limited(monkeypatch, 24e9)
    larger(qwen, sizes)
    rows = [
        line
        for line in run(str(qwen), *options.split(), "--engine", "vllm")[1].splitlines()
        if re.match(r" *[0-9]+,[0-9]{3} ", line)
    ]
    assert len(rows) == 7
    assert not [row for row in rows if f"    {row.rstrip()}\n" not in GUIDE]


def test_the_guide_has_the_hours_of_its_run_where_it_says_them(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, 24e9)
    hours: list[Any] = []
    for options in ("--gpu 24GB --engine vllm", "--gpu 24GB", ""):
        (row,) = json.loads(run(str(qwen), "--context", "1024", "--json", *options.split())[1])["contexts"]
        assert row["hours"] == pytest.approx(
            6_553_600 * (1 / row["tokens_per_s"] + 1 / row["trained_tokens_per_s"]) / 3600, rel=0.1
        )
        hours.append(row["hours"])
    with_vllm, embedded, on_a_cpu = hours
    said = f"without `--engine vllm`, {embedded:.1f} hours, and on a CPU of 24 GB {on_a_cpu:.0f}."
    assert f"with which {with_vllm:.1f} hours are\nplanned" in GUIDE and said in GUIDE


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


STEPS = (Path(__file__).resolve().parents[2] / "docs" / "decisions" / "backbones.md").read_text()


def test_what_a_gpu_is_expected_to_train_and_sample_was_measured_within_half_as_much_again(qwen: Path) -> None:
    """The shape of Qwen3-0.6B. A fused step's prefixes are shared, which leaves 7,432 tokens of 22,024."""
    shape, h100 = shape_of(qwen), GPUS["h100"]
    (measured,) = re.findall(r"7,432 of 22,024 tokens computed: .*?\| ([0-9.]+) to ([0-9.]+) s, MFU", STEPS)
    train = partial(
        engines.training_s, shape, again=False, kept=kept_per_token(shape, itemsize=2, rank=8, modules=True)
    )
    assert all(1 / 1.5 < train(h100, 7432, 1024) / float(each) < 1.5 for each in measured)
    took, taken, expected, planned = map(
        float, re.findall(r"([0-9.]+) (?:s|GB)\b", STEPS[STEPS.index("On one H200") :])[:4]
    )
    assert round(train(GPUS["h200"], 16_384, 2048), 2) == expected < 1.5 * took
    trained = training_bytes(shape, tokens=16_384, longest=2048, itemsize=2, rank=8, gpu=True).total
    assert round((trained + 150.1e9 / SCORES_SHARE) / 1e9, 1) == planned and taken < planned < 1.5 * taken
    decoding = 64 / engines.Load(shape, h100, "torch", 2, 16, 1024).expected_tokens_per_s(64)
    assert all(1 / 1.5 < decoding / each < 1.5 for each in (0.058, 0.072)), "as engines.py says"


@pytest.mark.parametrize("gpu", ["24GB", "h100"])
def test_trainers_have_micro_batches_as_large_as_pays_and_a_long_context_computes_no_layer_again(
    qwen: Path, gpu: str
) -> None:
    plan = plan_for(str(qwen), gpu=gpu, engine="vllm")
    assert plan.chosen is not None
    settings = settings_of(plan, plan.chosen)
    assert int(settings["MARLAAS_TRAINER_MICRO_BATCH_TOKENS"]) > 4096, "else the host starts kernels most of the time"
    assert plan.chosen.context > 4096 or gpu == "24GB"
    assert not (plan.chosen.trainer.again and plan.chosen.context > 4096)


@pytest.mark.parametrize(("rank", "most"), [(1, 1), (9, 16), (32, 32), (100, 128)])
def test_vllm_has_adapters_of_the_rank_that_is_planned_and_no_larger(qwen: Path, rank: int, most: int) -> None:
    plan = plan_for(str(qwen), gpu="24GB", engine="vllm", rank=rank)
    assert plan.chosen and settings_of(plan, plan.chosen)["MARLAAS_VLLM_MAX_LORA_RANK"] == str(most)


def test_its_constants_are_the_workers_defaults() -> None:
    trainer, rollout = TrainerSettings.model_fields, RolloutSettings.model_fields
    assert fitting.MICRO_BATCHES[-1] == trainer["trainer_micro_batch_tokens"].default
    assert fitting.MICRO_BATCHES[0] == TrainerSettings(trainer_device="cuda").most_tokens
    assert memory.LEAST_CACHE == fitting.LEAST_CACHE and rollout["rollout_kv_bytes"].default == fitting.LEAST_KV
    assert rollout["rollout_slots"].default == engines.slots_of("torch", gpu=True)
    assert rollout["rollout_idle_adapter_bytes"].default == engines.IDLE_ADAPTERS
    on_gpu = RolloutSettings(engine="vllm", rollout_device="cuda")
    assert on_gpu.rollout_slots == engines.slots_of("vllm", gpu=True)
    assert {False: rollout["vllm_max_loras"].default, True: on_gpu.vllm_max_loras} == engines.MAX_LORAS
    assert rollout["vllm_max_lora_rank"].default == engines.MAX_LORA_RANK and engines.LORA_RANKS == LORA_RANKS
    assert (
        rollout["vllm_memory_fraction"].default == fitting.VLLM_FRACTION
        and vllm_engine.CHUNK_TOKENS == engines.STEP_TOKENS
    )
