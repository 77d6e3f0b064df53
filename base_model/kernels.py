"""Chooses how this machine multiplies matrices in deterministic mode: no row's bits may depend on other rows.

MKL and oneDNN pick a kernel by the processor and the number of rows, so other rows may change a row's bits. MKL reads
MKL_CBWR once, at its first product, so each candidate is tried in its own process. The fastest that passes the
service's self-test is chosen, and remembered for this machine.

    choose ─ a child for each candidate ─► self-test ─► the first that passes ─► MKL_CBWR in this process's environment
"""

import contextlib
import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog
import torch

from base_model.decoder import Decoder
from base_model.device import prepare_cpu
from common.errors import REFUSED, InvalidInput, MarlaasError

DIFFERS = 3
"""Exit status of a self-test whose kernels do not keep the promise."""
PROBE_TIMEOUT_S = 300.0
CPUINFO = Path("/proc/cpuinfo")
DEPENDS_ON = ("MKL_", "ATEN_", "DNNL_", "ONEDNN_", "OMP_", "KMP_")
"""Prefixes of the environment variables that change which kernels are picked."""
log = structlog.get_logger()


class NotDeterministic(InvalidInput):
    """This machine does not compute the same bits for the same work."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """One way of computing products."""

    mkl_cbwr: str | None = None  # Intel's "conditional bitwise reproducibility"; None: as the environment has it
    min_rows: int = 4  # of a forward, and of an adapter's product in it

    def environment(self) -> dict[str, str]:
        """This process's variables, with those that these kernels need."""
        return {**os.environ, **({} if self.mkl_cbwr is None else {"MKL_CBWR": self.mkl_cbwr})}


DEFAULT = Kernels()
CANDIDATES = tuple(Kernels(cbwr, rows) for rows in (4, 8) for cbwr in (None, "AUTO,STRICT")) + tuple(
    Kernels("AVX2,STRICT", rows) for rows in (4, 8)
)
"""Fastest first, as measured: docs/decisions/kernels.md."""


def choose(
    selftest: str, folder: Path, candidates: Sequence[Kernels] = CANDIDATES, *, sizes: Sequence[int] = ()
) -> "ChosenKernels":
    """Chooses kernels for this process, which must not have multiplied anything yet.

    `selftest`: runs as `python -m SELFTEST FOLDER MIN_ROWS SIZES...`; status 0 if its kernels keep the promise, else
    DIFFERS. `folder`: the base model's. `sizes`: on which the answer depends too.

    Raises NotDeterministic if no candidate passes, InvalidInput if the self-test cannot be run.
    """
    memory = Memory.of_this_machine(selftest, folder, sizes)
    kernels = memory.recall(candidates)
    if kernels is None:
        kernels = _first_that_passes(selftest, folder, sizes, candidates)
        memory.keep(kernels)
    if kernels.mkl_cbwr is not None:
        os.environ["MKL_CBWR"] = kernels.mkl_cbwr
    log.info("kernels_chosen", mkl_cbwr=os.environ.get("MKL_CBWR", ""), min_rows=kernels.min_rows)
    return ChosenKernels(kernels, memory)


def run_selftest(selftest: Callable[..., object]) -> None:
    """The main program of a self-test process, see `choose`. `selftest`: takes folder, MIN_ROWS and SIZES."""
    prepare_cpu(num_threads=1)
    try:
        selftest(Decoder.load(sys.argv[1]), *map(int, sys.argv[2:]))
    except NotDeterministic as error:
        sys.stdout.write(str(error))
        sys.exit(DIFFERS)
    except InvalidInput as error:
        sys.stdout.write(str(error))
        sys.exit(REFUSED)


def _first_that_passes(selftest: str, folder: Path, sizes: Sequence[int], candidates: Sequence[Kernels]) -> Kernels:
    for kernels in candidates:
        command = [sys.executable, "-m", selftest, str(folder), *map(str, (kernels.min_rows, *sizes))]
        try:
            done = subprocess.run(
                command, env=kernels.environment(), capture_output=True, text=True, timeout=PROBE_TIMEOUT_S
            )
        except subprocess.TimeoutExpired as error:
            raise InvalidInput(f"deterministic mode: {selftest} did not end in {PROBE_TIMEOUT_S:g} s") from error
        if done.returncode == 0:
            return kernels
        if done.returncode == REFUSED:
            raise InvalidInput(f"deterministic mode: {done.stdout}")
        if done.returncode != DIFFERS:
            raise InvalidInput(f"deterministic mode: {selftest} could not be run: {done.stderr.strip()[-500:]}")
        log.info("kernels_refused", mkl_cbwr=kernels.mkl_cbwr, min_rows=kernels.min_rows, reason=done.stdout.strip())
    raise NotDeterministic(
        "deterministic mode: on this machine bits depend on what is computed beside them, whatever kernels are chosen "
        "(the log says what was tried); unset MARLAAS_DETERMINISTIC, or use another machine"
    )


@dataclass(frozen=True, slots=True)
class Memory:
    """Remembers the choice in the user's cache folder, in a file named by all that it depends on."""

    file: Path

    @classmethod
    def of_this_machine(cls, selftest: str, folder: Path, sizes: Sequence[int] = ()) -> "Memory":
        config = folder / "config.json"
        known = [
            *map(str, (selftest, *sizes)),
            platform.machine(),
            torch.__version__,
            _cpu(),
            config.read_text() if config.exists() else "",
        ]
        known += [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(DEPENDS_ON)]
        digest = hashlib.sha256("\0".join(known).encode()).hexdigest()
        return cls(_cache_folder(os.environ) / "marlaas" / f"kernels-{digest[:16]}.json")

    def recall(self, candidates: Sequence[Kernels]) -> Kernels | None:
        """The choice, if it is among the candidates; None if nothing is known."""
        try:
            found = Kernels(**json.loads(self.file.read_text()))
        except (OSError, ValueError, TypeError):
            return None
        return found if found in candidates else None

    def keep(self, kernels: Kernels) -> None:
        """Writes the choice; without a cache folder the next start tries all candidates again."""
        written = self.file.with_suffix(f".{os.getpid()}")
        with contextlib.suppress(OSError):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            written.write_text(json.dumps({"mkl_cbwr": kernels.mkl_cbwr, "min_rows": kernels.min_rows}))
            written.replace(self.file)

    def forget(self) -> None:
        with contextlib.suppress(OSError):
            self.file.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class ChosenKernels:
    """The kernels of this process, and where they are remembered."""

    kernels: Kernels
    memory: Memory

    def fingerprint(self, outputs: Callable[[], str]) -> str:
        """Names the bits that this process computes: a cell's workers must agree on it. `outputs`: runs the self-test here.

        Raises MarlaasError if the self-test fails with kernels that passed it before.
        """
        try:
            return hashlib.sha256(f"{outputs()} torch {torch.__version__}".encode()).hexdigest()
        except NotDeterministic as error:
            self.memory.forget()
            reason = f"{error}, which was not so before on this machine; start again"
            raise MarlaasError(f"deterministic mode: {reason}") from error


def _cache_folder(environment: Mapping[str, str]) -> Path:
    return Path(environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME") or "/nonexistent") / ".cache")


def _cpu() -> str:
    """Describes the kind of this machine's processor."""
    try:
        first = CPUINFO.read_text().partition("\n\n")[0]
    except OSError:
        return platform.processor()
    kinds = ("vendor_id", "cpu family", "model", "stepping", "flags", "Features", "CPU implementer", "CPU part")
    return "\n".join(line for line in first.splitlines() if line.partition(":")[0].strip() in kinds)
