"""What the headers of weights say."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from common.settings import TINY
from common.weight_files import Weights, parse_header, read_weights


def test_the_weights_of_all_files_count(tmp_path: Path) -> None:
    layer = np.zeros((4, 3), np.float16)
    save_file(
        {"model.layers.0.self_attn.q_proj.weight": layer, "norm": np.zeros(5, np.float32)}, tmp_path / "a.safetensors"
    )
    save_file({"model.layers.1.mlp.up_proj.weight": layer}, tmp_path / "b.safetensors")
    shapes = {"model.layers.0.self_attn.q_proj": (4, 3), "model.layers.1.mlp.up_proj": (4, 3)}
    assert read_weights(tmp_path) == Weights(29, "float16", frozenset({"q_proj", "up_proj"}), shapes)


def test_the_base_that_ships_is_counted() -> None:
    assert read_weights(TINY)[:2] == (822_656, "float32")


def test_a_folder_without_weights_is_not_known_and_a_broken_file_is_named(tmp_path: Path) -> None:
    assert read_weights(tmp_path) == Weights(0, "", frozenset())
    (tmp_path / "a.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(ValueError, match=r"a\.safetensors is no safetensors file"):
        read_weights(tmp_path)


@pytest.mark.parametrize("shape", [[10**4200] * 240, [1] * 65, [-1, -1]])
def test_numbers_that_cannot_be_a_shape_are_not_multiplied(shape: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    header = json.dumps({"x": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}}).encode()
    monkeypatch.delattr("common.weight_files.prod")
    with pytest.raises(ValueError, match="'x' is not where or as large as its header says"):
        parse_header(header, 8 + len(header) + 4)
