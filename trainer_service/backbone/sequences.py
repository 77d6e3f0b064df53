"""The CPU's backbone: our decoder over padded sequences. In deterministic mode a row's bits depend on no neighbour.

Axes: B sequences, T positions, M targets of the micro-batch, E hidden.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from base_model.decoder import Attend, Decoder, RunLayer, directly, plain
from base_model.device import free_bytes
from common.models.footprint import kept_with_checkpoints
from trainer_service.backbone.head import target_logprobs
from trainer_service.backbone.interface import AdapterPlace, Sequences
from trainer_service.backbone.projection import Projection
from trainer_service.batch import Ints
from trainer_service.lora import AdapterLayout, AdapterStack
from trainer_service.packing import Cost


@dataclass(frozen=True, slots=True)
class DecoderBackbone:
    """See `Backbone`. `run_layer`: `directly` keeps a layer's activations, `checkpointed` only its input."""

    decoder: Decoder
    run_layer: RunLayer = directly
    pads: bool = True
    num_ranks: int = 1

    @property
    def vocab(self) -> int:
        return self.decoder.config.vocab

    @property
    def context(self) -> int:
        return self.decoder.config.context

    @property
    def device(self) -> torch.device:
        return self.decoder.device

    @property
    def concurrent(self) -> bool:
        return self.device.type == "cpu"

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        return self.decoder.linear_shapes()

    def cost(self) -> Cost:
        shapes, config = self.decoder.linear_shapes().values(), self.decoder.config
        num_weights = sum(out * width for out, width in shapes)
        return Cost.of_layer(num_weights // config.num_layers, config.num_heads, config.head_dim)

    def stack(self, layout: AdapterLayout) -> AdapterStack:
        return AdapterStack(layout, self.device)

    def logprobs(self, sequences: Sequences, adapters: Sequence[AdapterPlace] | None) -> Tensor:
        project = plain if adapters is None else Projection.of(adapters)
        tokens_BT, positions_BT, bias_BTT, predictors_M = _inputs(sequences, self.decoder)
        attend = _attend(self.decoder, bias_BTT)
        hidden_BTE = self.decoder.forward(tokens_BT, positions_BT, attend, project, self.run_layer)
        hidden_ME = hidden_BTE.flatten(0, 1).index_select(0, predictors_M)
        targets_M, temperatures_M, learned_M = sequences.about_targets(self.device)
        return target_logprobs(hidden_ME, self.decoder.head, targets_M, temperatures_M, learned_M)

    def keeping_all(self) -> "DecoderBackbone":
        return replace(self, run_layer=directly)

    def kept_per_token(self, keeping_all: float) -> float:
        num_layers = self.decoder.config.num_layers
        input_bytes = self.decoder.config.hidden * self.decoder.embedding.dtype.itemsize
        checkpointed = 0 if self.run_layer is directly else num_layers
        return kept_with_checkpoints(keeping_all, num_layers, checkpointed, input_bytes=input_bytes)

    def fitting(self, keeping_all: float, wanted: float) -> "DecoderBackbone":
        return self

    def free_bytes(self) -> int:
        return free_bytes(self.device)

    def counters(self) -> dict[str, float]:
        return {}


def _inputs(sequences: Sequences, decoder: Decoder) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """A micro-batch on the device: tokens and positions [B, T]; what is added to attention scores (None: every sequence is one row,
    plainly causal); predictors [M], an index into the flattened B x T."""
    trees, width = sequences.trees, sequences.width
    tokens_BT, positions_BT, branches_BT = np.zeros((3, len(trees), width), np.int64)
    branches_BT -= 1
    predictors: list[Ints] = []
    for i, tree in enumerate(trees):
        tokens_BT[i, : len(tree)], positions_BT[i, : len(tree)] = tree.tokens, tree.positions
        branches_BT[i, : len(tree)] = tree.branches
        predictors += [row_M + i * width for row_M in tree.predictors]
    arrays = (tokens_BT, positions_BT, branches_BT, np.concatenate(predictors))
    tokens, positions, branches, places = (torch.from_numpy(each).to(decoder.device) for each in arrays)
    bias = _attention_bias(branches, decoder.embedding.dtype) if any(tree.branched for tree in trees) else None
    return tokens, positions, bias, places


def _attention_bias(branches_BT: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, 1, T, T]: 0 on what a position sees, up to itself in its branch and the shared beginning; else -inf."""
    to, by = branches_BT[:, None, None, :], branches_BT[:, None, :, None]
    seen = ((to == by) | (to == 0)).tril()
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))


def _attend(decoder: Decoder, bias_BTT: Tensor | None) -> Attend:
    grouped = decoder.config.num_heads > decoder.config.num_kv_heads

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        causal = bias_BTT is None
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias_BTT, is_causal=causal, enable_gqa=grouped)
        return out.transpose(1, 2)

    return attend


def checkpointed(layer: Callable[..., Tensor], *args: Any) -> Tensor:
    """Keeps only the layer's input; the backward computes it again (Chen et al. 2016, arXiv 1604.06174)."""
    return checkpoint(layer, *args, use_reentrant=False)  # pyright: ignore
