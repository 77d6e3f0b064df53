"""`--forks`, by which the tests run: what ran is told once, what failed or died fails, and nothing is left out unseen."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = """
import os, warnings
import pytest

@pytest.fixture(scope="module")
def shared():
    yield os.getpid()
    print("torn down")

@pytest.mark.parametrize("number", range(3))
def test_passes(number, shared, tmp_path):
    assert shared == os.getpid() != PARENT
    warnings.warn("have a care")

def test_fails():
    print("said by it")
    assert [1] == [2]

def test_is_skipped():
    pytest.skip("for a reason")
"""
DIES = """
import os

def test_dies():
    os._exit(3)

def test_never_runs():
    pass
"""


def test_all_that_ran_is_told_once_and_what_a_process_that_died_did_not_run_fails(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").touch()
    for name, text in {"dies": DIES, "one": TESTS, "two": TESTS}.items():
        (tmp_path / f"test_{name}.py").write_text(text.replace("PARENT", str(os.getpid())))
    options = ["-c", str(tmp_path / "pytest.ini"), "-p", "tests.support.forks", "--forks", "2", "-ra", str(tmp_path)]
    variables = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", *options]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)

    said = done.stdout
    assert done.returncode == 1 and "4 failed, 6 passed, 2 skipped, 6 warnings" in said, said + done.stderr
    assert said.count("E       assert [1] == [2]") == said.count("\nsaid by it\n") == 2, said
    assert "UserWarning: have a care" in said and re.search("(?m)^SKIPPED .*for a reason", said), said
    for name, reason in {"test_dies": "its process ended with status 3", "test_never_runs": "it has not run: "}.items():
        assert re.search(f"(?m)^FAILED .*{name}", said) and f"\n{reason}" in said, said
