"""Helper processes: for work that may take forever, or would stop the event loop, and that only the end of its process can stop.

    HelperPool ─ a question, as bytes ─► process ─ the answer, as bytes ─► HelperPool

A helper starts when it is first needed and answers one question after the other. One that does not answer is killed.
"""

import asyncio
import contextlib
import ctypes
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

LENGTH_BYTES = 8
"""Bytes of the length that stands before each question and each answer."""
END_S = 1.0
"""Time in which a helper that has closed its pipe ends by itself."""
PR_SET_PDEATHSIG = 1


class HelperKilled(ConnectionError):
    """A helper got SIGKILL from outside, before it had answered."""


class Helper:
    """One process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    async def ask(self, question: bytes) -> bytes:
        """Kills the helper unless it answers. Raises HelperKilled, or ConnectionError if it ended by itself."""
        process, answered = self._process, False
        assert process.stdin and process.stdout
        try:
            process.stdin.write(len(question).to_bytes(LENGTH_BYTES) + question)
            await process.stdin.drain()
            answer = await process.stdout.readexactly(int.from_bytes(await process.stdout.readexactly(LENGTH_BYTES)))
            answered = True
        except (EOFError, ConnectionError) as error:
            raise await self._ended() from error
        finally:
            if not answered:
                await self.close()
        return answer

    async def _ended(self) -> ConnectionError:
        """The reason why it answers no more."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await self._process.wait()
        killed = self._process.returncode == -signal.SIGKILL
        return HelperKilled("the helper was killed") if killed else ConnectionError("the helper ended")

    async def close(self) -> None:
        tell(self._process, signal.SIGKILL)
        await self._process.communicate()


class HelperPool:
    """Idle helpers that run one program. `close` when done."""

    def __init__(self, module: str, *arguments: str, variables: Mapping[str, str]) -> None:
        """`module`: the program, which calls `serve`. `variables`: its environment."""
        self._program = ("-P", "-m", module, *arguments)
        self._variables = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **variables}
        self._idle: list[Helper] = []

    def idle(self) -> Helper | None:
        """Hands out a helper that has answered before, if there is one."""
        while self._idle:
            if (helper := self._idle.pop()).alive:
                return helper
        return None

    async def start(self) -> Helper:
        pipe = asyncio.subprocess.PIPE
        return Helper(
            await asyncio.create_subprocess_exec(
                sys.executable, *self._program, stdin=pipe, stdout=pipe, env=self._variables
            )
        )

    def give_back(self, helper: Helper) -> None:
        """Takes back a helper that has answered."""
        self._idle.append(helper)

    async def close(self) -> None:
        while self._idle:
            await self._idle.pop().close()


def tell(process: asyncio.subprocess.Process, number: int) -> None:
    """Sends a signal to a process that has not ended.

    Its own methods also ask for its status, once, so of one that has just ended asyncio would find none, and report 255.
    """
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def die_with_parent() -> None:
    """Lets the kernel kill this process when the thread that started it ends; outside Linux it does not."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def kill_children() -> None:
    """Kills the processes that this one has started, where the kernel tells which they are."""
    for file in Path("/proc/self/task").glob("*/children"):
        for pid in file.read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def serve(answer: Callable[[bytes], bytes], *, memory_bytes: int | None = None) -> None:
    """Runs a helper: answers questions until standard input ends. The kernel kills it with its parent, and where memory runs out
    before its parent. A Ctrl-C in the terminal is for the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")
    if memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    with os.fdopen(os.dup(1), "wb") as sink:
        os.dup2(2, 1)  # what a library prints is no answer
        while length := sys.stdin.buffer.read(LENGTH_BYTES):
            encoded = answer(sys.stdin.buffer.read(int.from_bytes(length)))
            sink.write(len(encoded).to_bytes(LENGTH_BYTES) + encoded)
            sink.flush()
