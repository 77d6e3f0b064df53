"""Fetches a file part by part into the node folder: from a holder, from another if that fails, from the store at last.

reads: `holders:<sha256>`, holders, the store   writes: `holders:<sha256>`, `peer-key`, the node folder
waits for: a place, a holder's next bytes   unblocked by: a holder; HEAR_S without a byte, or SLOW_S of few; the store
after a crash: whole parts stay in the node folder, and followers join elsewhere
"""

import asyncio
import contextlib
import fcntl
import os
import socket
import time
from collections import OrderedDict
from io import BufferedRandom
from pathlib import Path
from weakref import WeakValueDictionary

import structlog

from common.errors import CorruptObject
from common.peers.convoys import Convoy
from common.peers.folder import NodeFolder, WrongPart, keep_right_parts, read_right, read_whole, write_part
from common.peers.holders import RENEW_S, STORE, Holders
from common.peers.server import BEAT, HEAR_S, PART, Offer, PeerServer
from common.peers.speed import SLOW_S, HolderSpeed, Usual
from common.store.objects import Objects
from common.store.parts import StoredFile, part_bytes, read_parts

MAX_OFFERS = 64
"""Adapters that a worker tells of, those used last: each is an entry to renew every second."""
WAIT_S = 0.1
PATIENCE_S = 30.0
"""Seconds after which another worker of this machine that writes a file is not waited for."""
log = structlog.get_logger()


class Relay:
    """One worker's files that come through its peers. Used from one event loop."""

    def __init__(
        self, objects: Objects, folder: NodeFolder, holders: Holders, *, bytes_per_s: int | None = None
    ) -> None:
        """`bytes_per_s`: the most that it sends to followers, together; None: as fast as it can."""
        self._objects = objects
        self._folder = folder
        self.holders = holders
        self._offers: OrderedDict[str, Offer] = OrderedDict()  # by sha256, least recently used first
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # of who uses one file at once
        self.server = PeerServer(self._offers, lambda: holders.key, bytes_per_s)
        self._store_bytes = self._peer_bytes = 0
        self._usual = Usual()
        self.is_usable = True
        """Could the node folder be used so far?"""
        self.convoy: Convoy | None = None
        """Its worker's place in one, if it takes part."""

    async def open(self, host: str, first_port: int) -> None:
        """Begins to serve at an address of this machine. Raises OSError."""
        self.holders.address = await self.server.open(host, first_port)

    async def run(self) -> None:
        """Renews what this worker offers."""
        while True:
            for offer in list(self._offers.values()):
                if offer.is_whole and not offer.path.exists():  # another worker of this machine needed its room
                    self._forget(offer)
            of_bases = [offer for offer in self._offers.values() if offer.stays]
            adapters = [offer for offer in self._offers.values() if not offer.stays]
            await self.holders.renew([*of_bases, *adapters[-MAX_OFFERS:]])
            await asyncio.sleep(RENEW_S)

    async def close(self) -> None:
        """Leaves, so that nobody joins it any more."""
        await self.server.close()
        offers = list(self._offers.values())
        self._offers.clear()  # so that `run` renews none
        with contextlib.suppress(TimeoutError):  # without Redis its entries expire
            async with asyncio.timeout(RENEW_S):
                await self.holders.leave(offers)

    def counters(self) -> dict[str, float]:
        """Totals since the start: bytes that came from the store, and from peers."""
        return {"store_bytes": float(self._store_bytes), "peer_bytes": float(self._peer_bytes)}

    async def read(self, file: StoredFile, path: str) -> bytes | None:
        """A file that has parts, checked; the node folder keeps it. `path`: its object. None: the folder cannot be used.

        Raises StoreUnavailable, NotFound or CorruptObject if it must come from the store.
        """
        async with self._turns.setdefault(file.sha256, asyncio.Lock()):
            try:
                return await self._read(file, path)
            except (OSError, FolderUnusable) as error:
                if self.is_usable:
                    log.warning("node_folder_unusable", reason=f"{error}; see MARLAAS_CACHE_DIR")
                self.is_usable = False
                return None

    def offer(self, file: StoredFile, path: Path) -> Offer:
        """Offers a file outside of the folder of adapters as long as this worker runs. The caller says what is there."""
        offer = self._offers.setdefault(file.sha256, Offer(file, path))
        offer.path, offer.stays = path, True
        return offer

    # ---- the node folder --------------------------------------------------------------------------------------------

    async def _read(self, file: StoredFile, path: str) -> bytes | None:
        """Raises OSError or FolderUnusable, and what `read` raises."""
        for _ in range(2):  # once more if what was in the folder is not right any more
            if (handle := await self._locked(file)) is None:
                return None
            with contextlib.closing(handle):
                if os.fstat(handle.fileno()).st_size < file.size:
                    await self.complete(handle, file, path)
                    return await asyncio.to_thread(read_whole, handle)
                fcntl.flock(handle, fcntl.LOCK_UN)  # others of this machine read it at the same time
                if (data := await asyncio.to_thread(read_right, handle, file)) is not None:
                    self._offer(file).has(len(file.parts))
                    return data
                self._folder.remove(handle, file)
        return None

    async def _locked(self, file: StoredFile) -> BufferedRandom | None:
        """Waits for another worker of this machine that writes it, for PATIENCE_S."""
        since_s = time.monotonic()
        while (handle := await asyncio.to_thread(self._folder.open, file)) is None:
            if time.monotonic() - since_s > PATIENCE_S:
                return None
            await asyncio.sleep(WAIT_S)
        return handle

    def _offer(self, file: StoredFile) -> Offer:
        """Adds a file of the node folder to what this worker offers."""
        offer = self._offers.setdefault(file.sha256, Offer(file, self._folder.path / file.sha256))
        self._offers.move_to_end(file.sha256)
        return offer

    def _forget(self, offer: Offer) -> None:
        self._offers.pop(offer.file.sha256, None)
        offer.end()

    # ---- the chain --------------------------------------------------------------------------------------------------

    async def complete(self, handle: BufferedRandom, file: StoredFile, path: str, to: Path | None = None) -> None:
        """Gets the parts that are missing, and offers each as it comes. `path`: of the object. `to`: where it lies, if not in the folder
        of adapters. Raises what `read` raises, and OSError or FolderUnusable."""
        num_parts = await asyncio.to_thread(keep_right_parts, handle, file)
        if file.sha256 in self._offers:  # it was whole, and another worker needed its room
            self._forget(self._offers[file.sha256])
        offer, lost, slow = self.offer(file, to) if to else self._offer(file), set[str](), set[str]()
        offer.has(num_parts)
        try:
            while not offer.is_whole:
                source, address = await self.holders.join(offer, lost | slow)
                if source == STORE:
                    await self._from_store(handle, offer, path)
                elif not source:
                    slow.clear()  # better than none
                    await asyncio.sleep(WAIT_S)
                elif error := await self._follow(handle, offer, address):
                    (slow if isinstance(error, SlowHolder) else lost).add(source)
            offer.source = ""
            await self.holders.renew([offer])  # at once: its place at the store is free
        finally:
            if not offer.is_whole:
                self._forget(offer)
                await self.holders.leave([offer])

    async def _follow(self, handle: BufferedRandom, offer: Offer, address: str) -> Exception | None:
        """Takes parts from a holder until the file is whole, or the holder is to be left: returns why."""
        host, _, port = address.rpartition(":")
        loop, part = asyncio.get_running_loop(), memoryview(bytearray(part_bytes(offer.file.size)))
        try:
            with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as holder:
                holder.setblocking(False)
                async with asyncio.timeout(HEAR_S):
                    await loop.sock_connect(holder, (host, int(port)))
                    asked = f"{self.holders.key} {offer.file.sha256} {offer.num_parts}\n"
                    await loop.sock_sendall(holder, asked.encode())
                speed = HolderSpeed(self._usual, time.monotonic())
                while not offer.is_whole:
                    mark = bytes(await _heard(holder, part[:1]))
                    if speed.came(0, 0.0, time.monotonic()):
                        await self._check_lag(offer, speed)
                    if mark == PART:
                        size = offer.file.span(offer.num_parts)[1]
                        await _take(handle, offer, await _heard(holder, part[:size], speed))
                        self._peer_bytes += size
                    elif mark != BEAT:
                        raise WrongPart(f"it says {mark!r}")
        except (OSError, EOFError, WrongPart, SlowHolder) as error:
            log.warning("holder_lost", holder=offer.source, part=offer.num_parts, reason=repr(error))
            return error
        return None

    async def _check_lag(self, offer: Offer, speed: HolderSpeed) -> None:
        """Raises SlowHolder if the holder is what slows the chain: it has far less than whom it follows."""
        if speed.is_starved:
            lag = await self.holders.lag(offer) * part_bytes(offer.file.size)
            if lag > SLOW_S * speed.got_per_s:
                raise SlowHolder(f"it is {lag:,} bytes behind its own holder")

    async def _from_store(self, handle: BufferedRandom, offer: Offer, path: str) -> None:
        async for part in read_parts(self._objects, path, offer.file, offer.num_parts):
            self._store_bytes += len(part)
            try:
                await _take(handle, offer, part)
            except WrongPart as error:
                raise CorruptObject(f"{path}: {error}") from error


