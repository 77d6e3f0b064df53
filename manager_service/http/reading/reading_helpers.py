"""Reads what tenants send: little of it here, much of it in helper processes, so that no text stops the event loop.

Helpers.do(tenant, task, size) ─┬─ small ─► here
                                └─ large ─► a place, fair between tenants ─► a helper process, with a time limit
"""

import asyncio
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from common.children.helpers import HelperOverran, HelperPool
from common.errors import InvalidInput, Unavailable
from common.sharing.places import SharedThreads
from common.tasks.environments import BUILT_IN
from common.text.tokens import ChatTokenizer
from manager_service.http.reading.process import IMPORTS, TASK_S
from manager_service.http.reading.tasks import CheckGrader, CheckMethod, Constrain, Task, do
from manager_service.http.sampling.places import SharedPlaces
from manager_service.records.tenants import TenantRecord

T = TypeVar("T")

HELPER = "manager_service.http.reading.process"
"""The program of the helpers."""
NUM_HELPERS = 2
SMALL_BYTES = 4 << 10
"""Smaller inputs are read here, whichever tenant sent them: the slowest takes 3 ms."""
TINY_BYTES = 1 << 10
"""These are read without a thread, which would often take longer to wake: the slowest takes 2 ms."""
SLICE_BYTES = 1 << 20
"""Files are read in parts of this size, so that several tenants' take turns."""
PATIENCE_S, IMPORT_S = 300.0, 120.0
"""The longest wait for an answer of a helper, whose tasks TASK_S bounds, and of one that may import an operator's package."""
WAIT_S = 600.0
"""The longest wait for a helper."""


class Helpers:
    """A few processes for the texts of all tenants. They start when they are first needed. `close` when done."""

    def __init__(self, folders: Mapping[str, Path], tokenizers: Mapping[str, ChatTokenizer]) -> None:
        """`folders`, `tokenizers`: of the base models."""
        self._tokenizers = tokenizers
        argument = json.dumps({name: (str(folder), tokenizers[name].context) for name, folder in folders.items()})
        variables = {"TOKENIZERS_PARALLELISM": "false"}
        self._pool = HelperPool(HELPER, argument, variables=variables)
        self._importing = HelperPool(HELPER, argument, IMPORTS, variables=variables)
        self._threads = SharedThreads()
        self._places = SharedPlaces("helpers that read large texts", lambda: NUM_HELPERS)

    async def close(self) -> None:
        await self._pool.close()
        await self._importing.close()

    async def do(self, tenant: TenantRecord, task: Task, *, num_bytes: int) -> Any:
        """The answer to a task about so many bytes. Raises InvalidInput, also if it takes too long; Unavailable if the helper
        dies, or a busy machine has no time for it."""
        is_slow = isinstance(task, Constrain) or _compiles(task)  # however small it is
        if num_bytes <= TINY_BYTES and not is_slow and not _may_import(task):
            return do(task, self._tokenizers)
        if num_bytes <= SMALL_BYTES and not is_slow:
            return await self.beside(tenant, partial(do, task, self._tokenizers))
        async with self._places.one(tenant, WAIT_S):
            encoded = await self.beside(tenant, partial(msgspec.msgpack.encode, task))
            imports = _may_import(task)
            return await (
                _ask(self._importing, encoded, IMPORT_S) if imports else _ask(self._pool, encoded, PATIENCE_S)
            )

    async def beside(self, tenant: TenantRecord, function: Callable[[], T]) -> T:
        """Calls a function of ours in a thread, once it is the tenant's turn: it would stop the event loop for a moment."""
        return await self._threads.run(function, tenant.id, tenant.weight)


async def _ask(pool: HelperPool, encoded: bytes, limit_s: float) -> Any:
    try:
        async with pool.helper() as helper, asyncio.timeout(limit_s):
            return await helper.ask(encoded)
    except HelperOverran as error:
        raise InvalidInput(
            f"reading this took more than {TASK_S:g} seconds of a processor: send less at once"
        ) from error
    except TimeoutError as error:
        raise Unavailable(
            f"reading this took longer than {limit_s:g} seconds: try again, or send less at once"
        ) from error
    except OSError as error:
        raise Unavailable("the helper that read this died; try again") from error


def _compiles(task: Task) -> bool:
    """May a task compile Python? Each `finally` within another doubles its code: a kilobyte can take hours, and all memory."""
    return isinstance(task, CheckGrader | CheckMethod) and b"source" in msgspec.msgpack.encode(task)


def _may_import(task: Task) -> bool:
    """May a task import an environment's package, however long that takes?"""
    return isinstance(task, CheckMethod) and task.environment not in BUILT_IN
