"""A base model that several ranks compute together: the first rank's `Backbone`.

    logprobs ─ split ─► each rank's share ─► log-probs ─► the first rank ─ losses ─ backward ─► each rank's share of the gradient
    stack ─ put ─► the adapter, on each rank        gradient ─► the sum of the ranks' gradients, once a batch

Each rank gathers a layer's weights from all while it computes it. When memory runs out on one, all end the pass in step, and
the first rank raises MemoryError. Axes: M targets of the micro-batch, P all values of an adapter.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from base_model.device import free_bytes
from trainer_service.backbone.interface import AdapterPlace, Sequences
from trainer_service.backbone.modules import ModulesBackbone
from trainer_service.backbone.sharding import forget_pass
from trainer_service.lora import AdapterLayout, AdapterStack
from trainer_service.packing import Cost
from trainer_service.ranks.commands import AddUp, Backward, FindFree, NewStack, Put, RankForward, Remove
from trainer_service.ranks.group import Share, split
from trainer_service.ranks.leader import Ranks, begin_of
from trainer_service.settings import TrainerSettings


def load_ranks(settings: TrainerSettings, folder: Path) -> "RankedBackbone":
    """Starts the ranks, each with its part of the base model. Raises InvalidInput."""
    ranks, part = Ranks.start(begin_of(settings, folder))
    return RankedBackbone(part.checkpointing(len(part.layers)) if settings.trainer_checkpointing else part, ranks)


@dataclass(frozen=True, slots=True)
class RankedBackbone:
    """See `Backbone`. `own`: the first rank's part. For one `Trainer` at a time: a new one makes all ranks forget empty stacks."""

    own: ModulesBackbone
    ranks: Ranks
    pads: bool = False
    concurrent: bool = False
    _anchor: Tensor = field(default_factory=lambda: torch.zeros((), requires_grad=True))

    @property
    def vocab(self) -> int:
        return self.own.vocab

    @property
    def context(self) -> int:
        return self.own.context

    @property
    def device(self) -> torch.device:
        return self.own.device

    @property
    def num_ranks(self) -> int:
        return self.ranks.group.num_ranks

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        return self.own.linear_shapes()

    def cost(self) -> Cost:
        return self.own.cost()

    def stack(self, layout: AdapterLayout) -> AdapterStack:
        return RankedStack(layout, self.device, self.ranks)

    def logprobs(self, sequences: Sequences, adapters: Sequence[AdapterPlace] | None) -> Tensor:
        learns = torch.is_grad_enabled() and adapters is not None
        return _Together.apply(self._anchor if learns else self._anchor.detach(), self, sequences, adapters)  # pyright: ignore

    def forward(
        self, sequences: Sequences, adapters: Sequence[AdapterPlace] | None, *, learns: bool
    ) -> "tuple[Tensor, Under]":
        """The log-probs of all, [M], and what their backward needs. Raises MemoryError."""
        shares = split(sequences, adapters, self.num_ranks)
        sizes = [share.num_targets for share in shares]
        with self.ranks.busy():
            places = None if adapters is None else tuple(map(_on_the_wire, adapters))
            self.ranks.tell(RankForward(sequences, places, learns, self.own.num_checkpointed))
            with torch.set_grad_enabled(learns):
                own_M = self.own.logprobs(shares[0].sequences, shares[0].adapters)
            lacking = self.ranks.group.lacking(self.own)
            found = [] if lacking else self.ranks.group.collect(own_M.detach(), sizes)
        if lacking:
            del own_M
            raise self._forgotten(lacking)
        for rank, share in enumerate(shares):
            self.ranks.tokens[rank] += share.num_tokens
        logprobs_M = own_M.new_empty(sum(map(len, sequences.targets)))
        places_of = [torch.from_numpy(share.places).to(self.device) for share in shares]
        for places_m, values_m in zip(places_of, found, strict=True):
            logprobs_M[places_m] = values_m[: len(places_m)]
        return logprobs_M, Under(own_M, shares, places_of, sizes)

    def backward(self, under: "Under", grad_M: Tensor) -> None:
        """Adds each rank's gradients to its own stacks. Raises MemoryError; they are worthless then."""
        with self.ranks.busy():
            self.ranks.tell(Backward())
            parts = [grad_M[places_m] for places_m in under.places]
            under.own_M.backward(self.ranks.group.hand_out(parts, under.sizes))  # pyright: ignore
            lacking = self.ranks.group.lacking(self.own)
        if lacking:
            raise self._forgotten(lacking)

    def _forgotten(self, lacking: Sequence[int]) -> MemoryError:
        reason = forget_pass(self.own)
        return MemoryError(f"on rank {', '.join(map(str, lacking))}{f': {reason}' if reason else ''}")

    def keeping_all(self) -> "RankedBackbone":
        return replace(self, own=self.own.keeping_all())

    def kept_per_token(self, keeping_all: float) -> float:
        return self.own.kept_per_token(keeping_all)

    def fitting(self, keeping_all: float, wanted: float) -> "RankedBackbone":
        return replace(self, own=self.own.fitting(keeping_all, wanted))

    def free_bytes(self) -> int:
        with self.ranks.in_step():
            self.ranks.tell(FindFree())
            return self.ranks.group.least(free_bytes(self.device))

    def counters(self) -> dict[str, float]:
        """`rank_<n>_tokens`: of each rank's forwards; `ranks_s`: seconds in passes, backwards included."""
        tokens = {f"rank_{rank}_tokens": float(number) for rank, number in enumerate(self.ranks.tokens)}
        return {**tokens, "ranks_s": self.ranks.busy_s}


