"""Threads that tenants share by weight, for what keeps a processor busy for long."""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

from common.sharing.places import KEPT, Places

T = TypeVar("T")


class SharedThreads:
    """A number of threads; tenants take turns, see `Places`. Safe to use from many tasks."""

    def __init__(self, num: int = os.cpu_count() or 1) -> None:
        """`num`: calls at once."""
        self._places = Places(lambda: num)
        self._pool = ThreadPoolExecutor(num + KEPT, "work")

    async def run(
        self, function: Callable[[], T], tenant: str, weight: float, advanced: Callable[[], None] = lambda: None
    ) -> T:
        """Calls the function, in this context, once it is its tenant's turn. Calls `advanced` while it waits: see `Places.one`."""
        async with self._places.one(tenant, weight, advanced):
            return await asyncio.get_running_loop().run_in_executor(self._pool, copy_context().run, function)
