"""Numbers in a sentence that may be its result, and which of them is.

Of several it is the last, or the last in bold, a total, or a list that ends with it; never one of two side by side.
"""

import re
from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise
from math import prod

from env_service.graders.answers import vocabulary as said
from env_service.graders.answers.expressions import value_at
from env_service.graders.answers.values.numbers import NUMBER, quantity
from env_service.graders.answers.values.units import MIXED

Candidate = tuple[int, str]
"""Position and text of what may be a result."""

_ROOT = r"-?[\d.]*\s?\\(?:sqrt|[dt]?frac|pi)(?:\{[^{}]*\}|[\s\d+\-*/^]|\\(?:sqrt|pi))*+"
_POWER = r"\d+(?:\.\d+)?\s?(?:×|\\times|\\cdot|·|\*|x)\s?10\s?\^\s?\{?-?\d+\}?"
_TUPLE = r"[(\[]-?\d[\d.]*(?:, ?-?\d[\d.]*)+[)\]]"
_TWO_UNITS = rf"{MIXED}(?! (?:more|less|[a-z]+er)\b)"
_WHOLE = re.compile(
    rf"(?<![\d:])\d{{1,3}}(?: ?: ?(?:\d{{1,3}}(?:,\d{{3}})+(?!\d)|\d{{1,7}}))+|{_TWO_UNITS}|{_POWER}|{_ROOT}|{_TUPLE}"
)
_RATIO = re.compile(r"(?<![\d:])\d{1,3}(?:(?: ?: ?| to )\d{1,3})+")
_JOINED = re.compile(rf"[\s.…]*,?\s*{said.OR}\s*", re.IGNORECASE)
_BESIDE = re.compile(
    rf"\s+|(?: (?!first\b|once\b|before\b)[a-z]+){{0,3}}[;,] |\s?[-–—]\s?|\s(?:to|minus|plus|times)\s"
    rf"|(?: [a-z]+)?[;,] (?:(?-i:[A-Z])[a-z]+|the (?!total|sum|rest|difference|answer|remain|whole|other)[a-z]+)(?: (?:is|has"
    rf"|gets?))?:? |; [^.=\d]* (?:is|are) |[^,;:.=]*?\s{said.AND}\s(?!(?:[a-z]+ )?now|equals "
    r"|(?:you|we|get|have|obtain|earn(?:s|ed)) |the (?:other"
    rf"|remaining) $|(?:that|which|has an?) |the (?:sum|total|difference|product|answer))[^,;:.=]*",
    re.IGNORECASE,
)
_AND = re.compile(rf"\s*,?\s*(?:{said.AND}|,)\s*", re.IGNORECASE)
_COMMA = re.compile(r"\s*,\s*(?:and\s+)?")
_COMPOUND = re.compile(
    r"\s*(?:hours?|hrs?|h|minutes?|feet|foot|years?|weeks?|days?|dollars?|euros?|pounds?),?\s*(?:and\s*)?",
    re.IGNORECASE,
)
_LEFT = re.compile(r"\b(?:left|remain\w*)\b")
_CLOCK = re.compile(r"\d{1,2}:\d\d\b")
_TIMES = re.compile(r"(?: [a-z]+)?(?: ?[x×*] ?| of )(?:[a-z]+ )?")
_DIVIDED = re.compile(
    r"(?: [a-z]+){0,2} ?(?:[/÷]|divided by|split (?:by|between|among)|(?:between|among|over))(?: the)? "
)
_OPERAND = re.compile(r"[\w)] [×*÷+] [＄€£]?$")
"""Words before a number that is calculated with."""


def has_number(text: str) -> bool:
    return bool(re.search(r"\d", text))


def candidates(sentence: str) -> Iterator[Candidate]:
    """Position and text of each ⟦math⟧ and each number in a sentence."""
    end = 0
    for found in re.finditer(r"⟦([^⟦⟧]+)⟧", sentence):
        yield from _numbers(sentence, end, found.start())
        if re.search(r"^(?!\^).*(?:\d|\\infty|\\pi|\\text)", found[1]):
            yield found.start(), found[0]
        end = found.end()
    yield from _numbers(sentence, end, len(sentence))


def _numbers(sentence: str, start: int, end: int) -> Iterator[Candidate]:
    while start < end:
        found = (_RATIO if re.search(r"ratio|odds|\bgives \d+ to \d+\W*$", sentence) else _WHOLE).search(
            sentence, start, end
        )
        stop = found.start() if found else end
        yield from ((n.start(), n[0]) for n in NUMBER.finditer(sentence, start, stop))
        if found:
            yield found.start(), found[0]
        start = found.end() if found else end


