"""Computes a decoder-only transformer (Qwen3, Qwen2, Llama) as one function of its weights.

Callers pass `attend` (a cache, or a whole causal sequence) and `project` (linear layers, with or without adapters).
So rollout and training run the same arithmetic on the base model.

Axes: B rows, T positions, E hidden, H query heads, K key/value heads, D head size, V vocabulary.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import structlog
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from common.errors import InvalidInput
from common.models.base_shape import BaseShape
from common.models.families import check_weights, unsupported
from common.models.stages import Stage
from common.models.weight_files import LINEAR_LAYERS
from common.text.model_folder import read_config

log = structlog.get_logger()


class Project(Protocol):
    """A linear layer: x [..., in] -> [..., out]. `name`: its module, as `layers.3.self_attn.q_proj`."""

    def __call__(self, name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor: ...


class Attend(Protocol):
    """Attention of one layer: q [B, T, H, D], k and v [B, T, K, D] -> [B, T, H, D]. It may cache."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """The architecture and sizes of a base model."""

    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    context: int
    rope_theta: float
    norm_eps: float
    tied: bool

    @classmethod
    def load(cls, folder: Path, max_context: int | None = None) -> "DecoderConfig":
        """Reads a base model's configuration. `max_context`: serve no longer context than this.

        Raises InvalidInput for an architecture that this decoder does not compute exactly.
        """
        raw = read_config(folder)
        if refused := list(unsupported(raw)):
            raise InvalidInput(
                f"{folder}: our decoder does not compute {', nor '.join(refused)} "
                "(others may, outside deterministic mode: MARLAAS_ROLLOUT_BACKBONE=transformers or MARLAAS_ENGINE=vllm, and "
                "MARLAAS_TRAINER_BACKBONE=transformers)"
            )
        shape, rope = BaseShape.load(folder), raw.get("rope_parameters") or {}
        return cls(
            num_layers=shape.num_layers,
            hidden=shape.hidden,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            vocab=shape.vocab,
            context=min(shape.context, max_context or shape.context),
            rope_theta=rope.get("rope_theta") or raw.get("rope_theta", 10_000.0),
            norm_eps=raw.get("rms_norm_eps", 1e-6),
            tied=shape.tied,
        )


class RunLayer(Protocol):
    """Calls a layer's function with its arguments; it decides what is kept for the backward."""

    def __call__(self, layer: Callable[..., Tensor], *args: Any) -> Tensor: ...


def directly(layer: Callable[..., Tensor], *args: Any) -> Tensor:
    return layer(*args)


