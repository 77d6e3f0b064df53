"""Says what of a base model our decoder, which the embedded engine samples with, does not compute: of its configuration and its weights."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from common.base_shape import BaseShape
from common.errors import InvalidInput
from common.modules_families import SCALED_SCORES
from common.text.model_folder import read_config
from common.weight_files import LINEAR_LAYERS, stored_shapes

SUPPORTED = ("qwen3", "qwen2", "llama")
NORMS = ("input_layernorm", "post_attention_layernorm")
NORMS_OF_HEADS = ("self_attn.q_norm", "self_attn.k_norm")
EMBEDDING = "embed_tokens.weight"
Shapes = dict[str, tuple[int, ...]]


def unsupported(raw: Mapping[str, Any]) -> Iterator[str]:
    """Names the fields of a configuration that our decoder does not compute."""
    if raw.get("model_type") not in SUPPORTED:
        yield f"model_type {raw.get('model_type')!r} (only {', '.join(SUPPORTED)})"
    for field in ("rope_scaling", "rope_parameters"):
        yield from _unsupported_rope(field, raw.get(field) or {})
    if raw.get("partial_rotary_factor", 1.0) != 1.0:
        yield f"partial_rotary_factor {raw['partial_rotary_factor']}"
    if raw.get("use_sliding_window"):
        yield "use_sliding_window"
    if others := sorted({str(kind) for kind in raw.get("layer_types") or ()} - {"full_attention"}):
        yield f"layer_types {', '.join(others)}"
    if raw.get("hidden_act", "silu") != "silu":
        yield f"hidden_act {raw['hidden_act']!r} (only 'silu')"
    for name in SCALED_SCORES:
        if raw.get(name) not in (None, 1.0):
            yield f"{name} {raw[name]}"
    if quantized := raw.get("quantization_config"):
        yield f"quantization_config {quantized.get('quant_method', '')!r} (load the weights that were not quantized)"


def _unsupported_rope(field: str, rope: Mapping[str, Any]) -> Iterator[str]:
    """`type` is what configurations called `rope_type` before transformers 4.43."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind != "default":
        yield f"{field} of type {kind!r} (only 'default')"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        yield f"{field} with partial_rotary_factor {rope['partial_rotary_factor']}"
    if nested := [name for name, value in rope.items() if isinstance(value, Mapping)]:
        yield f"{field} that differ between layers ({', '.join(nested)})"


def check_weights(folder: Path, shape: BaseShape) -> None:
    """Compares the weights in a folder's files, which stay unread, with what its configuration asks for, by names and shapes.

    Raises InvalidInput, naming one, for weights that are missing, would be left out, or have another shape.
    """
    stored = _stored(folder)
    if not stored:
        raise InvalidInput(f"{folder}: no .safetensors file")
    needed = _needed(read_config(folder), shape)
    _refuse(folder, [*_other_names(stored, needed), *_other_shapes(stored, needed)])


def check_shapes(folder: Path, shape: BaseShape) -> None:
    """The same of the shapes alone: weights may be missing, as before they are downloaded."""
    _refuse(folder, [*_other_shapes(_stored(folder), _needed(read_config(folder), shape))])


def _refuse(folder: Path, faults: Sequence[str]) -> None:
    if faults:
        raise InvalidInput(f"{folder}: {'; '.join(faults)}")


def _stored(folder: Path) -> Shapes:
    try:
        return {name.removeprefix("model."): shape for name, shape in stored_shapes(folder).items()}
    except ValueError as error:
        raise InvalidInput(str(error)) from error


def _other_names(stored: Shapes, needed: Shapes) -> Iterator[str]:
    known = needed.keys() | _optional(needed).keys()
    if missing := sorted(needed.keys() - stored.keys()):
        yield f"{len(missing)} weights are missing, such as {missing[0]}"
    if unknown := sorted(name for name in stored.keys() - known if not name.endswith("rotary_emb.inv_freq")):
        yield f"{len(unknown)} weights would be left out, such as {unknown[0]}"


def _other_shapes(stored: Shapes, needed: Shapes) -> Iterator[str]:
    known = needed | _optional(needed)
    if odd := sorted(name for name in known.keys() & stored.keys() if stored[name] != known[name]):
        has, asked = list(stored[odd[0]]), list(known[odd[0]])
        yield f"{len(odd)} weights have other shapes, such as {odd[0]}: {has}, where config.json asks for {asked}"


def _needed(config: Mapping[str, Any], shape: BaseShape) -> Shapes:
    layers, biased = range(shape.num_layers), _biased(config)
    found: Shapes = {f"{name}.weight": sizes for name, sizes in shape.linear_shapes.items()}
    found |= {
        f"{name}.bias": (after,)
        for name, (after, _) in shape.linear_shapes.items()
        if name.rpartition(".")[2] in biased
    }
    found |= {f"layers.{n}.{name}.weight": (shape.hidden,) for n in layers for name in NORMS}
    if shape.head_norms:
        found |= {f"layers.{n}.{name}.weight": (shape.head_dim,) for n in layers for name in NORMS_OF_HEADS}
    tables = (EMBEDDING,) if shape.tied else (EMBEDDING, "lm_head.weight")
    return found | dict.fromkeys(tables, (shape.vocab, shape.hidden)) | {"norm.weight": (shape.hidden,)}


def _biased(config: Mapping[str, Any]) -> Sequence[str]:
    """Linear layers that have biases, by their last names."""
    kind = config.get("model_type")
    if kind == "qwen2":
        return LINEAR_LAYERS[:3]
    attention = LINEAR_LAYERS[:4] if config.get("attention_bias") else ()
    return attention + (LINEAR_LAYERS[4:] if kind == "llama" and config.get("mlp_bias") else ())


def _optional(needed: Shapes) -> Shapes:
    """A head that is the embedding once more."""
    return {"lm_head.weight": needed[EMBEDDING]}
