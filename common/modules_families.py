"""Says what of a base model's configuration trainers do not compute with transformers' own modules."""

from collections.abc import Iterator, Mapping
from typing import Any

LAYER_TYPES = {"full_attention", "sliding_attention"}
ROPES = {"default", "linear", "yarn", "llama3", "proportional"}
"""Kinds of RoPE that are computed. `dynamic` and `longrope` depend on the longest row of a pass, so that rows would change their
neighbours; of names that it does not know transformers merely warns."""
ACTIVATIONS = {
    *("silu", "swish", "relu", "relu2", "xielu"),
    *("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "quick_gelu"),
}
PARTLY_ROTATED = ("glm", "glm4", "glm4_moe", "minimax_m2", "nemotron", "phi", "phi3", "solar_open", "stablelm")
"""Families of which transformers rotates a part of each head by `partial_rotary_factor`; for others it ignores the field."""
SCALED_SCORES = ("attn_logit_softcapping", "final_logit_softcapping", "logit_scale", "logits_scaling")


def unsupported_by_modules(config: Any) -> Iterator[str]:
    """Names the fields of one of transformers' configurations that the transformers backbone refuses."""
    text = config.get_text_config()
    if quantized := getattr(config, "quantization_config", None):
        method = quantized.get("quant_method", "") if isinstance(quantized, dict) else type(quantized).__name__
        yield f"quantization_config {method!r} (load the weights that were not quantized)"
    if not isinstance(getattr(text, "max_position_embeddings", None), int):
        yield "a configuration without max_position_embeddings"
    if text is not config:
        yield f"model_type {config.model_type!r} (it reads more than text; take its language model alone)"
    if others := sorted({str(kind) for kind in getattr(text, "layer_types", None) or ()} - LAYER_TYPES):
        yield f"layer_types {', '.join(others)}"
    rope: dict[str, Any] = getattr(text, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)]
    for kind in sorted({str(each.get("rope_type") or "default") for each in (rope, *nested)} - ROPES):
        yield f"rope_parameters of type {kind!r}"
    if text.model_type not in PARTLY_ROTATED:
        for factor in sorted({*_rotated_parts(text, rope, *nested)} - {1.0}):
            yield f"partial_rotary_factor {factor}"
    if "sliding_attention" in (getattr(text, "layer_types", None) or ()) and not getattr(text, "sliding_window", None):
        yield "layer_types sliding_attention without a sliding_window"
    if (activation := getattr(text, "hidden_act", None) or "silu") not in ACTIVATIONS:
        yield f"hidden_act {activation!r}"
    for name in SCALED_SCORES:
        if getattr(text, name, None) not in (None, 1.0):
            yield f"{name} {getattr(text, name)}"
    if getattr(text, "use_bidirectional_attention", False):
        yield "use_bidirectional_attention"


def _rotated_parts(text: Any, *ropes: Mapping[str, Any]) -> Iterator[float]:
    """The parts of each head that a configuration wants rotated. What is `proportional` is computed for all families."""
    yield getattr(text, "partial_rotary_factor", None) or 1.0
    for rope in ropes:
        if rope.get("rope_type") != "proportional":
            yield rope.get("partial_rotary_factor") or 1.0
