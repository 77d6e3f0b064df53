"""A base model that the decoder would compute otherwise than meant is refused by the names of its fields."""

from pathlib import Path
from typing import Any

import pytest
import torch

from base_model.decoder import Decoder, DecoderConfig
from common.errors import InvalidInput
from common.settings import TINY
from common.text.tokens import ChatTokenizer
from tests.base_model.test_faulty_bases import base

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "gemma3"}, "model_type 'gemma3'"),
    ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling of type 'yarn'"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling of type 'llama3'"),
    ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "rope_parameters of type 'linear'"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ between layers (full_attention)"),
    ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
    ({"partial_rotary_factor": 0.25}, "partial_rotary_factor 0.25"),
    ({"layer_types": ["full_attention", "sliding_attention"] * 2}, "layer_types sliding_attention"),
    ({"use_sliding_window": True, "sliding_window": 128}, "use_sliding_window"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config 'fp8'"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
]


@pytest.mark.parametrize(("changed", "told"), REFUSED, ids=[told for _, told in REFUSED])
def test_what_is_not_computed_is_refused(tmp_path: Path, changed: dict[str, Any], told: str) -> None:
    folder = base(tmp_path / "base", **changed)
    with pytest.raises(InvalidInput) as refusal:
        Decoder.load(folder)
    assert told in str(refusal.value) and str(folder) in str(refusal.value)


def test_all_that_is_not_computed_is_named_at_once(tmp_path: Path) -> None:
    folder = base(tmp_path / "base", rope_scaling={"type": "yarn"}, quantization_config={"quant_method": "awq"})
    with pytest.raises(InvalidInput, match=r"'yarn'.*, nor quantization_config 'awq'"):
        DecoderConfig.load(folder)


def test_what_older_configurations_say_in_other_words_is_computed(tmp_path: Path) -> None:
    folder = base(tmp_path / "base", rope_parameters=None, rope_theta=10_000.0, rope_scaling={"type": "default"})
    assert DecoderConfig.load(folder) == DecoderConfig.load(TINY)


def test_a_setting_lowers_the_context_and_never_raises_it(tmp_path: Path) -> None:
    assert DecoderConfig.load(TINY, 512).context == ChatTokenizer.load(TINY, 512).context == 512
    assert DecoderConfig.load(TINY, 10**6).context == ChatTokenizer.load(TINY, 10**6).context == 2048
    assert torch.equal(Decoder.load(TINY, max_context=512).cos, Decoder.load(TINY).cos[:512])
