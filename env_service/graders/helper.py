"""Helper processes: for graders that may take forever, and that only the end of their process can stop.

    HelperPool ─ arguments, as a line of JSON ─► process ─ the answer, as a line of JSON ─► HelperPool

A helper starts when it is first needed, answers one question after the other, and is killed when one takes too long.
"""

import asyncio
import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common.places import Places
from env_service import work
from env_service.failures import GraderFailed

START_S = 30.0
"""Time to import the libraries of a helper on a busy machine."""
MEMORY_BYTES = 512 * 1024**2
PR_SET_PDEATHSIG = 1


class HelperPool:
    """Asks one helper at a time, or two where two tenants ask: see `Places`. Safe to use from many tasks; `close` when done."""

    def __init__(self, name: str, module: str, *, first: Sequence[Any]) -> None:
        """`name`: of the grader, for errors. `module`: the program, which calls `serve`. `first`: the arguments of a question
        that each new process answers before it is of use."""
        self._name = name
        self._module = module
        self._first = first
        self._places = Places(1)
        self._idle: list[asyncio.subprocess.Process] = []

    async def ask(self, *arguments: Any, timeout_s: float) -> Any:
        """The limit begins when it is this question's turn. Raises GraderFailed if it takes too long or too much memory."""
        async with work.place(self._places):
            try:
                with contextlib.suppress(
                    ConnectionError
                ):  # somebody killed it, or it took too much memory, as the next will
                    return await self._ask_one(arguments, timeout_s)
                return await self._ask_one(arguments, timeout_s)
            except (TimeoutError, ConnectionError) as error:
                reason = f"longer than {timeout_s:g} seconds" if isinstance(error, TimeoutError) else "too much memory"
                raise GraderFailed(f"{self._name}: comparing the texts took {reason}") from error

    async def _ask_one(self, arguments: Sequence[Any], timeout_s: float) -> Any:
        helper = await self._idle_one()
        with work.charged():
            return await self._ask(helper, arguments, timeout_s)

    async def close(self) -> None:
        while self._idle:
            await _end(self._idle.pop())

    async def _idle_one(self) -> asyncio.subprocess.Process:
        while self._idle:
            helper = self._idle.pop()
            if helper.returncode is None:
                return helper
        await self._ask(await self._start(), self._first, START_S)
        return self._idle.pop()

    async def _start(self) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", self._module,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
            env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OPENBLAS_NUM_THREADS": "1"},
        )  # fmt: skip

    async def _ask(self, helper: asyncio.subprocess.Process, arguments: Sequence[Any], timeout_s: float) -> Any:
        """Asks a helper, which is idle afterwards, or has ended if it gave no answer. Raises TimeoutError, ConnectionError."""
        try:
            async with work.time_limit(timeout_s):
                answer = await _exchange(helper, arguments)
            self._idle.append(helper)
            return answer
        finally:
            if helper not in self._idle:
                await _end(helper)


async def _exchange(helper: asyncio.subprocess.Process, arguments: Sequence[Any]) -> Any:
    assert helper.stdin and helper.stdout
    helper.stdin.write(json.dumps(arguments).encode() + b"\n")
    await helper.stdin.drain()
    line = await helper.stdout.readline()
    if not line.endswith(b"\n"):
        raise ConnectionError("the helper ended")
    return json.loads(line)


async def _end(helper: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        helper.kill()
    await helper.communicate()


def serve(answer: Callable[..., Any]) -> None:
    """Runs a helper: answers the questions on stdin until it ends. The kernel kills it with its worker, and where memory runs
    out before its worker."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    for line in sys.stdin:
        print(json.dumps(answer(*json.loads(line))), flush=True)
