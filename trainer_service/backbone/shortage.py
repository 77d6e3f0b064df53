"""Memory that runs out on one of several processes with parts of a base model: its pass ends in step, empty-handed.

All processes gather the same weights in the same order, so one that left a pass would leave the others waiting. A layer
without memory returns its input, and so do those after it, which only gather weights. The same in the backward. Afterwards
the processes tell one another, and the pass counts nowhere.

    gather weights ─► guarded layer: forward, or its input as it is ─► give weights up        (in the backward likewise)

What is not guarded ends the process: memory that runs out between layers, or while weights are gathered.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from base_model.device import is_out_of_memory


@dataclass(slots=True)
class Shortage:
    """Notes whether memory ran out on this process in the pass under way."""

    reason: str = ""
    _anchor: Tensor = field(default_factory=lambda: torch.zeros((), requires_grad=True))

    @contextmanager
    def noted(self) -> Generator[None]:
        """Notes an error of memory, and swallows it and its consequences."""
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            if not (self.reason or is_out_of_memory(error)):
                raise
            self.reason = self.reason or str(error).partition("\n")[0] or type(error).__name__

    def guard(self, layer: Any) -> None:
        """Guards a layer's forward (hidden states are its first argument and result) and its backward."""
        inner = layer.forward

        def forward(hidden: Tensor, *args: Any, **others: Any) -> Tensor:
            if torch.is_grad_enabled():
                call = partial(_called, inner, args, others)
                return _Guarded.apply(hidden, self._anchor, self, call)  # pyright: ignore
            with self.noted():
                return hidden if self.reason else inner(hidden, *args, **others)
            return hidden

        layer.forward = forward


def _called(inner: Callable[..., Tensor], args: Any, others: Any, hidden: Tensor) -> Tensor:
    return inner(hidden, *args, **others)


class _Guarded(torch.autograd.Function):
    """A layer with its own graph, so that its backward is a call to guard. `anchor` gives the result a gradient."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, anchor: Tensor, shortage: Shortage, call: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.shortage, ctx.own = shortage, None
        if not shortage.reason:
            with shortage.noted(), torch.enable_grad():
                own = hidden.detach().requires_grad_(hidden.requires_grad)
                ctx.own = own, call(own)
        return hidden.detach() if ctx.own is None else ctx.own[1].detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        own, ctx.own = ctx.own, None
        if own is not None and not ctx.shortage.reason:
            with ctx.shortage.noted():
                torch.autograd.backward(own[1], grads[0])
                return own[0].grad, None, None, None
        return grads[0], None, None, None
