"""Prints the requirements of one image: a dependency group of pyproject.toml, those that it includes first.

python deploy/docker/requirements.py manager
"""

import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


def requirements(group: str) -> list[str]:
    """Raises KeyError if there is no such group."""
    groups = tomllib.loads(PYPROJECT.read_text())["dependency-groups"]
    found: list[str] = []
    for entry in groups[group]:
        found += requirements(entry["include-group"]) if isinstance(entry, dict) else [entry]
    return found


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1])))
