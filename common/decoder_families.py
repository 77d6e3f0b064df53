"""Says what of a base model's configuration our decoder does not compute, which the embedded engine samples with."""

from collections.abc import Iterator, Mapping
from typing import Any

SUPPORTED = ("qwen3", "qwen2", "llama")


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
