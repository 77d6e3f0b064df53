"""Uploads that are no JSONL: CSV is converted, on disk and part by part in a helper; Parquet is refused with what to do instead.

One file of a tenant is converted at a time, which bounds what conversion adds to its uploads on this disk.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from tempfile import SpooledTemporaryFile
from typing import BinaryIO, NamedTuple, cast
from weakref import WeakValueDictionary

import msgspec
from fastapi import UploadFile

from common.errors import InvalidInput
from manager_service.http.errors import ApiError
from manager_service.http.openai.files.file_store import content_of
from manager_service.http.reading.csv_tables import Converted
from manager_service.http.reading.reading_helpers import SLICE_BYTES, Helpers
from manager_service.http.reading.tasks import ConvertCsv
from manager_service.records.tenants import TenantRecord

PARQUET = b"PAR1"
IN_MEMORY = 1 << 20
CSV_TYPES = ("text/csv", "application/csv")


class TableRows(NamedTuple):
    """An upload as JSONL."""

    file: UploadFile
    named: str  # what its lines were in the upload: a line, or a row


class Tables:
    """Makes JSONL of what tenants upload."""

    def __init__(self, helpers: Helpers, *, max_file_bytes: int, max_line_bytes: int) -> None:
        self._helpers = helpers
        self._max_file_bytes = max_file_bytes
        self._max_line_bytes = max_line_bytes
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def rows(self, tenant: TenantRecord, file: UploadFile) -> AsyncGenerator[TableRows]:
        """The upload itself if it is JSONL. Raises InvalidInput, with row and column."""
        start = await file.read(len(PARQUET))
        await file.seek(0)
        if start == PARQUET:
            raise InvalidInput(_OF_PARQUET, param="file", code="invalid_file")
        if not _is_csv(file):
            yield TableRows(file, "line")
            return
        async with self._turns.setdefault(tenant.id, asyncio.Lock()):
            with SpooledTemporaryFile(IN_MEMORY) as disk:
                made = UploadFile(cast(BinaryIO, disk), size=0)
                await self._convert(tenant, file, made)
                yield TableRows(made, "row")

    async def _convert(self, tenant: TenantRecord, file: UploadFile, made: UploadFile) -> None:
        read, num_bytes = await content_of(file)
        size, at, done = max(SLICE_BYTES, 4 * self._max_line_bytes), 0, Converted(b"", 0, 0, [])
        num_rows = 0
        while at < num_bytes:
            part = await read(at, size)
            is_last = at + len(part) >= num_bytes
            task = ConvertCsv(part, done.columns, num_rows, is_last, self._max_line_bytes)
            done = msgspec.convert(await self._helpers.do(tenant, task, num_bytes=len(part)), Converted)
            await made.write(done.lines)
            if (made.size or 0) > self._max_file_bytes:
                limit = self._max_file_bytes
                raise ApiError(
                    413, f"as JSONL this file has more than {limit} bytes", code="file_too_large", param="file"
                )
            at, num_rows = at + done.num_bytes, num_rows + done.num_rows


_OF_PARQUET = (
    "this is a Parquet file, which is converted on your side: `marlaas submit FILE.parquet`, or in Python"
    ' `pandas.read_parquet("FILE.parquet").to_json("FILE.jsonl", orient="records", lines=True)`'
)


def _is_csv(file: UploadFile) -> bool:
    kind = (file.content_type or "").partition(";")[0].strip().lower()
    return kind in CSV_TYPES or (file.filename or "").lower().endswith(".csv")
