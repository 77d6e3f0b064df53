"""Computes adapter products for rows of different adapters: batched products, no loop over adapters.

The linear layers of one input are fused: q, k, v; gate, up. One product serves an adapter's A factors, side by side;
each layer's B factor (times alpha / rank) takes its part. Rows that share an adapter fill *lanes* of `lane_rows` places,
each with a copy of its adapter's factors, so one batched product serves all lanes. Where copies would exceed their
budget, each adapter has a product of its own.

    x [N, in] ─ gather ─► [lanes, lane_rows, in] ─ bmm A ─► [.., R] ─┬ bmm B of q ─► [.., out of q] ─ scatter ─► y[:, q] += …
                                                                     ├ bmm B of k ─► …

A row's result depends only on its adapter: never on lanes, neighbours, or the number of adapters. So ranks are padded
by their own value only (to 8, 16, 32, ...), and every product has at least `lane_rows` rows, or all.

Axes: N rows of a forward, R padded rank times fused layers, at least MIN_INNER.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from base_model.adapter import Adapter, check_fits

MIN_LANES = 4
ALIGNMENT = 32
"""Values: 64 bytes or more, so that products find lanes as they find tensors of their own."""
MIN_RANK = 8
MIN_INNER = 16
"""Narrower products are slower, not faster."""
FUSED: tuple[tuple[str, ...], ...] = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
HUGE = 1e6
"""No factor that learns something is larger."""
MOST_PLACES = 1.25
"""The most places in wide lanes, for each row."""
NUM_FUSED = len(FUSED)
"""A fused product's number is layer * NUM_FUSED + its index in FUSED, or in `fused_of` of a base that lacks some."""


@dataclass(frozen=True, slots=True)
class LaneFactors:
    """Factors by fused product, for L lanes: `a[i]` [L, in, R]; `b[i]`, one a linear layer, [L, rank, out], scaled."""

    values: Tensor  # [L, P]: of each lane all factors, each of which begins at a multiple of ALIGNMENT
    a: tuple[Tensor, ...]
    b: tuple[tuple[Tensor, ...], ...]

    @classmethod
    def of(cls, a: Sequence[Tensor], b: Sequence[Sequence[Tensor]]) -> "LaneFactors":
        """Copies factors of one lane, [1, ...] each."""
        flat = [F.pad(each.flatten(), (0, -each.numel() % ALIGNMENT)) for each in chain(a, *b)]
        return cls(torch.cat(flat).unsqueeze(0), tuple(a), tuple(map(tuple, b))).over(lambda values: values)

    def over(self, change: Callable[[Tensor], Tensor]) -> "LaneFactors":
        """The same factors of other lanes, whose values are made of these."""
        values = change(self.values)
        starts = itertools.accumulate((rounded(each[0].numel()) for each in self), initial=0)

        def cut(each: Tensor) -> Tensor:
            start, shape = next(starts), each.shape[1:]
            return values[:, start : start + shape.numel()].unflatten(1, shape)

        return LaneFactors(values, tuple(map(cut, self.a)), tuple(tuple(map(cut, each)) for each in self.b))

    def __iter__(self) -> Iterator[Tensor]:
        return chain(self.a, *self.b)

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes


def rounded(num: int) -> int:
    return num + -num % ALIGNMENT


@dataclass(frozen=True, slots=True, eq=False)
class FusedAdapter:
    """One adapter, as a lane."""

    rank: int  # padded
    factors: LaneFactors
    is_huge: bool = False  # a query of a neighbour may overflow on the keys that it makes

    @property
    def num_bytes(self) -> int:
        return self.factors.num_bytes


def padded_rank(rank: int) -> int:
    """The next power of two, at least MIN_RANK: a function of the adapter's own rank."""
    return max(MIN_RANK, 1 << (rank - 1).bit_length())


def fused_of(shapes: Mapping[str, tuple[int, int]]) -> list[tuple[str, ...]]:
    """The entries of FUSED that a base has; its layers are all alike."""
    there = {name.split(".", 2)[2] for name in shapes}
    return [found for leaves in FUSED if (found := tuple(leaf for leaf in leaves if leaf in there))]


