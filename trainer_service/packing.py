"""Packs rows into sequences, and sequences into micro-batches.

The trajectories of a group begin with the same tokens. A sequence is a tree of such rows: the shared beginning once, then
each row's own tokens as a branch that sees the beginning and itself. The gradient is the same, for fewer tokens (Prefix
Grouper, arXiv 2506.05433). Attention over a tree is dense, or computed twice, so rows share only where that is cheaper.

    beginning  p0 p1 p2 | branch 1  a3 a4 | branch 2  b3 b4 b5        position: 0 1 2 3 4 3 4 5

Axes: B sequences of a micro-batch, T positions of a sequence, M targets.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from trainer_service.batch import Batch, Bools, Ints

PAD_MULTIPLE = 32  # of a sequence's length in deterministic mode
WINDOW_BATCHES = 2  # a micro-batch is chosen from work for so many
COMPUTED_AGAIN = 1.3  # time of attention whose forward the backward repeats, over attention
ATTENTION_COST = 4  # time of a multiply-add in attention over one in a linear layer, as on a CPU
PADDING_SHARE = 1 / 16  # of a micro-batch's tokens: padding as dear as one micro-batch more


@dataclass(frozen=True, slots=True)
class Tree:
    """One sequence. A single row is a tree without branches."""

    group: int
    rows: tuple[int, ...]
    tokens: Ints  # [T]
    positions: Ints  # [T]
    branches: Ints  # [T] 0: the shared beginning; i: own tokens of rows[i - 1]
    predictors: tuple[Ints, ...]  # for each row [its M]: index in `tokens` of what predicts the target
    part: int = 0  # see Batch.parts_R
    learns: bool = True  # False: a forward is all that its rows need

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def branched(self) -> bool:
        return len(self.rows) > 1

    @property
    def kind(self) -> tuple[int, bool, bool]:
        """Sequences of one kind share a micro-batch bit by bit: padded length, need of a mask, and a backward."""
        return -(-len(self) // PAD_MULTIPLE) * PAD_MULTIPLE, self.branched, self.learns


@dataclass(frozen=True, slots=True)
class Cost:
    """Work of the base model, in multiply-adds a layer."""

    per_token: int  # linear layers
    per_pair: int  # attention, for each pair of positions
    by_branch: bool = False  # attention over a tree: by branch, computed again in the backward; else all pairs

    @classmethod
    def of_layer(cls, num_weights: int, num_heads: int, head_dim: int, *, by_branch: bool = False) -> "Cost":
        """The cost of a layer with so many weights in its linear layers."""
        return cls(num_weights, ATTENTION_COST * 2 * num_heads * head_dim, by_branch)

    def of_row(self, length: int) -> float:
        return self.per_token * length + self.per_pair * length * length / 2

    def of_tree(self, shared: int, owns: Sequence[int]) -> float:
        """`shared`: positions of the beginning; `owns`: of each branch."""
        length = shared + sum(owns)
        pairs = shared * shared / 2 + COMPUTED_AGAIN * sum(own * (shared + own / 2) for own in owns)
        return self.per_token * length + self.per_pair * (pairs if self.by_branch else length * length)


def pack(batch: Batch, cost: Cost | None, most: float = math.inf) -> list[Tree]:
    """Packs all wanted rows into sequences: first those that can learn, which the others must not change."""
    learned, others = batch.wanted_R & batch.learned_R, batch.wanted_R & ~batch.learned_R
    return trees(batch, learned, cost, most) + trees(batch, others, cost, most)


def trees(batch: Batch, active_R: Bools, cost: Cost | None, most: float = math.inf) -> list[Tree]:
    """Packs active rows into sequences by group. `cost` None: each row alone. `most`: tokens of rows together."""
    made: list[Tree] = []
    active = np.flatnonzero(active_R)
    for group in np.unique(batch.groups_R[active]):
        rows = active[batch.groups_R[active] == group].tolist()
        size = 1 if cost is None else _best_size(batch, rows, cost, most)
        made += [_tree(batch, rows[i : i + size]) for i in range(0, len(rows), size)]
    return made


def _best_size(batch: Batch, rows: list[int], cost: Cost, most: float) -> int:
    """The cheapest number of rows to a tree: all of the group, half of it, a quarter, ..., 1."""
    lengths = [len(batch.inputs[row]) for row in rows]
    shared = _common(batch, rows)
    best, best_cost = 1, sum(map(cost.of_row, lengths))
    size = len(rows)
    while size > 1 and shared > 0:
        parts = [[n - shared for n in lengths[i : i + size]] for i in range(0, len(rows), size)]
        total = sum(cost.of_tree(shared, owns) for owns in parts)
        if total < best_cost and shared + max(map(sum, parts)) <= most:
            best, best_cost = size, total
        size = (size + 1) // 2
    return best


def _common(batch: Batch, rows: list[int]) -> int:
    return common_length([batch.inputs[row] for row in rows])


def common_length(inputs: Sequence[Ints]) -> int:
    """The length of the rows' common beginning."""
    shortest = min(len(tokens) for tokens in inputs)
    differs = np.zeros(shortest, bool)
    for tokens in inputs[1:]:
        differs |= tokens[:shortest] != inputs[0][:shortest]
    return int(differs.argmax()) if differs.any() else shortest


