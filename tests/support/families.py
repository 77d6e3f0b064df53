"""Tiny base models with random weights, of each family that the transformers backbone is compared on."""

from pathlib import Path
from typing import Any

import torch

VOCAB, NUM_LAYERS = 256, 2
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
"""Weights large enough that a wrong mask, position or adapter shows."""
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
WINDOW = 6
"""Positions that a layer with a sliding window sees: fewer than a row has."""
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": ("LlamaConfig", {"rope_parameters": LLAMA3_ROPE}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"tie_word_embeddings": True}),
    "gemma3": (
        "Gemma3TextConfig",
        {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 16},
    ),
    "mistral": ("MistralConfig", {"sliding_window": WINDOW}),
    "qwen3_moe": ("Qwen3MoeConfig", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
}
"""Each family's configuration, by its name in transformers, and what it has beyond SHAPE."""


def save_family(family: str, folder: Path, **changes: Any) -> Path:
    """Writes a base model of a family with random weights; `changes` of its configuration."""
    import transformers  # here: it takes seconds, and most tests of the modules that save families load none

    torch.manual_seed(1)
    name, own = FAMILIES[family]
    config = getattr(transformers, name)(**SHAPE | own | changes)
    model: Any = transformers.AutoModelForCausalLM.from_config(config)  # pyright: ignore
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                weight.add_(0.1 * torch.randn_like(weight))
    model.save_pretrained(folder)
    return folder