def fuse(adapter: Adapter, shapes: Mapping[str, tuple[int, int]], num_layers: int, *, like: Tensor) -> FusedAdapter:
    """Fuses an adapter. `shapes`: module -> (out, in) of the base; factors get the device and dtype of `like`.

    Raises CorruptObject if the adapter does not fit the base.
    """
    check_fits(adapter, shapes)
    rank, fused = padded_rank(adapter.spec.rank), fused_of(shapes)
    a: list[Tensor] = []
    b: list[tuple[Tensor, ...]] = []
    for layer in range(num_layers):
        for leaves in fused:
            names = [f"layers.{layer}.{leaf}" for leaf in leaves]
            a.append(_joined_a(adapter, names, shapes, rank).unsqueeze(0).to(like))
            b.append(tuple(_padded_b(adapter, name, shapes, rank).unsqueeze(0).to(like) for name in names))
    factors = LaneFactors.of(a, b)
    return FusedAdapter(rank, factors, is_huge=float(factors.values.abs().max()) > HUGE)


def _joined_a(adapter: Adapter, names: Sequence[str], shapes: Mapping[str, tuple[int, int]], rank: int) -> Tensor:
    """Joins the A factors, [in, R]; layers that the adapter does not target stay zero."""
    joined = torch.zeros(shapes[names[0]][1], max(MIN_INNER, rank * len(names)))
    for index, name in enumerate(names):
        if name in adapter.a:
            joined[:, index * rank : index * rank + adapter.spec.rank] = adapter.a[name].t()
    return joined


def _padded_b(adapter: Adapter, name: str, shapes: Mapping[str, tuple[int, int]], rank: int) -> Tensor:
    """Pads the B factor, [rank, out]."""
    padded = torch.zeros(rank, shapes[name][0])
    if name in adapter.b:
        padded[: adapter.spec.rank] = adapter.b[name].t() * adapter.scale
    return padded


@dataclass(slots=True, eq=False)
class Lanes:
    """Copies of the adapters' factors, one a lane; a lane keeps its adapter until another needs it."""

    owners: list[FusedAdapter | None] = field(default_factory=list[FusedAdapter | None])
    _factors: LaneFactors | None = None
    _first: dict[int, LaneFactors] = field(default_factory=dict[int, LaneFactors])

    @property
    def num(self) -> int:
        return 0 if self._factors is None else len(self._factors.a[0])

    @property
    def num_bytes(self) -> int:
        return 0 if self._factors is None else self._factors.num_bytes

    def first(self, num: int) -> LaneFactors:
        """The factors of the first lanes."""
        assert self._factors is not None, "lanes that nobody was assigned"
        if num not in self._first:
            self._first[num] = self._factors.over(lambda values: values[:num])
        return self._first[num]

    def assign(self, wanted: Sequence[FusedAdapter]) -> list[int]:
        """Finds a lane for each entry of `wanted`, all of one padded rank; an adapter may be there several times."""
        if len(self.owners) > 2 * len(wanted):
            del self.owners[len(wanted) :]
        missing = Counter(wanted)
        free: list[int] = []
        found: dict[FusedAdapter, list[int]] = {}
        for lane, owner in enumerate(self.owners):
            if owner is not None and missing[owner] > 0:
                missing[owner] -= 1
                found.setdefault(owner, []).append(lane)
            else:
                free.append(lane)
        free += range(len(self.owners), self.num)
        return [found[w].pop() if found.get(w) else self.put(free.pop(0), w) for w in wanted]

    def put(self, lane: int, adapter: FusedAdapter) -> int:
        """Makes `lane` the adapter's, unless it is already; returns `lane`."""
        assert self._factors is not None, "lanes that nobody made"
        self.owners += [None] * (lane + 1 - len(self.owners))
        if self.owners[lane] is not adapter:
            self.owners[lane] = None  # a copy that fails makes it nobody's
            self._factors.values[lane] = adapter.factors.values[0]
            self.owners[lane] = adapter
        return lane

    def make(self, num: int, like: FusedAdapter) -> None:
        """Makes empty lanes, and frees the old ones' memory first: no product of these may be under way."""
        self.owners.clear()
        self._first.clear()
        self._factors = None
        self._factors = like.factors.over(lambda values: values.new_zeros(num, values.shape[1]))


