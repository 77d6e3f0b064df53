"""Starts children by forking, where that is the same as to execute them and sooner.

a command ─┬─ `python -m MODULE` of a prefork server's, with its variables ─► the prefork server forks, and tells how the child ends
           └─ any other ─► executed
"""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from signal import SIGKILL

import msgspec

from common.children import prefork
from common.children.prefork import SETTINGS, ForkRequest, beside_settings
from common.children.processes import ChildProcess, Command, open_log, start_tied, tied


class PreforkServer:
    """A process that has imported the modules of some commands, begun by the first `start` or `begin`.

    Once it has ended, its commands are executed.
    """

    def __init__(self, commands: Sequence[Command], log: Path) -> None:
        """Serves those of the commands that can be forked and have the variables of the first, except settings."""
        able = [command for command in commands if can_be_forked(command)]
        self._environment = beside_settings(able[0].environment) if able else {}
        self._modules = sorted({command.argv[2] for command in able if self._is_own(command)})
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None
        self._has_forked = False

    @property
    def pid(self) -> int | None:
        """None before it began."""
        return self._process.pid if self._process else None

    def begin(self) -> None:
        """Starts the process, unless there is nothing to import. Call it from the main thread, with which the process ends."""
        if self._process is not None or not self._modules:
            return
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        argv = (sys.executable, "-m", prefork.MODULE, *self._modules)
        with theirs, open_log(self._log) as log:
            self._process = subprocess.Popen(
                tied(argv), env=self._environment, stdin=theirs.fileno(), stdout=log, stderr=log, start_new_session=True
            )

    async def start(self, command: Command) -> ChildProcess:
        """Starts a child that leads its own session and that the kernel ends with this process."""
        if can_be_forked(command) and self._is_own(command) and (child := await self._fork(command)):
            return child
        return await start_tied(command)

    def give_up(self) -> None:
        """Ends the process if it still imports: whoever waits for that has a child at once, which is executed."""
        if not self._has_forked:
            self.end()

    def end(self) -> None:
        """Ends the process, and with it the children that are left."""
        if self._process is not None and self._requests is not None:
            self._requests.close()
            self._process.kill()
            self._process.wait()

    def _is_own(self, command: Command) -> bool:
        return beside_settings(command.environment) == self._environment

    async def _fork(self, command: Command) -> "Forked | None":
        """None if the prefork server has ended."""
        self.begin()
        assert self._requests is not None
        settings = {name: value for name, value in command.environment.items() if name.startswith(SETTINGS)}
        child = await fork(self._requests, ForkRequest(command.argv[2], settings, str(command.log)))
        self._has_forked = self._has_forked or child is not None
        return child


class Forked:
    """A child of a prefork server, which tells its exit status."""

    def __init__(self, pid: int, answers: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._answers = answers

    def send_signal(self, signal: int, /) -> None:
        os.kill(self.pid, signal)

    async def wait(self) -> int:
        """Its exit status, or minus the signal that ended it. Whoever kills the prefork server kills it too."""
        status = await _next_number(self._answers)
        self._answers.close()
        self.returncode = -SIGKILL if status is None else status
        return self.returncode


async def fork(requests: socket.socket, request: ForkRequest, *files: int) -> Forked | None:
    """A child of the server of these requests; None if that has ended. `files`: at most one, the child's standard input."""
    answers, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    answers.setblocking(False)
    with theirs, contextlib.suppress(OSError):  # it has ended, or has no room for so much
        socket.send_fds(requests, [msgspec.json.encode(request)], [theirs.fileno(), *files])
    pid = await _next_number(answers)
    if pid is None:
        answers.close()
        return None
    return Forked(pid, answers)


def can_be_forked(command: Command) -> bool:
    """Is it a module of Python?"""
    return command.argv[:2] == (sys.executable, "-m") and len(command.argv) == 3


async def _next_number(answers: socket.socket) -> int | None:
    """The next number that a prefork server tells; None if it has ended."""
    content = b""
    with contextlib.suppress(ConnectionError):
        content = await asyncio.get_running_loop().sock_recv(answers, 64)
    return int(content) if content else None
