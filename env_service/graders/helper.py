"""Helper processes of graders that may take long, or forever. See `common.helpers`."""

import contextlib
import os
from collections.abc import Callable

from common import helpers
from common.helpers import Helper, HelperKilled
from common.places import Places
from env_service import work
from env_service.failures import GraderFailed

START_S = 30.0
"""Time to import the libraries of a helper on a busy machine."""
MEMORY_BYTES = 512 * 1024**2
MAX_HELPERS = 5
"""Helpers that may be killed over one question, idle ones among them."""


class GraderHelpers:
    """Asks one helper at a time, or two where two tenants ask: see `Places`. Safe to use from many tasks; `close` when done."""

    def __init__(self, name: str, module: str, *, first: bytes) -> None:
        """`name`: of the grader, for errors. `module`: the program, which calls `serve`. `first`: a question that each new
        process answers before it is of use."""
        self._name = name
        self._first = first
        self._places = Places(lambda: 1)
        self._pool = helpers.HelperPool(module, variables={"OPENBLAS_NUM_THREADS": "1"})
        self.close = self._pool.close

    async def ask(self, question: bytes, allowance: work.Allowance) -> bytes:
        """Its time begins when it is this question's turn. Where others kill its helper, as the kernel does when the machine's memory
        runs out, another is asked. Raises GraderFailed if it takes too long or too much memory."""
        async with work.place(self._places):
            for _ in range(MAX_HELPERS):
                with contextlib.suppress(HelperKilled):
                    return await self._tried(question, allowance)
        raise GraderFailed(f"{self._name}: the process that compares the texts was killed {MAX_HELPERS} times")

    async def _tried(self, question: bytes, allowance: work.Allowance) -> bytes:
        try:
            return await self._ask_one(question, allowance)
        except HelperKilled:
            raise
        except (TimeoutError, ConnectionError) as error:
            timed_out = isinstance(error, TimeoutError)
            reason = f"longer than {allowance.seconds:g} seconds" if timed_out else "too much memory"
            raise GraderFailed(f"{self._name}: comparing the texts took {reason}") from error

    async def _ask_one(self, question: bytes, allowance: work.Allowance) -> bytes:
        helper = self._pool.idle() or await self._ready()
        with work.charged(), allowance.spending():
            return await self._ask(helper, question, allowance.left_s)

    async def _ready(self) -> Helper:
        """A new helper that has answered the first question."""
        helper = await self._pool.start()
        async with work.time_limit(START_S):
            await helper.ask(self._first)
        return helper

    async def _ask(self, helper: Helper, question: bytes, timeout_s: float) -> bytes:
        async with work.time_limit(timeout_s):
            answer = await helper.ask(question)
        self._pool.give_back(helper)
        return answer


def serve(answer: Callable[[bytes], bytes]) -> None:
    """Runs a helper, which calls `answer` with each question. Nothing shows what its libraries print."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    helpers.serve(answer, memory_bytes=MEMORY_BYTES)
