"""Computes the memory of training, keys and values from a base model's sizes: arithmetic, no measurement.

Of training:

    weights | adapters, optimiser states | kept for the backward | attention masks | a pass | scores | holes | the process

A trainer measures what its base model keeps (`trainer_service/memory.py`), and a test compares it with this; `python -m
benchmarks.planned_memory` measures a process. Both backbones take from here how many bytes checkpointing saves, and how
many scores exist at one time.
"""

from dataclasses import astuple, dataclass

from common.models.base_shape import BaseShape

MAX_SCORES = 1 << 22
"""Logits that exist at one time, or those of one position, if that has more."""
MODULES_SCORES = 1 << 24
"""The most in transformers' modules on a CPU: 110 rows at a vocabulary of 152 k take half as long as 27."""
BYTES_OF_SCORE = 16
"""Bytes of a score while log-probs are computed, copies included."""
SCORES_SHARE = 16
"""The part of free memory that transformers' modules let scores take: one in so many."""
FLOAT32 = 4
STATES = 9
"""Copies of an adapter in training: values, gradient, two moments, those of the step before, and the stack."""
CPU_PROCESS, GPU_PROCESS = 280_000_000, 700_000_000
"""Bytes of Python and torch with the code of a pass; on a GPU, of its driver's context (0.6 to 0.8 GB on an H200)."""
CPU_COMPILER, CPU_MODULES = 157_000_000, 225_000_000
"""Bytes more: of torch's compiler, which checkpointing loads; of transformers, which loads it too."""
CPU_HOLES, MODULES_HOLES, GPU_HOLES = 0.33, 0.45, 0.1
"""Holes for each byte of a pass: glibc's heap keeps them between aligned blocks, with and without checkpointing (measured
on a CPU; more in transformers' modules); torch's allocator on a GPU keeps few (0.03 on an H200)."""
MASK_QUERIES = 272
"""Queries for which transformers' modules have a mask: more than they attend with at one time."""
BYTES_OF_TRUTH = 1
"""Bytes that say whether a position sees another: our decoder makes of them what attention adds to scores."""
BYTES_OF_CHOICE = 32
"""For each expert of a token: four integers, its places in the tokens sorted by expert."""
GRAIN = 256
"""A context that somebody has not chosen is a multiple of this."""
ROWS_PART = 11 / 16
"""The least part of the embedded engine's key and value memory that rows have: see `EngineLimits.pools`."""


@dataclass(frozen=True, slots=True)
class TrainingBytes:
    """Bytes that a trainer takes at most while it trains one micro-batch."""

    weights: float
    adapters: float
    kept: float
    masks: float
    passing: float
    scores: float
    holes: float
    process: float

    @property
    def total(self) -> float:
        return sum(astuple(self))


def training_bytes(
    shape: BaseShape,
    *,
    tokens: int,
    itemsize: int,
    rank: int,
    gpu: bool,
    longest: int | None = None,
    modules: bool | None = None,
    num_checkpointed: int = 0,
    num_ranks: int = 1,
) -> TrainingBytes:
    """The bytes of a micro-batch of so many tokens, all learned. With several ranks: of one rank's tokens.

    `longest`: tokens of a sequence with branches; without it there is one sequence. `modules`: transformers computes
    the base model, as on a GPU; else our decoder, whose tables of positions have the model's whole context.
    `num_checkpointed`: layers that keep only their input.
    """
    modules = gpu if modules is None else modules
    kept, keeping_all = (
        _kept_per_token(shape, number, itemsize=itemsize, rank=rank, modules=modules)
        for number in (num_checkpointed, 0)
    )
    passing = passing_per_token(shape, itemsize=itemsize)
    held = kept if gpu else keeping_all
    share = GPU_HOLES if gpu else MODULES_HOLES if modules else CPU_HOLES
    tables = 0 if modules else 2 * shape.context * shape.head_dim * itemsize
    return TrainingBytes(
        weights=weights_of_rank(shape, num_ranks) * itemsize + tables,
        adapters=STATES * FLOAT32 * shape.adapter_weights(rank),
        kept=tokens * kept,
        masks=_masks(tokens, longest or tokens, itemsize=itemsize, modules=modules),
        passing=tokens * passing,
        scores=max(MODULES_SCORES if modules and not gpu else MAX_SCORES, shape.vocab) * BYTES_OF_SCORE,
        holes=share * tokens * (held + passing),
        process=GPU_PROCESS if gpu else _cpu_process(modules=modules, checkpoints=num_checkpointed > 0),
    )


