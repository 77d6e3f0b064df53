"""Changes of the names of a run's versions: a checkpoint is saved, is deleted, or gets another time at which it expires."""

import msgspec

from common.operations import Kind, NameChange, SaveWeights
from manager_service.runs.records import Checkpoint, RunState

MAX_CHECKPOINTS = 1000
"""Checkpoints of one run: the state has them all, and is written with each operation."""


def give_name(state: RunState, wanted: SaveWeights, kind: Kind, now: float) -> str:
    """Names the newest version; why that cannot be, or empty."""
    others = [known for known in state.checkpoints if (known.kind, known.name) != (kind, wanted.name)]
    kept = [known for known in others if known.is_kept(now)]
    if len(kept) >= MAX_CHECKPOINTS:
        return (
            f"this run has {MAX_CHECKPOINTS} checkpoints: delete some (`tinker checkpoint delete PATH`), or save with ttl_seconds,"
            " so that they expire"
        )
    expires_at = None if wanted.ttl_s is None else int(now) + wanted.ttl_s
    state.checkpoints = [*kept, Checkpoint(kind, wanted.name, state.version, int(now), expires_at)]
    return ""


def meant(state: RunState, change: NameChange) -> Checkpoint | None:
    """The checkpoint that a change is about; None if it is gone, or was saved anew since."""
    about = change.checkpoint, change.name, change.version, change.created_at
    for known in state.checkpoints:
        if (known.kind, known.name, known.version, known.created_at) == about:
            return known
    return None


def change_name(state: RunState, change: NameChange, now: float) -> None:
    """A repeat changes nothing. What has expired goes too."""
    known = meant(state, change)
    kept = [each for each in state.checkpoints if each.is_kept(now)]
    if known is not None and known in kept:
        place = kept.index(known)
        kept[place : place + 1] = [] if change.deletes else [_until(known, change.expires_at)]
    state.checkpoints = kept


def _until(known: Checkpoint, expires_at: int | None) -> Checkpoint:
    return msgspec.structs.replace(known, expires_at=expires_at)
