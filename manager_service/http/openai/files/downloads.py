"""Files of versions on their way to clients: a few at a time are made ready; for slow readers they wait on disk."""

import contextlib
import os
import tempfile
import weakref
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from functools import partial
from typing import IO, Any, TypeVar

from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from common.sharing.places import Places, SharedThreads
from manager_service.http.errors import ApiError, too_many
from manager_service.records.tenants import TenantRecord

MAX_OPEN = 16
"""Downloads of one tenant at once: each has a copy of an adapter on this machine's disk."""
MAX_MADE = 4
"""Downloads of all tenants that are made ready at once: meanwhile each is in memory."""
PART_BYTES = 256 << 10

T = TypeVar("T")
PackedFiles = Mapping[str, bytes]
PackInto = Callable[[PackedFiles, IO[bytes]], None]
"""Writes files, given by name, as one."""


class Downloads:
    """Makes answers of files."""

    def __init__(self) -> None:
        self._places = Places(lambda: MAX_MADE)
        self._threads = SharedThreads(1)  # one core at most is a tenant's; the loop needs another
        self._open: Counter[str] = Counter()  # tenant

    async def answer(
        self,
        asker: TenantRecord,
        read: Callable[[], Awaitable[PackedFiles]],
        pack: PackInto,
        media_type: str,
        headers: Mapping[str, str],
    ) -> Response:
        """The response that `pack` makes of what `read` returns. Raises ApiError 429 and 507, and what `read` raises."""
        tenant = asker.id
        if self._open[tenant] >= MAX_OPEN:
            message = f"{MAX_OPEN} of your downloads are open already: wait until some have ended"
            raise too_many(message, code="too_many_open")
        self._open[tenant] += 1
        with contextlib.ExitStack() as unless_made:
            unless_made.callback(self._end, tenant)
            async with self._places.one(tenant, asker.weight, lambda: None):
                file = await self.beside(asker, partial(_on_disk, await read(), pack))
            unless_made.pop_all()
        parts = _parts(file, partial(self.beside, asker))
        return FileDownload(file, parts, lambda: self._end(tenant), media_type, headers)

    async def beside(self, asker: TenantRecord, function: Callable[[], T]) -> T:
        """Calls a function in the asker's thread: what its downloads compute, part by part, takes its turn there."""
        return await self._threads.run(function, asker.id, asker.weight)

    def _end(self, tenant: str) -> None:
        self._open[tenant] -= 1
        self._open += Counter()  # without the tenants that have none open


class FileDownload(StreamingResponse):
    """Sends a file, which goes at its end."""

    def __init__(
        self,
        file: IO[bytes],
        parts: AsyncGenerator[bytes],
        ended: Callable[[], None],
        media_type: str,
        headers: Mapping[str, str],
    ) -> None:
        length = {"Content-Length": str(file.seek(0, os.SEEK_END))}
        super().__init__(parts, media_type=media_type, headers={**headers, **length})
        self._end = weakref.finalize(self, _end, file, ended)
        """Also if nobody sends the answer: its request may be cancelled first."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._end()


def _end(file: IO[bytes], ended: Callable[[], None]) -> None:
    file.close()
    ended()


async def _parts(file: IO[bytes], beside: Callable[[Callable[[], Any]], Awaitable[Any]]) -> AsyncGenerator[bytes]:
    file.seek(0)
    while part := await beside(partial(file.read, PART_BYTES)):
        yield part
    await beside(file.close)  # the kernel takes milliseconds to drop a large one's pages


def _on_disk(files: PackedFiles, pack: PackInto) -> IO[bytes]:
    """Raises ApiError if there is no room."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 - the answer closes it
    try:
        pack(files, file)
        file.flush()
    except OSError as error:
        file.close()
        raise ApiError(
            507, f"the manager's disk: {error.strerror or error}; try again later", code="no_room"
        ) from error
    return file
