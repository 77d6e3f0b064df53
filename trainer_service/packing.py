"""From rows to what goes through the base model: sequences, and micro-batches of sequences.

The trajectories of a group begin with the same tokens. A sequence is a tree of such rows: the shared beginning once, then
each row's own tokens as a branch that sees the beginning and itself. The gradient is the same, at a fraction of the tokens
(Prefix Grouper, arXiv 2506.05433). Attention over a tree is dense, so rows share only where that is cheaper.

    beginning  p0 p1 p2 | branch 1  a3 a4 | branch 2  b3 b4 b5        position: 0 1 2 3 4 3 4 5

Axes: B sequences of a micro-batch, T positions of a sequence, M trained tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from trainer_service.batch import Batch, Bools, Ints


@dataclass(frozen=True, slots=True)
class Tree:
    """One sequence. A single row is a tree without branches."""

    group: int
    rows: tuple[int, ...]
    tokens: Ints  # [T]
    positions: Ints  # [T]
    branches: Ints  # [T] 0: the shared beginning; i: own tokens of rows[i - 1]
    predictors: tuple[Ints, ...]  # for each row [its M]: index in `tokens` of what predicts the trained token

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class Cost:
    """Work of the base model, in multiply-adds a layer."""

    per_token: int  # linear layers
    per_pair: int  # attention, for each pair of positions

    def of(self, length: int, *, dense: bool) -> float:
        pairs = length * length if dense else length * length / 2
        return self.per_token * length + self.per_pair * pairs


def trees(batch: Batch, active_R: Bools, cost: Cost | None) -> list[Tree]:
    """All active rows as sequences, in order of group. `cost` None: each row on its own."""
    made: list[Tree] = []
    active = np.flatnonzero(active_R)
    for group in np.unique(batch.groups_R[active]):
        rows = active[batch.groups_R[active] == group].tolist()
        size = 1 if cost is None else _best_size(batch, rows, cost)
        made += [_tree(batch, rows[i : i + size]) for i in range(0, len(rows), size)]
    return made


def _best_size(batch: Batch, rows: list[int], cost: Cost) -> int:
    """How many rows to a tree is cheapest: all of the group, half of it, a quarter, ..., 1."""
    lengths = [len(_inputs(batch, row)) for row in rows]
    shared = _common(batch, rows)
    best, best_cost = 1, sum(cost.of(n, dense=False) for n in lengths)
    size = len(rows)
    while size > 1 and shared > 0:
        parts = [lengths[i : i + size] for i in range(0, len(rows), size)]
        total = sum(cost.of(shared + sum(n - shared for n in part), dense=True) for part in parts)
        if total < best_cost:
            best, best_cost = size, total
        size = (size + 1) // 2
    return best


def _inputs(batch: Batch, row: int) -> Ints:
    """The tokens that the model must read: all before the last trained one."""
    return batch.tokens[row][: int(np.flatnonzero(batch.written[row])[-1])]


def _common(batch: Batch, rows: list[int]) -> int:
    """Length of the rows' common beginning."""
    inputs = [_inputs(batch, row) for row in rows]
    shortest = min(len(tokens) for tokens in inputs)
    differs = np.zeros(shortest, bool)
    for tokens in inputs[1:]:
        differs |= tokens[:shortest] != inputs[0][:shortest]
    return int(differs.argmax()) if differs.any() else shortest


def _tree(batch: Batch, rows: list[int]) -> Tree:
    shared = _common(batch, rows) if len(rows) > 1 else len(_inputs(batch, rows[0]))
    tokens, positions = [_inputs(batch, rows[0])[:shared]], [np.arange(shared)]
    branches, predictors = [np.zeros(shared, np.int64)], []
    start = shared
    for branch, row in enumerate(rows, 1):
        own = _inputs(batch, row)[shared:]
        tokens.append(own)
        positions.append(np.arange(shared, shared + len(own)))
        branches.append(np.full(len(own), branch))
        before = np.flatnonzero(batch.written[row]) - 1
        predictors.append(np.where(before < shared, before, before - shared + start))
        start += len(own)
    return Tree(
        group=int(batch.groups_R[rows[0]]),
        rows=tuple(rows),
        tokens=np.concatenate(tokens),
        positions=np.concatenate(positions),
        branches=np.concatenate(branches),
        predictors=tuple(predictors),
    )


def micro_batches(sequences: Sequence[Tree], max_tokens: int, *, by_group: bool) -> Iterator[list[Tree]]:
    """Sequences of like length together, at most `max_tokens` with padding (one sequence may exceed it).

    `by_group`: a micro-batch holds sequences of one group only, groups in order, so that what it computes is a function
    of the group alone.
    """
    if by_group:
        for group in dict.fromkeys(tree.group for tree in sequences):
            yield from _filled([tree for tree in sequences if tree.group == group], max_tokens)
    else:
        yield from _filled(sequences, max_tokens)


def _filled(sequences: Sequence[Tree], max_tokens: int) -> Iterator[list[Tree]]:
    filling: list[Tree] = []
    for tree in sorted(sequences, key=len):
        if filling and (len(filling) + 1) * len(tree) > max_tokens:
            yield filling
            filling = []
        filling.append(tree)
    if filling:
        yield filling
