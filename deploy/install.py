"""Installs packages into the virtual environment that runs this: `python -m deploy.install [pip's options] -- PACKAGE...`

pip has neither options nor an index of its own    uv, for a fifth of the time; pip if uv fails
else                                               pip, with its options and settings, which uv does not read
"""

import subprocess
import sys
from collections.abc import Sequence
from functools import cache

PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
UV = "uv>=0.8"


def install(packages: Sequence[str], options: Sequence[str] = ()) -> None:
    """Raises CalledProcessError if pip fails. `packages`: as pip takes them, `-e .` too. `options`: of pip alone."""
    if options or has_index() or not _by_uv(packages):
        pip("install", "--prefer-binary", *options, *packages)


def pip(*arguments: str) -> None:
    subprocess.run([*PIP, "-qq", *arguments], check=True)


@cache
def has_index() -> bool:
    """True if pip's files or variables name an index in place of PyPI, or none."""
    listed = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True, check=True).stdout
    names = {line.partition("=")[0].rpartition(".")[2] for line in listed.splitlines()}
    return not names.isdisjoint({"index-url", "no-index"})


def _by_uv(packages: Sequence[str]) -> bool:
    """False, with uv's own message, if it did not install them."""
    try:
        pip("install", UV)
        subprocess.run(
            [sys.executable, "-m", "uv", "-q", "pip", "install", "--python", sys.executable, *packages], check=True
        )
    except subprocess.CalledProcessError:
        print("      uv cannot install them here; pip does, which takes a minute longer", flush=True)
        return False
    return True


def main() -> None:
    options, packages = _split(sys.argv[1:])
    try:
        install(packages, options)
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)


def _split(words: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    at = words.index("--")
    return words[:at], words[at + 1 :]


if __name__ == "__main__":
    main()
