"""Runs a system's commands for N jobs, and measures their whole process trees: wall time, processor time, memory.

Memory is PSS (a page that n processes share counts 1/n in each), summed over all processes in one look a second; the peak is of the
largest look. Processor time is what the kernel counts for ended children.
"""

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.peers.settings import Job
from harness.processes import memory_below, with_descendants

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / ".peers"
"""A virtual environment each, made by `make bench-peers`."""
LOOK_EVERY_S = 1.0
POLL_S = 0.05
LIMIT_S = 1800.0


@dataclass(frozen=True, slots=True)
class System:
    """`adapters`: the folder in a job's folder in which the adapter ends. `at_once`: processes at a time, one a job; 0: all; None: one
    process for all jobs."""

    label: str
    adapters: str
    python: Path
    at_once: int | None = None

    def commands(self, folder: Path, jobs: Sequence[Job]) -> list[list[str]]:
        start = [str(self.python), "-m", f"benchmarks.peers.{self.adapters}_jobs", str(folder)]
        if self.at_once is None:
            return [[*start, *(job.name for job in jobs)]]
        return [[*start, job.name] for job in jobs]


TRL = PEERS / "trl" / "bin" / "python"
SYSTEMS = {
    "marlaas": System("MARLaaS", "marlaas", Path(sys.executable)),
    "trl-1": System("TRL, one after another", "trl", TRL, 1),
    "trl-2": System("TRL, two at once", "trl", TRL, 2),
    "trl-all": System("TRL, all at once", "trl", TRL, 0),
    "skyrl": System("SkyRL", "skyrl", PEERS / "skyrl" / "bin" / "python"),
}


@dataclass(frozen=True, slots=True)
class Cost:
    wall_s: float
    cpu_s: float
    peak_mb: float
    """Peak in MB of a million bytes."""


class RunFailed(Exception):
    """A command ended with an error or took too long. The message is the end of its output."""


def environment(threads: int) -> dict[str, str]:
    """Environment of every process: its threads, and nothing that reports to or asks a hub."""
    numbers = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NPROC")  # the last: XLA's
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("MARLAAS_")},
        "PYTHONPATH": str(ROOT),
        **dict.fromkeys(numbers, str(threads)),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TINKER_TELEMETRY": "0",
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_cpu_multi_thread_eigen={'true' if threads > 1 else 'false'}",
    }


def run(commands: Sequence[Sequence[str]], *, at_once: int, threads: int, log: Path, limit_s: float = LIMIT_S) -> Cost:
    """Runs all commands in order, at most `at_once` at a time. Raises RunFailed; leaves no process behind."""
    waiting, running, known = list(commands), list[subprocess.Popen[bytes]](), environment(threads)
    began, cpu_before, peak_mb, next_look = time.monotonic(), children_cpu_s(), 0.0, 0.0
    with log.open("ab") as out:
        try:
            while waiting or running:
                while waiting and len(running) < at_once:
                    process = subprocess.Popen(
                        waiting.pop(0), env=known, stdout=out, stderr=out, stdin=subprocess.DEVNULL
                    )
                    running.append(process)
                if time.monotonic() >= next_look:
                    peak_mb = max(peak_mb, memory_below(*(process.pid for process in running)).pss_mb)
                    next_look = time.monotonic() + LOOK_EVERY_S
                time.sleep(POLL_S)
                if any(process.poll() for process in running):
                    raise RunFailed(tail(log))
                running = [process for process in running if process.returncode is None]
                if time.monotonic() - began > limit_s:
                    raise RunFailed(f"not done after {limit_s:.0f} s")
        finally:
            stop(running)
    return Cost(time.monotonic() - began, children_cpu_s() - cpu_before, peak_mb)


def children_cpu_s() -> float:
    """Processor seconds of all children that have ended so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def stop(running: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ends them, and everything below them."""
    left = list(with_descendants([process.pid for process in running]))
    for process in left:
        if process.is_running():
            process.send_signal(signal.SIGTERM)
    _, alive = psutil.wait_procs(left, timeout=10)
    for process in alive:
        process.kill()
    for process in running:
        process.wait()


def tail(log: Path) -> str:
    """The last line that says something."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no output"
