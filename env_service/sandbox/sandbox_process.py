"""The process of one call, as the sandbox sees it: what it wrote, how it ended, and whether the sandbox had it end.

Every end that the sandbox brings about goes through `CallProcess.stop`. Of a call that was killed and has no `stopped`, the supervisor
says by its status whether it did that itself (`child.supervise`); if not, it was killed from outside.
"""

import asyncio
import contextlib
import os
import signal
from dataclasses import dataclass
from typing import Literal

import structlog

from common.children.helpers import tell
from env_service import work

END_S = 0.4
"""Time in which a call that has been killed is gone: milliseconds on a machine that is not overloaded."""

RunEnding = Literal["ok", "raised", "output", "result", "timeout", "crashed"]


@dataclass(frozen=True, slots=True)
class Stopped:
    """The reason why the sandbox had a call end."""

    ending: RunEnding
    reason: str


class CallProcess:
    """A call's supervisor."""

    def __init__(self, process: asyncio.subprocess.Process, result_bytes: int, output_bytes: int) -> None:
        self._process = process
        self._result_bytes, self._output_bytes = result_bytes, output_bytes
        self.result, self.output = bytearray(), bytearray()
        """The bytes that it wrote, up to their limits."""
        self.stopped: Stopped | None = None

    @property
    def status(self) -> int | None:
        return self._process.returncode

    def stop(self, ending: RunEnding, reason: str) -> None:
        """Has the supervisor kill the call. The first reason counts, also where the call has just ended by itself."""
        if self.stopped is None:
            self.stopped = Stopped(ending, reason)
            tell(self._process, signal.SIGTERM)

    async def converse(self, content: bytes, allowance: work.Allowance) -> None:
        """Gives it what it reads, and collects what it writes, up to its end or that of the allowance."""
        process, result, output = self._process, self._result_bytes, self._output_bytes
        assert process.stdout and process.stderr
        try:
            async with work.time_limit(allowance.left_s):
                await asyncio.gather(
                    self._give(content),
                    self._read(process.stdout, self.result, result, "result", f"returned more than {result} bytes"),
                    self._read(process.stderr, self.output, output, "output", f"printed more than {output} bytes"),
                )
                await process.wait()
        except TimeoutError:
            self.stop("timeout", f"took longer than {allowance.seconds:g} seconds")

    async def end(self) -> None:
        """Has the supervisor kill what is left of the call. A supervisor that takes too long is killed; the kernel then kills the call."""
        tell(self._process, signal.SIGTERM)
        await self._has_ended()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        if not await self._has_ended():
            structlog.get_logger().error("sandboxed_call_does_not_end", pid=self._process.pid)

    async def _give(self, content: bytes) -> None:
        assert self._process.stdin
        with contextlib.suppress(ConnectionError):  # it died before it read all: its end says why
            self._process.stdin.write(content)
            await self._process.stdin.drain()
        self._process.stdin.close()

    async def _read(
        self, stream: asyncio.StreamReader, into: bytearray, limit: int, ending: RunEnding, reason: str
    ) -> None:
        """Reads to the end. Has the call stopped if it writes more than `limit` bytes; what follows is forgotten, but read, for a
        process counts as ended only when its streams are empty."""
        while chunk := await stream.read(16384):
            work.beat()
            if len(into) + len(chunk) > limit:
                self.stop(ending, reason)
            into += chunk[: limit - len(into)]

    async def _has_ended(self) -> bool:
        """Waits, but not for long, until the process has ended and nobody can write to its streams."""
        try:
            async with asyncio.timeout(END_S):
                for stream in filter(None, (self._process.stdout, self._process.stderr)):
                    while await stream.read(65536):
                        pass
                await self._process.wait()
        except TimeoutError:
            return False
        return True