def _tree(batch: Batch, rows: list[int]) -> Tree:
    shared = _common(batch, rows) if len(rows) > 1 else len(batch.inputs[rows[0]])
    tokens, positions = [batch.inputs[rows[0]][:shared]], [np.arange(shared)]
    branches, predictors = [np.zeros(shared, np.int64)], []
    start = shared
    for branch, row in enumerate(rows, 1):
        own = batch.inputs[row][shared:]
        tokens.append(own)
        positions.append(np.arange(shared, shared + len(own)))
        branches.append(np.full(len(own), branch))
        before = batch.predictors[row]
        predictors.append(np.where(before < shared, before, before - shared + start))
        start += len(own)
    return Tree(
        group=int(batch.groups_R[rows[0]]),
        rows=tuple(rows),
        tokens=np.concatenate(tokens),
        positions=np.concatenate(positions),
        branches=np.concatenate(branches),
        predictors=tuple(predictors),
        part=int(batch.parts_R[rows[0]]),
        learns=any(batch.terms.learned[row].any() for row in rows),
    )


@dataclass(frozen=True, slots=True)
class Budget:
    """A micro-batch's limits, padding included: its tokens, and a rank's bytes. A lone sequence may exceed them."""

    tokens: int = 2048
    num_bytes: float = math.inf
    bytes_per_token: float = 0.0
    bytes_per_pair: float = 0.0  # of positions of a padded sequence, where attention needs a mask

    def holds(self, num_sequences: int, width: int, *, branched: bool) -> bool:
        tokens = num_sequences * width
        per_token = self.bytes_per_token + (width * self.bytes_per_pair if branched else 0.0)
        return tokens <= self.tokens and tokens * per_token <= self.num_bytes

    @property
    def most_branched(self) -> float:
        """Tokens of the longest branched sequence of which a rank's bytes hold what it keeps."""
        if not (self.bytes_per_pair and math.isfinite(self.num_bytes)):
            return self.num_bytes / self.bytes_per_token if self.bytes_per_token else math.inf
        half = self.bytes_per_token / (2 * self.bytes_per_pair)
        return math.sqrt(half**2 + self.num_bytes / self.bytes_per_pair) - half

    def holds_packed(self, sequences: Sequence[Tree], num_ranks: int) -> bool:
        """Do the sequences fit end to end, without padding, the fullest rank's share too?"""
        if sum(map(len, sequences)) > self.tokens:
            return False
        lengths = [*map(len, sequences)]
        fullest = max(sum(lengths[number] for number in share) for share in spread(lengths, num_ranks))
        return fullest * self.bytes_per_token <= self.num_bytes


def spread(lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Spreads sequences over ranks: each rank's indices. Longest first, each to the rank with the fewest tokens."""
    taken: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        least = loads.index(min(loads))
        taken[least].append(number)
        loads[least] += lengths[number]
    return taken


def in_order(sequences: Iterable[Tree], *, exact: bool) -> list[Tree]:
    """Sorts a job's open sequences for training: by part, longest first; `exact`: widest first, then by group."""
    return sorted(sequences, key=lambda tree: (-tree.part, *(tree.kind if exact else (len(tree),))), reverse=True)


def next_micro_batch(queues: Sequence[Sequence[Tree]], budget: Budget, *, exact: bool) -> list[list[Tree]]:
    """Chooses the next of each job's open sequences, jobs by age, sequences as `in_order`; at least one of the oldest job.

    The oldest jobs whose work fills WINDOW_BATCHES micro-batches take part: others would only delay them. The oldest job's
    longest sequence gives the width; others follow by length while padding is cheaper than a micro-batch more.
    `exact`: one kind of sequences only, each job's in its own order, so that a job's gradient adds up as without others.
    Sequences that learn and others do not mix.
    """
    # In deterministic mode a job's gradient must add up in the order and shapes that it has without neighbours, so only the lead's
    # kind joins. Elsewhere a shorter sequence is padded while that costs less than one micro-batch more.
    window = _window(queues, WINDOW_BATCHES * budget.tokens)
    lead = window[0][0]
    width = lead.kind[0] if exact else len(lead)
    if exact:
        fitting = [[*itertools.takewhile(lambda tree: tree.kind == lead.kind, queue)] for queue in window]
    else:
        fitting = [[tree for tree in q if len(tree) <= len(lead) and tree.learns == lead.learns] for q in window]
    candidates = [(job, tree) for job, queue in enumerate(fitting) for tree in queue]
    taken: list[list[Tree]] = [[] for _ in queues]
    padding, branched = 0, False
    for num, (job, tree) in enumerate(sorted(candidates, key=lambda c: 0 if exact else -len(c[1]))):
        padding += 0 if exact else width - len(tree)
        branched |= tree.branched
        fits = budget.holds(num + 1, width, branched=branched)
        if num and not (fits and padding <= PADDING_SHARE * budget.tokens):
            break
        taken[job].append(tree)
    return taken


def next_pack(queues: Sequence[Sequence[Tree]], budget: Budget, num_ranks: int) -> list[list[Tree]]:
    """Chooses as `next_micro_batch`, for unpadded sequences end to end: the oldest job's first, as many as fit."""
    learns = queues[0][0].learns
    candidates = [(job, tree) for job, queue in enumerate(queues) for tree in queue if tree.learns == learns]
    least, most = 1, len(candidates)
    while least < most:
        middle = (least + most + 1) // 2
        if budget.holds_packed([tree for _, tree in candidates[:middle]], num_ranks):
            least = middle
        else:
            most = middle - 1
    taken: list[list[Tree]] = [[] for _ in queues]
    for job, tree in candidates[:least]:
        taken[job].append(tree)
    return taken


def _window(queues: Sequence[Sequence[Tree]], tokens: int) -> list[Sequence[Tree]]:
    window: list[Sequence[Tree]] = []
    for queue in queues:
        window.append(queue)
        tokens -= sum(len(tree) for tree in queue)
        if tokens <= 0:
            break
    return window
