"""Finds the processes that another one has started, and what is left of them."""

import asyncio
import signal
import subprocess
import sys
import time
from pathlib import Path

from manager_service.launcher.supervisor import LocalCluster

Process = tuple[int, str]
"""A process's id and its start, which tells it from a later one of that id."""


def descendants(ancestor: int) -> set[Process]:
    """Processes below another, whatever their session and namespace; all of them below 0."""
    parents: dict[Process, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        parents[int(entry.parent.name), fields[19]] = int(fields[1])
    found: set[Process] = set()
    level = {ancestor}
    while below := {process for process, parent in parents.items() if parent in level}:
        found |= below
        level = {pid for pid, _ in below}
    return found


def alive(processes: set[Process]) -> set[Process]:
    return processes & descendants(0)


def left_behind(worker: str, *, num: int) -> set[Process]:
    """Runs Python code, kills it once `num` processes of its have run for a moment, and returns those that live on."""
    with subprocess.Popen([sys.executable, "-c", worker]) as process:
        while len(started := descendants(process.pid)) < num:
            time.sleep(0.05)
        time.sleep(2.0)
        process.send_signal(signal.SIGKILL)
    until = time.monotonic() + 5
    while alive(started) and time.monotonic() < until:
        time.sleep(0.05)
    return alive(started)


async def restart(cluster: LocalCluster, name: str, number: int = signal.SIGTERM) -> None:
    """Sends a signal to a child and waits until it runs under another process id."""
    before = cluster.pids[name]
    cluster.kill(name, number)
    while cluster.pids.get(name, before) == before:
        await asyncio.sleep(0.02)