def plain(name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer without adapters."""
    return F.linear(x, weight, bias)


class Decoder:
    """The base model's frozen weights. Holds no sequence state; one thread may call it at a time."""

    def __init__(self, config: DecoderConfig, weights: Mapping[str, Tensor]) -> None:
        self.config = config
        self.weights = dict(weights)
        self.embedding = self.weights["embed_tokens.weight"]
        self.head = self.embedding if config.tied else self.weights["lm_head.weight"]
        exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu") / config.head_dim
        angles = torch.outer(torch.arange(config.context, dtype=torch.float32), config.rope_theta**-exponent)
        angles = torch.cat([angles, angles], dim=-1)
        self.cos = angles.cos().to(self.embedding)  # [context, D]
        self.sin = angles.sin().to(self.embedding)

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        max_context: int | None = None,
        stage: Stage | None = None,
    ) -> "Decoder":
        """Loads a local Hugging Face folder. `stage`: only what that one needs, for other weights may be missing; all but the head have
        an empty embedding. Raises InvalidInput for an unsupported model, or non-finite weights."""
        folder = Path(folder)
        config = DecoderConfig.load(folder, max_context)
        check_weights(folder, BaseShape.load(folder))
        weights: dict[str, Tensor] = {}
        for shard in sorted(folder.glob("*.safetensors")):
            with safe_open(shard, "pt", device=device) as stored:
                names = [name for name in stored.keys() if stage is None or stage.has(name)]  # noqa: SIM118 - it is no dict
                loaded = {name: stored.get_tensor(name) for name in names}
            check_finite(folder, loaded.items())
            weights |= {name.removeprefix("model."): tensor.to(dtype) for name, tensor in loaded.items()}
        if stage and stage.number:
            config, empty = replace(config, tied=True), weights["norm.weight"].new_zeros(0, config.hidden)
            weights["embed_tokens.weight"] = empty
        return cls(config, weights)

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """Module name -> (out, in), for every layer that an adapter may target."""
        return {
            name.removesuffix(".weight"): (weight.shape[0], weight.shape[1])
            for name, weight in self.weights.items()
            if name.endswith(".weight") and name.split(".")[-2] in LINEAR_LAYERS
        }

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: Attend,
        project: Project = plain,
        run_layer: RunLayer = directly,
    ) -> Tensor:
        """tokens, positions [B, T] -> hidden states [B, T, E] after the last norm; see `logits`."""
        x = F.embedding(tokens, self.embedding)
        cos, sin = self.cos[positions].unsqueeze(2), self.sin[positions].unsqueeze(2)
        for layer in range(self.config.num_layers):
            x = run_layer(self._layer, layer, x, cos, sin, attend, project)
        return self._norm("norm", x)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., E] -> [..., V]"""
        return F.linear(hidden, self.head)

    def _layer(self, layer: int, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, project: Project) -> Tensor:
        x = x + self._attention(layer, x, cos, sin, attend, project)
        return x + self._mlp(layer, x, project)

    def _attention(self, layer: int, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, project: Project) -> Tensor:
        at, c = f"layers.{layer}.self_attn", self.config
        x = self._norm(f"layers.{layer}.input_layernorm", x)
        q = self._linear(f"{at}.q_proj", x, project).unflatten(-1, (c.num_heads, c.head_dim))
        k = self._linear(f"{at}.k_proj", x, project).unflatten(-1, (c.num_kv_heads, c.head_dim))
        v = self._linear(f"{at}.v_proj", x, project).unflatten(-1, (c.num_kv_heads, c.head_dim))
        if f"{at}.q_norm.weight" in self.weights:
            q, k = self._norm(f"{at}.q_norm", q), self._norm(f"{at}.k_norm", k)
        out = attend(layer, rotate(q, cos, sin), rotate(k, cos, sin), v)
        return self._linear(f"{at}.o_proj", out.flatten(-2), project)

    def _mlp(self, layer: int, x: Tensor, project: Project) -> Tensor:
        at = f"layers.{layer}.mlp"
        x = self._norm(f"layers.{layer}.post_attention_layernorm", x)
        gate = self._linear(f"{at}.gate_proj", x, project)
        up = self._linear(f"{at}.up_proj", x, project)
        return self._linear(f"{at}.down_proj", gated(gate, up), project)

    def _linear(self, name: str, x: Tensor, project: Project) -> Tensor:
        return project(name, x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight = self.weights[f"{name}.weight"]
        return F.rms_norm(x, (weight.shape[0],), weight, self.config.norm_eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (Su et al. 2021, arXiv 2104.09864), halves layout. x [B, T, H, D], cos [B, T, 1, D]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """SwiGLU (Shazeer 2020, arXiv 2002.05202)."""
    return F.silu(gate) * up


def check_finite(folder: Path, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Raises InvalidInput naming the first weight with a value that is not finite. Reads each once."""
    for name, weight in weights:
        if not weight.sum().isfinite() and not weight.isfinite().all():
            raise InvalidInput(f"{folder}: {name} has values that are infinite or no numbers")


def fitting_kind(
    folder: Path, device: torch.device, *, only_decoder: bool, faster_on: Collection[str] = ("cpu",)
) -> str:
    """The decoder where no other computes this, and for its families on the kinds of device where it is faster; else `transformers`."""
    if only_decoder:
        return "decoder"
    if device.type not in faster_on:
        return "transformers"
    try:
        DecoderConfig.load(folder)
    except InvalidInput as error:
        log.info("decoder_refused", reason=str(error))
        return "transformers"
    return "decoder"
