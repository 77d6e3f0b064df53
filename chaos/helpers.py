"""Finds the processes that managers and env workers start for tenants' texts and code, and sends them signals."""

import contextlib
import signal
from collections.abc import Iterable

import psutil

from env_service.graders import text
from env_service.sandbox import sandbox
from env_service.verifiers import package_process as hosts
from harness.processes import with_descendants
from manager_service.http.reading import reading_helpers as reading

HELPERS = {text.HELPER, reading.HELPER, sandbox.START, str(hosts.HOST)}
"""A word of each one's command line. The sandbox's prepared processes, supervisors and calls have the same."""


def helpers(roots: Iterable[int]) -> list[psutil.Process]:
    """Finds those below these processes, with the calls that they run."""
    return [process for process in with_descendants(roots) if HELPERS & _words(process)]


def calls(roots: Iterable[int]) -> list[psutil.Process]:
    """Finds the processes that run tenants' code. A supervisor has started each, and a prepared process that one."""
    found = {process.pid: process for process in helpers(roots)}
    supervised = {pid for pid, process in found.items() if _parent(process) in found}
    return [process for process in found.values() if _parent(process) in supervised]


def signalled(processes: Iterable[psutil.Process], number: signal.Signals) -> int:
    """Sends a signal. Returns how many were still there to get it."""
    num = 0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
            num += 1
    return num


def _words(process: psutil.Process) -> set[str]:
    try:
        return set(process.cmdline())
    except psutil.Error:
        return set()


def _parent(process: psutil.Process) -> int:
    try:
        return process.ppid()
    except psutil.NoSuchProcess:
        return 0
