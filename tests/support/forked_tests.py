"""Runs tests in forks of the process that has collected them, so that what they import is imported once and its memory shared.

a worker, forked, asks for a test of its file, then of the next file ─► reports, which go on as if the tests had run here
"""

import io
import os
import sys
import traceback
import warnings
from collections import defaultdict, deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

import pytest

from common.children.child import tie_to


@dataclass
class Worker:
    pid: int
    tests: deque[int] = field(default_factory=deque[int])
    """The rest of its file."""
    runs: str = ""
    """The test that is under way."""


def run(session: pytest.Session, num_workers: int) -> None:
    """Raises Failed or Interrupted, as pytest's own loop does, if no more tests are to run."""
    files = deque(by_file(session.items))
    begin_shared(session.config)
    workers = dict(forked(session, number) for number in range(min(num_workers, len(files))))
    while workers:
        for pipe in wait(list(workers)):
            assert isinstance(pipe, Connection)
            try:
                kind, content = pipe.recv()
            except EOFError:
                ended(session, workers.pop(pipe))
            else:
                if kind == "wants":
                    pipe.send(None if session.shouldfail or session.shouldstop else next_test(workers[pipe], files))
                elif kind == "runs":
                    workers[pipe].runs = content
                else:
                    tell(session.config, kind, content)
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)


def by_file(items: Sequence[pytest.Item]) -> list[list[int]]:
    """Places of each file's tests, for some share what a module makes: files with slow ones, then the others, large ones first."""
    files = defaultdict[Path, list[int]](list)
    for place, item in enumerate(items):
        files[item.path].append(place)
    slow = [file for file in files.values() if any(items[place].get_closest_marker("slow") for place in file)]
    return [*slow, *sorted((file for file in files.values() if file not in slow), key=len, reverse=True)]


def begin_shared(config: Any) -> None:
    """Begins what all workers have together."""
    config._tmp_path_factory.getbasetemp()
    if services := sys.modules.get("tests.support.forked"):  # a test that starts them was collected
        services.begin()


def forked(session: pytest.Session, number: int) -> tuple[Connection, Worker]:
    ours, theirs = Pipe()
    parent = os.getpid()
    if pid := os.fork():
        theirs.close()
        return ours, Worker(pid)
    work(session, number, parent, theirs)


def next_test(worker: Worker, files: deque[list[int]]) -> int | None:
    if not worker.tests and files:
        worker.tests.extend(files.popleft())
    return worker.tests.popleft() if worker.tests else None


def ended(session: pytest.Session, worker: Worker) -> None:
    """Lets no more tests run if it did not end by itself."""
    status = os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])
    if status:
        why = f"a worker ended with status {status}" + (f" in {worker.runs}" if worker.runs else "")
        session.testsfailed += 1
        session.shouldfail = why


def tell(config: pytest.Config, kind: str, content: Any) -> None:
    if kind == "report":
        report = config.hook.pytest_report_from_serializable(config=config, data=content)
        config.hook.pytest_runtest_logreport(report=report)
    else:
        text, filename, lineno, nodeid = content
        warning = warnings.WarningMessage(Warning(text), Warning, filename, lineno)
        about = {"warning_message": warning, "when": "runtest", "nodeid": nodeid, "location": None}
        config.hook.pytest_warning_recorded.call_historic(kwargs=about)


# ---- in a worker ----------------------------------------------------------------------------------------------------


def work(session: pytest.Session, number: int, parent: int, pipe: Connection) -> NoReturn:
    """Skips what this process is to do at its end, which is the parent's; what it started is tied to it."""
    try:
        tie_to(parent)
        begin_own(session.config, number)
        session.config.pluginmanager.register(Teller(session.config, pipe))
        for item, following in pairwise(chain(asked_for(session.items, pipe), [None])):
            assert item is not None
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            pipe.send(("runs", ""))
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
        os._exit(1)
    os._exit(0)


def begin_own(config: Any, number: int) -> None:
    """Gives the worker files of its own: those that its parent has opened are written by all."""
    capture = config.pluginmanager.get_plugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture()
    config.get_terminal_writer()._file = io.StringIO()
    (folder := config._tmp_path_factory.getbasetemp() / f"worker-{number}").mkdir()
    config._tmp_path_factory._basetemp = folder


def asked_for(items: Sequence[pytest.Item], pipe: Connection) -> Generator[pytest.Item]:
    while True:
        pipe.send(("wants", None))
        if (place := pipe.recv()) is None:
            return
        yield items[place]


class Teller:
    """Tells the parent what happens."""

    def __init__(self, config: pytest.Config, pipe: Connection) -> None:
        self._config = config
        self._pipe = pipe

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._pipe.send(("runs", nodeid))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        content = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._pipe.send(("report", content))

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, nodeid: str) -> None:
        told = (str(warning_message.message), warning_message.filename, warning_message.lineno, nodeid)
        self._pipe.send(("warning", told))
