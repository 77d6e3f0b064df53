"""New jobs whose files are still to be read."""

import asyncio
import contextlib
import tempfile
from typing import NamedTuple

from common.errors import Unavailable
from common.messages import AdapterRef
from common.objects import Objects
from manager_service.jobs.items import LinesOnDisk


class Delayed(NamedTuple):
    """A new job that waits for its files."""

    since: float  # seconds since 1970, when errors of this kind began
    error: Unavailable
    source: AdapterRef | None


async def download_lines(objects: Objects, path: str) -> LinesOnDisk:
    """A file's lines, on this machine's disk. Raises NotFound, and Unavailable: StoreUnavailable if it is not the disk."""
    try:
        with contextlib.ExitStack() as stack:
            rows = stack.enter_context(tempfile.TemporaryFile())
            await objects.download(path, rows)
            lines = await asyncio.to_thread(LinesOnDisk, rows)
            stack.pop_all()  # open as long as the items
            return lines
    except OSError as error:
        raise Unavailable(f"the manager's disk for temporary files: {error.strerror or error}") from error