def free_candidates(sentence: str) -> list[Candidate]:
    """The candidates that are no circumstance; of circumstances alone the first, or what says when or where."""
    found = [c for c in candidates(sentence) if not said.REFUSED.search(_before(sentence, c[0]))]
    found = [c for c in found if not sentence.endswith(("_", "_{"), 0, c[0])]
    free = [c for c in found if not said.GOVERNED.search(_before(sentence, c[0]))]
    terms = [c for c in found if said.TERM.search(_before(sentence, c[0]))]
    return _without_circumstances(sentence, free) or free[:1] or terms


def _without_circumstances(sentence: str, free: list[Candidate]) -> list[Candidate]:
    """The candidates not said to be the circumstance of another; `for $20` is a price, and no circumstance."""
    money = [at for at, text in free if re.search("[＄€£¥]", text) and re.search(r"\bfor\s+$", sentence[:at])][-1:]
    kept, hidden_end = list[Candidate](), -1
    for at, text in free:
        joined = hidden_end >= 0 and re.fullmatch(r"(?: [a-z]+){1,2} and ", sentence[hidden_end:at])
        if at not in money and not _CLOCK.match(sentence, at) and (joined or said.SOFT.search(_before(sentence, at))):
            hidden_end = at + len(text)
        else:
            kept.append((at, text))
    return kept


def hidden(text: str, at: int) -> bool:
    return not _CLOCK.match(text, at) and any(
        p.search(_before(text, at)) for p in (said.GOVERNED, said.SOFT, said.REFUSED)
    )


def _before(text: str, at: int) -> str:
    return text[max(0, at - 60) : at]


def chosen_value(sentence: str, free: list[Candidate]) -> str:
    """The value of the last candidate, or of the last in bold, with those before it that make a list with it."""
    bold = [c for c in free if sentence.rfind("⟪", 0, c[0] + 1) > sentence.rfind("⟫", 0, c[0])]
    chosen = bold or free
    at, text = chosen[-1]
    if total := _total(sentence, chosen):
        return total
    if _OPERAND.search(sentence[:at]):
        return ""
    start = _list_start(sentence, chosen, at)
    before = [c for c in chosen if c[0] < start]
    if (
        before
        and _amount(before[-1][1]) != _amount(text)
        and not text.startswith(("⟦(", "⟦["))
        and not (said.STILL.search(sentence, at) and not said.STILL.search(sentence[:at]))
        and _BESIDE.fullmatch(_unmarked(sentence[before[-1][0] + len(before[-1][1]) : start]))
    ):
        return ""
    return value_at(sentence[start:]) or text.strip("⟦⟧ ")


def _amount(text: str) -> tuple[Fraction, bool] | str:
    """The value of a candidate, whatever its unit, and whether it is a percentage; the text of one that is no number."""
    found = NUMBER.fullmatch(text)
    known = quantity(found) if found else None
    return (known.value, known.percent) if known else text


def _total(sentence: str, candidates: list[Candidate]) -> str | None:
    """The first or last of at least three numbers that is the sum or the product of the others."""
    found = [NUMBER.fullmatch(text) for _, text in candidates]
    values = [known.value for number in found if number and (known := quantity(number))]
    if len(values) == len(candidates) > 2:
        if values[-1] in (sum(values[:-1]), prod(values[:-1])):
            return candidates[-1][1]
        (at, text), (last, _) = candidates[-2:]
        between = sentence[at + len(text) : last]
        added = values[0] == sum(values[1:]) and not _LEFT.search(sentence) and _BESIDE.fullmatch(between)
        divided = len(values) == 3 and values[2] and values[0] == values[1] / values[2] and _DIVIDED.fullmatch(between)
        if added or divided or (values[0] == prod(values[1:]) and _TIMES.fullmatch(between)):
            return candidates[0][1]
    return None


def _list_start(sentence: str, free: list[Candidate], at: int) -> int:
    """Beginning of the list whose last value stands at `at`."""
    joint = _AND if said.SEVERAL.search(sentence) else None
    if len(free) > 2 and all(_COMMA.fullmatch(sentence[a[0] + len(a[1]) : b[0]]) for a, b in pairwise(free[-3:])):
        joint = _AND
    for place, text in reversed([c for c in free if c[0] < at]):
        between = _unmarked(sentence[place + len(text) : at])
        named = _AND if re.search(r"[a-z] ?=", text) and re.match(r"⟦ ?[a-z] ?=", sentence[at:]) else _COMPOUND
        if not _JOINED.fullmatch(between) and not (joint or named).fullmatch(between):
            break
        at = place
    return at


def _unmarked(text: str) -> str:
    return re.sub("[⟪⟫]", "", text)