@dataclass(frozen=True, slots=True)
class Under:
    """A pass under way."""

    own_M: Tensor  # the log-probs of this rank's share, with their graph
    shares: Sequence[Share[AdapterPlace]]
    places: Sequence[Tensor]  # of each share's targets among those of the micro-batch
    sizes: Sequence[int]  # of each share's log-probs


class _Together(torch.autograd.Function):
    """The micro-batch on all ranks. `anchor` makes the result need a gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        backbone: RankedBackbone,
        sequences: Sequences,
        adapters: Sequence[AdapterPlace] | None,
    ) -> Tensor:
        ctx.backbone = backbone
        logprobs_M, ctx.under = backbone.forward(sequences, adapters, learns=ctx.needs_input_grad[0])
        return logprobs_M

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        ctx.backbone.backward(ctx.under, grads[0])
        return None, None, None, None


class RankedStack(AdapterStack):
    """A stack that each rank has too, with the gradients of its own shares."""

    def __init__(self, layout: AdapterLayout, device: torch.device, ranks: Ranks) -> None:
        super().__init__(layout, device)
        self._ranks, self.number = ranks, ranks.new_stack()
        with ranks.in_step():
            ranks.tell(NewStack(self.number, layout.rank, layout.names, tuple(map(tuple, layout.shapes))))

    def put(self, values_P: Tensor, scale: float, grad_P: Tensor | None = None) -> int:
        place = super().put(values_P, scale, grad_P)
        with self._ranks.in_step():
            self._ranks.tell(Put(self.number, place, scale))
            self._ranks.group.hand_on(values_P)
        return place

    def gradient(self, place: int) -> Tensor:
        grad_P = super().gradient(place)
        with self._ranks.in_step():
            self._ranks.tell(AddUp(self.number, place))
            self._ranks.group.add_up(grad_P)
        return grad_P

    def remove(self, place: int) -> None:
        super().remove(place)
        with self._ranks.in_step():
            self._ranks.tell(Remove(self.number, place))


def _on_the_wire(adapter: AdapterPlace) -> tuple[int, int]:
    stack, place = adapter
    assert isinstance(stack, RankedStack)
    return stack.number, place
