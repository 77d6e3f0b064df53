"""Seeds faults into a copy of the product, one at a time, and says which test notices: `python -m tests.seeded_faults [NAME ...]`.

`tests/data/seeded_faults.toml` lists them: a snippet of the product that occurs once, what replaces it, and the tests that are
expected to fail. The file of a snippet or a test is looked for, so that both may move.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import msgspec

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("common", "base_model", "manager_service", "rollout_service", "env_service", "trainer_service")
LIMIT_S = 400.0
"""Seconds for the tests of one fault."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One way to break a promise."""

    name: str
    promise: str
    before: str
    after: str
    tests: tuple[str, ...]
    """Names of test functions."""
    exact: bool = False
    """The tests run in deterministic mode."""


def read_faults(file: Path = ROOT / "tests" / "data" / "seeded_faults.toml") -> list[Fault]:
    return msgspec.convert(tomllib.loads(file.read_text())["fault"], list[Fault])


def files_with(root: Path, folders: Iterable[str], text: str) -> list[Path]:
    """The Python files in which a text stands, once for each time."""
    files = (file for folder in folders for file in sorted((root / folder).rglob("*.py")))
    return [file for file in files for _ in range(file.read_text().count(text))]


def problems(fault: Fault, root: Path = ROOT) -> list[str]:
    """The reasons why a fault cannot be seeded."""
    num = len(files_with(root, PRODUCT, fault.before))
    found = [f"its snippet occurs {num} times in the product"] if num != 1 else []
    return found + [
        f"there is no test {name}" for name in fault.tests if not files_with(root, ["tests"], f"def {name}(")
    ]


def noticed_by(fault: Fault, root: Path) -> str:
    """The first test that fails in this copy of the tree once the fault is in it; empty if none does."""
    (file,) = files_with(root, PRODUCT, fault.before)
    sound = file.read_text()
    file.write_text(sound.replace(fault.before, fault.after))
    try:
        return _first_failure(fault, root)
    finally:
        file.write_text(sound)


def _first_failure(fault: Fault, root: Path) -> str:
    files = [file for name in fault.tests for file in files_with(root, ["tests"], f"def {name}(")]
    chosen = ["-k", " or ".join(fault.tests), *map(str, dict.fromkeys(files))]
    options = ["-q", "-x", "-p", "no:cacheprovider", *(["--exact"] * fault.exact)]
    command = [sys.executable, "-m", "pytest", *options, *chosen]
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    ran = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    failed = re.search(r"^(?:FAILED|ERROR) \S*::(\w+)", ran.stdout, re.MULTILINE)
    return failed[1] if failed and ran.returncode == 1 else ""


def copy_of_the_tree(folder: Path) -> Path:
    listed = subprocess.run(
        ["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="faults to seed; all if none is named")
    parser.add_argument("--jobs", type=int, default=1, help="copies of the tree, each with one fault at a time")
    asked = parser.parse_args(arguments)
    faults = [fault for fault in read_faults() if not asked.names or fault.name in asked.names]
    if wrong := [f"{fault.name}: {reason}" for fault in faults for reason in problems(fault)]:
        print(*wrong, sep="\n")
        return 2
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(asked.jobs) as pool:
        copies = SimpleQueue[Path]()
        for number in range(asked.jobs):
            copies.put(copy_of_the_tree(Path(folder) / str(number)))

        def seeded(fault: Fault) -> bool:
            copy = copies.get()
            try:
                test = noticed_by(fault, copy)
            finally:
                copies.put(copy)
            print(f"{fault.name}: {f'noticed by {test}' if test else 'NOT NOTICED'}", flush=True)
            return bool(test)

        num = sum(pool.map(seeded, faults))
    print(f"{num} of {len(faults)} noticed")
    return 0 if num == len(faults) else 1


if __name__ == "__main__":
    sys.exit(main())
