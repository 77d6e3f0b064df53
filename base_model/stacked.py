"""Adapter products for batches whose rows belong to different adapters: two batched products a layer, no loop over adapters.

The linear layers of one input are fused: q, k, v; gate, up. An adapter is fused alike: the A factors of the layers stand
side by side, the B factors (times alpha / rank) on the diagonal. Rows that share an adapter fill *lanes* of `LANE_ROWS`
places; a lane holds a copy of its adapter's factors, so that one batched product serves all lanes.

    x [N, in] ─ gather ─► [lanes, LANE_ROWS, in] ─ bmm A ─► [.., R] ─ bmm B ─► [.., out] ─ scatter ─► y += [N, out]

A row's result depends on its adapter alone: never on lanes, neighbours, or how many adapters there are. For that, ranks
are padded by their own value only (to 8, 16, 32, ...), and every product has at least `LANE_ROWS` rows, or all of them.

Axes: N rows of a forward, R padded rank times fused layers, at least MIN_INNER.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from base_model.adapter import Adapter

LANE_ROWS = 4
MIN_RANK = 8
MIN_INNER = 16
"""Narrower products are slower, not faster."""
FUSED: tuple[tuple[str, ...], ...] = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
NUM_FUSED = len(FUSED)
"""A fused product's number is layer * NUM_FUSED + its index in FUSED."""


@dataclass(frozen=True, slots=True, eq=False)
class FusedAdapter:
    """One adapter's factors by number of the fused product: `a[i]` [1, in, R], `b[i]` [1, R, out], scale included."""

    rank: int  # padded
    a: tuple[Tensor, ...]
    b: tuple[Tensor, ...]

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.a, *self.b))


def padded_rank(rank: int) -> int:
    """The next power of two, at least MIN_RANK: a function of the adapter's own rank."""
    return max(MIN_RANK, 1 << (rank - 1).bit_length())


def fuse(adapter: Adapter, shapes: Mapping[str, tuple[int, int]], num_layers: int, *, like: Tensor) -> FusedAdapter:
    """`shapes`: module name -> (out, in) of the base. Factors get the device and dtype of `like`.

    Raises ValueError if the adapter's factors do not fit the base.
    """
    _check_fits(adapter, shapes)
    rank = padded_rank(adapter.spec.rank)
    a: list[Tensor] = []
    b: list[Tensor] = []
    for layer in range(num_layers):
        for leaves in FUSED:
            names = [f"layers.{layer}.{leaf}" for leaf in leaves]
            fused_a, fused_b = _fuse_one(adapter, names, shapes, rank)
            a.append(fused_a.unsqueeze(0).to(like))
            b.append(fused_b.unsqueeze(0).to(like))
    return FusedAdapter(rank, tuple(a), tuple(b))


def _check_fits(adapter: Adapter, shapes: Mapping[str, tuple[int, int]]) -> None:
    for name in adapter.names():
        out, width = shapes.get(name, (0, 0))
        if adapter.a[name].shape[1] != width or adapter.b[name].shape[0] != out:
            raise ValueError(f"adapter does not fit the base model at {name}")


def _fuse_one(
    adapter: Adapter, names: Sequence[str], shapes: Mapping[str, tuple[int, int]], rank: int
) -> tuple[Tensor, Tensor]:
    """([in, R], [R, out]); layers that the adapter does not target stay zero."""
    width, inner = shapes[names[0]][1], max(MIN_INNER, rank * len(names))
    a = torch.zeros(width, inner)
    b = torch.zeros(inner, sum(shapes[name][0] for name in names))
    column = 0
    for index, name in enumerate(names):
        out = shapes[name][0]
        if name in adapter.a:
            first, own = index * rank, adapter.spec.rank
            a[:, first : first + own] = adapter.a[name].t()
            b[first : first + own, column : column + out] = adapter.b[name].t() * adapter.scale
        column += out
    return a, b


@dataclass(slots=True, eq=False)
class Lanes:
    """Copies of the factors of the adapters at work, one a lane; a lane keeps its adapter until it is needed otherwise."""

    owners: list[FusedAdapter | None] = field(default_factory=list[FusedAdapter | None])
    a: list[Tensor] = field(default_factory=list[Tensor])  # [lanes, in, R]
    b: list[Tensor] = field(default_factory=list[Tensor])  # [lanes, R, out]

    def assign(self, wanted: Sequence[FusedAdapter]) -> list[int]:
        """A lane for each entry of `wanted` (all of one padded rank); an adapter may be wanted several times."""
        if len(self.owners) > 2 * len(wanted):
            self._truncate(len(wanted))
        missing = Counter(wanted)
        free: list[int] = []
        found: dict[FusedAdapter, list[int]] = {}
        for lane, owner in enumerate(self.owners):
            if owner is not None and missing[owner] > 0:
                missing[owner] -= 1
                found.setdefault(owner, []).append(lane)
            else:
                free.append(lane)
        self._grow(len(wanted), wanted[0])
        free += range(len(self.owners), len(self.a[0]))
        return [found[w].pop() if found.get(w) else self.put(free.pop(0), w) for w in wanted]

    def put(self, lane: int, adapter: FusedAdapter) -> int:
        """Make `lane` the adapter's, unless it is already; returns `lane`."""
        self._grow(lane + 1, adapter)
        self.owners += [None] * (lane + 1 - len(self.owners))
        if self.owners[lane] is not adapter:
            self.owners[lane] = adapter
            for target, source in zip((*self.a, *self.b), (*adapter.a, *adapter.b), strict=True):
                target[lane] = source[0]
        return lane

    def _truncate(self, num: int) -> None:
        del self.owners[num:]

    def _grow(self, num: int, like: FusedAdapter) -> None:
        if self.a and len(self.a[0]) >= num:
            return
        size = max(LANE_ROWS, 1 << (num - 1).bit_length())
        self.a = [_grown(old, size, new) for old, new in zip(self.a or like.a, like.a, strict=True)]
        self.b = [_grown(old, size, new) for old, new in zip(self.b or like.b, like.b, strict=True)]


