"""Object storage behind one small set of calls: a local folder, S3, or memory (obstore does the work).

S3's credentials, region and endpoint come from the environment: `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`,
`AWS_SESSION_TOKEN`, `AWS_REGION`, `AWS_ENDPOINT_URL` (`http://` is allowed), or the machine's role.
"""

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any, BinaryIO, Protocol, TypeVar
from urllib.parse import urlparse
from uuid import uuid4

import obstore
import structlog
from obstore.exceptions import AlreadyExistsError, BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import LocalStore, S3Store, from_url
from obstore.store import ObjectStore as Backend

from common.errors import AlreadyExists, InvalidInput, NotFound, StoreUnavailable, Unavailable
from common.store.store_folder import SMALL_BYTES, StoreFolder

T = TypeVar("T")
log = structlog.get_logger()

PART_BYTES = 8 << 20
"""Larger objects go up in parts of this size, several at a time."""
S3: Any = {
    "retry_config": {
        "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=2), "base": 2},
        "max_retries": 5,
        "retry_timeout": timedelta(seconds=5),
    },
    "client_options": {
        "connect_timeout": timedelta(seconds=5),
        "timeout": timedelta(seconds=30),
        "allow_http": True,  # the endpoint's scheme says what the operator wants
    },
}
"""Retries within one call end before a lease does. The caller waits longer, and can renew meanwhile."""
MAX_DELAY_S = 2.0


class InThread(Protocol):
    """Calls a function in a thread."""

    async def __call__(self, function: Callable[[], T], /) -> T: ...


class Objects:
    """Immutable objects by path. All calls are coroutines, and raise StoreUnavailable when it is away or full."""

    def __init__(self, backend: Backend, folder: StoreFolder | None = None) -> None:
        """`folder`: that of a local store."""
        self._backend = backend
        self._folder = folder

    @classmethod
    def open(cls, url: str) -> "Objects":
        """`file:///folder` (made if missing, for this user), `s3://bucket/prefix` or `memory:///`. Raises InvalidInput."""
        if folder := StoreFolder.of(url):
            folder.open()
            return cls(LocalStore(folder.path, automatic_cleanup=True), folder)
        try:
            return cls(S3Store.from_url(url, **S3) if urlparse(url).scheme == "s3" else from_url(url))
        except (BaseError, ValueError) as error:
            raise InvalidInput(f"store URL {url!r}: {error}. Use file:///folder or s3://bucket/prefix") from error

    async def create(self, path: str, data: bytes) -> None:
        """Writes a new object, whole or not at all. Raises AlreadyExists.

        For small objects: it sends one request, because S3 checks the condition only there.
        """
        self._present()
        call = obstore.put_async(self._backend, path, data, mode="create", use_multipart=False)
        try:
            await _translated(call, path)
        except AlreadyExistsError as error:
            if not await self.exists(path):  # two writers collided, and S3 let neither win
                raise Unavailable(f"object storage, {path}: conflicting writers") from error
            raise AlreadyExists(path) from error

    async def write(self, path: str, data: bytes) -> None:
        """Writes an object of any size, whole or not at all, under a partly random path of its own. Repeatable."""
        self._present()
        in_parts = len(data) > PART_BYTES
        call = obstore.put_async(self._backend, path, data, use_multipart=in_parts, chunk_size=PART_BYTES)
        await _translated(call, path)

    async def write_parts(self, path: str, parts: AsyncIterator[bytes]) -> None:
        """Does what `write` does, with content that is never in memory as a whole."""
        self._present()
        call = obstore.put_async(self._backend, path, parts, use_multipart=True, chunk_size=PART_BYTES)
        await _translated(call, path)

    async def get_part(self, path: str, start: int, num_bytes: int) -> bytes:
        """`num_bytes` of an object that has them behind `start`. Raises NotFound."""
        call = obstore.get_range_async(self._backend, path, start=start, length=num_bytes)
        return bytes(await self._found(call, path))

    async def get(self, path: str, beside: InThread = asyncio.to_thread) -> bytes:
        """`beside`: calls a function in a thread. Raises NotFound."""
        if self._folder is not None:
            if (small := self._folder.read(path, SMALL_BYTES)) is not None:
                return small
            # a thread reads into the bytes that it returns; copying them from obstore's would hold the interpreter's lock
            if (large := await beside(partial(self._folder.read, path, sys.maxsize))) is not None:
                return large
        result = await self._found(obstore.get_async(self._backend, path), path)
        return bytes(await _translated(result.bytes_async(), path))

    async def download(self, path: str, file: BinaryIO) -> None:
        """Copies an object of any size into a file, a part at a time. Raises NotFound, and OSError if the disk is full."""
        result = await self._found(obstore.get_async(self._backend, path), path)
        file.truncate(file.seek(0))
        parts = aiter(result.stream(min_chunk_size=PART_BYTES))
        while part := await _translated(anext(parts, None), path):
            await asyncio.to_thread(file.write, part)
        file.flush()

    async def stream(self, path: str, start: int, least_bytes: int) -> AsyncIterator[bytes]:
        """The bytes of an object from `start` on, `least_bytes` or more at a time but for the last. Raises NotFound."""
        options: Any = {"range": {"offset": start}}
        result = await self._found(obstore.get_async(self._backend, path, options=options), path)
        parts = aiter(result.stream(min_chunk_size=least_bytes))
        while part := await _translated(anext(parts, None), path):
            yield bytes(part)

    async def exists(self, path: str) -> bool:
        try:
            await self._found(obstore.head_async(self._backend, path), path)
        except NotFound:
            return False
        return True

    async def paths(self, prefix: str) -> list[str]:
        """Paths below a folder, sorted."""
        return sorted(await self.sizes(prefix))

    async def sizes(self, prefix: str) -> dict[str, int]:
        """Path of each object below a folder, with its bytes."""
        self._present()
        pages = obstore.list(self._backend, prefix).collect_async()
        return {meta["path"]: meta["size"] for meta in await _translated(pages, prefix)}

    async def folders(self, prefix: str) -> list[str]:
        """Names of the folders directly below a folder, sorted."""
        self._present()
        found = await _translated(obstore.list_with_delimiter_async(self._backend, prefix), prefix)
        return sorted(path.rstrip("/").rsplit("/", 1)[-1] for path in found["common_prefixes"])

    async def delete(self, *paths: str) -> None:
        """Deletes what is there; a missing object is no error."""
        self._present()
        for path in paths:
            try:
                await _translated(obstore.delete_async(self._backend, path), path)
            except NotFound:
                continue

    async def delete_older(self, prefix: str, seconds: float) -> None:
        """Deletes what is below a folder and was written so long ago."""
        self._present()
        found = await _translated(obstore.list(self._backend, prefix).collect_async(), prefix)
        last = time.time() - seconds
        await self.delete(*(meta["path"] for meta in found if meta["last_modified"].timestamp() < last))

    def drop_drafts(self, prefix: str, before_s: float) -> None:
        """Deletes each `name#1` in a folder of a local store, which a killed writer left: unchanged since a moment, in s since 1970."""
        for draft in (self._folder.path / prefix).glob("*#*") if self._folder else ():
            with contextlib.suppress(FileNotFoundError):  # another push has just ended it
                if draft.stat().st_mtime < before_s:
                    draft.unlink()

    async def delete_folder(self, prefix: str) -> None:
        await self.delete(*await self.paths(prefix))

    async def _found(self, call: Awaitable[T], path: str) -> T:
        """Raises NotFound only if the object is missing while the storage is there."""
        try:
            return await _translated(call, path)
        except NotFound:
            self._present()
            raise

    def _present(self) -> None:
        """Raises StoreUnavailable if the folder of a local store is away."""
        if self._folder is not None:
            self._folder.check()  # at once: the way to a thread and back takes longer

    async def identity(self) -> str:
        """The identity of a local store while its folder is there; empty: it has none."""
        try:
            self._present()
        except StoreUnavailable:
            return ""
        return self._folder.opened_identity if self._folder else ""

    def reopen(self) -> None:
        """Takes the folder of a local store that is there now for the one that must be there."""
        if self._folder is not None:
            self._folder.open()

    async def probe(self) -> None:
        """Writes, reads and deletes a small object below `probe/`, as every service does at its start.

        Raises InvalidInput, with advice, for a lasting error; Unavailable for one that may pass.
        """
        path, data = f"probe/{uuid4().hex}", b"marlaas"
        try:
            await self.create(path, data)
            try:
                await self.create(path, data)
            except AlreadyExists:
                pass
            else:
                raise InvalidInput(
                    "object storage: it overwrites in spite of `If-None-Match: *`; use one that honours it"
                )
            if await self.get(path) != data:
                raise InvalidInput("object storage: it returns other bytes than were written")
            await self.delete(path)
        except (NotFound, Unavailable) as error:
            if advice := _advice(error):
                raise InvalidInput(f"object storage: {advice} ({_first_line(error.__cause__ or error)})") from error
            raise


