"""Processor time and memory of processes, as the kernel counts them."""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory in MB of a million bytes.

    PSS is the proportional set size: a page that n processes share counts 1/n in each. RSS counts it in every process.
    """

    pss_mb: float = 0.0
    rss_mb: float = 0.0

    def __add__(self, other: "Memory") -> "Memory":
        return Memory(self.pss_mb + other.pss_mb, self.rss_mb + other.rss_mb)


def memory(pid: int) -> Memory:
    """Memory of the process; zeros if it has just ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except (FileNotFoundError, ProcessLookupError):
        return Memory()
    kb = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    return Memory(kb["Pss"] * 1024 / 1e6, kb["Rss"] * 1024 / 1e6)


def memory_below(*roots: int) -> Memory:
    """Memory of the processes and of all that they started."""
    return sum((memory(process.pid) for process in with_descendants(roots)), Memory())


def with_descendants(roots: Iterable[int]) -> Iterator[psutil.Process]:
    for root in roots:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(root)
            yield from [process, *process.children(recursive=True)]


def cpu_s(pid: int) -> float:
    """Processor seconds that the process has used so far, without its children."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system
