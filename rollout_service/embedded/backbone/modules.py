"""transformers' own modules for generation: the arithmetic of the trainers' backbone `modules`, on the engine's rows.

Their attention and linear layers are replaced: the engine attends, on its keys and values, and linear layers of one input
are one product, to which each row's adapter is added.

Axes: N rows of a forward (one a position), E hidden, H query heads, K key/value heads, D head size; n rows of T tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from base_model.modules import check_computed, context_of, load_model, passed_on, target_layers, written_logprobs
from base_model.stacked import fused_of
from common.errors import InvalidInput
from rollout_service.embedded import kv
from rollout_service.embedded.backbone.interface import ForwardPart, ModelShape, adapt, cut, joined, joined_bias
from rollout_service.embedded.pools import MIN_LENGTH, Pool

ROWS, LENGTH = 2, 9
"""Sizes of the few tokens that are compared with transformers' own."""
NAME = "marlaas_rows"
"""The name by which transformers knows the engine's attention."""
SHAPES_DIFFER = (
    "the transformers backbone does not sample where keys and values, or those of other layers, differ in shape"
)


def shape_of(model: Any, max_context: int | None) -> ModelShape:
    """Raises InvalidInput for a base model whose layers differ in it."""
    config = model.config.get_text_config()
    try:
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    except RuntimeError as error:  # of transformers, for a field that layers have for themselves
        raise InvalidInput(f"{SHAPES_DIFFER}: {error}") from error
    num_layers = len(model.get_decoder().layers)
    return ModelShape(num_layers, heads, kv_heads, head_dim, config.vocab_size, context_of(model, max_context))


class ModulesDecoder:
    """See `EngineBackbone`. Changes the linear layers and the attention of `model`, which it owns."""

    def __init__(self, model: Any, max_context: int | None = None) -> None:
        """Takes a loaded model. `max_context`: serve no longer context than this."""
        self.model, self.config = model, shape_of(model, max_context)
        self.embedding: Tensor = model.get_input_embeddings().weight
        self.windows = set[int | None]()  # that layers have asked attention for
        self._current = CurrentParts()
        self._shapes = _join_layers(target_layers(model), self.config.num_layers, self._current)
        model.set_attn_implementation(NAME)

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        return self._shapes

    def forward(self, tokens: Tensor, positions: Tensor, parts: Sequence[ForwardPart]) -> Tensor:
        self._current.parts = parts
        model = self.model.get_decoder()
        output = model(input_ids=tokens[None], position_ids=positions[None], use_cache=False, rows=self)
        return output.last_hidden_state[0]

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.model.get_output_embeddings().weight).float()

    def attend(self, layer: int, qkv: Tensor, scale: float | None, window: int | None) -> Tensor:
        """Attention of the rows of the forward under way."""
        parts = self._current.parts
        self.windows.add(window)
        return joined(
            [part.attend(layer, own, scale, window) for part, own in zip(parts, cut(qkv, parts), strict=True)]
        )


def rows_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    rows: ModulesDecoder | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """query [1, H, N, D], key and value [1, K, N, D] -> [1, N, H, D]. `rows` comes with the model's call. Raises InvalidInput for
    another attention."""
    rows = passed_on(rows, others)
    c, each = rows.config, [states[0].transpose(0, 1) for states in (query, key, value)]
    expected = [(heads, c.head_dim) for heads in (c.num_heads, c.num_kv_heads, c.num_kv_heads)]
    if [states.shape[1:] for states in each] != expected:
        raise InvalidInput(SHAPES_DIFFER)
    attended = rows.attend(module.layer_idx, torch.cat(each, dim=1), scaling, sliding_window)
    return attended.view(1, *each[0].shape), None


@dataclass(slots=True)
class CurrentParts:
    """The parts of the forward under way, which transformers' linear layers cannot take as an argument."""

    parts: Sequence[ForwardPart] = ()


