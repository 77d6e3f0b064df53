"""Asks a run's owner to delete a checkpoint, or to let it expire at another time, and waits until it has."""

import asyncio
from contextlib import AbstractContextManager
from typing import Any

from common.bus.streams import partition_of
from common.errors import NotFound, Unavailable
from common.wire.operations import NameChange
from manager_service.http.stores.run_store import RunRow
from manager_service.records.run_records import Checkpoint, RunState, meant

WAIT_S = 20.0
"""Seconds that a request waits for the owner: another takes over within a lease."""

Announcements = AbstractContextManager[asyncio.Event]
"""Sets its event when the run's owner has carried out a change."""


async def delete(run: RunRow, known: Checkpoint, changes: Announcements) -> None:
    """Raises Unavailable."""
    await _carry_out(run, _change(run, known, deletes=True), changes)


async def expire_at(run: RunRow, known: Checkpoint, expires_at: int | None, changes: Announcements) -> None:
    """Raises Unavailable, and NotFound if it is gone meanwhile. `expires_at`: seconds since 1970; None: never."""
    state = await _carry_out(run, change := _change(run, known, expires_at=expires_at), changes)
    if meant(state, change) is None:
        raise NotFound(f"the checkpoint {known.kind}/{known.name} was deleted or saved anew at this moment")


def _change(run: RunRow, known: Checkpoint, **to: Any) -> NameChange:
    about = f"{known.kind}/{known.name}@{known.version}"
    return NameChange(
        id=f"{run.id}/{about}/{to}",
        tenant=run.spec.tenant,
        job=run.id,
        partition=partition_of(run.spec.tenant),
        checkpoint=known.kind,
        name=known.name,
        version=known.version,
        created_at=known.created_at,
        **to,
    )


async def _carry_out(run: RunRow, change: NameChange, changes: Announcements) -> RunState:
    """The run's state behind the change."""
    with changes as answered:
        await _send(run, change)
        try:
            async with asyncio.timeout(WAIT_S):
                while not _is_done(state := await run.state(), change):
                    await answered.wait()
                    answered.clear()
                return state
        except TimeoutError:
            raise Unavailable("the run's owner is away for a moment: it carries this out when it is back") from None


def _is_done(state: RunState, change: NameChange) -> bool:
    known = meant(state, change)
    return known is None or (not change.deletes and known.expires_at == change.expires_at)


async def _send(run: RunRow, change: NameChange) -> None:
    fields = await run.base.bus.fields(change)
    entry = dict(zip(fields[::2], fields[1::2], strict=True))
    await run.base.redis.xadd(run.base.cell.jobs(change.partition), entry)
