"""Helper processes: for work that would stop the event loop, or that only the end of its process can stop.

    HelperPool ─ question: bytes ─► process: serve ─ answer or refusal ─► HelperPool

A helper starts when first needed and answers one question after the other. One that does not answer is killed.
"""

import asyncio
import contextlib
import os
import resource
import signal
import sys
from collections.abc import AsyncGenerator, Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from common.children.child import tie_to
from common.errors import InvalidInput

LENGTH_BYTES = 8
"""Bytes of the length that stands before each question and each answer."""
END_S = 1.0
"""Time in which a helper that has closed its pipe ends by itself."""


class HelperKilled(ConnectionError):
    """A helper got SIGKILL from outside, before it had answered."""


class HelperOverran(ConnectionError):
    """A helper has ended because a question took it too much processor time."""


class Answer(msgspec.Struct, tag=True):
    """The answer to a question: plain data."""

    value: Any


class Refusal(msgspec.Struct, tag=True):
    """An InvalidInput, in parts."""

    message: str
    param: str | None
    code: str | None


class Helper:
    """One process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._closed = False
        self.is_new = True
        """Has it answered nothing yet?"""

    @property
    def alive(self) -> bool:
        # a cancelled `close` may not have heard yet that the process, which it killed, has ended
        return self._process.returncode is None and not self._closed

    async def ask(self, question: bytes) -> Any:
        """Kills the helper unless it answers. Raises InvalidInput if it refuses, HelperKilled, HelperOverran, or
        ConnectionError if it ended."""
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
        self.is_new = False
        found = msgspec.msgpack.decode(answer, type=Answer | Refusal)
        if isinstance(found, Refusal):
            raise InvalidInput(found.message, param=found.param, code=found.code)
        return found.value

    async def _ended(self) -> ConnectionError:
        """The reason why it answers no more."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await self._process.wait()
        match -(self._process.returncode or 0):
            case signal.SIGKILL:
                return HelperKilled("the helper was killed")
            case signal.SIGPROF:
                return HelperOverran("the question took too long")
            case _:
                return ConnectionError("the helper ended")

    async def close(self) -> None:
        self._closed = True
        tell(self._process, signal.SIGKILL)
        await self._process.communicate()


class HelperPool:
    """Idle helpers that run one program. `close` when done."""

    def __init__(self, module: str, *arguments: str, variables: Mapping[str, str]) -> None:
        """`module`: the program, which calls `serve`. `variables`: its environment."""
        self._program = ("-P", "-m", module, *arguments)
        self._variables = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **variables}
        self._idle: list[Helper] = []

    @contextlib.asynccontextmanager
    async def helper(self) -> AsyncGenerator[Helper]:
        """Lends a helper to the block: one that has answered before if there is one, else a new one."""
        self._idle = [helper for helper in self._idle if helper.alive]
        helper = self._idle.pop() if self._idle else await self._start()
        try:
            yield helper
        finally:
            if helper.alive:
                self._idle.append(helper)

    async def _start(self) -> Helper:
        pipe = asyncio.subprocess.PIPE
        return Helper(
            await asyncio.create_subprocess_exec(
                sys.executable, *self._program, stdin=pipe, stdout=pipe, env=self._variables
            )
        )

    async def close(self) -> None:
        while self._idle:
            await self._idle.pop().close()


def tell(process: asyncio.subprocess.Process, number: int) -> None:
    """Sends a signal to a process that has not ended. Its own methods would also take its status, and asyncio would report 255."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def kill_children() -> None:
    """Kills the processes that this one has started, where the kernel tells which they are."""
    for file in Path("/proc/self/task").glob("*/children"):
        for pid in file.read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def address_space() -> int:
    """Bytes of address space that this process has so far."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def serve(answer: Callable[[bytes], Any], *, memory_bytes: int | None = None, processor_s: float = 0.0) -> None:
    """Runs a helper: answers questions until standard input ends. `answer` may raise InvalidInput.

    The kernel kills it with its parent, and before its parent where memory runs out. Ctrl-C is for the parent. `memory_bytes`: of
    address space in all; a question that needs more is refused. `processor_s`: the processor seconds of one question, which ends the
    process if it takes more; 0: any.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tie_to(os.getppid())
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    if memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    with os.fdopen(os.dup(1), "wb") as sink:
        os.dup2(2, 1)  # what a library prints is no answer
        while length := sys.stdin.buffer.read(LENGTH_BYTES):
            question = sys.stdin.buffer.read(int.from_bytes(length))
            signal.setitimer(signal.ITIMER_PROF, processor_s)  # unhandled: it ends loops in C too
            encoded = msgspec.msgpack.encode(_answered(answer, question))
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            sink.write(len(encoded).to_bytes(LENGTH_BYTES) + encoded)
            sink.flush()


def _answered(answer: Callable[[bytes], Any], question: bytes) -> Answer | Refusal:
    try:
        return Answer(answer(question))
    except InvalidInput as error:
        return Refusal(str(error), error.param, error.code)
    except MemoryError:
        return Refusal("reading this takes more memory than one request may have: send less at once", None, "too_large")