def _grown(old: Tensor, size: int, like: Tensor) -> Tensor:
    new = like.new_zeros(size, *like.shape[1:])
    new[: len(old)] = old
    return new


@dataclass(slots=True, eq=False)
class Product:
    """What one rank class adds to a forward's rows."""

    a: Sequence[Tensor]  # [lanes, in, R] by number of the fused product
    b: Sequence[Tensor]  # [lanes, R, out]
    num_lanes: int
    gather: Tensor | None = (
        None  # [lanes * LANE_ROWS] row in each place; None: all rows, in order, evenly over the lanes
    )
    rows: Tensor | None = None  # [n] the rows of this class; None: all N
    places: Tensor | None = None  # [n] where they stand; None: in order

    def add_to(self, y: Tensor, x: Tensor, number: int) -> None:
        """y [N, out] += B A x [N, in]"""
        spread = x if self.gather is None else x.index_select(0, self.gather)
        spread = spread.view(self.num_lanes, -1, x.shape[1])
        inner = torch.bmm(spread, self.a[number][: self.num_lanes])
        out = torch.bmm(inner, self.b[number][: self.num_lanes]).view(-1, y.shape[1])
        if self.places is not None:
            out = out.index_select(0, self.places)
        if self.rows is None:
            y.add_(out)
        else:
            y.index_add_(0, self.rows, out)


class Stack:
    """Plans the products of one kind of forward; keeps the lanes between plans."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lanes: dict[int, Lanes] = {}

    def plan(self, adapters: Sequence[FusedAdapter | None], size: int) -> list[Product]:
        """For a forward of `size` rows of one position each; None: a row of the bare base model.

        Rows after those of `adapters` only round the size up; what they get does not count.
        """
        present = {a for a in adapters if a is not None}
        if len(present) == 1 and None not in adapters:
            return [uniform(present.pop())]
        ranks = sorted({a.rank for a in present})
        return [self._spread([a if a and a.rank == rank else None for a in adapters], rank, size) for rank in ranks]

    def plan_sequences(self, adapters: Sequence[FusedAdapter]) -> list[Product]:
        """For a forward of len(adapters) sequences of equal length, end to end, all adapters of one padded rank."""
        if all(a is adapters[0] for a in adapters):
            return [uniform(adapters[0])]
        lanes = self._of_rank(adapters[0].rank)
        for lane, adapter in enumerate(adapters):
            lanes.put(lane, adapter)
        return [Product(lanes.a, lanes.b, len(adapters))]

    def _of_rank(self, rank: int) -> Lanes:
        return self._lanes.setdefault(rank, Lanes())

    def _spread(self, adapters: Sequence[FusedAdapter | None], rank: int, size: int) -> Product:
        rows_of: dict[FusedAdapter, list[int]] = {}
        for row, adapter in enumerate(adapters):
            if adapter is not None:
                rows_of.setdefault(adapter, []).append(row)
        blocks = [(a, r[i : i + LANE_ROWS]) for a, r in rows_of.items() for i in range(0, len(r), LANE_ROWS)]
        lanes = self._of_rank(rank)
        assigned = lanes.assign([adapter for adapter, _ in blocks])
        num_lanes = max(assigned) + 1
        gather = [0] * (num_lanes * LANE_ROWS)
        place_of: dict[int, int] = {}
        for lane, (_, block) in zip(assigned, blocks, strict=True):
            for place, row in enumerate(block, start=lane * LANE_ROWS):
                gather[place], place_of[row] = row, place
        if len(place_of) == len(adapters):  # every row is of this class: one operation less
            rows, places = None, [place_of.get(row, 0) for row in range(size)]
        else:
            rows, places = self._index([*place_of]), [*place_of.values()]
        return Product(lanes.a, lanes.b, num_lanes, self._index(gather), rows, self._index(places))

    def _index(self, values: list[int]) -> Tensor:
        return torch.tensor(values, device=self._device)


def uniform(adapter: FusedAdapter) -> Product:
    """All rows of the forward are of one adapter."""
    return Product(adapter.a, adapter.b, 1)
