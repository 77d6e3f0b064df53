"""The headers of weights, read alone."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save_file

from common.models.weight_files import ITEM_BYTES, Weights, parse_header, read_weights
from common.settings import TINY


def test_the_weights_of_all_files_count(tmp_path: Path) -> None:
    layer = np.zeros((4, 3), np.float16)
    save_file(
        {"model.layers.0.self_attn.q_proj.weight": layer, "norm": np.zeros(5, np.float32)}, tmp_path / "a.safetensors"
    )
    save_file(
        {"model.layers.1.self_attn.q_proj.weight": layer, "model.layers.1.mlp.up_proj.weight": layer},
        tmp_path / "b.safetensors",
    )
    found = read_weights(tmp_path)
    assert found == Weights(41, "float16", {f"layers.{number}.self_attn.q_proj": (4, 3) for number in (0, 1)})
    assert found.linear_layers == {"q_proj"}, "not every layer has the other"


def test_the_base_that_ships_is_counted() -> None:
    assert read_weights(TINY)[:2] == (822_656, "float32")


def test_a_folder_without_weights_is_not_known_and_a_broken_file_is_named(tmp_path: Path) -> None:
    assert read_weights(tmp_path) == Weights(0, "")
    (tmp_path / "a.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(ValueError, match=r"a\.safetensors is no safetensors file"):
        read_weights(tmp_path)


@pytest.mark.parametrize("shape", [[10**4200] * 240, [1] * 65, [-1, -1]])
def test_numbers_that_cannot_be_a_shape_are_not_multiplied(shape: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    header = json.dumps({"x": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}}).encode()
    monkeypatch.delattr("common.models.weight_files.prod")
    with pytest.raises(ValueError, match=r"'x' is not where or as large as its header says|is negative"):
        parse_header(header, 8 + len(header) + 4)


@pytest.mark.parametrize("odd", [r'"\ud800"', "NaN", "-Infinity", "1.5", "[" * 200 + "]" * 200, "9" * 4000])
def test_what_safetensors_own_reader_does_not_take_is_refused_before(odd: str) -> None:
    for place in (f'"__metadata__": {{"a": {odd}}}, "x": {{', f'"x": {{"more": {odd}, '):
        header = f'{{{place}"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}}}'.encode()
        with pytest.raises(ValueError, match="its header is none"):
            parse_header(header, 8 + len(header) + 4)


SOUND = {
    "a": {"dtype": "F32", "shape": [2, 1], "data_offsets": [0, 8]},
    "b": {"dtype": "BF16", "shape": [2], "data_offsets": [8, 12]},
}
PLACES = [(name, field, at) for name in SOUND for field in SOUND[name] for at in range(len(SOUND[name][field]))]
ODD = st.one_of(st.none(), st.booleans(), st.integers(-9, 20), st.integers(), st.floats(), st.text(max_size=3))


@st.composite
def headers(draw: st.DrawFn) -> bytes:
    """Headers of a file with twelve bytes of numbers, with a few lies."""
    header: dict[str, Any] = json.loads(json.dumps(SOUND))
    for name, field, at in draw(st.lists(st.sampled_from(PLACES), max_size=2)):
        if field == "dtype":
            header[name][field] = draw(st.one_of(ODD, st.sampled_from(["F16", "I8", "F8_E4M3"])))
        elif isinstance(header[name], dict) and at < len(header[name].get(field, ())):
            told = SOUND[name][field][at]
            header[name][field][at] = draw(
                st.one_of(ODD, st.sampled_from([float(told), str(told), bool(told), [told]]))
            )
    for change in draw(st.lists(st.sampled_from(["metadata", "more", "less", "other"]), max_size=1)):
        if change == "metadata":
            header["__metadata__"] = draw(st.one_of(ODD, st.dictionaries(st.text(max_size=2), ODD, max_size=2)))
        elif change == "more":
            header[draw(st.text(max_size=3))] = draw(st.one_of(ODD, st.just(SOUND["a"])))
        elif change == "less":
            del header["b"][draw(st.sampled_from(["dtype", "shape", "data_offsets"]))]
        else:
            header["b"] = draw(ODD)
    text = json.dumps(header).encode()
    at, part = draw(st.integers(0, len(text))), draw(st.sampled_from([b"", b"", b"", b" ", b"\0", b"\xff", b"{", b'"']))
    return (
        draw(st.sampled_from([b"", b"\n", b"\xef\xbb\xbf"]))
        + text[:at]
        + part
        + text[at:].replace(b'"b"', draw(st.sampled_from([b'"b"', b'"a"'])))
    )


@settings(max_examples=500, deadline=None)
@given(headers())
def test_a_header_that_is_taken_means_the_same_to_safetensors_own_reader(header: bytes) -> None:
    try:
        found = parse_header(header, 8 + len(header) + 12)
    except ValueError:
        return
    if not {tensor.dtype for tensor in found} <= ITEM_BYTES.keys():
        return  # who reads the numbers refuses it
    try:
        theirs = dict(deserialize(struct.pack("<Q", len(header)) + header + bytes(12)))
    except SafetensorError as error:
        raise AssertionError(f"it does not take {header!r}") from error
    assert {tensor.name: (tensor.dtype, tensor.shape) for tensor in found} == {
        name: (tensor["dtype"], list(tensor["shape"])) for name, tensor in theirs.items()
    }
