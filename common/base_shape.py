"""The sizes of a dense base model, from its `config.json`, and how many weights they make."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.text.model_folder import positive

HEAD_NORMS = ("qwen3", "gemma3_text")
"""Families that normalise queries and keys by head."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True)
class BaseShape:
    """E hidden, F of the feed-forward layer, H query heads, K key/value heads, D head size."""

    num_layers: int
    hidden: int
    ffn: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    context: int  # the model's own, in tokens
    tied: bool
    head_norms: bool

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "BaseShape":
        """Raises ValueError, naming the field, for a configuration that does not say it, and for a mixture of experts."""
        config = config.get("text_config", config)
        if experts := [name for name in EXPERTS if config.get(name)]:
            raise ValueError(f"config.json has {experts[0]}: the sizes of a mixture of experts are not known here")
        hidden, num_heads = positive(config, "hidden_size"), positive(config, "num_attention_heads")
        return cls(
            num_layers=positive(config, "num_hidden_layers"),
            hidden=hidden,
            ffn=positive(config, "intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads") or num_heads,
            head_dim=config.get("head_dim") or hidden // num_heads,
            vocab=positive(config, "vocab_size"),
            context=positive(config, "max_position_embeddings"),
            tied=config.get("tie_word_embeddings", False),
            head_norms=config.get("model_type") in HEAD_NORMS,
        )

    @property
    def linear_sizes(self) -> tuple[tuple[int, int], ...]:
        """(in, out) of a layer's linear layers, all of which have adapters unless a job names some."""
        e, f, queries, keys = self.hidden, self.ffn, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return (e, queries), (e, keys), (e, keys), (queries, e), (e, f), (e, f), (f, e)

    @property
    def num_weights(self) -> int:
        """Biases, of which there are few, do not count."""
        norms = 2 * self.hidden + (2 * self.head_dim if self.head_norms else 0)
        layer = sum(before * after for before, after in self.linear_sizes) + norms
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        return embeddings + self.num_layers * layer + self.hidden

    def kv_bytes(self, itemsize: int) -> int:
        """Of a token's keys and values in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize

    def adapter_weights(self, rank: int) -> int:
        """Of an adapter on every linear layer."""
        return rank * self.num_layers * sum(before + after for before, after in self.linear_sizes)
