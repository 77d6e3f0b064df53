"""Names what our decoder, transformers' modules or vLLM do not compute of a base model.

              decoder                     modules                               vLLM on a CPU
families      those of DECODER            all                                   all but mixtures of experts
RoPE          default, for all layers     kinds that no other row changes       what it does not refuse itself
layers        full attention              sliding windows too                   "
activation    silu                        those of MODULES                      "
heads         rotated as a whole          in part too, in PARTLY_ROTATED        of the sizes HEAD_DIMS
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import InvalidInput
from common.models.base_shape import EXPERTS, BaseShape
from common.models.weight_files import LINEAR_LAYERS, stored_shapes
from common.text.model_folder import read_config

PARTLY_ROTATED = ("glm", "glm4", "glm4_moe", "minimax_m2", "nemotron", "phi", "phi3", "solar_open", "stablelm")
"""Families of which transformers rotates only `partial_rotary_factor` of each head; others ignore the field."""
SCALED_SCORES = ("attn_logit_softcapping", "final_logit_softcapping", "logit_scale", "logits_scaling")
HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes of vLLM's attention on a CPU."""


class ModelSupport(NamedTuple):
    """A column of the table. Our decoder and transformers' modules refuse quantized weights and scaled scores."""

    families: Sequence[str]  # empty: all
    ropes: Sequence[str]
    layer_types: Sequence[str]
    activations: Sequence[str]
    partly_rotated: Sequence[str] = ()


DECODER = ModelSupport(("qwen3", "qwen2", "llama"), ("default",), ("full_attention",), ("silu",))
MODULES = ModelSupport(
    families=(),
    # `dynamic` and `longrope` depend on a pass's longest row, so rows would change their neighbours; transformers only warns of
    # unknown names
    ropes=("default", "linear", "yarn", "llama3", "proportional"),
    layer_types=("full_attention", "sliding_attention"),
    activations=(
        *("silu", "swish", "relu", "relu2", "xielu"),
        *("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "quick_gelu"),
    ),
    partly_rotated=PARTLY_ROTATED,
)
NORMS = ("input_layernorm", "post_attention_layernorm")
NORMS_OF_HEADS = ("self_attn.q_norm", "self_attn.k_norm")
EMBEDDING = "embed_tokens.weight"
Shapes = dict[str, tuple[int, ...]]


def unsupported(config: Mapping[str, Any]) -> Iterator[str]:
    """Names the fields of a configuration that our decoder, and so the embedded engine, does not compute."""
    ropes = [rope for rope, _ in _ropes(config.get)]
    if nested := [name for rope in ropes for name, value in rope.items() if isinstance(value, Mapping)]:
        yield f"rope_parameters that differ between layers ({', '.join(nested)})"
    if config.get("use_sliding_window"):
        yield "use_sliding_window"
    yield from _lacking(config.get, DECODER)


def unsupported_by_modules(config: Any) -> Iterator[str]:
    """Names the fields of one of transformers' configurations that the transformers backbone refuses."""
    text = config.get_text_config()

    def get(name: str) -> Any:
        return getattr(text, name, None)

    if not isinstance(get("max_position_embeddings"), int):
        yield "a configuration without max_position_embeddings"
    if text is not config:
        yield f"model_type {config.model_type!r} (it reads more than text; take its language model alone)"
    if "sliding_attention" in (get("layer_types") or ()) and not get("sliding_window"):
        yield "layer_types sliding_attention without a sliding_window"
    if get("use_bidirectional_attention"):
        yield "use_bidirectional_attention"
    yield from _lacking(get, MODULES)


def unsupported_on_cpu(config: Mapping[str, Any]) -> Iterator[str]:
    """Names what vLLM does not compute on a CPU: adapters of experts need Triton. `config`: well-formed."""
    text = config.get("text_config") or config
    if any(text.get(name) for name in EXPERTS):
        yield "a mixture of experts"
    hidden, heads = text.get("hidden_size"), text.get("num_attention_heads")
    size = text.get("head_dim") or (hidden // heads if hidden and heads else None)
    if size and size not in HEAD_DIMS:
        yield f"head_dim {size} (only {', '.join(map(str, HEAD_DIMS))})"


def _lacking(get: Callable[[str], Any], computed: ModelSupport) -> Iterator[str]:
    """`get`: a field of a configuration, None where it is missing."""
    kind, ropes = get("model_type"), _ropes(get)
    if computed.families and kind not in computed.families:
        yield f"model_type {kind!r} (only {', '.join(computed.families)})"
    if others := sorted({str(each) for each in get("layer_types") or ()} - {*computed.layer_types}):
        yield f"layer_types {', '.join(others)}"
    kinds = {_kind(rope): field for rope, field in ropes}
    for other in sorted(kinds.keys() - {*computed.ropes}):
        yield f"{kinds[other]} of type {other!r}"
    if kind not in computed.partly_rotated:
        parts = {get("partial_rotary_factor") or 1.0, *(_rotated_part(rope) for rope, _ in ropes)}
        yield from (f"partial_rotary_factor {part}" for part in sorted(parts - {1.0}))
    if (activation := get("hidden_act") or "silu") not in computed.activations:
        yield f"hidden_act {activation!r}"
    for name in SCALED_SCORES:
        if get(name) not in (None, 1.0):
            yield f"{name} {get(name)}"
    if quantized := get("quantization_config"):
        method = quantized.get("quant_method", "") if isinstance(quantized, Mapping) else type(quantized).__name__
        yield f"quantization_config {method!r} (load the weights that were not quantized)"


def _ropes(get: Callable[[str], Any]) -> list[tuple[Mapping[str, Any], str]]:
    """The tables of RoPE, of all layers and of kinds of layers. Before version 5 transformers said `rope_scaling`."""
    whole: list[tuple[Mapping[str, Any], str]] = [
        (get(name) or {}, name) for name in ("rope_scaling", "rope_parameters")
    ]
    return [*whole, *((rope, name) for table, name in whole for rope in table.values() if isinstance(rope, Mapping))]


def _kind(rope: Mapping[str, Any]) -> str:
    """`type` is what configurations called `rope_type` before transformers 4.43."""
    return str(rope.get("rope_type") or rope.get("type") or "default")


def _rotated_part(rope: Mapping[str, Any]) -> float:
    """The part of each head that is rotated. `proportional` is computed for all families."""
    return 1.0 if _kind(rope) == "proportional" else rope.get("partial_rotary_factor") or 1.0


def check_weights(folder: Path, shape: BaseShape) -> None:
    """Compares names and shapes of a folder's weights, unread, with its configuration.

    Raises InvalidInput, naming one, for weights that are missing, left out, or of another shape.
    """
    try:
        stored = {name.removeprefix("model."): sizes for name, sizes in stored_shapes(folder).items()}
    except ValueError as error:
        raise InvalidInput(str(error)) from error
    if not stored:
        raise InvalidInput(f"{folder}: no .safetensors file")
    if faults := [*_faults(stored, _needed(read_config(folder), shape))]:
        raise InvalidInput(f"{folder}: {'; '.join(faults)}")


def _faults(stored: Shapes, needed: Shapes) -> Iterator[str]:
    known = {"lm_head.weight": needed[EMBEDDING]} | needed  # a head may be the embedding once more
    if missing := sorted(needed.keys() - stored.keys()):
        yield f"{len(missing)} weights are missing, such as {missing[0]}"
    if unknown := sorted(name for name in stored.keys() - known.keys() if not name.endswith("rotary_emb.inv_freq")):
        yield f"{len(unknown)} weights would be left out, such as {unknown[0]}"
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
