"""The `math` grader: are two final answers mathematically equal?

`answers` finds them and compares what is plain. Everything else goes to math-verify, which parses with sympy: it can take
forever, and guards itself with signals that work in a main thread only. So it runs in a helper process.
"""

import functools
from typing import Any

from common.errors import InvalidInput
from env_service.graders.answers import FinalAnswer, comparable, expected_answer, final_answer, quick


def plainly_equal(text: str, reference: str, *, fallback: bool = True) -> bool | None:
    """True or False if the final answers of two texts are plainly equal or not, None if math-verify must look.

    Raises InvalidInput if the reference has no answer."""
    return quick(*_answers(text, reference, fallback))


def equal(text: str, reference: str, *, fallback: bool = True) -> bool:
    """The same, and math-verify looks where it must. For a helper process."""
    answer, expected = _answers(text, reference, fallback)
    found = quick(answer, expected)
    return found if found is not None else _verified(comparable(answer, expected), expected)


def _answers(text: str, reference: str, fallback: bool) -> tuple[FinalAnswer, str]:
    if not (expected := expected_answer(reference)):
        raise InvalidInput("the reference is empty")
    return final_answer(text, expected, fallback=fallback), expected


def _verified(answer: str, expected: str) -> bool:
    library = _library()
    ours, theirs = (library.parse(f"${text.strip(' $')}$", parsing_timeout=None) for text in (answer, expected))
    return library.verify(theirs, ours, timeout_seconds=None)


@functools.cache
def _library() -> Any:
    # imported here: only the helper needs sympy
    import math_verify as untyped  # pyright: ignore[reportMissingTypeStubs]

    return untyped
