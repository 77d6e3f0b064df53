"""Keeps a turn's fault from its neighbours: what fails for several rows is done again row by row.

    together ─ fails ─► the first row, the second, … ─► only those that fail by themselves end

A failed attempt must leave nothing that the next one reads.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import structlog

from base_model.device import is_out_of_memory
from rollout_service.embedded.row_states import TurnRow

T = TypeVar("T")
log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class FailedTurn:
    """A turn that failed by itself, with the reason."""

    row: TurnRow
    error: Exception


def outcomes(
    rows: Sequence[TurnRow], together: Callable[[], T], single: Callable[[TurnRow], T]
) -> Iterator[T | FailedTurn]:
    """Gives the outcome for all rows together or, if that fails, for each by itself. Raises the error when memory ran out, which is no
    row's fault."""
    found = tried(together)
    if not isinstance(found, Exception):
        yield found
    elif len(rows) == 1:
        yield FailedTurn(rows[0], found)
    else:
        log.warning("forward_failed", num_turns=len(rows), reason=f"{type(found).__name__}: {found}")
        for row in rows:
            own = tried(lambda row=row: single(row))
            yield FailedTurn(row, own) if isinstance(own, Exception) else own


def tried(call: Callable[[], T]) -> T | Exception:
    """Returns the call's result or its error. Raises the error when memory ran out."""
    try:
        return call()
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return error
