"""Holds the trainable LoRA factors of many adapters side by side, each with its gradient.

Axes: C places of a stack, P all values of an adapter.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from base_model.adapter import Adapter
from common.wire.messages import LoraSpec


@dataclass(frozen=True, slots=True)
class AdapterLayout:
    """The order of an adapter's values in a flat tensor [P]: by name, A before B. Equal layouts share products."""

    rank: int
    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...] = field(compare=False)  # of each name's A and B, by base and rank

    @classmethod
    def of(cls, adapter: Adapter) -> "AdapterLayout":
        return cls(adapter.spec.rank, tuple(adapter.names()), tuple(factor.shape for factor in _factors(adapter)))

    @property
    def num_values(self) -> int:
        return sum(shape.numel() for shape in self.shapes)

    @property
    def num_layers(self) -> int:
        return len({name.split(".")[1] for name in self.names})

    def cut(self, values: Tensor) -> list[Tensor]:
        """Cuts [..., P] into views [..., *shape]."""
        pieces = values.split([shape.numel() for shape in self.shapes], dim=-1)
        return [piece.view(*piece.shape[:-1], *shape) for piece, shape in zip(pieces, self.shapes, strict=True)]


def flatten(adapter: Adapter) -> Tensor:
    """Copies all values into one new tensor [P]."""
    return torch.cat([factor.reshape(-1) for factor in _factors(adapter)])


def unflatten(values_P: Tensor, layout: AdapterLayout, spec: LoraSpec) -> Adapter:
    """Makes an adapter that is a view of `values_P`."""
    factors = layout.cut(values_P)
    a, b = (dict(zip(layout.names, factors[side::2], strict=True)) for side in (0, 1))
    return Adapter(spec, a, b)


def _factors(adapter: Adapter) -> list[Tensor]:
    return [factors[name] for name in adapter.names() for factors in (adapter.a, adapter.b)]


@dataclass(frozen=True, slots=True)
class LayerFactors:
    """A linear layer's factors of a stack: a [C, rank, in], b [C, out, rank], and their gradients. All contiguous: adding to a
    strided tensor by index takes ten times as long."""

    a: Tensor
    b: Tensor
    grad_a: Tensor
    grad_b: Tensor


class AdapterStack:
    """The adapters of one shape in training, each with its gradient.

    Every layer of the base has the same modules: an adapter's values [P] are [L, P / L], layers ordered by name."""

    def __init__(self, layout: AdapterLayout, device: torch.device) -> None:
        self.layout = layout
        of_layer = layout.shapes[: len(layout.shapes) // layout.num_layers]
        self._values_CP = torch.empty(0, layout.num_values, device=device)
        self._grads = [torch.empty(layout.num_layers, 0, *shape, device=device) for shape in of_layer]  # of each factor
        self._taken = torch.empty(layout.num_values, device=device)
        self._free: list[int] = []
        self.scales: list[float] = []
        self.factors: dict[str, LayerFactors] = {}

    @property
    def paths(self) -> tuple[str, ...]:
        """The modules that an adapter targets in each layer, in order, such as `mlp.up_proj`."""
        return tuple(name.split(".", 2)[2] for name in self.layout.names[: len(self._grads) // 2])

    @property
    def layers(self) -> tuple[str, ...]:
        """The numbers of the layers, in order."""
        return tuple(name.split(".")[1] for name in self.layout.names[:: len(self._grads) // 2])

    def gathered(self, places_G: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Copies adapters: for each of `paths` A [L, G, rank, in] and B [L, G, out, rank], views of one tensor."""
        by_layer = self._values_CP.index_select(0, places_G).unflatten(1, (self.layout.num_layers, -1)).transpose(0, 1)
        shapes = [grad.shape[2:] for grad in self._grads]
        pieces = by_layer.split([shape.numel() for shape in shapes], dim=2)
        factors = [piece.unflatten(2, shape) for piece, shape in zip(pieces, shapes, strict=True)]
        return [*zip(factors[::2], factors[1::2], strict=True)]

    def add_gradients(self, path: str, places_G: Tensor, grads_a: Tensor, grads_b: Tensor) -> None:
        """Adds [L, G, rank, in] and [L, G, out, rank] to the gradients of adapters."""
        first = 2 * self.paths.index(path)
        for total, grads in zip(self._grads[first : first + 2], (grads_a, grads_b), strict=True):
            total.index_add_(1, places_G, grads.to(total.dtype))

    def put(self, values_P: Tensor, scale: float, grad_P: Tensor | None = None) -> int:
        """Copies an adapter in, with the gradient to go on from (None: 0); returns its place."""
        if not self._free:
            self._grow()
        place = self._free.pop()
        self._values_CP[place] = values_P
        if grad_P is None:
            for grad in self._grads:
                grad[:, place] = 0.0
        else:
            sizes = [grad[0, place].numel() for grad in self._grads]
            pieces = grad_P.view(self.layout.num_layers, -1).split(sizes, dim=1)
            for grad, piece in zip(self._grads, pieces, strict=True):
                grad[:, place] = piece.view_as(grad[:, place])
        self.scales[place] = scale
        return place

    def gradient(self, place: int) -> Tensor:
        """The gradient of an adapter, [P]; valid until the next call."""
        grads = [grad[:, place].flatten(1) for grad in self._grads]
        torch.cat(grads, dim=1, out=self._taken.view(self.layout.num_layers, -1))
        return self._taken

    def remove(self, place: int) -> None:
        self._free.append(place)

    @property
    def empty(self) -> bool:
        return len(self._free) == len(self.scales)

    @property
    def device(self) -> torch.device:
        return self._values_CP.device

    def _grow(self) -> None:
        num = len(self.scales)
        more = max(1, num)
        self._values_CP = torch.cat([self._values_CP, self._values_CP.new_empty(more, self._values_CP.shape[1])])
        self._grads = [torch.cat([g, g.new_empty(len(g), more, *g.shape[2:])], dim=1) for g in self._grads]
        self.scales += [0.0] * more
        self._free += range(num + more - 1, num - 1, -1)
        values = self.layout.cut(self._values_CP)
        grads = [grad[layer] for layer in range(self.layout.num_layers) for grad in self._grads]
        every = zip(self.layout.names, values[::2], values[1::2], grads[::2], grads[1::2], strict=True)
        self.factors = {name: LayerFactors(*tensors) for name, *tensors in every}
