"""Runs a system's commands, and measures their whole process trees: wall time, processor time, memory.

Memory is PSS (a page that n processes share counts 1/n in each), summed over all processes in one look a second; the peak
is of the largest look. Processor time is what the kernel counts for ended children: user + system of each process in the
tree that its parent has waited for.
"""

import os
import resource
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from harness.processes import memory_below, with_descendants

LOOK_EVERY_S = 1.0
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Cost:
    wall_s: float
    cpu_s: float
    peak_mb: float
    """Peak in MB of a million bytes."""
    load: float
    """The machine's load average over the last minute, at the end."""


class RunFailed(Exception):
    """A command ended with an error or took too long. The message is the end of its output."""


def run(
    commands: Sequence[Sequence[str]], *, at_once: int, environment: Mapping[str, str], log: Path, limit_s: float
) -> Cost:
    """Runs all commands in order, at most `at_once` at a time. Raises RunFailed; leaves no process behind."""
    waiting, running = list(commands), list[subprocess.Popen[bytes]]()
    began, cpu_before, peak_mb, next_look = time.monotonic(), children_cpu_s(), 0.0, 0.0
    with log.open("ab") as out:
        try:
            while waiting or running:
                while waiting and len(running) < at_once:
                    running.append(start(waiting.pop(0), environment, out.fileno()))
                if time.monotonic() >= next_look:
                    peak_mb = max(peak_mb, memory_below(*(process.pid for process in running)).pss_mb)
                    next_look = time.monotonic() + LOOK_EVERY_S
                time.sleep(POLL_S)
                running = still_running(running, log)
                if time.monotonic() - began > limit_s:
                    raise RunFailed(f"not done after {limit_s:.0f} s")
        finally:
            stop(running)
    return Cost(time.monotonic() - began, children_cpu_s() - cpu_before, peak_mb, os.getloadavg()[0])


def children_cpu_s() -> float:
    """Processor seconds of all children that have ended so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def still_running(processes: Sequence[subprocess.Popen[bytes]], log: Path) -> list[subprocess.Popen[bytes]]:
    """Raises RunFailed if one of them ended with an error."""
    if any(process.poll() for process in processes):
        raise RunFailed(tail(log))
    return [process for process in processes if process.returncode is None]


def start(command: Sequence[str], environment: Mapping[str, str], out: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, env=dict(environment), stdout=out, stderr=out, stdin=subprocess.DEVNULL)


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
