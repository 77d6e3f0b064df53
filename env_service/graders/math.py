"""The `math` grader: are two final answers mathematically equal?

`answers` finds them and compares what is plain. Everything else goes to math-verify, which parses with sympy: it can take
forever, and guards itself with signals that work in a main thread only. So it runs in a helper process.
"""

import functools
import re
from typing import Any

from common.errors import InvalidInput
from env_service.graders.answers.equality import quick
from env_service.graders.answers.final import expected_answer, final_answer
from env_service.graders.answers.plain import MAX_CHARACTERS, comma_is_decimal
from env_service.graders.answers.values.amounts import SAME_AMOUNT

_DECIMAL = re.compile(r"(?<![\d,.(\[{])(\d+),(\d{1,2})(?![\d,)\]}])")
"""A decimal comma in a reference whose text writes them."""
_GROUPED = re.compile(r"(?<![\d,.])(\d{1,3}(?:\.\d{3})+),(\d{1,2})(?![\d,.])")
"""A number of a reference that is written `1.234,50`."""
_POINT = re.compile(r"[＄€£]?-?(\d+)\.(\d{1,2}|(?<=0\.)\d+)(?!\d)")
"""An expected number with a decimal point, no thousands."""


def plainly_equal(text: str, reference: str) -> bool | None:
    """True or False if the final answers of two texts are plainly equal or not, None if math-verify must look.

    Raises InvalidInput if the reference has no answer."""
    return quick(*_answers(text, reference))


def equal(text: str, reference: str) -> bool:
    """The same, and math-verify looks where it must. For a helper process."""
    answer, expected = _answers(text, reference)
    found = quick(answer, expected)
    return found if found is not None else _verified(answer, expected)


def _answers(text: str, reference: str) -> tuple[str, str]:
    if _DECIMAL.search(reference) and comma_is_decimal(text[-MAX_CHARACTERS:]):
        reference = _DECIMAL.sub(r"\1.\2", reference)
    reference = _GROUPED.sub(lambda number: number[1].replace(".", "") + "." + number[2], reference)
    if not (expected := expected_answer(reference)):
        raise InvalidInput("the reference is empty")
    return final_answer(_with_decimal_point(text[-MAX_CHARACTERS:], expected), expected), expected


def _with_decimal_point(text: str, expected: str) -> str:
    """The text with a point in the number that is expected, where it has a decimal comma: no list is written `1,5`."""
    found = _POINT.match(expected)
    if found is None or f"{found[1]},{found[2]}" not in text:
        return text
    zeros = "0?" if len(found[2]) == 1 else ""
    return re.sub(rf"(?<![\d,.(\[{{])({found[1]}),({found[2]}{zeros})(?![\d,)\]}}])", r"\1.\2", text)


def _verified(answer: str, reference: str) -> bool:
    library = _library()
    forms, wanted = answer.split(SAME_AMOUNT), _read(library, reference)
    return any(library.verify(wanted, _read(library, form), timeout_seconds=None) for form in forms)


def _read(library: Any, text: str) -> Any:
    inside = text.strip("$").replace("·", r" \cdot ")
    return library.parse(f"${inside}$", parsing_timeout=None)


@functools.cache
def _library() -> Any:
    # imported here: only the helper needs sympy
    import math_verify as untyped  # pyright: ignore[reportMissingTypeStubs]

    return untyped
