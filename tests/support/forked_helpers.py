"""Helper processes of the API that start without importing anything: a prefork server forks them. Executed, each takes most of a second."""

import asyncio
import atexit
import contextlib
import os
import socket
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any, cast

import msgspec
import pytest

from common.children.forking import PreforkServer
from common.children.helpers import Helper, HelperPool
from common.children.processes import ChildProcess, Command
from manager_service.http.context import Api, ApiLimits
from manager_service.http.reading import process
from manager_service.http.server import make_api
from manager_service.settings import ManagerSettings

MODULE = "tests.support.forked_helpers"
BASES, PLACE = "MARLAAS_TEST_BASES", "MARLAAS_TEST_PLACE"
"""Variables of a child: its argument, and the socket to which it connects."""
LOG = Path(gettempdir()) / "helpers-of-tests.log"


@contextlib.asynccontextmanager
async def forked_api(settings: ManagerSettings, limits: ApiLimits) -> AsyncGenerator[Api]:
    """The parts of an API that forks its helpers."""
    async with contextlib.AsyncExitStack() as stack:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("manager_service.http.reading.reading_helpers.HelperPool", ForkedPool)
            api = await stack.enter_async_context(make_api(settings, limits))
        yield api


class ForkedPool(HelperPool):
    """A pool of helpers that read texts. Where packages lie elsewhere than when the prefork server began, and where they may be
    imported, they are executed."""

    def __init__(self, module: str, bases: str, *others: str, **options: Any) -> None:
        super().__init__(module, bases, *others, **options)
        self._bases, self._forks = bases, not others

    async def _start(self) -> Helper:
        variables, server = _shared(self._variables)
        if variables != self._variables or not self._forks:
            return await super()._start()
        with TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listening:
            listening.bind(f"{folder}/socket")
            listening.listen()
            listening.setblocking(False)
            child = await server.start(_command(variables | {BASES: self._bases, PLACE: f"{folder}/socket"}))
            ours, _ = await asyncio.get_running_loop().sock_accept(listening)
        return Helper(cast(Any, ForkedProcess(child, *await asyncio.open_connection(sock=ours))))


class ForkedProcess:
    """A process as its helper sees it: the part of `asyncio.subprocess.Process` that it needs."""

    def __init__(self, child: ChildProcess, stdout: asyncio.StreamReader, stdin: asyncio.StreamWriter) -> None:
        self.pid, self.stdout, self.stdin = child.pid, stdout, stdin
        self._child = child
        self._ends = asyncio.create_task(child.wait())

    @property
    def returncode(self) -> int | None:
        return self._child.returncode

    async def wait(self) -> int:
        return await asyncio.shield(self._ends)

    async def communicate(self) -> None:
        self.stdin.close()
        await self.wait()


_first: list[tuple[dict[str, str], PreforkServer]] = []


def _shared(variables: dict[str, str]) -> tuple[dict[str, str], PreforkServer]:
    """The one prefork server, and the variables of the helper for which it began."""
    if not _first:
        _first.append((variables, PreforkServer([_command(variables)], LOG)))
        atexit.register(_first[0][1].end)
    return _first[0]


def _command(variables: dict[str, str]) -> Command:
    return Command(name="helper", argv=(sys.executable, "-m", MODULE), environment=variables, log=LOG)


def main() -> None:
    """Runs a helper whose standard input and output are the socket."""
    with socket.socket(socket.AF_UNIX) as theirs:
        theirs.connect(os.environ[PLACE])
        for number in (0, 1):
            os.dup2(theirs.fileno(), number)
    process.main(msgspec.json.decode(os.environ[BASES], type=dict[str, tuple[str, int]]))


if __name__ == "__main__":
    main()
