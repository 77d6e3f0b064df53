"""The systems that are compared, as the commands that are started for N jobs, with their environment."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.settings import Job, Settings

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / ".peers"
"""A virtual environment each, made by `make bench-peers`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """`adapters`: the folder in a job's folder in which the adapter ends."""

    name: str
    label: str
    adapters: str
    module: str
    python: Path
    at_once: int | None = None
    """Processes at a time, one a job; 0: all. None: one process for all jobs."""

    def commands(self, folder: Path, jobs: Sequence[Job]) -> list[list[str]]:
        """Commands, each of which is started when fewer than `at_once` run."""
        start = [str(self.python), "-m", f"benchmarks.peers.{self.module}", str(folder)]
        if self.at_once is None:
            return [[*start, *(job.name for job in jobs)]]
        return [[*start, job.name] for job in jobs]

    def width(self, num_jobs: int) -> int:
        """Number of commands that run at a time."""
        return 1 if self.at_once is None else self.at_once or num_jobs


def _trl(name: str, label: str, at_once: int) -> System:
    python = PEERS / "trl" / "bin" / "python"
    return System(name=name, label=label, adapters="trl", module="trl_job", python=python, at_once=at_once)


BASELINE = "marlaas"
SYSTEMS: dict[str, System] = {
    system.name: system
    for system in (
        System(name=BASELINE, label="MARLaaS", adapters=BASELINE, module="marlaas_jobs", python=Path(sys.executable)),
        _trl("trl-1", "TRL, one after another", 1),
        _trl("trl-2", "TRL, two at once", 2),
        _trl("trl-all", "TRL, all at once", 0),
        System(
            name="skyrl",
            label="SkyRL",
            adapters="skyrl",
            module="skyrl_jobs",
            python=PEERS / "skyrl" / "bin" / "python",
        ),
    )
}


def environment(settings: Settings, inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Environment of every process: its threads, and nothing that reports to or asks a hub."""
    threads = str(settings.threads)
    return {
        **{name: value for name, value in inherited.items() if not name.startswith("MARLAAS_")},
        "PYTHONPATH": str(ROOT),
        **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TINKER_TELEMETRY": "0",
        "JAX_PLATFORMS": "cpu",
        "NPROC": threads,  # the size of XLA's thread pool
        "XLA_FLAGS": f"--xla_cpu_multi_thread_eigen={'true' if settings.threads > 1 else 'false'}",
    }
