"""Changes of the names of a run's versions: a checkpoint is deleted, or gets another time at which it expires."""

import msgspec

from common.operations import NameChange
from manager_service.runs.records import Checkpoint, RunState


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