@dataclass(slots=True, eq=False)
class Product:
    """The product that adds the adapters of one rank class to a forward's rows."""

    factors: LaneFactors
    gather: Tensor | None = None  # [L * lane_rows] row in each place; None: all rows, in order, evenly over the lanes
    rows: Tensor | None = None  # [n] the rows of this class; None: all N
    places: Tensor | None = None  # [n] the places of `rows`; None: in order
    in_place: bool = False  # sums inside the products: fewer operations, other bits; where all rows are in order

    def add_to(self, y: Tensor, x: Tensor, number: int) -> None:
        """Adds to y [N, out] B A x, of x [N, in]."""
        spread = x if self.gather is None else x.index_select(0, self.gather)
        a, bs = self.factors.a[number], self.factors.b[number]
        inner = torch.bmm(spread.view(a.shape[0], -1, x.shape[1]), a)
        rank = bs[0].shape[1]  # R may be wider than all ranks
        if self.in_place:
            parts = y.view(len(inner), -1, y.shape[1]).split_with_sizes([b.shape[2] for b in bs], dim=2)
            for index, (part, b) in enumerate(zip(parts, bs, strict=True)):
                part.baddbmm_(inner.narrow(2, index * rank, rank), b)
            return
        parts = [torch.bmm(inner.narrow(2, index * rank, rank), b) for index, b in enumerate(bs)]
        out = (parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)).flatten(0, 1)
        if self.places is not None:
            out = out.index_select(0, self.places)
        if self.rows is None:
            y.add_(out)
        else:
            y.index_add_(0, self.rows, out)


