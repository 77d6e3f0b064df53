"""Parses the data of a run's operations into a batch: what each of the losses of the Tinker protocol makes of a datum.

    loss                 loss of a target, all of them added up (no mean)              bounds
    cross_entropy        -w log p
    importance_sampling  -r A
    ppo                  -min(r A, clip(r, low, high) A)                              0.8 to 1.2
    cispo                -clip(r, low, high) A log p, no gradient through the clip    0 to 4
    dro                  -(A log p - beta / 2 (log r)²)                               beta 0.05
    gspo                 as ppo, with the sequence's ratio                            1 - 3e-4 to 1 + 4e-4
    stable_reinforce     -min(r, 2) A log p + beta / 2 (log r)² where A is not 0,     beta 0
                         no gradient through min: a stand-in for Tinker's own

r = p / q, with q the probability at sampling; gspo's ratio is the geometric mean of r over the datum's mask, which each token
carries with only the gradient of its own log p (GSPO-token, arXiv 2507.18071, eq. 13).

Axes: R rows, M targets of one row.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from common.errors import InvalidInput, Permanent, TrainingFailed
from common.wire.messages import Array
from common.wire.operations import Datum, Forward, LossFn
from trainer_service.batch import Batch, Bools, Floats, Ints, Terms
from trainer_service.losses import NUM_OF_TARGETS, MicroTerms
from trainer_service.packing import common_length

SHARED_BEGINNING = 0.5  # data that begin alike for this part of the shorter one are one group
ROW_TERMS = MicroTerms._fields[NUM_OF_TARGETS : MicroTerms._fields.index("has_anchored")]


@dataclass(frozen=True, slots=True)
class RunRule:
    """The properties in which the losses differ."""

    low: float
    high: float
    is_weight: bool = False
    is_anchored: bool = False
    beta: float = 0.0
    everywhere: bool = False  # beta counts at targets without advantage too
    needs: tuple[str, ...] = ("logprobs", "advantages")


RUN_RULES: dict[LossFn, RunRule] = {
    "cross_entropy": RunRule(1.0, 1.0, is_weight=True, needs=()),
    "importance_sampling": RunRule(0.0, math.inf),
    "ppo": RunRule(0.8, 1.2),
    "cispo": RunRule(0.0, 4.0, is_weight=True),
    "dro": RunRule(1.0, 1.0, is_weight=True, beta=0.05, everywhere=True),
    "gspo": RunRule(1 - 3e-4, 1 + 4e-4, is_anchored=True, needs=("logprobs", "advantages", "mask")),
    "stable_reinforce": RunRule(0.0, 2.0, is_weight=True),
}
CLIPPED: tuple[LossFn, ...] = ("ppo", "cispo", "gspo")
"""The losses whose bounds an operation may give."""


@dataclass(frozen=True, slots=True)
class CheckedDatum:
    """A datum, checked."""

    tokens: Ints
    targets: Ints
    of_targets_KM: Floats
    learned_M: Bools
    of_row_K: Floats


@dataclass(frozen=True, slots=True)
class OperationRows:
    """An operation's rows. `learns`: they add to the gradient. `answers`: their log-probs are wanted."""

    rows: Sequence[CheckedDatum]
    learns: bool
    answers: bool


def parse_forward(payload: bytes, *, vocab: int, context: int) -> tuple[LossFn, list[CheckedDatum]]:
    """The loss and the rows. Raises InvalidInput for data that contradict themselves or the base model, TrainingFailed for non-finite
    numbers."""
    try:
        forward = msgspec.msgpack.decode(payload, type=Forward)
    except (msgspec.DecodeError, ValueError) as error:
        raise InvalidInput(f"not the data of an operation: {error}") from error
    rule = _rule(forward)
    rows: list[CheckedDatum] = []
    for number, datum in enumerate(forward.data):
        try:
            rows.append(_row(datum, rule, vocab, context))
        except Permanent as error:
            raise type(error)(f"datum {number}: {error}") from error
    return forward.loss, rows


def _rule(forward: Forward) -> RunRule:
    """The loss's rule with the operation's own bounds."""
    rule, low, high, beta = RUN_RULES[forward.loss], forward.clip_low, forward.clip_high, forward.beta
    if forward.loss not in CLIPPED and (low is not None or high is not None):
        raise InvalidInput(f"{forward.loss} has no bounds")
    if forward.loss not in ("dro", "stable_reinforce") and beta is not None:
        raise InvalidInput(f"{forward.loss} has no beta")
    bounds = {"low": _finite(low, rule.low), "high": _finite(high, rule.high)}
    return replace(rule, **bounds, beta=_finite(beta, rule.beta))


def _finite(given: float | None, otherwise: float) -> float:
    if given is not None and not math.isfinite(given):
        raise InvalidInput("bounds and beta must be finite numbers")
    return otherwise if given is None else given


