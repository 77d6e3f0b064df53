"""`--forks N`: one process collects the tests, and N that it forks run them.

    collect once ─┬─ fork: takes a file of tests from the queue, runs them, sends reports ─┐
                  └─ fork: the same                                                       ─┴─► this process tells of them

To import all that tests import takes each process of pytest-xdist some twenty seconds. Here it is done once, and what is not imported twice
is not in memory twice. A file's tests run in one process, those that are slow apart from the others; files of slow tests come first.
"""

import atexit
import os
import pickle
import struct
import traceback
import warnings
from collections.abc import Iterator
from io import StringIO
from itertools import chain, groupby, pairwise
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest

Unit = list[pytest.Item]
Place = tuple[str, tuple[str, int | None, str]]
"""A test's id and location, as pytest names them."""
NO_PLACE: Place = ("(between two tests)", ("(between two tests)", None, ""))
NUMBER = struct.Struct("I")


def pytest_addoption(parser: pytest.Parser) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a fork has no other thread of the process that collected
    parser.addoption("--forks", type=int, default=1, help="processes that run tests, forked once all are collected")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    num_forks: int = session.config.option.forks
    if num_forks < 2 or session.testsfailed or session.config.option.collectonly:
        return None
    run_forked(session, num_forks)
    return True


def units_of(items: list[pytest.Item]) -> list[Unit]:
    """The tests of a file, slow ones apart from the others; files of slow ones first."""
    slow = {item: item.get_closest_marker("slow") is not None for item in items}
    ordered = sorted(items, key=lambda item: not slow[item])  # within each kind as collected
    return [list(unit) for _, unit in groupby(ordered, key=lambda item: (item.path, slow[item]))]


def queue_of(number: int) -> int:
    """A pipe with the numbers of all units, of which each process reads what no other has read."""
    taking, giving = os.pipe()
    os.write(giving, b"".join(map(NUMBER.pack, range(number))))
    os.close(giving)
    return taking


def run_forked(session: pytest.Session, num_forks: int) -> None:
    """Runs what was collected. A process that dies fails the test that it ran and what it was to run next; the others go on."""
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, "what tests import has started a thread, which no fork has"
    units = units_of(session.items)
    queue = queue_of(len(units))
    forks = [_forked(session, units, queue) for _ in range(min(num_forks, len(units)))]
    pids, running = dict(forks), dict[Connection, Place]()
    left = {item.nodeid for item in session.items}
    while pids:
        for one in wait(list(pids)):
            assert isinstance(one, Connection)
            try:
                _hear(session, one, running, left)
            except EOFError:
                _, status = os.waitpid(pids.pop(one), 0)
                if status:
                    reason = f"its process ended with status {os.waitstatus_to_exitcode(status)}"
                    _tell_failure(session, running.get(one, NO_PLACE), reason)
        while session.shouldfail and os.read(queue, NUMBER.size):
            pass  # nobody takes what is left
    os.close(queue)
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    for item in session.items:
        if item.nodeid in left:
            _tell_failure(
                session, (item.nodeid, item.location), "it has not run: the process that was to run it has ended"
            )


# ---- the process that collected -------------------------------------------------------------------------------------


def _forked(session: pytest.Session, units: list[Unit], queue: int) -> tuple[Connection, int]:
    ours, theirs = Pipe(duplex=False)
    if (pid := os.fork()) == 0:
        ours.close()
        _work(session, units, queue, theirs)
    theirs.close()
    return ours, pid


def _hear(session: pytest.Session, one: Connection, running: dict[Connection, Place], left: set[str]) -> None:
    """Passes on what a process has sent. Raises EOFError if it has ended."""
    hook, (kind, body) = session.config.hook, pickle.loads(one.recv_bytes())
    if kind == "start":
        running[one] = body
        left.discard(body[0])
        hook.pytest_runtest_logstart(nodeid=body[0], location=body[1])
    elif kind == "finish":
        running.pop(one, None)
        hook.pytest_runtest_logfinish(nodeid=body[0], location=body[1])
    elif kind == "warning":
        text, file, line, when, nodeid = body
        told = warnings.WarningMessage(UserWarning(text), UserWarning, file, line)
        hook.pytest_warning_recorded.call_historic(
            kwargs={"warning_message": told, "when": when, "nodeid": nodeid, "location": None}
        )
    else:
        report = hook.pytest_report_from_serializable(config=session.config, data=body)
        hook.pytest_runtest_logreport(report=report)


def _tell_failure(session: pytest.Session, place: Place, reason: str) -> None:
    report = pytest.TestReport(*place, keywords={}, outcome="failed", longrepr=reason, when="call")
    session.config.hook.pytest_runtest_logreport(report=report)


# ---- a forked process -----------------------------------------------------------------------------------------------


class _Sending:
    """Sends what happens to tests to the process that collected, which alone writes."""

    def __init__(self, config: pytest.Config, to: Connection) -> None:
        self._config = config
        self._to = to

    def _send(self, kind: str, body: Any) -> None:
        self._to.send_bytes(pickle.dumps((kind, body)))

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self._send("start", (nodeid, location))

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        self._send("finish", (nodeid, location))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._send("report", self._config.hook.pytest_report_to_serializable(config=self._config, report=report))

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, when: str, nodeid: str) -> None:
        text = f"{warning_message.category.__name__}: {warning_message.message}"
        self._send("warning", (text, warning_message.filename, warning_message.lineno, when, nodeid))


def _work(session: pytest.Session, units: list[Unit], queue: int, to: Connection) -> None:
    """Runs tests until none is left, and ends the process."""
    plugins, status = session.config.pluginmanager, 1
    capture: Any = plugins.getplugin("capturemanager")
    try:
        reporter: Any = plugins.unregister(name="terminalreporter")
        reporter._tw._file = StringIO()  # pytest-timeout writes there too
        plugins.register(_Sending(session.config, to))
        capture.stop_global_capturing()  # into files that all forks would share
        capture.start_global_capturing()
        for item, following in pairwise(chain(_taken(units, queue), [None])):
            assert item is not None
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
        status = 0
    except BaseException:
        capture.suspend_global_capture()
        traceback.print_exc()
    finally:
        os._exit(status)


def _taken(units: list[Unit], queue: int) -> Iterator[pytest.Item]:
    while number := os.read(queue, NUMBER.size):
        yield from units[NUMBER.unpack(number)[0]]
