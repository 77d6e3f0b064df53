"""The base model for generation: the function of `base_model.decoder`, in fewer and larger operations.

Axes: N rows of a forward (one a position), E hidden, H query heads, K key/value heads, D head size, V vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from base_model.decoder import Decoder
from base_model.stacked import NUM_FUSED
from rollout_service.embedded.backbone.compiling import compiled_for
from rollout_service.embedded.backbone.interface import ForwardPart, ModelShape, adapt, cut, joined, joined_bias

Norm = Callable[[Tensor], Tensor]
Linear = Callable[[Tensor], Tensor]
Rotate = Callable[["FusedLayer", Tensor], None]
"""Normalises and rotates the queries and keys of qkv [N, H + 2K, D], in place."""


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """The weights of one layer, those of one input joined."""

    qkv: Linear  # to (H + 2K) * D
    qk_norm: Norm | None
    qk_weight: Tensor  # [H + K, D] of that norm; [0, D] without it
    out: Linear
    gate_up: Linear
    down: Linear
    input_norm: Norm
    mlp_norm: Norm


class FusedDecoder:
    """See `EngineBackbone`."""

    def __init__(self, decoder: Decoder, *, exact: bool, consume: bool = False) -> None:
        """`exact`: its bits are those of torch; otherwise a CPU has quicker operations. `consume`: empties `decoder` layer by
        layer, so that no memory holds all weights twice. Of a stage's decoder adapters and pools number its layers from 0."""
        self.config, self._norm_eps = ModelShape.of(decoder.config), decoder.config.norm_eps
        self.embedding, self.head, self._shapes = decoder.embedding, decoder.head, decoder.linear_shapes()
        quick = not exact and decoder.device.type == "cpu" and decoder.embedding.dtype == torch.float32
        make_norm = partial(quick_norm if quick else torch_norm, eps=self._norm_eps)
        make_linear = packed_linear if quick and torch.backends.mkldnn.is_available() else torch_linear
        layers = sorted({int(name.split(".")[1]) for name in decoder.weights if name.startswith("layers.")})
        self.layers = [_fuse_layer(decoder, layer, make_norm, make_linear, consume) for layer in layers]
        self.final_norm = make_norm(decoder.weights["norm.weight"])
        half = self.config.head_dim // 2
        self._cos = decoder.cos.unsqueeze(1)  # [context, 1, D]
        self._sin = torch.cat([-decoder.sin[:, :half], decoder.sin[:, half:]], dim=-1).unsqueeze(1)
        self._compiled = compiled_for(self.embedding, exact=exact)

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        return self._shapes

    def forward(self, tokens: Tensor, positions: Tensor, parts: Sequence[ForwardPart]) -> Tensor:
        return self.final_norm(self.run(F.embedding(tokens, self.embedding), positions, parts))

    def run(self, x: Tensor, positions: Tensor, parts: Sequence[ForwardPart]) -> Tensor:
        """x [N, E], which it may change -> hidden states behind its layers [N, E]."""
        rotate = self.rotation(positions)
        for number, layer in enumerate(self.layers):
            x = x.add_(self._attention(number, layer, x, rotate, parts))
            x = x.add_(self._mlp(number, layer, x, parts))
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.head).float()

    def rotation(self, positions: Tensor) -> Rotate:
        """For rows at these positions [N]: by a compiled function as soon as that is there."""
        num = self.config.num_heads + self.config.num_kv_heads
        if (compiled := self._compiled()) is not None:
            eps, angles = np.float32(self._norm_eps), [each.squeeze(1).numpy() for each in (self._cos, self._sin)]
            at = positions.numpy()
            return lambda layer, qkv: compiled.rotate(qkv.numpy(), num, layer.qk_weight.numpy(), eps, *angles, at)
        cos, sin = self._cos[positions], self._sin[positions]

        def rotate(layer: FusedLayer, qkv: Tensor) -> None:
            rotated = qkv[:, :num]
            qk = layer.qk_norm(rotated) if layer.qk_norm is not None else rotated
            torch.addcmul(qk * cos, qk.roll(qk.shape[2] // 2, -1), sin, out=rotated)

        return rotate

    def _attention(
        self, number: int, layer: FusedLayer, x: Tensor, rotate: Rotate, parts: Sequence[ForwardPart]
    ) -> Tensor:
        x = layer.input_norm(x)
        qkv = layer.qkv(x)
        adapt(qkv, x, number * NUM_FUSED, parts)
        qkv = qkv.view(len(x), -1, self.config.head_dim)
        rotate(layer, qkv)
        seen = joined([part.attend(number, own) for part, own in zip(parts, cut(qkv, parts), strict=True)])
        out = layer.out(seen)
        adapt(out, seen, number * NUM_FUSED + 1, parts)
        return out

    def _mlp(self, number: int, layer: FusedLayer, x: Tensor, parts: Sequence[ForwardPart]) -> Tensor:
        x = layer.mlp_norm(x)
        both = layer.gate_up(x)
        adapt(both, x, number * NUM_FUSED + 2, parts)
        gate, up = both.chunk(2, dim=-1)
        inner = F.silu(gate).mul_(up)
        out = layer.down(inner)
        adapt(out, inner, number * NUM_FUSED + 3, parts)
        return out


def torch_norm(weight: Tensor, eps: float) -> Norm:
    """RMSNorm over the last axis with a weight for it, or for it and the axis before."""
    if weight.ndim == 1:
        return lambda x: F.rms_norm(x, weight.shape, weight, eps)
    return lambda x: F.rms_norm(x, weight.shape[1:], None, eps).mul_(weight)


def quick_norm(weight: Tensor, eps: float) -> Norm:
    """The same in four operations instead of ten: x w sqrt(E) / hypot(|x|, sqrt(E eps)), for float32."""
    root = math.sqrt(weight.shape[-1])
    scaled, floor = weight * root, torch.tensor(root * math.sqrt(eps), dtype=weight.dtype)

    def norm(x: Tensor) -> Tensor:
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return torch.mul(x, scaled).div_(size.hypot_(floor))

    return norm


def torch_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    return lambda x: F.linear(x, weight, bias)


def packed_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """The same by oneDNN, for float32, with the weight laid out for it once; torch's product does so at each call."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 48)  # rows; measured, as quick for 1 to 1,024
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def _fuse_layer(
    decoder: Decoder, layer: int, make_norm: Callable[[Tensor], Norm], make_linear: Callable[..., Linear], consume: bool
) -> FusedLayer:
    at = f"layers.{layer}"
    weights = {name: weight for name, weight in decoder.weights.items() if name.startswith(f"{at}.")}
    if consume:
        decoder.weights = {name: weight for name, weight in decoder.weights.items() if name not in weights}

    def fused(*names: str) -> Linear:
        own = [weights[f"{at}.{name}.weight"] for name in names]
        bias = joined_bias(own, [weights.get(f"{at}.{name}.bias") for name in names])
        return make_linear(torch.cat(own).contiguous(), bias)

    q_norm, k_norm = (weights.get(f"{at}.self_attn.{name}.weight") for name in ("q_norm", "k_norm"))
    c = decoder.config
    qk_norm, qk_weight = None, decoder.embedding.new_zeros(0, c.head_dim)
    if q_norm is not None and k_norm is not None:
        qk_weight = torch.cat([q_norm.expand(c.num_heads, -1), k_norm.expand(c.num_kv_heads, -1)])
        qk_norm = make_norm(qk_weight)
    return FusedLayer(
        qkv=fused("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        qk_norm=qk_norm,
        qk_weight=qk_weight,
        out=fused("self_attn.o_proj"),
        gate_up=fused("mlp.gate_proj", "mlp.up_proj"),
        down=fused("mlp.down_proj"),
        input_norm=make_norm(weights[f"{at}.input_layernorm.weight"]),
        mlp_norm=make_norm(weights[f"{at}.post_attention_layernorm.weight"]),
    )
