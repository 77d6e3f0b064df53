"""Says what of a base model's configuration vLLM does not compute on a CPU."""

from collections.abc import Iterator, Mapping
from typing import Any

from common.base_shape import EXPERTS

HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes of its attention there."""


def unsupported_on_cpu(config: Mapping[str, Any]) -> Iterator[str]:
    """`config`: well-formed. With adapters vLLM computes experts by Triton's kernels alone."""
    text = config.get("text_config") or config
    if any(text.get(name) for name in EXPERTS):
        yield "a mixture of experts"
    if (size := _head_dim(text)) and size not in HEAD_DIMS:
        yield f"head_dim {size} (only {', '.join(map(str, HEAD_DIMS))})"


def _head_dim(text: Mapping[str, Any]) -> int | None:
    """None: the configuration does not say it."""
    hidden, heads = text.get("hidden_size"), text.get("num_attention_heads")
    return text.get("head_dim") or (hidden // heads if hidden and heads else None)
