"""Helper processes of graders that may take long, or forever. See `common.children.helpers`."""

from typing import Any

from common.children.helpers import Helper, HelperKilled, HelperPool
from common.sharing.places import Places
from env_service import work
from env_service.failures import GraderFailed

START_S = 30.0
"""Time to import the libraries of a helper on a busy machine."""
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
        self._pool = HelperPool(module, variables={"OPENBLAS_NUM_THREADS": "1"})
        self.close = self._pool.close

    async def ask(self, question: bytes, allowance: work.Allowance) -> Any:
        """Its time begins when it is this question's turn. Where others kill its helper, as the kernel does when the machine's memory
        runs out, another is asked. Raises InvalidInput if it is refused, GraderFailed if it takes too long or too much memory."""
        async with work.place(self._places):
            for _ in range(MAX_HELPERS):
                try:
                    async with self._pool.helper() as helper:
                        return await self._ask(helper, question, allowance)
                except HelperKilled:
                    continue
                except (TimeoutError, ConnectionError) as error:
                    timed_out = isinstance(error, TimeoutError)
                    reason = f"longer than {allowance.seconds:g} seconds" if timed_out else "too much memory"
                    raise GraderFailed(f"{self._name}: comparing the texts took {reason}") from error
        raise GraderFailed(f"{self._name}: the process that compares the texts was killed {MAX_HELPERS} times")

    async def _ask(self, helper: Helper, question: bytes, allowance: work.Allowance) -> Any:
        if helper.is_new:
            async with work.time_limit(START_S):
                await helper.ask(self._first)
        with work.charged(), allowance.spending():
            async with work.time_limit(allowance.left_s):
                return await helper.ask(question)
