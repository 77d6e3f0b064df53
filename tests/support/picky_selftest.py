"""Passes with the kernels that MARLAAS_TEST_PASSES names alone, and counts how often it was run. Starts without torch."""

import os
import sys
from pathlib import Path

DIFFERS = 3

if __name__ == "__main__":
    folder, *sizes = sys.argv[1:]
    with (Path(folder) / "runs").open("a") as runs:
        runs.write("x")
    passes = os.environ["MARLAAS_TEST_PASSES"]
    if passes == "crash":
        raise RuntimeError("no such processor")
    sys.exit(0 if passes == f"{os.environ.get('MKL_CBWR')} {' '.join(sizes)}" else DIFFERS)
