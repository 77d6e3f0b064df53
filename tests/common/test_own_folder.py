"""Temporary folders, and real processes that are killed while they have one."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from common.own_folder import OwnFolder


def test_what_a_killed_process_left_is_removed_by_the_next_and_that_of_living_ones_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = (
        "import os, signal\nfrom common.own_folder import OwnFolder\n"
        "own = OwnFolder('x-'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(tmp_path)})
    (left,) = tmp_path.iterdir()
    one, other, foreign = OwnFolder("x-"), OwnFolder("x-"), OwnFolder("y-")
    assert not left.exists() and one.path.is_dir() and other.path.is_dir() and foreign.path.is_dir()
    one.remove()
    del other, foreign
    assert not list(tmp_path.iterdir())
