"""Files of items: JSONL, one item a line. The upload checks each line, and no file is in memory as a whole. What a tenant keeps is
bounded, in number and in bytes.

marlaas:{@}:file:<file>       string   FileRecord
marlaas:{@}:files:<tenant>    zset     file id by creation time
marlaas:{@}:file-bytes:<tenant>  hash  file id -> bytes
files/{tenant}/{file}         object   the content; of an adapter brought/{tenant}/{file}
"""

import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from typing import Any

import msgspec
from fastapi import UploadFile

from common.errors import InvalidInput, NotFound
from common.store.disk_room import DiskRoom
from common.store.objects import PART_BYTES, Objects
from common.suggestions import quoted
from manager_service.http.errors import ApiError, unavailable
from manager_service.http.quota import check_stored
from manager_service.http.reading.item_lines import FoundItems
from manager_service.http.reading.reading_helpers import SLICE_BYTES, Helpers
from manager_service.http.reading.tasks import CheckLines
from manager_service.records.file_records import FileRecord, UploadedAdapter, file_path, uploaded_path
from manager_service.records.keys import GLOBAL, JSON
from manager_service.records.stored import StoredBytes, file_sizes
from manager_service.records.tenants import TenantRecord

PIECE_BYTES = 256 << 10
"""Bytes of a content that are in memory for each of its readers."""
LINES_A_SLICE = 4
"""A slice has room for at least so many of the longest lines."""
ADAPTER = "adapter"
"""The purpose of files that jobs start from; of all others it is OpenAI's."""
MAX_FILES = 10_000
"""Files of one tenant."""
MAX_ROWS = 4_000_000
"""Rows of a file: managers put them into another order each epoch."""
PARQUET = b"PAR1"
BOM = b"\xef\xbb\xbf"
"""Windows programs write it before UTF-8."""

# KEYS: file, files, file-bytes. ARGV: the file, its record, score, bytes, most files, most bytes of them.
# Answers 0 if there is no room for one more; then it writes nothing.
_KEEP = """
local total = 0
for _, each in ipairs(redis.call('HVALS', KEYS[3])) do total = total + each end
local num = redis.call('ZCARD', KEYS[2])
if num >= tonumber(ARGV[5]) or total + ARGV[4] > tonumber(ARGV[6]) then return 0 end
redis.call('SET', KEYS[1], ARGV[2])
redis.call('ZADD', KEYS[2], ARGV[3], ARGV[1])
redis.call('HSET', KEYS[3], ARGV[1], ARGV[4])
return 1
"""

ReadPart = Callable[[int, int], Awaitable[bytes]]
"""(start, number of bytes) -> that part of a content."""