def _kept_per_token(shape: BaseShape, num_checkpointed: int, *, itemsize: int, rank: int, modules: bool) -> float:
    """With the last hidden states, and their slopes."""
    keeping_all = kept_per_token(shape, itemsize=itemsize, rank=rank, modules=modules)
    input_bytes = shape.hidden * itemsize
    kept = kept_with_checkpoints(keeping_all, shape.num_layers, num_checkpointed, input_bytes=input_bytes)
    return kept + 2 * input_bytes


def _cpu_process(*, modules: bool, checkpoints: bool) -> float:
    more = CPU_MODULES if modules else CPU_COMPILER if checkpoints else 0
    return CPU_PROCESS + more


def weights_of_rank(shape: BaseShape, num_ranks: int) -> float:
    """The most weights of the base on each rank: its part, and a layer or table gathered while it is copied."""
    return shape.num_weights / num_ranks + (2 * shape.largest_unit if num_ranks > 1 else 0)


def _masks(tokens: int, longest: int, *, itemsize: int, modules: bool) -> float:
    """Bytes of what attention adds to scores, once for all layers: in our decoder for all pairs of positions."""
    if modules:
        return MASK_QUERIES * longest * itemsize
    return tokens * longest * (itemsize + BYTES_OF_TRUTH)


def kept_per_token(shape: BaseShape, *, itemsize: int, rank: int, modules: bool) -> float:
    """Bytes that a token keeps for the backward if all is kept. `modules`: transformers computes the base model.

    Of a layer: the inputs of its norms, in float32, and of its linear layers; queries, keys, values and attention's
    output; gate, activation, up and their product; and adapters' products. Experts have no adapters: they keep gate,
    up, activation and output of each that a token takes, and the router its shares, in float32.
    """
    heads = shape.num_heads + shape.num_kv_heads
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    linear = shape.hidden + (3 if modules else 2) * queries + 2 * keys + len(shape.linear_sizes) * rank
    experts = shape.experts
    linear += 3 * shape.ffn + experts.active * shape.hidden if experts else shape.hidden + 4 * shape.ffn
    norms = 2 * (shape.hidden + 1) + (queries + keys + heads if shape.head_norms else 0)
    sums = shape.num_heads + (experts.num if experts else 0)  # attention's, one a head
    choices = BYTES_OF_CHOICE * experts.active if experts else 0
    last = FLOAT32 * (shape.hidden + 1) if modules else 0  # the last norm's input: there every norm keeps its own
    return shape.num_layers * (itemsize * linear + FLOAT32 * (norms + sums) + choices) + last


def kept_with_checkpoints(keeping_all: float, num_layers: int, num_checkpointed: int, *, input_bytes: float) -> float:
    """Bytes that a token keeps where some layers keep only their input and are computed again, one by one."""
    if not num_checkpointed:
        return keeping_all
    whole = num_layers - num_checkpointed + 1
    return keeping_all * whole / num_layers + num_checkpointed * input_bytes


def passing_per_token(shape: BaseShape, *, itemsize: int) -> float:
    """Bytes of a token besides what is kept, at the backward's peak: in the last feed-forward layer or its norm."""
    outputs = shape.experts.active * shape.hidden if shape.experts else 0
    return max(2 * itemsize * max(shape.ffn, outputs), 5 * FLOAT32 * shape.hidden)


def cache_room(kv_bytes: int, num_layers: int) -> int:
    """Bytes for rows of the memory for keys and values; the rest is for one layer that is resized."""
    return kv_bytes * num_layers // (num_layers + 1)


def fitting_context(kv_bytes: int, num_layers: int, token_bytes: int) -> int:
    """The longest context, of GRAIN tokens or a multiple, of which a row fits; 0 if none does."""
    return cache_room(kv_bytes, num_layers) // token_bytes // GRAIN * GRAIN
