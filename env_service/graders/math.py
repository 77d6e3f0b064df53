r"""The `math` grader: are two final answers mathematically equal?

The final answer is what follows the last `####`, or stands in the last `\boxed{}`, or is the last number or expression.
Two plain numbers are compared here, exactly. Everything else goes to math-verify, in a helper process: it parses with
sympy, which can take forever, and guards itself with signals that work in a main thread only.

As a program (`python -m env_service.graders.math`) this file is the helper.
"""

import re
from fractions import Fraction
from typing import Any

from env_service.failures import GraderFailed
from env_service.graders.helper import HelperPool, serve

MAX_ANSWER_CHARACTERS = 1000
"""A longer final answer counts as wrong."""

_NUMBER = r"(?:(?<![\w.)])[-+])?[$€£]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,3})?(?:\s*/\s*\d[\d,]*)?\s*%?"
_ONLY_NUMBER = re.compile(_NUMBER)
_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|mathrm|mbox)\{([^{}]*)\}")
_THOUSANDS = re.compile(r"\d{1,3}(,\d{3})+(?!\d)")
_EXPRESSION = re.compile(r"(?:[\d\s+\-*/^().,={}\\]|(?<![A-Za-z])[A-Za-z](?![A-Za-z])|sqrt|pi|frac|log|sin|cos|exp)+")


def final_answer(text: str) -> str:
    """The part of a text that is its answer; the whole last line if there is no number in it."""
    if "####" in text:
        return text.rpartition("####")[2].strip().split("\n")[0].strip()
    if (boxed := _last_boxed(text)) is not None:
        return _TEXT_COMMAND.sub(r"\1", boxed).strip()
    lines = [line.strip() for line in text.strip().split("\n") if line.strip()]
    last = lines[-1].rstrip(".") if lines else ""
    if math := re.findall(r"\$([^$]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", text, re.DOTALL):
        return next(part for part in math[-1] if part).strip()
    if _EXPRESSION.fullmatch(last):
        return last.rpartition("=")[2].strip()
    numbers = _ONLY_NUMBER.findall(text)
    return numbers[-1].strip() if numbers else last


def number(answer: str) -> Fraction | None:
    """A plain number: `1,234`, `-0.5`, `3/4`, `$18`, `50%` (as 50), `18.`; None for anything else."""
    text = answer.strip().strip("$").replace("\\$", "").replace("\\%", "%").replace("\\!", "").rstrip(". ").strip()
    if len(text) > 100 or not _ONLY_NUMBER.fullmatch(text):
        return None
    text = re.sub(r"[\s$€£%]", "", text)
    if "," in text and not all(_THOUSANDS.fullmatch(part) for part in re.findall(r"\d[\d,]*,[\d,]*", text)):
        return None
    top, _, bottom = text.replace(",", "").partition("/")
    if bottom and not int(bottom):
        return None
    return Fraction(top) / (int(bottom) if bottom else 1)


def quick(answer: str, reference: str) -> bool | None:
    """True if two final answers are plainly equal, False if they plainly are not, None if math-verify must look."""
    if not answer or len(answer) > MAX_ANSWER_CHARACTERS:
        return False
    if _squeezed(answer) == _squeezed(reference):
        return True
    ours, theirs = number(answer), number(reference)
    if ours is not None and theirs is not None:
        return ours == theirs or _rounded_alike(answer, ours, theirs)
    words = r"\s*[A-Za-z][A-Za-z \-']{2,}\s*"
    if re.fullmatch(words, reference) or re.fullmatch(words, answer):
        return False
    return None


def _rounded_alike(answer: str, ours: Fraction, theirs: Fraction) -> bool:
    """A decimal answer with at least six places may be rounded: 0.333333 is 1/3."""
    places = len(answer.partition(".")[2].rstrip("% "))
    return places >= 6 and abs(ours - theirs) <= Fraction(1, 10**6)


def _squeezed(text: str) -> str:
    return re.sub(r"\s+", "", text).casefold()


def _last_boxed(text: str) -> str | None:
    r"""The inside of the last `\boxed{...}` whose braces match."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for i in range(start + 6, len(text)):
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return text[start + 7 : i]
    return None


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