class Files:
    """Uploaded files of all tenants."""

    def __init__(
        self,
        redis: Any,
        objects: Objects,
        helpers: Helpers,
        *,
        bases: Collection[str],
        max_line_bytes: int,
        stored: StoredBytes,
        room: DiskRoom,
    ) -> None:
        """`bases`: names of the base models."""
        self._redis = redis
        self._objects = objects
        self._helpers = helpers
        self._bases = bases
        self._max_line_bytes = max_line_bytes
        self._stored = stored
        self._room = room

    async def check(self, tenant: TenantRecord, file: UploadFile) -> FoundItems:
        """Checks a file, and measures its prompts for all jobs. Raises InvalidInput with the line, ApiError if there is no room."""
        read, num_bytes = await content_of(file)
        if (file.filename or "").lower().endswith(".csv") or await read(0, len(PARQUET)) == PARQUET:
            raise _wrong(_OF_TABLE)
        await check_stored(self._stored, tenant, num_bytes)
        all_found = FoundItems.none(self._bases)
        async for part in _slices(read, num_bytes, max(SLICE_BYTES, LINES_A_SLICE * self._max_line_bytes)):
            task = CheckLines(part, all_found.num_lines, self._max_line_bytes)
            all_found += msgspec.convert(await self._helpers.do(tenant, task, num_bytes=len(part)), FoundItems)
            if all_found.num_items > MAX_ROWS:
                told = f"the file has more than {MAX_ROWS:,} rows: leave some out, or upload it as several files, for several jobs"
                raise InvalidInput(told, param="file", code="too_many_rows")
        if not all_found.num_items:
            raise _wrong("the file is empty: it needs one JSON object a line")
        return all_found

    async def create(
        self, tenant: TenantRecord, filename: str, file: UploadFile, found: FoundItems | UploadedAdapter
    ) -> FileRecord:
        """Keep a file of items, or an adapter, that was checked. Raises ApiError if there is no room for it."""
        adapter, items = (None, found) if isinstance(found, FoundItems) else (found, FoundItems.none(()))
        (read, num_bytes), now = await content_of(file), time.time()
        record = FileRecord(
            id=f"file-{secrets.token_hex(12)}",
            tenant=tenant.id,
            filename=filename,
            purpose="fine-tune" if adapter is None else ADAPTER,
            created_at=int(now),
            num_bytes=num_bytes,
            num_items=items.num_items,
            longest=items.longest,
            tokens=items.tokens,
            num_examples=items.num_examples,
            num_texts=items.num_texts,
            fields=items.fields or frozenset(),
            adapter=adapter,
        )
        if reason := self._room.lacks(num_bytes):
            raise unavailable(reason, code="disk_full")
        if num_bytes > PART_BYTES:
            await self._objects.write_parts(_path(record), _parts(read, num_bytes))
        else:
            await self._objects.write(_path(record), await read(0, num_bytes))
        keys = [_key(record.id), _index(tenant.id), file_sizes(tenant.id)]
        room = await self._stored.room_for_files(tenant)
        words = [record.id, JSON.encode(record), repr(now), num_bytes, MAX_FILES, room]
        kept = await self._redis.register_script(_KEEP)(keys=keys, args=words)
        if not kept:  # others were faster, or there are too many
            await self._objects.delete(_path(record))
            await check_stored(self._stored, tenant, num_bytes)
            told = f"you have {MAX_FILES:,} files: delete some first"
            raise ApiError(429, told, code="too_many_files", retry=False)
        return record

    async def get(self, tenant: str, file: str) -> FileRecord:
        """Raises NotFound, also for another tenant's file."""
        found = await self._redis.get(_key(file))
        record = None if found is None else msgspec.json.decode(found, type=FileRecord)
        if record is None or record.tenant != tenant:
            raise NotFound(f"there is no file {quoted(file)}")
        return record

    def parts(self, record: FileRecord) -> AsyncIterator[bytes]:
        """The content, piece by piece."""
        return _parts(self._reader(record), record.num_bytes)

    def slices(self, record: FileRecord) -> AsyncIterator[bytes]:
        """The content in pieces that each end with a line."""
        return _slices(self._reader(record), record.num_bytes, SLICE_BYTES)

    def _reader(self, record: FileRecord) -> ReadPart:
        async def read(at: int, num: int) -> bytes:
            return await self._objects.get_part(_path(record), at, min(num, record.num_bytes - at))

        return read

    async def delete(self, tenant: str, file: str) -> None:
        """Raises NotFound. Running jobs keep the items that they have read."""
        record = await self.get(tenant, file)
        pipe = self._redis.pipeline(transaction=True)
        pipe.zrem(_index(tenant), file)
        pipe.hdel(file_sizes(tenant), file)
        pipe.delete(_key(file))
        await pipe.execute()
        await self._objects.delete(_path(record))

    async def ids(self, tenant: str, *, newest_first: bool = True) -> list[str]:
        found = await self._redis.zrange(_index(tenant), 0, -1, desc=newest_first)
        return [file.decode() for file in found]

    async def several(self, ids: list[str]) -> list[FileRecord]:
        """Existing records, in the order of the ids."""
        found = await self._redis.mget([_key(file) for file in ids]) if ids else []
        return [msgspec.json.decode(record, type=FileRecord) for record in found if record is not None]


_OF_TABLE = (
    "this is a table, which is converted on your side: `marlaas submit FILE`, or in Python"
    ' `pandas.read_csv("FILE.csv").to_json("FILE.jsonl", orient="records", lines=True)`, of Parquet `read_parquet`'
)


def _wrong(message: str) -> InvalidInput:
    return InvalidInput(message, param="file", code="invalid_file")


def _key(file: str) -> str:
    return f"{GLOBAL}file:{file}"


def _index(tenant: str) -> str:
    return f"{GLOBAL}files:{tenant}"


def _path(record: FileRecord) -> str:
    path_of = file_path if record.adapter is None else uploaded_path
    return path_of(record.tenant, record.id)


async def content_of(file: UploadFile) -> tuple[ReadPart, int]:
    """Reads an upload, and tells its size, both without the mark that Windows programs write."""
    await file.seek(0)
    start = len(BOM) if await file.read(len(BOM)) == BOM else 0

    async def read(at: int, num: int) -> bytes:
        await file.seek(start + at)
        return await file.read(num)

    return read, (file.size or 0) - start


async def _parts(read: ReadPart, num_bytes: int) -> AsyncIterator[bytes]:
    for at in range(0, num_bytes, PIECE_BYTES):
        yield await read(at, PIECE_BYTES)


async def _slices(read: ReadPart, num_bytes: int, size: int) -> AsyncIterator[bytes]:
    """Pieces of about this size that end with a line. A longer line is cut."""
    at = 0
    while at < num_bytes:
        part = await read(at, size)
        newline = part.rfind(b"\n")
        if newline >= 0 and at + len(part) < num_bytes:
            part = part[: newline + 1]
        yield part
        at += len(part)
