"""Child processes that are kept running.

SupervisedProcess.keep_running   starts the command, waits for its end, starts it again after a growing delay
waits for: the process, or `stop`   unblocked by: its death, or the supervisor
after a crash of this process: the kernel kills the children (see `child.py`)
"""

import asyncio
import contextlib
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from common.errors import REFUSED

FIRST_DELAY_S = 0.1
MAX_DELAY_S = 10.0
STABLE_S = 10.0
"""A process that lived this long starts again after `FIRST_DELAY_S`, however often it died before."""
MAX_LOG_BYTES = 16 * 2**20
WARNING = re.compile(r"^\S+:\d+: \w*Warning: .*\n(  .*\n)?", re.MULTILINE)
"""A warning of Python's, with the line that gave it."""

Notify = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    name: str
    """Unique in a cluster, e.g. `rollout-0`."""
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    """All variables of the child; it inherits none."""
    log: Path
    """Standard output and error are appended here."""


class ChildProcess(Protocol):
    """A process that this one started: asyncio's, or a fork of a prefork server's."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    def send_signal(self, signal: int, /) -> None: ...

    async def wait(self) -> int: ...


async def start_tied(command: Command) -> ChildProcess:
    """Starts a child that the kernel ends with this process. It leads its own session."""
    with open_log(command.log) as log:
        return await asyncio.create_subprocess_exec(
            *tied(command.argv),
            env=dict(command.environment),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


StartChild = Callable[[Command], Awaitable[ChildProcess]]


class SupervisedProcess:
    """A command that is started again whenever it ends, until `stop`. Each run leads its own session, so that a
    Ctrl-C in the terminal reaches only the supervisor."""

    def __init__(self, command: Command, notify: Notify, start: StartChild = start_tied) -> None:
        self.command = command
        self._start = start
        self.num_exits = 0
        """Times that it ended without having been asked to."""
        self.refused = False
        """It ended because of its settings. It is tried again now and then: what they name may come up."""
        self._notify = notify
        self._kept_from = size(command.log)
        self._process: ChildProcess | None = None
        self._stopping = asyncio.Event()
        self._ended = asyncio.Event()

    @property
    def pid(self) -> int | None:
        """None between two runs."""
        return self._process.pid if self._process else None

    async def keep_running(self) -> None:
        """Runs until `stop`. Call it from the main thread: the kernel ties the child's life to the calling thread."""
        delay_s = 0.0
        try:
            while not self._stopping.is_set():
                since, said_from = time.monotonic(), size(self.command.log)
                status = await self._run_once()
                if self._stopping.is_set():
                    return
                self.refused = status == REFUSED
                delay_s = MAX_DELAY_S if self.refused else _next_delay(delay_s, lived_s=time.monotonic() - since)
                self.num_exits += 1
                reason = last_error(self.command.log, start=said_from) if status > 0 else ""
                ended = f"{self.command.name} {describe(status)}{reason and f': {reason}'}"
                self._notify(f"{ended}; starting again in {delay_s:.1f} s")
                await _wait(self._stopping, delay_s)
        finally:
            self._ended.set()

    def last_words(self, num_lines: int) -> str:
        """The end of what it has written since it is kept; a log may hold more, of earlier supervisors."""
        return tail(self.command.log, num_lines, start=self._kept_from)

    def last_error(self) -> str:
        return last_error(self.command.log, start=self._kept_from)

    def signal(self, number: int) -> bool:
        """False if it is not running just now."""
        process = self._process
        if process is None or process.returncode is not None:
            return False
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
        return True

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, and after `grace_s` SIGKILL. Only for a process whose `keep_running` was started."""
        self._stopping.set()
        self.signal(signal.SIGTERM)
        if not await _wait(self._ended, grace_s):
            self.signal(signal.SIGKILL)
            await self._ended.wait()

    async def _run_once(self) -> int:
        """Runs the command to its end. Returns its exit status, or minus the signal that ended it."""
        self._process = process = await self._start(self.command)
        if self._stopping.is_set():  # while it was being started
            self.signal(signal.SIGTERM)
        try:
            return await process.wait()
        finally:
            kill_session(process.pid)  # what it started itself and left behind: the kernel ends only the child
            self._process = None


def open_log(log: Path) -> BinaryIO:
    """Opened to append; only this user can read it."""
    return os.fdopen(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab")


def _next_delay(before_s: float, *, lived_s: float) -> float:
    if lived_s > STABLE_S:
        return FIRST_DELAY_S
    return min(max(2 * before_s, FIRST_DELAY_S), MAX_DELAY_S)


def describe(status: int) -> str:
    """`was killed by SIGKILL`, `ended with status 1`, `refused its settings`."""
    if status == REFUSED:
        return "refused its settings"
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def rotate(log: Path, limit_bytes: int = MAX_LOG_BYTES) -> None:
    """Moves a log's content to `<name>.1` if it is too long. Its writers append, so they may go on meanwhile."""
    if log.exists() and log.stat().st_size > limit_bytes:
        shutil.copyfile(log, log.with_name(f"{log.name}.1"))
        os.truncate(log, 0)


def own_age_s() -> float:
    """Seconds since this process began; 0 where the kernel does not say."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


def size(log: Path) -> int:
    """Bytes in bytes; 0 before its first line."""
    return log.stat().st_size if log.exists() else 0


def tail(log: Path, num_lines: int = 15, *, start: int = 0) -> str:
    """The last lines of a log, for an error message. `start`: the byte from which they count, unless rotated since."""
    end = size(log)
    if end == 0:
        return ""
    with log.open("rb") as file:
        file.seek(max(start if start <= end else 0, end - 16_384))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-num_lines:])


def last_error(log: Path, *, start: int = 0) -> str:
    """The last line of a log that is no warning, which a resource tracker may add. `start`: see `tail`."""
    return WARNING.sub("", f"{tail(log, start=start)}\n").strip().rpartition("\n")[2]


def tied(argv: tuple[str, ...]) -> tuple[str, ...]:
    """A command that runs `argv` and that the kernel ends with this process."""
    wrapper = Path(__file__).with_name("child.py")
    return (sys.executable, "-I", "-S", str(wrapper), str(os.getpid()), *argv)


def kill_session(leader: int) -> None:
    """Kills what a child, its leader, has started and left behind."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


async def _wait(event: asyncio.Event, timeout_s: float) -> bool:
    """True if the event came in time."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), timeout_s)
    return event.is_set()
