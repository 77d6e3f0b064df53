"""The backbone of devices: transformers' own modules, rows packed without padding, an adapter for each.

Axes: N tokens of a pack, M targets, E hidden.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from base_model.device import free_bytes
from common.models.footprint import BYTES_OF_SCORE, MAX_SCORES, MODULES_SCORES, SCORES_SHARE, kept_with_checkpoints
from trainer_service.backbone.attention import Pack
from trainer_service.backbone.grouped import CurrentGroups, Groups, LoraLinear, groups_of
from trainer_service.backbone.head import target_logprobs
from trainer_service.backbone.interface import AdapterPlace, Sequences
from trainer_service.backbone.shortage import Shortage
from trainer_service.lora import AdapterLayout, AdapterStack
from trainer_service.packing import Cost


@dataclass(frozen=True, slots=True)
class ModulesBackbone:
    """See `Backbone`. Changes the linear layers of `model`, which it owns."""

    model: Any
    context: int
    layer_weights: int  # of a layer, on average
    num_checkpointed: int = 0  # of the first layers: they keep only their input for the backward
    max_scores: int = MAX_SCORES
    whole: Callable[[Any], AbstractContextManager[Any]] = nullcontext
    """Makes a module's weights whole, outside of its own forward."""
    shortage: Shortage | None = None
    """A shortage of memory, where processes compute in step: what it notes raises no error, and results are worthless."""
    pads: bool = False
    num_ranks: int = 1
    concurrent: bool = False
    current: CurrentGroups = field(default_factory=CurrentGroups)
    _shapes: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])

    @classmethod
    def of(cls, model: Any, targets: Mapping[str, tuple[Any, str]], context: int) -> "ModulesBackbone":
        """Takes a loaded model. `targets`: see `target_layers`; `context`: most tokens of a sequence."""
        layers = model.get_decoder().layers
        num_weights = sum(p.numel() for layer in layers for p in layer.parameters())
        backbone = cls(
            model,
            context,
            num_weights // len(layers),
            max_scores=scores_on(model.get_output_embeddings().weight.device),
        )
        backbone.current.follow(model.get_input_embeddings())
        for name, (layer, leaf) in targets.items():
            module = getattr(layer, leaf)
            setattr(layer, leaf, LoraLinear(module, name, backbone.current))
            backbone._shapes[name] = (module.out_features, module.in_features)
        return backbone

    @property
    def vocab(self) -> int:
        return self._config.vocab_size

    @property
    def device(self) -> torch.device:
        return self.model.device

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        return self._shapes

    def cost(self) -> Cost:
        config = self._config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return Cost.of_layer(self.layer_weights, config.num_attention_heads, head_dim, by_branch=True)

    def stack(self, layout: AdapterLayout) -> AdapterStack:
        return AdapterStack(layout, self.device)

    def logprobs(self, sequences: Sequences, adapters: Sequence[AdapterPlace] | None) -> Tensor:
        pack = Pack.of(sequences.trees, self.device)
        groups = None
        if adapters is not None:
            lengths = [*map(len, sequences.trees)]
            how = {"one_graph": self.current.one_graph, "fused": self.current.fused}
            groups = groups_of(adapters, lengths, self._shapes, self._head.dtype, **how)
        with self.current.using(groups), torch.cuda.device_of(self._head):  # Triton launches on the current device
            hidden_NE = self.hidden(pack, groups)
        about = sequences.about_targets(self.device)
        with self.whole(self.model.get_output_embeddings()), torch.cuda.device_of(self._head):
            hidden_ME = hidden_NE.index_select(0, pack.predictors_M)
            return target_logprobs(hidden_ME, self._head, *about, self.max_scores, self.current.fused)
        return torch.zeros_like(about[1])  # memory ran out, and `shortage` knows

    def keeping_all(self) -> "ModulesBackbone":
        return replace(self, num_checkpointed=0)

    def checkpointing(self, num_layers: int) -> "ModulesBackbone":
        """The same base model; its first layers keep only their input, and the backward computes them again."""
        return replace(self, num_checkpointed=min(num_layers, len(self.layers)))

    def kept_per_token(self, keeping_all: float) -> float:
        input_bytes = self._config.hidden_size * self._head.dtype.itemsize
        return kept_with_checkpoints(keeping_all, len(self.layers), self.num_checkpointed, input_bytes=input_bytes)

    def fitting(self, keeping_all: float, wanted: float) -> "ModulesBackbone":
        """Checkpoints as few layers more as will do; all, where that does not."""
        for num_layers in range(self.num_checkpointed, len(self.layers)):
            fewer = self.checkpointing(num_layers)
            if fewer.kept_per_token(keeping_all) <= wanted:
                return fewer
        return self.checkpointing(len(self.layers))

    def free_bytes(self) -> int:
        return free_bytes(self.device)

    def counters(self) -> dict[str, float]:
        return {}

    @property
    def _config(self) -> Any:
        return self.model.config.get_text_config()

    @property
    def layers(self) -> Sequence[Any]:
        return self.model.get_decoder().layers

    @property
    def _head(self) -> Tensor:
        return self.model.get_output_embeddings().weight

    def hidden(self, pack: Pack, groups: Groups | None) -> Tensor:
        """Hidden states after the last norm, [N, E]."""
        again = partial(self.current.using, groups)
        for number, layer in enumerate(self.layers):
            _let_checkpoint(layer, number < self.num_checkpointed, again)
        tokens_1N, positions_1N = pack.tokens_N[None], pack.positions_N[None]
        model = self.model.get_decoder()
        found = model(input_ids=tokens_1N, position_ids=positions_1N, use_cache=False, packed=pack)
        return found.last_hidden_state[0]


def scores_on(device: torch.device) -> int:
    """The number of scores that may exist at one time on a device, by its free memory."""
    some = free_bytes(device) // (SCORES_SHARE * BYTES_OF_SCORE)
    return max(MAX_SCORES, some if device.type == "cuda" else min(some, MODULES_SCORES))


def _let_checkpoint(layer: Any, wanted: bool, again: Any) -> None:
    """Sets how transformers' layer is called. `again`: the context of its second computation.

    Checkpointing needs training mode, which is set on the layer only, not while it computes: it would drop out.
    """

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), again()

    def evaluated(call: Any, *args: Any) -> Any:
        layer.training = False
        try:
            return call(*args)
        finally:
            layer.training = True

    def checkpointed(call: Any, *args: Any) -> Any:
        return checkpoint(
            partial(evaluated, call), *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts
        )

    layer.training = layer.gradient_checkpointing = wanted
    layer._gradient_checkpointing_func = checkpointed
