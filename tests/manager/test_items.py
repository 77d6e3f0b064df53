"""Rows of files, read from disk one at a time."""

import io
import tempfile
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import NotFound
from common.store.objects import PART_BYTES, Objects
from manager_service.owner.jobs import items
from manager_service.owner.jobs.items import LinesOnDisk, Shuffle


@pytest.mark.parametrize("block", [2, 3, 1 << 18])
@given(st.text(alphabet="a \r\n", max_size=30))
def test_lines_are_found_as_if_the_whole_file_were_split(block: int, text: str) -> None:
    content = text.encode()
    with tempfile.TemporaryFile() as file, pytest.MonkeyPatch.context() as patched:
        patched.setattr(items, "BLOCK_BYTES", block)
        file.write(content)
        lines = LinesOnDisk(file)
        found = [lines[n].rstrip(b"\r\n") for n in range(len(lines))]
    assert found == [line for line in content.splitlines() if line.strip()]


def test_a_queued_file_holds_no_memory_however_many_lines_it_has() -> None:
    with tempfile.TemporaryFile() as file:
        file.write(b'{"n": 0}\n' * 200_000)
        tracemalloc.start()
        lines = LinesOnDisk(file)
        held, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert (len(lines), lines[199_999]) == (200_000, b'{"n": 0}\n')
    assert held < 100_000 and peak < 8 << 20


@pytest.mark.parametrize("size", [0, 10, PART_BYTES + 10])
async def test_an_object_is_downloaded_in_place_of_what_was_there(tmp_path: Path, size: int) -> None:
    objects = Objects.open((tmp_path / "store").as_uri())
    await objects.write("x", b"0123456789" * (size // 10))
    with (tmp_path / "file").open("w+b") as file:
        file.write(b"of before" * 5)
        await objects.download("x", file)
        file.seek(0)
        assert file.read() == b"0123456789" * (size // 10)
        with pytest.raises(NotFound):
            await objects.download("y", io.BytesIO())


@pytest.mark.parametrize("small", [0, 64])
def test_each_epoch_visits_every_row_once_in_an_order_of_its_own(small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(items, "SMALL_FILE", small)
    order = Shuffle(7, 64)
    epochs = [tuple(order.place(group) for group in range(start, start + 64)) for start in (0, 64, 128)]
    assert len({*epochs}) == 3 and all(sorted(epoch) == list(range(64)) for epoch in epochs)
    assert tuple(Shuffle(7, 64).place(group) for group in range(64)) == epochs[0], (
        "another owner goes on in the same order"
    )
