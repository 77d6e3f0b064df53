"""Takes a folder for the store of a cell only if it is the one that the cell's first service found.

reads, writes: `store` of each cell   waits for: the store's folder   unblocked by: whoever puts it back
after a crash: nothing is left to do

A cell without a known store (a new one, or one whose Redis was emptied) takes the folder that is there, and names it if it must.
"""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import structlog

from common.bus.bus import Bus
from common.bus.streams import Cell
from common.settings import Settings
from common.store.objects import Objects
from common.store.store_folder import IDENTITY, StoreFolder

LOOK_EVERY_S = 1.0
ANSWER_S = 2.0
"""Seconds in which Redis answers, if it is there."""
SHOWN_DIGITS = 8
"""Digits of an identity that an error shows."""
log = structlog.get_logger()


async def recognise(folder: StoreFolder, buses: Sequence[Bus], tell: Callable[[str], None]) -> None:
    """Returns once a local store's folder is the cells'. `buses`: one a cell. `tell` hears at each change what to do."""
    told = ""
    while reason := await _why_not(folder, buses):
        if reason != told:
            tell(reason)
        told = reason
        await asyncio.sleep(LOOK_EVERY_S)


async def _why_not(folder: StoreFolder, buses: Sequence[Bus]) -> str:
    """The reason for which the folder is not used; empty: it may be."""
    try:
        known = await _known(buses)
        own = await asyncio.to_thread(folder.identity)
        if own in known.values() or not known:
            own = await asyncio.to_thread(folder.identified)
            await remember(own, buses)
            known = await _known(buses)
    except OSError as error:
        return f"the store's folder {folder.path} cannot be used: {error.strerror or error}"
    return next((_explained(folder.path, cell, own, name) for cell, name in known.items() if name != own), "")


async def _known(buses: Sequence[Bus]) -> dict[Cell, str]:
    """The identity of each cell's store; not of a cell that knows none."""
    names: list[Any] = [await bus.retrying(lambda bus=bus: bus.client.get(bus.cell.store)) for bus in buses]
    return {bus.cell: name.decode() for bus, name in zip(buses, names, strict=True) if name}


def _explained(path: Path, cell: Cell, own: str, known: str) -> str:
    there = f"there is no folder {path}"
    if path.is_dir():
        what = f"another store ({own[:SHOWN_DIGITS]})" if own else f"no store (no file {IDENTITY!r})"
        there = f"{path} holds {what}"
    return (
        f"{there}, and the store of {cell.base_model} is {known[:SHOWN_DIGITS]}: put that one's folder there (is its disk mounted?), or "
        f"set MARLAAS_REDIS_URL to the Redis that belongs to this folder; if that store is lost for good, begin again: write {known} "
        f"into {path / IDENTITY}"
    )


async def remember(identity: str, buses: Sequence[Bus]) -> None:
    """Tells the cells that know no store of this one; empty: nothing."""
    for bus in buses if identity else ():
        await bus.retrying(lambda bus=bus: bus.client.set(bus.cell.store, identity, nx=True))


async def recognised(folder: StoreFolder, redis_url: str, bases: Sequence[str], tell: Callable[[str], None]) -> None:
    """Calls `recognise` for these base models' cells."""
    buses = [Bus.connect(redis_url, Cell(base)) for base in bases]
    try:
        await recognise(folder, buses, tell)
    finally:
        for bus in buses:
            await bus.close()


async def recognised_by_service(settings: Settings, bases: Sequence[str], objects: Objects | None = None) -> None:
    """Waits for the store of a service's settings, if it is a folder, and logs it. `objects`: the store, if it is open."""
    if folder := StoreFolder.of(settings.store):
        await recognised(
            folder, settings.redis_url, bases, lambda reason: log.warning("waits_for_store", reason=reason)
        )
    if objects is not None:
        objects.reopen()


async def recognised_at_once(settings: Settings, bases: Sequence[str]) -> bool:
    """Calls `recognised_by_service` if Redis answers. False: it does not; other faults of settings come first."""
    bus = Bus.connect(settings.redis_url, Cell(bases[0]))
    try:
        async with asyncio.timeout(ANSWER_S):
            await bus.retrying(bus.client.ping)
    except TimeoutError:
        return False
    finally:
        await bus.close()
    await recognised_by_service(settings, bases)
    return True
