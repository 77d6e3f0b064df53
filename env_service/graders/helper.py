"""Helper processes of graders that may take forever: arguments and answers are JSON. See `common.helpers`."""

import contextlib
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

from common import helpers
from common.helpers import Helper
from common.places import Places
from env_service import work
from env_service.failures import GraderFailed

START_S = 30.0
"""Time to import the libraries of a helper on a busy machine."""
MEMORY_BYTES = 512 * 1024**2


class HelperPool:
    """Asks one helper at a time, or two where two tenants ask: see `Places`. Safe to use from many tasks; `close` when done."""

    def __init__(self, name: str, module: str, *, first: Sequence[Any]) -> None:
        """`name`: of the grader, for errors. `module`: the program, which calls `serve`. `first`: the arguments of a question
        that each new process answers before it is of use."""
        self._name = name
        self._first = first
        self._places = Places(lambda: 1)
        self._pool = helpers.HelperPool(module, variables={"OPENBLAS_NUM_THREADS": "1"})
        self.close = self._pool.close

    async def ask(self, *arguments: Any, timeout_s: float) -> Any:
        """The limit begins when it is this question's turn. Raises GraderFailed if it takes too long or too much memory."""
        async with work.place(self._places):
            try:
                with contextlib.suppress(
                    ConnectionError
                ):  # it was killed, or it took too much memory, as the next will
                    return await self._ask_one(arguments, timeout_s)
                return await self._ask_one(arguments, timeout_s)
            except (TimeoutError, ConnectionError) as error:
                reason = f"longer than {timeout_s:g} seconds" if isinstance(error, TimeoutError) else "too much memory"
                raise GraderFailed(f"{self._name}: comparing the texts took {reason}") from error

    async def _ask_one(self, arguments: Sequence[Any], timeout_s: float) -> Any:
        helper = self._pool.idle() or await self._ready()
        with work.charged():
            return await self._ask(helper, arguments, timeout_s)

    async def _ready(self) -> Helper:
        """A new helper that has answered the first question."""
        helper = await self._pool.start()
        async with work.time_limit(START_S):
            await helper.ask(json.dumps(self._first).encode())
        return helper

    async def _ask(self, helper: Helper, arguments: Sequence[Any], timeout_s: float) -> Any:
        async with work.time_limit(timeout_s):
            answer = await helper.ask(json.dumps(arguments).encode())
        self._pool.give_back(helper)
        return json.loads(answer)


def serve(answer: Callable[..., Any]) -> None:
    """Runs a helper, which calls `answer` with the arguments of each question. Nothing shows what its libraries print."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    helpers.serve(lambda question: json.dumps(answer(*json.loads(question))).encode(), memory_bytes=MEMORY_BYTES)
