r"""Numbers as they stand alone, with their unit: `18`, `4.4 \\cdot 10^{4}`, `0.\\overline{3}`, `12 km`, `1 hour 20 minutes`."""

import re
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

from env_service.graders.answers.values.foreign_numbers import foreign_number
from env_service.graders.answers.values.numbers import NUMBER, Quantity, quantity, spelled_small
from env_service.graders.answers.values.units import UNIT, measure

SAME_AMOUNT = " ≡ "
"""Stands between one amount in two units: `90 minutes ≡ 1.5 hours`."""

_SCIENTIFIC = re.compile(
    r"(-?\d+(?:\.\d+)?)\s*(?:\\cdot|\\times|×|·|\*|x)\s*10\s*(?:\^|\*\*)\s*\{?\s*\(?([-+]?\d{1,3})\)?\s*\}?"
)
_MEASURED = re.compile(
    rf"(?P<number>(?:[^A-Za-z]|x(?= ?10)){{1,40}})(?P<unit>{UNIT})(?:,?\s*(?:and\s+)?(?P<number2>\d+(?:\.\d+)?)\s*(?P<unit2>{UNIT}))?",
    re.IGNORECASE,
)
_REPEATING = re.compile(r"(?P<sign>-)?(?P<whole>\d+)\.(?P<fixed>\d*)\\overline\s*\{?(?P<again>\d+)\}?")
_AMOUNT = re.compile(
    rf"(?:{NUMBER.pattern})\s?(?:{UNIT})(?![A-Za-z])(?:,?\s(?:and\s)?\d+(?:\.\d+)?\s?(?:{UNIT})(?![A-Za-z]))?",
    re.IGNORECASE,
)
_OR = re.compile(r"(?: [a-z]+){0,2}(?:,? (?:or|which is|i\.e\.,?|that is,?)(?: after| in)?|\s?\()\s?", re.IGNORECASE)
_APPROXIMATE = re.compile(r"(?:≈|\\approx(?![a-z]))\s*(-?\d+\.\d+)(?![\d.]*\d)")
_ROUNDED = re.compile(
    r"(?P<exact>-?\d+/\d+)⟧?[,(]{0,2} ?\(?(?:(?:or|which is|that is|i\.e\.),? )?"
    r"(?:≈|\\approx(?![a-z])|\b(?:approximately|about|roughly|around)\b"
    r"|(?P<vaguely>\b(?:a (?:little|bit)|just|slightly|somewhat|well)? ?(?:under|over|less than|more than|nearly|almost)\b)) ?⟦?"
    r"(?P<rounded>-?\d+(?:\.\d+)?%?)"
)
"""A fraction, and its rounded value."""
_LOSS = re.compile(
    r"(?P<gain>-[＄€£]?(?P<size>\d[\d.,]*\d|\d))(?: [a-z]+)?,? \(?(?:i\.e\.,?|or|which (?:is|means)|meaning|that is,?)"
    r" [^\d.]*\b(?:loss|lost|owes?|debt|deficit|below|decrease|drop)\b[^\d.]*(?P=size)(?![\d.,]*\d)",
    re.IGNORECASE,
)


_WHOLE = re.compile(r"\bof (?:[a-z]+ )?$", re.IGNORECASE)
_SHARE = re.compile(
    r"(?P<amount>(?<![\d.,/])(?<!in )(?<!of )\d[\d,]*)(?: (?!of\b|out\b)[a-z]+){0,3}, (?:i\.e\.,?|that is,?|or"
    r"|which is) (?P<share>\d+/\d+|\d[\d.]*%)(?=\W*$| of )"
)
"""An amount, and what share of a whole it is."""


def number(text: str) -> Quantity | None:
    """A plain number, with `4.4 \\cdot 10^{4}` and `- 3`; None for anything else."""
    text = re.sub(r"^-\s+", "-", text.strip().rstrip(". "))
    if len(text) > 100:
        return None
    if repeating := _REPEATING.fullmatch(text):
        return Quantity(_repeating(repeating))
    if power := _SCIENTIFIC.fullmatch(text):
        return Quantity(Fraction(power[1]) * Fraction(10) ** int(power[2]))
    if text.startswith("(") and text.endswith(")"):
        text = text[1:-1]
    if (named := foreign_number(text)) is not None:
        return Quantity(Fraction(named))
    forms = (text.removesuffix("＄"), text, spelled_small(text))
    if (match := next(filter(None, map(NUMBER.fullmatch, forms)), None)) is not None:
        return quantity(match)
    measured = _MEASURED.fullmatch(text)
    return _measured(measured) if measured else None


def _measured(found: re.Match[str]) -> Quantity | None:
    """A number with a unit, or with two: `1 hour 20 minutes`."""
    ours, further = number(found["number"]), found["number2"]
    if ours is None or not further:
        return ours and replace(ours, unit=found["unit"].casefold())
    (kind, size), (other, part) = measure(found["unit"]), measure(found["unit2"])
    if kind != other or size < part:
        return None
    return Quantity((ours.value * size + Fraction(further) * part) / part, unit=found["unit2"].casefold())


def _repeating(found: re.Match[str]) -> Fraction:
    places = len(found["fixed"])
    fixed = Fraction(int(found["whole"] + found["fixed"]), 10**places)
    value = fixed + Fraction(int(found["again"]), (10 ** len(found["again"]) - 1) * 10**places)
    return -value if found["sign"] else value


def in_each_form(found: str, sentence: str) -> str:
    """An amount, and the same in another form if a sentence states both: `90 minutes, or 1.5 hours`, `-$40, a loss of $40`."""
    ours = number(found)
    if ours and (loss := _LOSS.search(sentence)) and number(loss["size"]) == Quantity(abs(ours.value)):
        return f"{loss['gain']}{SAME_AMOUNT}{loss['size']}"
    if ours is None and (approximate := _APPROXIMATE.search(sentence)):
        exact = sentence[: approximate.start()].rstrip(" ⟧").endswith(found)
        return f"{found}{SAME_AMOUNT}{approximate[1]}" if exact else found
    if ours and (both := _ROUNDED.search(sentence)) and found in (both["exact"], both["rounded"]) and _is_near(both):
        return both["exact"] if both["vaguely"] else f"{both['exact']}{SAME_AMOUNT}{both['rounded']}"
    share = _SHARE.search(sentence)
    if ours and share and not _WHOLE.search(sentence[: share.start()]) and found in (share["amount"], share["share"]):
        return f"{share['amount']}{SAME_AMOUNT}{share['share']}"
    if ours is None or not ours.unit:
        return found
    for one, other in pairwise(_AMOUNT.finditer(sentence)):
        amounts = number(one[0]), number(other[0])
        if (
            ours in amounts
            and _OR.fullmatch(sentence[one.end() : other.start()])
            and _size(amounts[0]) == _size(amounts[1])
        ):
            return f"{one[0]}{SAME_AMOUNT}{other[0]}"
    return found


def _is_near(both: re.Match[str]) -> bool:
    exact, rounded = number(both["exact"]), number(both["rounded"])
    if exact is None or rounded is None:
        return False
    return abs(exact.value - rounded.value / (100 if rounded.percent else 1)) < Fraction(1, 50)


def _size(one: Quantity | None) -> tuple[str, Fraction] | None:
    if one is None or not one.unit:
        return None
    kind, size = measure(one.unit)
    return kind, one.value * size