class FolderUnusable(Exception):
    """An OSError of the node folder, told from one of a connection."""


class SlowHolder(Exception):
    """It gives a small part of what a worker usually gets (speed.py)."""


async def _take(handle: BufferedRandom, offer: Offer, part: bytes | memoryview) -> None:
    """Raises WrongPart and FolderUnusable."""
    try:
        await asyncio.to_thread(write_part, handle, offer.file, offer.num_parts, part)
    except OSError as error:
        if not offer.stays:
            offer.path.unlink(missing_ok=True)  # what is there of it may fill the disk
        raise FolderUnusable(str(error)) from error
    offer.has(offer.num_parts + 1)


async def _heard(holder: socket.socket, wanted: memoryview, speed: HolderSpeed | None = None) -> memoryview:
    """Fills `wanted`. Raises TimeoutError if no byte comes for HEAR_S, EOFError at the end, and SlowHolder by `speed`."""
    num_bytes = 0
    while num_bytes < len(wanted):
        since_s = time.monotonic()
        async with asyncio.timeout(HEAR_S):
            num_more = await asyncio.get_running_loop().sock_recv_into(holder, wanted[num_bytes:])
        if not num_more:
            raise EOFError("it ended the connection")
        num_bytes += num_more
        if speed and speed.came(num_more, (now_s := time.monotonic()) - since_s, now_s) and speed.is_slow:
            speed.leave()
            raise SlowHolder(f"{speed.got_per_s:,.0f} bytes a second")
    return wanted
