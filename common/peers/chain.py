"""Fetches a file part by part into the node folder: from a holder, from another if that fails, from the store at last.

reads: `holders:<sha256>`, holders, the store   writes: `holders:<sha256>`, `peer-key`, the node folder
waits for: a place, a holder's next bytes   unblocked by: a holder; HEAR_S without a byte; the store
after a crash: whole parts stay in the node folder, and followers join elsewhere
"""

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar
from weakref import WeakValueDictionary

import structlog

from common.errors import CorruptObject, MarlaasError
from common.peers.folder import CachedFile, FolderUnusable, NodeFolder, WrongPart
from common.peers.holders import RENEW_S, STORE, Holders, Place
from common.peers.server import BEAT, HEAR_S, PART, Offer, PeerServer
from common.store.objects import Objects
from common.store.parts import StoredFile, part_bytes

MAX_OFFERS = 64
"""Files that a worker offers at once, those used last: each is an entry to renew every second."""
WAIT_S = 0.1
STUCK_S = 5.0
"""Seconds after which a worker of this machine whose file does not grow is not waited for."""
BUFFER_BYTES = 1 << 20
T = TypeVar("T")
log = structlog.get_logger()


class Relay:
    """One worker's files that come through its peers. Used from one event loop."""

    def __init__(
        self, objects: Objects, folder: NodeFolder, holders: Holders, *, bytes_per_s: int | None = None
    ) -> None:
        """`bytes_per_s`: the most that it sends to followers, together; None: as fast as it can."""
        self._objects = objects
        self._folder = folder
        self._holders = holders
        self._offers: OrderedDict[str, Offer] = OrderedDict()  # by sha256, least recently used first
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # of who uses one file at once
        self._server = PeerServer(self._offers, lambda: holders.key, bytes_per_s)
        self._store_bytes = self._peer_bytes = 0
        self._has_warned = False

    async def open(self, host: str, first_port: int) -> None:
        """Begins to serve at an address of this machine. Raises OSError."""
        self._holders.address = await self._server.open(host, first_port)

    async def run(self) -> None:
        """Renews what this worker offers."""
        while True:
            for sha256, offer in list(self._offers.items()):
                if offer.is_whole and not offer.path.exists():  # another worker of this machine needed its room
                    self._offers.pop(sha256).end()
            await self._holders.renew(list(self._offers.values()))
            await asyncio.sleep(RENEW_S)

    async def close(self) -> None:
        """Leaves, so that nobody joins it any more."""
        await self._server.close()
        with contextlib.suppress(TimeoutError):  # without Redis its entries expire
            async with asyncio.timeout(RENEW_S):
                await self._holders.leave(list(self._offers.values()))

    def counters(self) -> dict[str, float]:
        """Totals since the start: bytes that came from the store, and from peers."""
        return {"store_bytes": float(self._store_bytes), "peer_bytes": float(self._peer_bytes)}

    async def read(self, file: StoredFile, path: str) -> bytes | None:
        """A file that has parts, checked. `path`: its object. None: the node folder cannot be used.

        Raises StoreUnavailable, NotFound or CorruptObject if it must come from the store.
        """
        return await self._used(file, path, CachedFile.read)

    async def fill(self, file: StoredFile, path: str) -> None:
        """Has the node folder hold a file, if it can, and offers it. Raises what `read` raises."""
        offer = self._offers.get(file.sha256)
        if offer is None or not offer.is_whole or not offer.path.exists():
            await self._used(file, path, lambda cached: cached.is_checked or cached.is_right() or None)

    # ---- the node folder --------------------------------------------------------------------------------------------

    async def _used(self, file: StoredFile, path: str, use: Callable[[CachedFile], T | None]) -> T | None:
        """The result of `use`, called in a thread, which says None of a file that is not right any more."""
        async with self._turns.setdefault(file.sha256, asyncio.Lock()):
            try:
                for _ in range(2):  # once more if what was in the folder was not right
                    if (cached := await self._locked(file)) is None:
                        return None
                    with contextlib.closing(cached):
                        if not cached.is_long_enough:
                            await self._complete(cached, path)
                        cached.unlock()
                        if (used := await asyncio.to_thread(use, cached)) is not None:
                            self._offer(cached).has(len(file.parts))
                            return used
                    self._forget(file)
                    await asyncio.to_thread(self._folder.delete, file)
            except FolderUnusable as error:
                if not self._has_warned:
                    log.warning("node_folder_unusable", reason=str(error))
                self._has_warned = True
        return None

    async def _locked(self, file: StoredFile) -> CachedFile | None:
        """Waits for another worker of this machine that writes it, as long as it goes on."""
        size, since_s = -1, time.monotonic()
        while (cached := await asyncio.to_thread(self._folder.open, file)) is None:
            if (now_there := self._folder.size(file)) != size:
                size, since_s = now_there, time.monotonic()
            elif time.monotonic() - since_s > STUCK_S:
                return None
            await asyncio.sleep(WAIT_S)
        return cached

    def _offer(self, cached: CachedFile) -> Offer:
        """What this worker offers of a file, the last used of MAX_OFFERS."""
        offer = self._offers.setdefault(cached.file.sha256, Offer(cached.file, cached.path))
        self._offers.move_to_end(cached.file.sha256)
        whole = [each for each in self._offers.values() if each.is_whole]
        for each in whole[: max(0, len(self._offers) - MAX_OFFERS)]:
            self._forget(each.file)
        return offer

    def _forget(self, file: StoredFile) -> None:
        if (offer := self._offers.pop(file.sha256, None)) is not None:
            offer.end()

    # ---- the chain --------------------------------------------------------------------------------------------------

    async def _complete(self, cached: CachedFile, path: str) -> None:
        """Gets the parts that are missing, and offers each as it comes. Raises as `read` does, and FolderUnusable."""
        self._forget(cached.file)
        await asyncio.to_thread(cached.check_parts)
        offer, left_out = self._offer(cached), set[str]()
        offer.has(cached.num_parts)
        try:
            while not offer.is_whole:
                place = await self._holders.join(offer, left_out)
                if place.source == STORE:
                    await self._from_store(cached, offer, path)
                elif not place.source:
                    await asyncio.sleep(WAIT_S)
                elif not await self._follow(cached, offer, place):
                    left_out.add(place.source)
            offer.source = ""
            await self._holders.renew([offer])  # at once: its place at the store is free
        except BaseException as error:
            self._forget(cached.file)
            if isinstance(error, FolderUnusable):
                cached.discard()
            if isinstance(error, MarlaasError):
                await self._holders.leave([offer])
            raise

    async def _follow(self, cached: CachedFile, offer: Offer, place: Place) -> bool:
        """Takes parts from a holder until the file is whole. False: it is gone, lies, or was not heard for HEAR_S."""
        host, _, port = place.address.rpartition(":")
        try:
            async with asyncio.timeout(HEAR_S):
                reader, writer = await asyncio.open_connection(host, int(port), limit=BUFFER_BYTES)
            with contextlib.closing(writer):
                writer.write(f"{self._holders.key} {offer.file.sha256} {offer.num_parts}\n".encode())
                while not offer.is_whole:
                    mark = bytes(await _heard(reader, 1))
                    if mark == PART:
                        part = await _heard(reader, offer.file.span(offer.num_parts)[1])
                        self._peer_bytes += len(part)
                        await _take(cached, offer, part)
                    elif mark != BEAT:
                        raise WrongPart(f"it says {mark!r}")
        except (OSError, EOFError, WrongPart) as error:
            log.warning("holder_lost", holder=place.source, part=offer.num_parts, reason=repr(error))
            return False
        return True

    async def _from_store(self, cached: CachedFile, offer: Offer, path: str) -> None:
        file, read = cached.file, bytearray()
        async for piece in self._objects.stream(path, file.span(offer.num_parts)[0], part_bytes(file.size)):
            self._store_bytes += len(piece)
            read += piece
            while not offer.is_whole and len(read) >= (size := file.span(offer.num_parts)[1]):
                try:
                    await _take(cached, offer, read[:size])
                except WrongPart as error:
                    raise CorruptObject(f"{path}: {error}") from error
                del read[:size]
        if not offer.is_whole:
            raise CorruptObject(f"{path} is too short")


async def _take(cached: CachedFile, offer: Offer, part: bytearray) -> None:
    await asyncio.to_thread(cached.append, part)
    offer.has(cached.num_parts)


async def _heard(reader: asyncio.StreamReader, num_bytes: int) -> bytearray:
    """So many bytes. Raises TimeoutError if there is none for HEAR_S, and EOFError at the end."""
    heard = bytearray()
    while len(heard) < num_bytes:
        async with asyncio.timeout(HEAR_S):
            piece = await reader.read(num_bytes - len(heard))
        if not piece:
            raise EOFError("it ended the connection")
        heard += piece
    return heard
