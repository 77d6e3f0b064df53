"""Runs a system's commands, and measures their whole process trees: wall time, processor time, memory.

Memory is PSS (a page that n processes share counts 1/n in each), summed over all processes in one look; the peak is of the
largest look. Processor time is user + system of each process when it was last seen.
"""

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

LOOK_EVERY_S = 0.25


@dataclass(frozen=True, slots=True)
class Cost:
    wall_s: float
    cpu_s: float
    peak_mb: float
    """In MB of a million bytes."""
    load: float
    """The machine's load average over the last minute, at the end."""


class RunFailed(Exception):
    """A command ended with an error or took too long. The message is the end of its output."""


@dataclass(slots=True)
class Watch:
    """What was seen so far."""

    peak_mb: float = 0.0
    cpu_s: dict[tuple[int, float], float] = field(default_factory=dict[tuple[int, float], float])
    """(process id, its start) -> processor seconds."""

    def look(self, roots: Sequence[int]) -> None:
        total_mb = 0.0
        for process in with_descendants(roots):
            try:
                times = process.cpu_times()
                self.cpu_s[process.pid, process.create_time()] = times.user + times.system
                total_mb += pss_mb(process.pid)
            except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
                continue  # it has just ended
        self.peak_mb = max(self.peak_mb, total_mb)


def with_descendants(roots: Sequence[int]) -> Iterator[psutil.Process]:
    for root in roots:
        try:
            process = psutil.Process(root)
            yield from [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue


def pss_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith("Pss:")), 0.0)


def run(
    commands: Sequence[Sequence[str]], *, at_once: int, environment: Mapping[str, str], log: Path, limit_s: float
) -> Cost:
    """All commands, at most `at_once` at a time, in order. Raises RunFailed; leaves no process behind."""
    waiting, running, watch = list(commands), list[subprocess.Popen[bytes]](), Watch()
    began = time.monotonic()
    with log.open("ab") as out:
        try:
            while waiting or running:
                while waiting and len(running) < at_once:
                    running.append(start(waiting.pop(0), environment, out.fileno()))
                watch.look([process.pid for process in running])
                wait_any(running, LOOK_EVERY_S)
                ended = [process for process in running if process.poll() is not None]
                running = [process for process in running if process not in ended]
                if any(process.returncode for process in ended):
                    raise RunFailed(tail(log))
                if time.monotonic() - began > limit_s:
                    raise RunFailed(f"not done after {limit_s:.0f} s")
        finally:
            stop(running)
    wall_s = time.monotonic() - began
    return Cost(wall_s, sum(watch.cpu_s.values()), watch.peak_mb, os.getloadavg()[0])


def start(command: Sequence[str], environment: Mapping[str, str], out: int) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(command, env=dict(environment), stdout=out, stderr=out, stdin=subprocess.DEVNULL)


def wait_any(running: Sequence["subprocess.Popen[bytes]"], seconds: float) -> None:
    """Returns as soon as the first has ended if it is alone, otherwise looks again soon."""
    try:
        running[0].wait(seconds if len(running) == 1 else seconds / len(running))
    except subprocess.TimeoutExpired:
        return


def stop(running: Sequence["subprocess.Popen[bytes]"]) -> None:
    """Everything below them too."""
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
