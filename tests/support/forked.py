"""Clusters of real processes that start without importing anything: each is forked from one that has imported all services.

    first cluster of a test run ─► a fork server imports `warm` once ─► each process of a cluster: fork, own variables, `python -m SERVICE`

A process has its own id, session, log and variables, as one that is executed, and dies of the same signals. Few tests leave the
starting to `harness.live.running`, which executes each process as `marlaas up` does.
"""

import asyncio
import multiprocessing
import os
import runpy
import signal
import sys
import threading
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from harness import live
from harness.live import Api
from manager_service.local.processes import ChildProcess, Command, open_log, start_tied
from manager_service.local.supervisor import LocalCluster

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.support.warm", "tests.support.forked"])


def running(folder: Path | None = None, **options: Any) -> AbstractAsyncContextManager[tuple[LocalCluster, Api]]:
    """A cluster like `harness.live.running`'s."""
    return live.running(folder, start=start, **options)


async def start(command: Command) -> ChildProcess:
    """Forks what is a module of Python; what is none is executed."""
    if command.argv[:2] != (sys.executable, "-m"):
        return await start_tied(command)
    process = FORKS.Process(target=_become, args=(command.argv[2], dict(command.environment), command.log))
    process.start()
    return Forked(process)


class Forked:
    """A forked process. Its parent is the fork server, which tells its exit status."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process
        assert process.pid is not None
        self.pid = process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, signal: int, /) -> None:
        os.kill(self.pid, signal)

    async def wait(self) -> int:
        ended, loop = asyncio.Event(), asyncio.get_running_loop()
        loop.add_reader(self._process.sentinel, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(self._process.sentinel)
        assert self._process.exitcode is not None
        return self._process.exitcode


def _become(module: str, variables: Mapping[str, str], log: Path) -> None:
    """Runs the module as the main program in the forked process, as `child.py` would. Ends with the process of the tests."""
    os.setsid()
    os.umask(0o077)
    with open_log(log) as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    os.environ.clear()
    os.environ.update(variables)
    sys.path[:0] = variables["PYTHONPATH"].split(os.pathsep)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.killpg(0, signal.SIGKILL)
