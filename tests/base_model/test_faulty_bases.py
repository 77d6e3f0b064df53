"""A base model whose configuration is not well-formed, or does not fit its weights, is refused in a line by all that read it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.activations import ACT2FN

from base_model.decoder import Decoder
from base_model.modules import load_model
from common.errors import InvalidInput
from common.models.base_shape import BaseShape
from common.models.families import MODULES as BY_MODULES
from common.models.families import PARTLY_ROTATED, unsupported_by_modules
from common.settings import TINY
from common.text.tokens import ChatTokenizer
from manager_service.launcher.commands.plan_command import plan_for
from manager_service.launcher.gpus import LocalWorker
from manager_service.launcher.memory_shares import choose

MALFORMED: list[tuple[dict[str, Any], str]] = [
    ({"rope_scaling": "yarn"}, "rope_scaling, a table; it gives 'yarn'"),
    ({"rope_parameters": [1]}, "rope_parameters, a table; it gives [1]"),
    ({"quantization_config": "gptq"}, "quantization_config, a table; it gives 'gptq'"),
    ({"num_key_value_heads": 0}, "num_key_value_heads, a positive number; it gives 0"),
    ({"num_key_value_heads": 3}, "num_key_value_heads that divide num_attention_heads; it gives 3 and 4"),
    ({"num_hidden_layers": "4"}, "num_hidden_layers, a positive number; it gives '4'"),
    ({"hidden_size": -1, "vocab_size": True}, "it gives -1; vocab_size, a positive number; it gives True"),
    ({"rms_norm_eps": "1e-6"}, "rms_norm_eps, a positive number; it gives '1e-6'"),
    ({"rope_theta": 0}, "rope_theta, a positive number; it gives 0"),
    ({"rope_parameters": {"rope_theta": "10000"}}, "rope_theta, a positive number; it gives '10000'"),
    ({"rope_scaling": {"type": "linear", "factor": -4.0}}, "factor, a positive number; it gives -4.0"),
    ({"model_type": ["qwen3"]}, "model_type, a name; it gives ['qwen3']"),
    ({"layer_types": "full_attention"}, "layer_types, a list of names; it gives 'full_attention'"),
    ({"head_dim": None, "num_attention_heads": 3, "num_key_value_heads": 3}, "it gives 3 and 128"),
]


def load_modules(folder: Path) -> Any:
    return load_model(folder, device="cpu", dtype=torch.float32)


def plan(folder: Path) -> Any:
    return plan_for(str(folder), gpu=None)


READERS: list[Callable[[Path], Any]] = [Decoder.load, load_modules, BaseShape.load, ChatTokenizer.load, plan]


def base(folder: Path, **changed: Any) -> Path:
    """A copy of `tiny` with another configuration."""
    shutil.copytree(TINY, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changed))
    return folder


@pytest.mark.parametrize(("changed", "told"), MALFORMED, ids=[told for _, told in MALFORMED])
def test_what_is_malformed_is_refused_in_a_line_by_all_that_read_it(
    tmp_path: Path, changed: dict[str, Any], told: str
) -> None:
    folder = base(tmp_path / "base", **changed)
    for read in READERS:
        with pytest.raises(InvalidInput) as refusal:
            read(folder)
        assert told in str(refusal.value) and str(folder) in str(refusal.value)
        assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("changed", [changed for changed, _ in MALFORMED], ids=[told for _, told in MALFORMED])
def test_up_leaves_what_is_malformed_to_the_services(tmp_path: Path, changed: dict[str, Any]) -> None:
    environment = {"MARLAAS_BASE_MODELS": f"q={base(tmp_path / 'base', **changed)}"}
    assert not choose(environment, [LocalWorker("trainer-0", "trainer", "q")], {}, []).settings


@pytest.mark.parametrize(
    ("own", "told"),
    [
        ({"learning_rate": "fast"}, "learning_rate must be a number above 0 and at most 1, not 'fast'"),
        ({"learning_rate": -1e-5}, "learning_rate must be a number above 0 and at most 1, not -1e-05"),
        ({"learning_rate": float("nan")}, "learning_rate must be a number above 0 and at most 1, not nan"),
        ({"learning_rate": True}, "learning_rate must be a number above 0 and at most 1, not True"),
        ({"tool_format": ["hermes"]}, "tool_format must be 'hermes' or 'compact', not ['hermes']"),
        ({"learningrate": 1e-5}, "unknown field 'learningrate'; did you mean 'learning_rate'?"),
        ([1e-5], "marlaas.json must hold a JSON object"),
    ],
)
def test_a_marlaas_json_of_no_use_is_refused_in_a_line_at_the_start_and_by_plan(
    tmp_path: Path, own: Any, told: str
) -> None:
    folder = base(tmp_path / "base")
    (folder / "marlaas.json").write_text(json.dumps(own))
    for read in (ChatTokenizer.load, plan):
        with pytest.raises(InvalidInput) as refusal:
            read(folder)
        assert told in str(refusal.value) and str(folder) in str(refusal.value)
        assert "\n" not in str(refusal.value)


OTHER_SHAPES: list[tuple[dict[str, Any], str]] = [
    ({"vocab_size": 544}, r"embed_tokens\.weight: \[272, 128\], where config\.json asks for \[544, 128\]"),
    ({"num_attention_heads": 8}, r"layers\.0\.self_attn\.\w+\.weight: .*, where config\.json asks for .*256"),
    ({"intermediate_size": 96}, r"mlp\.down_proj\.weight: \[128, 384\], where config\.json asks for \[128, 96\]"),
    ({"num_key_value_heads": 1}, r"k_proj\.weight: \[64, 128\], where config\.json asks for \[32, 128\]"),
]


@pytest.mark.parametrize(("changed", "told"), OTHER_SHAPES, ids=["vocabulary", "heads", "width", "keys"])
@pytest.mark.parametrize("load", [Decoder.load, load_modules, plan])
def test_weights_of_other_shapes_are_refused_by_name_and_nothing_else_is_told(
    tmp_path: Path, load: Callable[[Path], Any], changed: dict[str, Any], told: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InvalidInput, match=told) as refusal:
        load(base(tmp_path / "base", **changed))
    assert "\n" not in str(refusal.value) and capfd.readouterr() == ("", "")


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("load", [Decoder.load, load_modules])
def test_weights_that_are_no_numbers_are_refused_by_name(
    tmp_path: Path, load: Callable[[Path], Any], value: float
) -> None:
    folder = base(tmp_path / "base")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.3.mlp.up_proj.weight"][7, 5] = value
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(InvalidInput, match=r"layers\.3\.mlp\.up_proj\.weight has values that are infinite"):
        load(folder)


MODULES: list[tuple[dict[str, Any], str]] = [
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}}, "partial_rotary_factor 0.25"),
    ({"layer_types": ["sliding_attention", "full_attention"] * 2}, "sliding_attention without a sliding_window"),
    ({"num_hidden_layers": 5, "layer_types": None}, "missing weights, such as model.layers.4."),
    ({"model_type": "foobar"}, "`foobar`"),
    ({"rope_parameters": {"rope_type": "zorp", "rope_theta": 1e4}}, "rope_parameters of type 'zorp'"),
    ({"hidden_act": "zorp"}, "hidden_act 'zorp'"),
    ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0"),
]


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"num_hidden_layers": 5, "layer_types": None}, "weights are missing, such as layers.4."),
        ({"num_hidden_layers": 3, "layer_types": None}, "weights would be left out, such as layers.3."),
        ({"tie_word_embeddings": False}, "weights are missing, such as lm_head.weight"),
        ({"attention_bias": True}, "16 weights are missing, such as layers.0.self_attn.k_proj.bias"),
        *MODULES[-3:],
    ],
)
@pytest.mark.parametrize("load", [Decoder.load, plan])
def test_plan_refuses_what_the_services_refuse(
    tmp_path: Path, load: Callable[[Path], Any], changed: dict[str, Any], told: str
) -> None:
    with pytest.raises(InvalidInput) as refusal:
        load(base(tmp_path / "base", **changed))
    assert told in str(refusal.value) and "\n" not in str(refusal.value)


def test_the_activations_are_those_of_transformers() -> None:
    assert set(ACT2FN) >= {*BY_MODULES.activations}


@pytest.mark.parametrize(("changed", "told"), MODULES, ids=[told for _, told in MODULES])
def test_what_transformers_would_compute_otherwise_is_refused_in_a_line(
    tmp_path: Path, changed: dict[str, Any], told: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InvalidInput) as refusal:
        load_modules(base(tmp_path / "base", **changed))
    assert told in str(refusal.value) and "\n" not in str(refusal.value)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("family", [*PARTLY_ROTATED, "qwen3", "llama", "mistral"])
def test_a_part_of_each_head_is_rotated_by_the_families_that_are_said_to(family: str) -> None:
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    more = {"num_hidden_layers": 1, "vocab_size": 40, "pad_token_id": 0, "num_local_experts": 4, "n_routed_experts": 4}
    config: Any = AutoConfig.for_model(family, **sizes, **more, partial_rotary_factor=0.5)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    rotates_a_part = len(model.model.rotary_emb.inv_freq) == 16 * 0.5 / 2
    assert rotates_a_part == (family in PARTLY_ROTATED)
    assert rotates_a_part == ("partial_rotary_factor 0.5" not in [*unsupported_by_modules(config)])