class LanePlanner:
    """Plans the products of one kind of forward; keeps lanes between plans. A plan ends the one before."""

    def __init__(
        self, device: torch.device, lane_rows: int, *, wide_rows: int | None = None, budget_bytes: float = math.inf
    ) -> None:
        """`wide_rows`: rows of a lane where few places stay empty, so fewer copies are read; `budget_bytes`: of all lanes."""
        self._device = device
        self._lane_rows = lane_rows
        self._wide_rows = wide_rows or lane_rows
        self._budget_bytes = budget_bytes
        self._lanes: dict[int, Lanes] = {}
        self._zeros: dict[int, FusedAdapter] = {}  # by rank: adapters that add nothing, for rows of others

    def plan(self, adapters: Sequence[FusedAdapter | None], size: int) -> list[Product]:
        """Plans a forward of `size` rows of one position each; None: a row of the bare base model.

        Rows after those of `adapters` only round the size up; their results do not count.
        """
        present = {a for a in adapters if a is not None}
        if len(present) == 1 and None not in adapters:
            return [uniform(present.pop())]
        ranks = sorted({a.rank for a in present})
        self._forget_all_but(ranks)
        each = ([a if a and a.rank == rank else None for a in adapters] for rank in ranks)
        return [product for mine in each for product in self._spread(mine, size)]

    def plan_sequences(self, adapters: Sequence[FusedAdapter], width: int) -> list[Product]:
        """Plans a forward of len(adapters) sequences of `width` positions, end to end, all of one padded rank."""
        if all(a is adapters[0] for a in adapters):
            return [uniform(adapters[0])]
        self._forget_all_but([adapters[0].rank])
        lanes = self._lanes_for(len(adapters), adapters[0])
        if lanes is None:
            rows_of = _places(a for a in adapters for _ in range(width))
            return [self._own(adapter, rows) for adapter, rows in rows_of.items()]
        for lane, adapter in enumerate(adapters):
            lanes.put(lane, adapter)
        return [Product(lanes.first(len(adapters)))]

    def plan_lanes(self, adapters: Sequence[FusedAdapter | None]) -> tuple[list[Product], np.ndarray, int] | None:
        """Plans a forward whose rows stand in lanes, which each product serves: the products, each row's place, and the number of
        places; what no row stands at does not count. None: the lanes would exceed the budget."""
        nums = Counter(adapters)
        width = next(w for w in (8, 4, 2, 1) if sum(-(-num // w) * w for num in nums.values()) <= 2 * len(adapters))
        owners = [a for a in sorted(nums, key=id) for _ in range(-(-nums[a] // width))]  # the same order next time
        first = {a: itertools.count(owners.index(a) * width) for a in nums}
        num_lanes = len(owners) + -len(owners) % MIN_LANES
        like = {a.rank: a for a in nums if a is not None}
        self._forget_all_but([*like])
        products: list[Product] = []
        for rank in sorted(like):
            if (lanes := self._lanes_for(num_lanes, like[rank])) is None:
                return None
            if rank not in self._zeros:  # in memory one zero
                zeros = like[rank].factors.over(lambda values: values.new_zeros(()).expand_as(values))
                self._zeros[rank] = FusedAdapter(rank, zeros)
            for lane, owner in enumerate(owners):
                lanes.put(lane, owner if owner is not None and owner.rank == rank else self._zeros[rank])
            products.append(Product(lanes.first(num_lanes), in_place=True))
        return products, np.array([next(first[a]) for a in adapters]), num_lanes * width

    def _forget_all_but(self, ranks: Sequence[int]) -> None:
        """Gives back the lanes of other ranks, once all of them use up half of the budget."""
        if 2 * sum(lanes.num_bytes for lanes in self._lanes.values()) > self._budget_bytes:
            self._lanes = {rank: lanes for rank, lanes in self._lanes.items() if rank in ranks}

    def _lanes_for(self, num: int, like: FusedAdapter) -> Lanes | None:
        """At least `num` lanes of the adapter's rank; None: they would exceed the budget."""
        lanes = self._lanes.setdefault(like.rank, Lanes())
        if lanes.num < num:
            size = max(MIN_LANES, 1 << (num - 1).bit_length())
            others = sum(each.num_bytes for each in self._lanes.values() if each is not lanes)
            if others + size * like.num_bytes > self._budget_bytes:
                return None
            lanes.make(size, like)
        return lanes

    def _spread(self, adapters: Sequence[FusedAdapter | None], size: int) -> list[Product]:
        """The products of one rank's rows; None: a row that is not of this rank."""
        rows_of = _places(adapters)
        num = self._width([len(rows) for rows in rows_of.values()])
        blocks = [(a, r[i : i + num]) for a, r in rows_of.items() for i in range(0, len(r), num)]
        lanes = self._lanes_for(len(blocks), blocks[0][0])
        if lanes is None:
            return [self._own(adapter, rows) for adapter, rows in rows_of.items()]
        assigned = lanes.assign([adapter for adapter, _ in blocks])
        num_lanes = max(assigned) + 1
        gather = [0] * (num_lanes * num)
        place_of: dict[int, int] = {}
        for lane, (_, block) in zip(assigned, blocks, strict=True):
            for place, row in enumerate(block, start=lane * num):
                gather[place], place_of[row] = row, place
        if len(place_of) == len(adapters):  # every row is of this class: one operation less
            rows, places = None, [place_of.get(row, 0) for row in range(size)]
        else:
            rows, places = self._index([*place_of]), [*place_of.values()]
        return [Product(lanes.first(num_lanes), self._index(gather), rows, self._index(places))]

    def _width(self, nums: Sequence[int]) -> int:
        """The rows of a lane, for adapters of so many rows each."""
        places = sum(-(-num // self._wide_rows) * self._wide_rows for num in nums)
        return self._wide_rows if places <= MOST_PLACES * sum(nums) else self._lane_rows

    def _own(self, adapter: FusedAdapter, rows: list[int]) -> Product:
        """The product of one adapter's rows with its own factors, which need no copy."""
        gather = rows + rows[:1] * (-len(rows) % self._lane_rows)
        return Product(adapter.factors, self._index(gather), self._index(rows), self._index([*range(len(rows))]))

    def _index(self, values: list[int]) -> Tensor:
        return torch.tensor(values, device=self._device)


def uniform(adapter: FusedAdapter) -> Product:
    """A product for a forward whose rows are all of one adapter."""
    return Product(adapter.factors)


def _places(adapters: Iterable[FusedAdapter | None]) -> dict[FusedAdapter, list[int]]:
    """The rows of each adapter."""
    found: dict[FusedAdapter, list[int]] = {}
    for row, adapter in enumerate(adapters):
        if adapter is not None:
            found.setdefault(adapter, []).append(row)
    return found
