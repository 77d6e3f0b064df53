"""The numbers of sentences, those that their equations come to, and what follows from two of them."""

import functools
import re
from fractions import Fraction
from itertools import permutations

from env_service.graders.answers.values.numbers import NUMBER, quantity

RECENT = 256
"""Sentences whose reading is remembered: each of a text's is looked at many times."""
MAX_OPERANDS = 20
"""Numbers whose sums, differences, products and quotients are looked at."""

_EQUALS = re.compile(rf"=\s*(?:{NUMBER.pattern})(?!\s*(?:[-+*/×·÷=(^]|(?:r|rem\w*|with)\b))", re.IGNORECASE)
_UNKNOWN_SIDE = re.compile(
    r"[^=]*(?<![A-Za-z])[a-z] ?[-+*/×·][^=]*=|[^=]*[-+*/×·] ?\d*[a-z](?![A-Za-z])[^=]*=|[^=]*\d[a-z] ?="
)
"""The left side of an equation with an unknown that is not alone there."""


@functools.lru_cache(maxsize=RECENT)
def equated(sentence: str) -> tuple[Fraction, ...]:
    """The values that the equations of a sentence come to."""
    return tuple(known.value for number in _EQUALS.finditer(sentence) if (known := quantity(number)))


def calculated(sentences: list[str]) -> set[Fraction]:
    """The values of equations without an unknown on their left sides."""
    sides = (part for s in sentences for part in re.split(r"[,;:.]\s|[→⇒]", s) if not _UNKNOWN_SIDE.match(part))
    return {value for part in sides for value in equated(part)}


@functools.lru_cache(maxsize=RECENT)
def values(sentence: str) -> tuple[Fraction, ...]:
    return tuple(known.value for number in NUMBER.finditer(sentence) if (known := quantity(number)))


def numbers(sentences: list[str]) -> set[Fraction]:
    return {value for s in sentences for value in values(s.replace("/", " ÷ "))}


def combines(one: Fraction, other: Fraction, result: Fraction) -> bool:
    quotients = (one / other if other else None, other / one if one else None)
    return result in (one + other, one - other, other - one, one * other, *quotients)


def computes(result: Fraction, operands: list[Fraction]) -> bool:
    """True if two of the operands have this sum, difference, product or quotient."""
    return any(result in (a + b, a - b, a * b, b and a / b) for a, b in permutations(operands[:MAX_OPERANDS], 2))
