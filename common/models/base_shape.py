"""The sizes of a base model, dense or a mixture of experts, from its `config.json`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import InvalidInput
from common.models.weight_files import LINEAR_MODULES
from common.text.model_folder import check_config, positive, read_config

HEAD_NORMS = ("qwen3", "qwen3_moe", "gemma3_text")
"""Families that normalise queries and keys by head."""
NAMED_AS_LLAMA = ("llama", "mistral", "mixtral", "gemma", "gemma2", *("qwen2", "qwen2_moe"), *HEAD_NORMS)
"""Families whose linear layers are the LINEAR_MODULES, except for experts."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
EXPERT_WIDTH = {
    "qwen3_moe": "moe_intermediate_size",
    "qwen2_moe": "moe_intermediate_size",
    "mixtral": "intermediate_size",
}
"""Families of mixtures of experts whose sizes are known here, and their field for an expert's width."""


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a layer, each a feed-forward layer."""

    num: int
    active: int  # of a token
    ffn: int  # width of one
    shared_ffn: int  # width of the one that all tokens take; 0: there is none

    def num_weights(self, hidden: int, num: int) -> int:
        """Weights of the router, the shared expert with its gate, and `num` others."""
        shared = 3 * hidden * self.shared_ffn + hidden if self.shared_ffn else 0
        return hidden * self.num + shared + num * 3 * hidden * self.ffn

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Experts | None":
        """None for a dense model. Raises ValueError, naming the field, for experts of unknown sizes."""
        fields = [name for name in EXPERTS if config.get(name)]
        if not fields:
            return None
        kind = config.get("model_type", "")
        if kind not in EXPERT_WIDTH:
            raise ValueError(
                f"config.json has {fields[0]}: the sizes of experts of model_type {kind!r} are not known here"
                f" (only {', '.join(EXPERT_WIDTH)})"
            )
        if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
            raise ValueError("config.json has mlp_only_layers or decoder_sparse_step: not every layer has experts")
        return cls(
            num=positive(config, fields[0]),
            active=positive(config, "num_experts_per_tok"),
            ffn=positive(config, EXPERT_WIDTH[kind]),
            shared_ffn=config.get("shared_expert_intermediate_size") or 0,
        )


@dataclass(frozen=True, slots=True)
class BaseShape:
    """E hidden, F of the feed-forward layer, H query heads, K key/value heads, D head size."""

    num_layers: int
    hidden: int
    ffn: int  # in a mixture of experts, of all that a token takes
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    context: int  # the model's own, in tokens
    tied: bool
    head_norms: bool
    experts: Experts | None = None

    @classmethod
    def load(cls, folder: Path) -> "BaseShape":
        """Reads `config.json`. Raises InvalidInput where `of` raises ValueError, naming the folder too."""
        config = read_config(folder)
        try:
            return cls.of(config)
        except ValueError as error:
            raise InvalidInput(f"{folder}: {error}") from error

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "BaseShape":
        """Raises ValueError, naming the field, for a malformed or incomplete configuration, or unknown experts."""
        check_config(config)
        config = config.get("text_config") or config
        hidden, num_heads = positive(config, "hidden_size"), positive(config, "num_attention_heads")
        experts = Experts.of(config)
        return cls(
            num_layers=positive(config, "num_hidden_layers"),
            hidden=hidden,
            ffn=experts.active * experts.ffn + experts.shared_ffn if experts else positive(config, "intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads") or num_heads,
            head_dim=config.get("head_dim") or hidden // num_heads,
            vocab=positive(config, "vocab_size"),
            context=positive(config, "max_position_embeddings"),
            tied=config.get("tie_word_embeddings", False),
            head_norms=config.get("model_type") in HEAD_NORMS,
            experts=experts,
        )

    @property
    def linear_sizes(self) -> tuple[tuple[int, int], ...]:
        """(in, out) of the linear layers that have adapters by default: all of a layer, except experts."""
        e, f, queries, keys = self.hidden, self.ffn, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = ((e, queries), (e, keys), (e, keys), (queries, e))
        return attention if self.experts else (*attention, (e, f), (e, f), (f, e))

    @property
    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """(out, in) of those layers, by the names that NAMED_AS_LLAMA have for them."""
        named = [*zip(LINEAR_MODULES, self.linear_sizes, strict=False)]
        return {
            f"layers.{number}.{module}": (after, before)
            for number in range(self.num_layers)
            for module, (before, after) in named
        }

    @property
    def num_weights(self) -> int:
        """Biases, of which there are few, do not count."""
        return self.weights_with(self.experts.num if self.experts else 0)

    @property
    def num_active(self) -> int:
        """Weights that a token is multiplied with."""
        return self.weights_with(self.experts.active if self.experts else 0)

    def weights_with(self, num_experts: int) -> int:
        """Weights, with so many experts of each layer."""
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        return embeddings + self.num_layers * self._of_layer(num_experts) + self.hidden

    @property
    def largest_unit(self) -> int:
        """Weights of a layer, or of a table of input or output, whatever has more."""
        return max(self.vocab * self.hidden, self._of_layer(self.experts.num if self.experts else 0))

    def _of_layer(self, num_experts: int) -> int:
        norms = 2 * self.hidden + (2 * self.head_dim if self.head_norms else 0)
        experts = self.experts.num_weights(self.hidden, num_experts) if self.experts else 0
        return sum(before * after for before, after in self.linear_sizes) + experts + norms

    def kv_bytes(self, itemsize: int, num_parts: int = 1) -> int:
        """Bytes of a token's keys and values in all layers, on each device that shares the heads."""
        return 2 * self.num_layers * -(-self.num_kv_heads // num_parts) * self.head_dim * itemsize

    def adapter_weights(self, rank: int) -> int:
        """Weights of an adapter on every linear layer that may have one."""
        return rank * self.num_layers * sum(before + after for before, after in self.linear_sizes)
