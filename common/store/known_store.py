"""Takes a folder for the store of a cell only if it is the one that the cell's first service found.

reads, writes: `store` of each cell   waits for: the store's folder   unblocked by: whoever puts it back
after a crash: nothing is left to do

A cell that knows no store, as a new one or one whose Redis was emptied, takes the folder that is there; it gets an identity if it has none.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import structlog

from common.bus.bus import Bus
from common.bus.streams import Cell
from common.settings import Settings
from common.store.objects import Objects
from common.store.store_folder import IDENTITY, StoreFolder

EVERY_S = 1.0
ANSWER_S = 2.0
"""Seconds in which Redis answers, if it is there."""
SHOWN = 8
"""Digits of an identity that a person is shown."""
log = structlog.get_logger()


class KnownStore:
    """The folder of a local store, before it is used by services of some cells."""

    def __init__(self, folder: StoreFolder, buses: Sequence[Bus]) -> None:
        """`buses`: one for each cell."""
        self._folder = folder
        self._buses = buses

    async def recognise(self, tell: Callable[[str], None]) -> None:
        """Returns once the folder is that of the cells' store. `tell` hears what it waits for and what to do, whenever that changes."""
        told = ""
        while reason := await self._reason():
            if reason != told:
                tell(reason)
            told = reason
            await asyncio.sleep(EVERY_S)

    async def _reason(self) -> str:
        """Says why the folder is not used; empty: it may be."""
        try:
            known = await self._known()
            own = await asyncio.to_thread(self._folder.identity)
            if own in known.values() or not known:
                own = await asyncio.to_thread(self._folder.identified)
                await remember(own, self._buses)
                known = await self._known()
        except OSError as error:
            return f"the store's folder {self._folder.path} cannot be used: {error.strerror or error}"
        return next((self._explained(cell, own, name) for cell, name in known.items() if name != own), "")

    async def _known(self) -> dict[Cell, str]:
        """The identity of each cell's store; not of a cell that knows none."""
        known: dict[Cell, str] = {}
        for bus in self._buses:
            found: Any = await bus.retrying(lambda bus=bus: bus.client.get(bus.cell.store))
            known |= {bus.cell: found.decode()} if found else {}
        return known

    def _explained(self, cell: Cell, own: str, known: str) -> str:
        path = self._folder.path
        there = f"there is no folder {path}"
        if self._folder.path.is_dir():
            there = (
                f"{path} holds another store ({own[:SHOWN]})"
                if own
                else f"{path} holds no store (no file {IDENTITY!r})"
            )
        return (
            f"{there}, and the store of {cell.base_model} is {known[:SHOWN]}: put that one's folder there (is its disk mounted?), or set "
            f"MARLAAS_REDIS_URL to the Redis that belongs to this folder; if that store is lost for good, begin anew: write {known} into "
            f"{path / IDENTITY}"
        )


async def remember(identity: str, buses: Sequence[Bus]) -> None:
    """Tells the cells that know no store of this one; empty: nothing."""
    for bus in buses if identity else ():
        await bus.retrying(lambda bus=bus: bus.client.set(bus.cell.store, identity, nx=True))


async def recognised(folder: StoreFolder, redis_url: str, bases: Sequence[str], tell: Callable[[str], None]) -> None:
    """Calls `KnownStore.recognise` for these base models' cells."""
    buses = [Bus.connect(redis_url, Cell(base)) for base in bases]
    try:
        await KnownStore(folder, buses).recognise(tell)
    finally:
        for bus in buses:
            await bus.close()


async def recognised_by_service(settings: Settings, bases: Sequence[str], objects: Objects | None = None) -> None:
    """Waits for the store of a service's settings, and says so in its log. A store that is no folder needs no waiting. `objects`: that
    store, if it was opened before."""
    if folder := StoreFolder.of(settings.store):
        await recognised(
            folder, settings.redis_url, bases, lambda reason: log.warning("waits_for_store", reason=reason)
        )
    if objects is not None:
        objects.reopen()


async def recognised_at_once(settings: Settings, bases: Sequence[str]) -> bool:
    """Calls `recognised_by_service` if Redis answers. False: it does not, and other faults of the settings are to be said first."""
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
