"""Tests how much of files is in memory, with real files: the kernel tells."""

import os
from pathlib import Path

from common.pool.pages import are_in_memory, read_ahead
from tests.common.test_worker import until


async def test_files_are_in_memory_until_they_are_dropped_and_again_once_they_were_read_ahead(tmp_path: Path) -> None:
    files = [tmp_path / "a", tmp_path / "b"]
    for file in files:
        file.write_bytes(os.urandom(3 << 20))
    assert are_in_memory(files)
    with files[0].open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert not are_in_memory(files) and are_in_memory(files[1:])
    read_ahead(files)
    await until(lambda: are_in_memory(files))


def test_a_file_that_is_gone_is_not_in_memory(tmp_path: Path) -> None:
    assert not are_in_memory([tmp_path / "none"])