def _row(datum: Datum, rule: RunRule, vocab: int, context: int) -> CheckedDatum:
    num = len(_flat("tokens", datum.tokens, "i4", None))
    tokens, targets = (
        _ids(name, array, num, vocab) for name, array in (("tokens", datum.tokens), ("targets", datum.targets))
    )
    if not 1 <= num <= context:
        raise InvalidInput(f"{num} tokens; the base model's context is {context}")
    for name in rule.needs:
        if getattr(datum, name) is None:
            raise InvalidInput(f"{name} are missing, which the loss needs")
    learned = "advantages" if rule.needs else "weights"
    factors_M = _numbers(learned, getattr(datum, learned), num, 1.0)
    learned_M = (factors_M != 0) | (rule.everywhere and rule.beta != 0)
    of_targets_KM = np.stack(
        [
            _numbers("logprobs", datum.logprobs if rule.needs else None, num, 0.0),
            factors_M,
            learned_M.astype(np.float64),
            _numbers("low", datum.low if rule.is_anchored else None, num, rule.low),
            _numbers("high", datum.high if rule.is_anchored else None, num, rule.high),
            _numbers("mask", datum.mask if rule.is_anchored else None, num, 0.0),
        ]
    )
    if not np.isin(of_targets_KM[-1], (0.0, 1.0)).all():
        raise InvalidInput("mask must hold 1 or 0")
    of_row = {
        "limit_R1": math.inf,
        "is_anchored_R1": float(rule.is_anchored),
        "is_weight_R1": float(rule.is_weight),
        "betas_R1": rule.beta,
    }
    return CheckedDatum(
        tokens, targets, of_targets_KM, learned_M, np.array([of_row.get(name, 0.0) for name in ROW_TERMS])
    )


def _flat(name: str, array: Array, dtype: str, num: int | None) -> np.ndarray[Any, Any]:
    if array.dtype != dtype or len(array.shape) != 1:
        raise InvalidInput(f"{name} must be a flat array of {'integers' if dtype == 'i4' else 'numbers'}")
    if num is not None and len(array) != num:
        raise InvalidInput(f"{len(array)} {name}, but {num} tokens")
    return array.numpy()


def _ids(name: str, array: Array, num: int, vocab: int) -> Ints:
    ids = _flat(name, array, "i4", num).astype(np.int64)
    if num and (ids.min() < 0 or ids.max() >= vocab):
        raise InvalidInput(f"{name}: a token id outside the base model's vocabulary")
    return ids


def _numbers(name: str, array: Array | None, num: int, otherwise: float) -> Floats:
    """The numbers as float64; `otherwise` where none are given."""
    if array is None:
        return np.full(num, otherwise)
    values = _flat(name, array, "f4", num).astype(np.float64)
    if not np.isfinite(values).all():
        raise TrainingFailed(f"{name} hold what is not a finite number")
    return values


def batch_of_parts(parts: Sequence[OperationRows]) -> Batch:
    """The batch of a segment of operations, in order. Rows that neither learn nor answer are left out."""
    rows = [row for part in parts for row in part.rows]
    learned_R = np.array([bool(row.learned_M.any()) for row in rows], bool)
    num_rows = [len(part.rows) for part in parts]
    learns_R = np.repeat(np.array([part.learns for part in parts], bool), num_rows)
    answers_R = np.repeat(np.array([part.answers for part in parts], bool), num_rows)
    groups: list[Ints] = []
    for part in parts:
        groups.append(_groups([row.tokens for row in part.rows]) + sum(map(len, groups)))
    no_targets, no_rows = np.zeros((NUM_OF_TARGETS, 0)), np.zeros((len(ROW_TERMS), 0))
    return Batch(
        inputs=[row.tokens for row in rows],
        predictors=[np.arange(len(row.tokens)) for row in rows],
        targets=[row.targets for row in rows],
        groups_R=np.concatenate([np.zeros(0, np.int64), *groups]),
        parts_R=np.repeat(np.arange(len(parts)), num_rows),
        wanted_R=answers_R | (learned_R & learns_R),
        learned_R=learned_R,
        terms=Terms(
            np.concatenate([no_targets, *(row.of_targets_KM for row in rows)], axis=1),
            np.concatenate([no_rows, *(row.of_row_K[:, None] for row in rows)], axis=1),
            [row.learned_M & learns for row, learns in zip(rows, learns_R, strict=True)],
        ),
        keeps_logprobs=True,
    )


def _groups(inputs: Sequence[Ints]) -> Ints:
    """Numbers the groups: neighbours that begin alike."""
    starts = [common_length(pair) < SHARED_BEGINNING * min(map(len, pair)) for pair in itertools.pairwise(inputs)]
    return np.cumsum([0, *starts])[: len(inputs)]
