"""One connection that reads the streams of a cell for many waiting requests.

If each request blocked on a connection of its own, a tenant with a hundred event streams would take all of the process'.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, cast

from common.bus.bus import Bus

READ_EVERY_S = 0.2
READ_COUNT = 200

Id = tuple[int, int]
FeedEntry = tuple[Id, Mapping[bytes, bytes]]


@dataclass(frozen=True, slots=True, eq=False)
class Reader:
    key: str
    after: Id
    found: "asyncio.Future[list[FeedEntry]]"


@dataclass(slots=True)
class Feed:
    """Reads while `run` runs, a few times a second, and only what somebody waits for."""

    bus: Bus
    _readers: set[Reader] = field(default_factory=set[Reader])
    _wanted: asyncio.Event = field(default_factory=asyncio.Event)

    async def after(self, key: str, last: Id, timeout_s: float) -> list[FeedEntry]:
        """Entries of a stream behind an id, oldest first; none if none came in time."""
        reader = Reader(key, last, asyncio.get_running_loop().create_future())
        self._readers.add(reader)
        self._wanted.set()
        try:
            async with asyncio.timeout(timeout_s):
                return await reader.found
        except TimeoutError:
            return []
        finally:
            self._readers.discard(reader)

    async def now(self, key: str, last: Id) -> list[FeedEntry]:
        """The next entries behind an id that the stream has already."""
        return (await self.bus.retrying(lambda: self._xread({key: last}))).get(key, [])

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            await self._wanted.wait()
            await asyncio.sleep(READ_EVERY_S)
            if self._readers:
                self._tell(await self.bus.retrying(self._read))
            else:
                self._wanted.clear()

    async def _read(self) -> dict[str, list[FeedEntry]]:
        lowest: dict[str, Id] = {}
        for reader in self._readers:
            lowest[reader.key] = min(reader.after, lowest.get(reader.key, reader.after))
        return await self._xread(lowest) if lowest else {}

    async def _xread(self, last: Mapping[str, Id]) -> dict[str, list[FeedEntry]]:
        streams = {key: f"{time}-{number}" for key, (time, number) in last.items()}
        pages: Any = await self.bus.client.xread(cast(Any, streams), count=READ_COUNT)
        found = {key.decode(): chain.from_iterable(rows) for key, rows in (pages or {}).items()}
        return {key: [(_id(entry), fields) for entry, fields in rows] for key, rows in found.items()}

    def _tell(self, found: Mapping[str, list[FeedEntry]]) -> None:
        for reader in list(self._readers):
            entries = [entry for entry in found.get(reader.key, []) if entry[0] > reader.after]
            if entries and not reader.found.done():
                reader.found.set_result(entries)


def _id(entry: bytes) -> Id:
    time, _, number = entry.partition(b"-")
    return int(time), int(number)
