r"""Would a text take long to compute? `9^{9^{9^9}}` and `100000000!` would, whatever they are compared with.

Only what is made of plain numbers is looked at; a text with a variable in an exponent makes no number.
"""

import math
import re
from itertools import accumulate

MAX_DIGITS = 20_000
"""Digits of a power or a factorial that is worth computing."""
LOOKED_AT = 200
"""Characters behind the sign of a power."""
_TOO_LARGE = 10.0**9

MAX_DEPTH = 30
"""Depth of groups within each other: the parser's time grows with the square."""
_COUNTS = re.compile(r"\\(?:binom|tbinom|dbinom|choose|sum|prod)(?![A-Za-z])")
_LARGE = re.compile(r"\d{5}")
_POWER = re.compile(r"\^\s*+")
_BASE = re.compile(r"(\d++)[)}\s]*+$|[)}\]]\s*+$")
_FACTORIAL = re.compile(r"(?:(\d++)|(?P<group>[)}]))\s*+(?P<signs>!(?:\s*+!)*+)(?!\s*=)")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_VARIABLE = re.compile(r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])")
_OPEN, _CLOSE = "({[", ")}]"


def is_huge(text: str) -> bool:
    """True if the text has a power or a factorial of more than MAX_DIGITS digits, counts to a large number, or is nested deeply."""
    text = text.replace("**", "^")
    return (
        _depth(text) > MAX_DEPTH
        or bool(_COUNTS.search(text) and _LARGE.search(text))
        or any(_huge_factorial(text, found) for found in _FACTORIAL.finditer(text))
        or any(_huge_power(text, found) for found in _POWER.finditer(text))
    )


def _depth(text: str) -> int:
    """The most groups that are open at one place."""
    depths = accumulate((sign in _OPEN) - (sign in _CLOSE) for sign in text)
    return max(depths, default=0)


def _huge_factorial(text: str, found: re.Match[str]) -> bool:
    number = (
        float(found[1][:12])
        if found[1]
        else _most(text[max(0, _other_end(text, found.start(), -1)) : found.start() + 1])
    )
    if (more := found["signs"].count("!") - 1) > 0:
        return number > (7 if more == 1 else 3)
    return number * math.log10(max(number, 2)) > MAX_DIGITS


def _huge_power(text: str, found: re.Match[str]) -> bool:
    exponent, base = _exponent(text, found.end()), _BASE.search(text, max(0, found.start() - 100), found.start())
    if base is None or _VARIABLE.search(exponent):
        return False
    num_digits = len(base[1]) if base[1] else max(map(len, _NUMBER.findall(text[: found.start()])), default=1)
    return _most(exponent) * num_digits > MAX_DIGITS


def _exponent(text: str, start: int) -> str:
    """The exponent behind a sign of a power, with the powers and factorials that follow it directly."""
    end, stop = start, min(len(text), start + LOOKED_AT)
    while end < stop:
        if text[end] in _OPEN:
            end = _other_end(text, end, 1) + 1
        elif text[end].isdigit() or text[end] in ".-+!^":
            end += 1
        else:
            break
    return text[start:end]


def _other_end(text: str, at: int, step: int) -> int:
    """End of the group that begins at a place, or, with a step of -1, beginning of the one that ends there."""
    depth = 0
    while 0 <= at < len(text):
        depth += (text[at] in _OPEN) - (text[at] in _CLOSE)
        if depth == 0:
            break
        at += step
    return at


def _most(text: str) -> float:
    """A bound on the size of an expression of numbers."""
    if "!" in text and (found := max((float(n[:12]) for n in _NUMBER.findall(text)), default=0)) > 3:
        return _TOO_LARGE if found > 9 else math.factorial(int(found)) * _most(text.replace("!", ""))
    head, sign, rest = text.partition("^")
    size = math.prod(max(1.0, float(n[:12])) for n in _NUMBER.findall(head)[:40])
    if not sign or size <= 1:
        return min(size, _TOO_LARGE)
    return _TOO_LARGE if _most(rest) * math.log10(size) > 9 else size ** _most(rest)
