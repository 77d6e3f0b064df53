"""Prepares a process for tests that ask for the same bits, as deterministic mode prepares a worker."""

import fcntl
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

TINY = Path(__file__).resolve().parents[2] / "models" / "tiny"


@dataclass(frozen=True, slots=True)
class Exact:
    min_rows: int = 0
    refusal: str | None = None
    """The reason why deterministic mode does not start on this machine."""


def prepare() -> Exact:
    """Chooses kernels that both services accept, for both are tested in one process."""
    from base_model.kernels import NotDeterministic, choose  # torch, which other tests do without
    from trainer_service.selftest import KERNELS

    try:
        with (Path(tempfile.gettempdir()) / f"marlaas-exact-tests-{os.getuid()}.lock").open("w") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)  # what one process tries for many seconds those beside it remember then
            kernels = choose("rollout_service.embedded.selftest", TINY).kernels
            choose("trainer_service.selftest", TINY, [each for each in KERNELS if each.mkl_cbwr == kernels.mkl_cbwr])
    except NotDeterministic as error:
        return Exact(refusal=str(error))
    return Exact(min_rows=kernels.min_rows)
