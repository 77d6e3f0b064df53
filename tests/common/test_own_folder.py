"""Temporary folders, and real processes that are killed while they have one."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from common.children.own_folder import OwnFolder, roomy


def test_what_a_killed_process_left_is_removed_by_the_next_and_that_of_living_ones_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = (
        "import os, signal\nfrom common.children.own_folder import OwnFolder\n"
        "own = OwnFolder('x-'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(tmp_path)})
    (left,) = tmp_path.iterdir()
    one, other, foreign = OwnFolder("x-"), OwnFolder("x-"), OwnFolder("y-")
    assert not left.exists() and one.path.is_dir() and other.path.is_dir() and foreign.path.is_dir()
    one.remove()
    del other, foreign
    assert not list(tmp_path.iterdir())


def test_files_lie_in_shared_memory_where_it_has_room_for_them_twice(tmp_path: Path) -> None:
    room = shutil.disk_usage(tmp_path).free
    assert roomy(room // 4, memory=tmp_path) == tmp_path
    assert roomy(room, memory=tmp_path) == roomy(0, memory=tmp_path / "none") == Path(tempfile.gettempdir())
    parent = roomy(1, memory=tmp_path)
    folder = OwnFolder("x-", parent)
    assert folder.path.parent == tmp_path
    folder.remove()
    assert not list(tmp_path.iterdir())