async def patiently(
    call: Callable[[], Awaitable[T]],
    *,
    meanwhile: Callable[[], Awaitable[object]] | None = None,
    delays_s: Iterable[float] | None = None,
) -> T:
    """Awaits `call()` until the storage answers; with `delays_s`, retries after each and raises Unavailable then.

    Calls `meanwhile` before each retry, so that the caller can renew.
    """
    for delay_s in _growing_s() if delays_s is None else delays_s:
        try:
            return await call()
        except Unavailable as error:
            log.warning("store_unavailable", reason=str(error), retry_s=delay_s)
        await asyncio.sleep(delay_s)
        if meanwhile is not None:
            await meanwhile()
    return await call()


def _growing_s() -> Iterator[float]:
    """Endless waits, each twice the one before, up to MAX_DELAY_S."""
    delay_s = 0.2
    while True:
        yield delay_s
        delay_s = min(2 * delay_s, MAX_DELAY_S)


async def _translated(call: Awaitable[T], path: str) -> T:
    """Translates foreign errors into ours, here and nowhere else."""
    try:
        return await call
    except FileNotFoundError as error:
        raise NotFound(path) from error
    except AlreadyExistsError:
        raise
    except (BaseError, OSError) as error:
        raise StoreUnavailable(f"object storage, {path}: {_first_line(error)}") from error


def _advice(error: NotFound | Unavailable) -> str:
    """Advice about an error that waiting will not heal; empty for others."""
    text = str(error.__cause__ or error)
    if isinstance(error, NotFound) or "NoSuchBucket" in text:
        return "the bucket of MARLAAS_STORE_URL does not exist; create it, or name another"
    if "169.254.169.254" in text:
        return "there are no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the machine a role"
    if "AuthorizationHeaderMalformed" in text or "redirect" in text.lower() or "IllegalLocationConstraint" in text:
        return "the bucket is in another region; set AWS_REGION to it"
    if isinstance(error.__cause__, PermissionDeniedError | UnauthenticatedError):
        return (
            "access denied; AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY must be right, and may list, read, write and"
            " delete below MARLAAS_STORE_URL"
        )
    return ""


def _first_line(error: BaseException) -> str:
    """The first line of an error: obstore's own insides stand in the others."""
    return str(error).strip().partition("\n")[0][:300]
