"""Reads what tenants send: little of it here, much of it in helper processes, so that no text stops the event loop.

Helpers.do(tenant, task, size) ─┬─ small ─► here
                                └─ large ─► a place, fair between tenants ─► a helper process, with a time limit
"""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from common.errors import InvalidInput, Unavailable
from common.places import KEPT
from common.text.tokens import ChatTokenizer
from manager_service.api.places import SharedPlaces
from manager_service.api.reading.process import LENGTH_BYTES
from manager_service.api.reading.tasks import Done, Refused, Task, do
from manager_service.records import TenantRecord

NUM_HELPERS = 2
SMALL_BYTES = 32 << 10
"""What is smaller is read here: the slowest of it takes 20 ms."""
SLICE_BYTES = 1 << 20
"""Files are read in parts of this size, so that several tenants' take turns."""
TASK_S = 120.0
"""The longest time of one task in a helper."""
WAIT_S = 600.0
"""The longest wait for a helper."""


class Helpers:
    """A few processes for the texts of all tenants. They start when they are first needed. `close` when done."""

    def __init__(self, folders: Mapping[str, Path], tokenizers: Mapping[str, ChatTokenizer]) -> None:
        """`folders`, `tokenizers`: of the base models."""
        self._tokenizers = tokenizers
        self._idle = [Helper(folders) for _ in range(NUM_HELPERS + KEPT)]
        self._all = list(self._idle)
        self._places = SharedPlaces("helpers that read large texts", lambda: NUM_HELPERS)

    async def do(self, tenant: TenantRecord, task: Task, *, num_bytes: int) -> Any:
        """The answer to a task about a text of this size. Raises InvalidInput, also if it takes too long."""
        if num_bytes <= SMALL_BYTES:
            return await asyncio.to_thread(do, task, self._tokenizers)
        async with self._places.one(tenant, WAIT_S):
            helper = self._idle.pop()
            try:
                return await helper.ask(task)
            finally:
                self._idle.append(helper)

    async def close(self) -> None:
        for helper in self._all:
            await helper.close()


class Helper:
    """One process, started again after it died or was too slow."""

    def __init__(self, folders: Mapping[str, Path]) -> None:
        self._folders = folders
        self._process: asyncio.subprocess.Process | None = None

    async def ask(self, task: Task) -> Any:
        """Raises InvalidInput if the task refuses its input or takes too long, Unavailable if the process dies."""
        try:
            async with asyncio.timeout(TASK_S):
                answer = await self._exchange(await self._started(), task)
        except (TimeoutError, OSError, EOFError, asyncio.CancelledError) as error:
            await self.close()
            if isinstance(error, TimeoutError):
                raise InvalidInput(f"reading this took longer than {TASK_S:g} seconds: send less at once") from error
            if isinstance(error, asyncio.CancelledError):
                raise
            raise Unavailable("the helper that read this died; try again") from error
        if isinstance(answer, Refused):
            raise InvalidInput(answer.message, param=answer.param, code=answer.code)
        return answer.value

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.communicate()

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "manager_service.api.reading.process",
                json.dumps({name: str(folder) for name, folder in self._folders.items()}),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TOKENIZERS_PARALLELISM": "false"},
            )  # fmt: skip
        return self._process

    async def _exchange(self, process: asyncio.subprocess.Process, task: Task) -> Done | Refused:
        assert process.stdin and process.stdout
        encoded = await asyncio.to_thread(msgspec.msgpack.encode, task)
        process.stdin.write(len(encoded).to_bytes(LENGTH_BYTES) + encoded)
        await process.stdin.drain()
        length = int.from_bytes(await process.stdout.readexactly(LENGTH_BYTES))
        return msgspec.msgpack.decode(await process.stdout.readexactly(length), type=Done | Refused)
