"""The base model for generation: the same function as `base_model.decoder`, with fewer and larger operations.

Axes: N rows of a forward (one a position), E hidden, H query heads, K key/value heads, D head size, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from base_model.decoder import Decoder
from base_model.stacked import NUM_FUSED, Product

QkvAttend = Callable[[int, Tensor], Tensor]
"""(layer, q and k and v [N, H + 2K, D], q and k rotated) -> [N, H * D]; it keeps keys and values as it likes."""


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """The weights of one layer, those of one input joined."""

    qkv: Tensor  # [(H + 2K) * D, E]
    qkv_bias: Tensor | None
    qk_norm: Tensor | None  # [H + K, D]
    out: Tensor
    out_bias: Tensor | None
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    input_norm: Tensor
    mlp_norm: Tensor


class FusedDecoder:
    """Frozen weights, safe to use from one thread at a time."""

    def __init__(self, decoder: Decoder) -> None:
        self.config = decoder.config
        self.embedding, self.head = decoder.embedding, decoder.head
        self.layers = [_fuse_layer(decoder, layer) for layer in range(self.config.num_layers)]
        self.final_norm = decoder.weights["norm.weight"]
        half = self.config.head_dim // 2
        self._cos = decoder.cos.unsqueeze(1)  # [context, 1, D]
        self._sin = torch.cat([-decoder.sin[:, :half], decoder.sin[:, half:]], dim=-1).unsqueeze(1)

    def forward(self, tokens: Tensor, positions: Tensor, attend: QkvAttend, products: Sequence[Product]) -> Tensor:
        """tokens, positions [N] -> hidden states [N, E] after the last norm."""
        x = F.embedding(tokens, self.embedding)
        cos, sin = self._cos[positions], self._sin[positions]
        for number, layer in enumerate(self.layers):
            x = x.add_(self._attention(number, layer, x, cos, sin, attend, products))
            x = x.add_(self._mlp(number, layer, x, products))
        return self._norm(x, self.final_norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, E] -> float32 [N, V]"""
        return F.linear(hidden, self.head).float()

    def _attention(
        self,
        number: int,
        layer: FusedLayer,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        attend: QkvAttend,
        products: Sequence[Product],
    ) -> Tensor:
        c = self.config
        x = self._norm(x, layer.input_norm)
        qkv = F.linear(x, layer.qkv, layer.qkv_bias)
        for product in products:
            product.add_to(qkv, x, number * NUM_FUSED)
        qkv = qkv.view(len(x), -1, c.head_dim)
        rotated = qkv[:, : c.num_heads + c.num_kv_heads]
        qk = rotated
        if layer.qk_norm is not None:
            qk = F.rms_norm(qk, (c.head_dim,), None, c.norm_eps).mul_(layer.qk_norm)
        torch.addcmul(qk * cos, qk.roll(c.head_dim // 2, -1), sin, out=rotated)
        seen = attend(number, qkv)
        out = F.linear(seen, layer.out, layer.out_bias)
        for product in products:
            product.add_to(out, seen, number * NUM_FUSED + 1)
        return out

    def _mlp(self, number: int, layer: FusedLayer, x: Tensor, products: Sequence[Product]) -> Tensor:
        x = self._norm(x, layer.mlp_norm)
        both = F.linear(x, layer.gate_up, layer.gate_up_bias)
        for product in products:
            product.add_to(both, x, number * NUM_FUSED + 2)
        gate, up = both.chunk(2, dim=-1)
        inner = F.silu(gate).mul_(up)
        out = F.linear(inner, layer.down, layer.down_bias)
        for product in products:
            product.add_to(out, inner, number * NUM_FUSED + 3)
        return out

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.config.norm_eps)


def _fuse_layer(decoder: Decoder, layer: int) -> FusedLayer:
    at = f"layers.{layer}"
    weights = decoder.weights

    def fused(*names: str) -> Tensor:
        return torch.cat([weights[f"{at}.{name}.weight"] for name in names]).contiguous()

    def bias(*names: str) -> Tensor | None:
        found = [weights.get(f"{at}.{name}.bias") for name in names]
        if all(b is None for b in found):
            return None
        rows = [weights[f"{at}.{name}.weight"] for name in names]
        return torch.cat([w.new_zeros(len(w)) if b is None else b for b, w in zip(found, rows, strict=True)])

    q_norm, k_norm = (weights.get(f"{at}.self_attn.{name}.weight") for name in ("q_norm", "k_norm"))
    c = decoder.config
    qk_norm = None
    if q_norm is not None and k_norm is not None:
        qk_norm = torch.cat([q_norm.expand(c.num_heads, -1), k_norm.expand(c.num_kv_heads, -1)])
    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    gate_up = ("mlp.gate_proj", "mlp.up_proj")
    return FusedLayer(
        qkv=fused(*qkv),
        qkv_bias=bias(*qkv),
        qk_norm=qk_norm,
        out=fused("self_attn.o_proj"),
        out_bias=bias("self_attn.o_proj"),
        gate_up=fused(*gate_up),
        gate_up_bias=bias(*gate_up),
        down=fused("mlp.down_proj"),
        down_bias=bias("mlp.down_proj"),
        input_norm=weights[f"{at}.input_layernorm.weight"],
        mlp_norm=weights[f"{at}.post_attention_layernorm.weight"],
    )
