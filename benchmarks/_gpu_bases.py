"""Base models with random weights in the shape of real ones: our decoder, and transformers' modules that train and sample over its
weights."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from base_model.decoder import Decoder, DecoderConfig
from rollout_service.embedded.backbone.fused import FusedDecoder
from rollout_service.embedded.backbone.interface import EngineBackbone
from trainer_service.backbone.interface import Backbone
from trainer_service.settings import AUTO, TrainerSettings


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of a base model."""

    config: DecoderConfig
    inner: int  # width between gate and down


def _qwen3(
    layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int, vocab: int, inner: int, *, tied: bool = True
) -> Shape:
    config = DecoderConfig(layers, hidden, heads, kv_heads, head_dim, vocab, 4096, 1e6, 1e-6, tied=tied)
    return Shape(config, inner)


SHAPES_OF_BASES = {
    "qwen3-0.6b": _qwen3(28, 1024, 16, 8, 128, 151_936, 3072),
    "qwen3-8b": _qwen3(36, 4096, 32, 8, 128, 151_936, 12_288, tied=False),
    "tiny": _qwen3(4, 128, 4, 2, 32, 272, 384),
}


def random_decoder(shape: Shape, device: torch.device, dtype: torch.dtype) -> Decoder:
    c, generator = shape.config, torch.Generator(device).manual_seed(0)

    def drawn(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, device=device, dtype=dtype) * 0.02

    ones = partial(torch.ones, device=device, dtype=dtype)
    weights = {"embed_tokens.weight": drawn(c.vocab, c.hidden), "norm.weight": ones(c.hidden)}
    query, key = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    linear = {
        "self_attn.q_proj": (query, c.hidden),
        "self_attn.k_proj": (key, c.hidden),
        "self_attn.v_proj": (key, c.hidden),
        "self_attn.o_proj": (c.hidden, query),
        "mlp.gate_proj": (shape.inner, c.hidden),
        "mlp.up_proj": (shape.inner, c.hidden),
        "mlp.down_proj": (c.hidden, shape.inner),
    }
    if not c.tied:
        weights["lm_head.weight"] = drawn(c.vocab, c.hidden)
    norms = {"input_layernorm": c.hidden, "post_attention_layernorm": c.hidden}
    norms |= {"self_attn.q_norm": c.head_dim, "self_attn.k_norm": c.head_dim}
    for layer in range(c.num_layers):
        weights |= {f"layers.{layer}.{name}.weight": drawn(*size) for name, size in linear.items()}
        weights |= {f"layers.{layer}.{name}.weight": ones(size) for name, size in norms.items()}
    return Decoder(c, weights)


def random_model(decoder: Decoder, attention: str) -> Any:
    """transformers' model with the weights of a decoder, not copied. `attention`: its name in transformers."""
    from transformers import Qwen3Config, Qwen3ForCausalLM  # here: a lent GPU may lack them

    c, weights = decoder.config, decoder.weights
    fields: dict[str, Any] = {
        "vocab_size": c.vocab,
        "hidden_size": c.hidden,
        "intermediate_size": weights["layers.0.mlp.up_proj.weight"].shape[0],
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "max_position_embeddings": c.context,
        "rope_parameters": {"rope_type": "default", "rope_theta": c.rope_theta},
        "rms_norm_eps": c.norm_eps,
        "tie_word_embeddings": c.tied,
        "attn_implementation": attention,
    }
    config = Qwen3Config(**fields)
    with torch.device("meta"):
        model: Any = Qwen3ForCausalLM(config)
    named = {("" if name.startswith("lm_head") else "model.") + name: weight for name, weight in weights.items()}
    model.load_state_dict({"lm_head.weight": decoder.head, **named}, assign=True)
    model.tie_weights()
    rotary = model.get_decoder().rotary_emb  # its frequencies are no weights
    model.get_decoder().rotary_emb = type(rotary)(config).to(decoder.device)
    return model.eval().requires_grad_(False)


def random_modules(decoder: Decoder) -> Backbone:
    """The backbone of devices with the weights of a decoder, not copied."""
    from base_model.modules import target_layers  # here: they import transformers
    from trainer_service.backbone.attention import NAME
    from trainer_service.backbone.modules import ModulesBackbone

    model = random_model(decoder, NAME)
    return ModulesBackbone.of(model, target_layers(model), decoder.config.context)


def training_modules(decoder: Decoder, kernels: str = AUTO) -> Backbone:
    """The same, with kernels as a trainer takes them on that device. Raises InvalidInput for some that cannot run there."""
    from trainer_service.backbone.device_kernels.kernel_choice import chosen_kernels, use_kernels
    from trainer_service.backbone.modules import ModulesBackbone

    backbone = random_modules(decoder)
    assert isinstance(backbone, ModulesBackbone)
    dtype = str(decoder.embedding.dtype).removeprefix("torch.")
    given = {"trainer_device": str(decoder.device), "trainer_dtype": dtype, "trainer_kernels": kernels}
    use_kernels(backbone, chosen_kernels(TrainerSettings.model_validate(given), decoder.device))
    return backbone


def sampling_backbone(decoder: Decoder, kind: str) -> EngineBackbone:
    """The backbone of that kind for the embedded engine, with the weights of a decoder. `kind`: decoder or transformers."""
    if kind == "decoder":
        return FusedDecoder(decoder, exact=False)
    from rollout_service.embedded.backbone.modules import ModulesDecoder  # here: it imports transformers

    return ModulesDecoder(random_model(decoder, "sdpa"))
