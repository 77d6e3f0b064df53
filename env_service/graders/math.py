"""The `math` grader: are two final answers mathematically equal?

`answers` finds them and compares what is plain. Everything else goes to math-verify, in a helper process: it parses with
sympy, which can take forever, and guards itself with signals that work in a main thread only.

As a program (`python -m env_service.graders.math`) this file is the helper.
"""

from typing import Any

from env_service.failures import GraderFailed
from env_service.graders.answers.equality import quick
from env_service.graders.answers.final import final_answer
from env_service.graders.helper import HelperPool, serve


class MathChecker:
    """Compares answers. Safe to use from many tasks; `close` ends the helpers."""

    def __init__(self) -> None:
        self._helpers = HelperPool("math", "env_service.graders.math", first=("1", "1"))
        self.close = self._helpers.close

    async def equal(self, text: str, reference: str, *, timeout_s: float) -> bool:
        """True if the final answers of two texts are equal. Raises GraderFailed if it takes too long, or if the
        reference has no answer."""
        expected = final_answer(reference)
        if not expected:
            raise GraderFailed("math: the reference is empty")
        answer = final_answer(text)
        found = quick(answer, expected)
        return found if found is not None else await self._helpers.ask(answer, expected, timeout_s=timeout_s)


def _main() -> None:
    # imported here: only the helper needs sympy
    import math_verify as untyped  # pyright: ignore[reportMissingTypeStubs]

    library: Any = untyped

    def read(text: str) -> Any:
        return library.parse(f"${text.strip('$')}$", parsing_timeout=None)

    def verified(answer: str, reference: str) -> bool:
        return bool(library.verify(read(reference), read(answer), timeout_seconds=None))

    serve(verified)


if __name__ == "__main__":
    _main()
