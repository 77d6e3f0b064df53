"""Measures `lagged_gap`: how far engine and trainer differ in rows that an older version than the trained one sampled.

`sampling_gap` compares rows of the trained version only, of which an asynchronous job's batch may have none: against the trained
version an older one's rows differ by what was learned since. So up to MAX_ROWS of them go through the base model under their own
version, without a gradient, in a step of their own before the TrainStep's.
"""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import structlog

from base_model.device import is_out_of_memory
from common.cancellation import beating
from common.errors import MarlaasError, TrainingFailed
from common.wire.messages import TrainStep
from trainer_service.backbone.interface import Backbone
from trainer_service.batch import Batch, parse_rows
from trainer_service.fusion import Fusion
from trainer_service.losses import batch_of, row_terms
from trainer_service.open_step import FIGURES, OpenBatch, Trained
from trainer_service.versions import Versions

MAX_ROWS = 4
log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class OpenGap:
    """The measurement under way."""

    opened: OpenBatch


@dataclass(frozen=True, slots=True)
class LaggedGap:
    """A mean of |log-prob in the trainer - at sampling| over the rows' tokens, and the seconds that it took."""

    gap: float
    seconds: float

    def added_to(self, trained: Trained) -> Trained:
        """The step's result with this metric and time."""
        seconds = trained.train_s + self.seconds
        return replace(trained, metrics=trained.metrics | {"lagged_gap": self.gap, "train_s": seconds}, train_s=seconds)


def is_lagged(step: TrainStep) -> bool:
    """Has an older version than the trained one sampled any of its rows?"""
    return step.loss.name != "cross_entropy" and bool((step.rows.versions.numpy() < step.adapter.version).any())


async def measure(step: TrainStep, fusion: Fusion, versions: Versions, beat: Callable[[], None]) -> LaggedGap | None:
    """None if no such row is trained, or if it cannot be measured, which the log says and the step survives: a version that is
    gone, a row or a version that memory does not hold."""
    if not is_lagged(step):
        return None
    try:
        found = await beating(beat, asyncio.to_thread(lagged_batch, step, fusion.trainer.backbone))
        if found is None:
            return None
        version, batch = found
        state = await versions.weights(msgspec.structs.replace(step.adapter, version=version), beat)
        tokens = sum(len(row) for row, wanted in zip(batch.inputs, batch.wanted_R, strict=True) if wanted)
        return await fusion.run(
            step.tenant,
            lambda trainer: OpenGap(trainer.open(state, batch)),
            lambda opened: _finish(fusion, opened),
            beat,
            tokens=tokens,
            weight=step.weight,
        )
    except (MarlaasError, MemoryError, RuntimeError) as error:
        if not (isinstance(error, MarlaasError) or is_out_of_memory(error)):
            raise
        log.warning("lagged_gap_not_measured", job=step.job, version=step.adapter.version, reason=str(error))
        return None


def lagged_batch(step: TrainStep, base: Backbone) -> tuple[int, Batch] | None:
    """Up to MAX_ROWS trained rows of the older version that sampled most of them, and that version; None: there are none.

    Raises as `parse_rows`.
    """
    version = step.adapter.version
    rows = parse_rows(step.rows, version=version, vocab=base.vocab, context=base.context)
    terms = row_terms(rows, step.loss)
    lagged_R = terms.active_R & (rows.versions_R < version)
    if not lagged_R.any():
        return None
    known, counts = np.unique(rows.versions_R[lagged_R], return_counts=True)
    older = int(known[counts == counts.max()][-1])
    candidates = np.flatnonzero(lagged_R & (rows.versions_R == older))
    wanted_R = np.zeros(len(rows), bool)
    wanted_R[candidates[np.linspace(0, len(candidates) - 1, min(MAX_ROWS, len(candidates))).astype(int)]] = True
    batch = batch_of(rows, terms, step.loss, older)
    unlearned = replace(batch.terms, learned=[np.zeros_like(learned) for learned in batch.terms.learned])
    return older, replace(batch, wanted_R=wanted_R, learned_R=np.zeros_like(wanted_R), terms=unlearned, kl_coef=0.0)


def _finish(fusion: Fusion, step: OpenGap) -> LaggedGap:
    opened = step.opened
    fusion.trainer.discard(opened)
    fusion.trainer.settle()
    sum_of = dict(zip(FIGURES, opened.sums.figures_K.tolist(), strict=True))
    gap = sum_of["gap"] / max(sum_of["num_gap"], 1)
    if not math.isfinite(gap):
        raise TrainingFailed("a log-prob under the older version is not a finite number")
    return LaggedGap(gap, opened.sums.seconds)