class JoinedLinears:
    """Linear layers of one input, as one product with each row's adapter."""

    def __init__(self, layers: Sequence[torch.nn.Linear], number: int, current: CurrentParts) -> None:
        """`number`: of their fused product."""
        weights = [layer.weight for layer in layers]
        self._weight = joined(weights)
        self._bias = joined_bias(weights, [layer.bias for layer in layers])
        self._widths = [layer.out_features for layer in layers]
        self._number, self._current = number, current
        self._input: Tensor | None = None
        self._outputs: dict[int, Tensor] = {}

    def output(self, x: Tensor, index: int) -> Tensor:
        """x [..., in] -> [..., out of one layer]. The first call computes all, the last frees them."""
        if x is not self._input or index not in self._outputs:
            self._input, self._outputs = x, dict(enumerate(self._computed(x).split(self._widths, dim=-1)))
        output = self._outputs.pop(index)
        if not self._outputs:
            self._input = None
        return output

    def _computed(self, x: Tensor) -> Tensor:
        y = F.linear(x, self._weight, self._bias)
        adapt(y.flatten(0, -2), x.flatten(0, -2), self._number, self._current.parts)
        return y


class JoinedLinear(torch.nn.Module):
    """One of several layers that are computed as one."""

    def __init__(self, of: JoinedLinears, index: int) -> None:
        super().__init__()
        self._of, self._index = of, index

    def forward(self, x: Tensor) -> Tensor:
        return self._of.output(x, self._index)


def _join_layers(
    targets: Mapping[str, tuple[Any, str]], num_layers: int, current: CurrentParts
) -> dict[str, tuple[int, int]]:
    """Replaces the layers that an adapter may target; returns their shapes."""
    modules = {name: getattr(*place) for name, place in targets.items()}
    shapes = {name: (module.out_features, module.in_features) for name, module in modules.items()}
    fused = fused_of(shapes)
    groups = [[f"layers.{layer}.{leaf}" for leaf in leaves] for layer in range(num_layers) for leaves in fused]
    for number, names in enumerate(groups):
        together = JoinedLinears([modules.pop(name) for name in names], number, current)
        for index, name in enumerate(names):
            setattr(*targets[name], JoinedLinear(together, index))
    return shapes


def load_modules(
    folder: Path, *, device: str = "cpu", dtype: torch.dtype = torch.float32, max_context: int | None = None
) -> ModulesDecoder:
    """Loads a local folder in Hugging Face layout. `max_context`: serve no longer context than this.

    Raises InvalidInput for a model that the engine would not compute as transformers does.
    """
    model = load_model(folder, device=device, dtype=dtype)
    vocab = model.config.get_text_config().vocab_size
    tokens_nT = np.arange(ROWS * LENGTH).reshape(ROWS, LENGTH) * 7919 % vocab
    theirs_nT = torch.stack([written_logprobs(model, row, LENGTH - 1) for row in tokens_nT])
    decoder = ModulesDecoder(model, max_context)
    ours_nT = _logprobs(decoder, torch.from_numpy(tokens_nT).to(theirs_nT.device))
    check_computed(folder, model, ours_nT - theirs_nT, decoder.windows)
    return decoder


@torch.no_grad()
def _logprobs(decoder: ModulesDecoder, tokens_nT: Tensor) -> Tensor:
    """Log-probs of all tokens but the first: the last by a step of decoding, the others by a prefill."""
    num, width = len(tokens_nT), tokens_nT.shape[1] - 2
    pool = Pool.empty(decoder.config, MIN_LENGTH, decoder.embedding)
    pool.resize(num)
    pool.slots += range(num)
    at_T = torch.arange(width, device=tokens_nT.device).repeat(num)
    prefill = kv.PrefillAttend(decoder.config, [(pool, row) for row in range(num)], [width] * num, width)
    before = decoder.forward(tokens_nT[:, :width].flatten(), at_T, [ForwardPart(len(at_T), prefill, ())])
    at_n = torch.full((num,), width, device=tokens_nT.device)
    step = kv.DecodeAttend(decoder.config, kv.slices([pool], at_n, [width + 1]), exact=False)
    last = decoder.forward(tokens_nT[:, width], at_n, [ForwardPart(num, step, ())])
    hidden = torch.cat([before.unflatten(0, (num, width)), last[:, None]], dim=1)
    return decoder.logits(hidden).log_softmax(-1).gather(2, tokens_nT[:, 1:, None]).squeeze(2)


AttentionInterface.register(NAME, rows_attention)  # pyright: ignore
