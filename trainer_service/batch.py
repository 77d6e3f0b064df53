"""Holds what one adapter computes at a time, and parses a TrainStep's rows (a run's data: data.py).

Axes: R rows, T tokens of one row, M targets of one row.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.errors import InvalidInput, TrainingFailed
from common.wire.messages import Rows

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Terms:
    """The loss's terms by target and row, named in `losses.MicroTerms`. With it, micro-batches only add up."""

    of_targets_KM: Floats  # [., targets of all rows, end to end]
    of_rows_KR: Floats
    learned: list[Bools]  # R times [M] targets with a gradient, if any is asked for


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows for the base model under one adapter, each with targets at some of its positions."""

    inputs: list[Ints]  # R times [T] read by the model
    predictors: list[Ints]  # R times [M] the positions at which the targets are predicted, ascending
    targets: list[Ints]  # R times [M]
    groups_R: Ints  # rows of one group begin alike
    parts_R: Ints  # a part's rows (an operation's) add to the gradient before the next's; groups lie within one
    wanted_R: Bools  # the others need no forward
    learned_R: Bools  # the others cannot add to the gradient; they are packed apart
    terms: Terms
    temperature: float = 1.0
    kl_coef: float = 0.0
    keeps_logprobs: bool = False  # those of the targets are asked for

    @property
    def starts_R(self) -> Ints:
        """The begins of the rows' targets in `terms.of_targets_KM`, and the end of the last row's."""
        return np.cumsum([0, *map(len, self.targets)])


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The rows of a TrainStep, sorted by (group, sample)."""

    tokens: list[Ints]  # R times [T]
    logprobs: list[Floats]  # R times [T], log-prob of each token at sampling
    written: list[Bools]  # R times [T], the model wrote the token
    groups_R: Ints
    rewards_R: Floats
    versions_R: Ints  # the version that sampled the row
    truncated_R: Bools  # the last turn was cut off

    def __len__(self) -> int:
        return len(self.tokens)

    def num_written_R(self) -> Ints:
        return np.array([int(mask.sum()) for mask in self.written], np.int64)

    def num_tokens(self) -> int:
        return sum(len(tokens) for tokens in self.tokens)


def parse_rows(rows: Rows, *, version: int, vocab: int, context: int) -> SampledRows:
    """Parses the rows of a TrainStep that trains `version`.

    A token at position 0 is never trained: nothing predicts it. Raises InvalidInput for rows that contradict themselves or
    the base model, TrainingFailed for rewards and log-probs that are not finite.
    """
    lengths = rows.lengths.numpy().astype(np.int64)
    _check_shapes(rows, lengths)
    cuts = np.cumsum(lengths)[:-1]
    written = rows.written.numpy().astype(bool)
    batch = SampledRows(
        tokens=_split(rows.tokens.numpy().astype(np.int64), cuts, len(lengths)),
        logprobs=_split(rows.logprobs.numpy().astype(np.float64), cuts, len(lengths)),
        written=_split(written, cuts, len(lengths)),
        groups_R=rows.groups.numpy().astype(np.int64),
        rewards_R=rows.rewards.numpy().astype(np.float64),
        versions_R=rows.versions.numpy().astype(np.int64),
        truncated_R=rows.truncated.numpy().astype(bool),
    )
    for mask in batch.written:
        mask[0] = False
    _check_values(batch, version, vocab, context)
    return batch


def _split(flat: NDArray[Any], cuts: Ints, num_rows: int) -> list[NDArray[Any]]:
    return np.split(flat, cuts) if num_rows else []


def _check_shapes(rows: Rows, lengths: Ints) -> None:
    per_row = (rows.groups, rows.samples, rows.rewards, rows.versions, rows.truncated)
    if any(len(array) != len(lengths) for array in per_row):
        raise InvalidInput("training batch: arrays of one entry a row differ in length")
    if len(rows.transcript) != lengths.sum():
        raise InvalidInput("training batch: the tokens do not match the rows' lengths")
    if (lengths < 1).any():
        raise InvalidInput("training batch: a row without tokens")


def _check_values(batch: SampledRows, version: int, vocab: int, context: int) -> None:
    if not np.isfinite(batch.rewards_R).all():
        raise TrainingFailed("a reward is not a finite number")
    if (batch.versions_R > version).any():
        raise InvalidInput(f"training batch: a row was sampled by a version after {version}, the one being trained")
    if (np.diff(batch.groups_R) < 0).any():
        raise InvalidInput("training batch: rows are not sorted by group")
    for tokens, logprobs, mask in zip(batch.tokens, batch.logprobs, batch.written, strict=True):
        if len(tokens) > context:
            raise InvalidInput(f"training batch: a row of {len(tokens)} tokens, the base model's context is {context}")
        if tokens.min() < 0 or tokens.max() >= vocab:
            raise InvalidInput("training batch: a token id outside the base model's vocabulary")
        if not np.isfinite(logprobs[mask]).all():
            raise TrainingFailed("a log-probability at sampling is not a finite number")
