r"""Are two final answers equal? Numbers, fractions, percent, money, times, ratios, tuples and lists are compared exactly."""

import re
from fractions import Fraction
from itertools import product

from env_service.graders.answers.values.amounts import SAME_AMOUNT, number
from env_service.graders.answers.values.numbers import Quantity
from env_service.graders.answers.values.ranges import ranges
from env_service.graders.answers.values.sizes import is_huge
from env_service.graders.answers.values.units import measure
from env_service.graders.answers.wording import is_in_words, same_words

MAX_ANSWER_CHARACTERS = 1000
"""A longer final answer counts as wrong."""

_SPACES = re.compile(r"(?<!\\)\\(?:left|right|displaystyle|limits|quad|[,;:! ])(?![A-Za-z])|[\s~]")
_DEGREES = re.compile(r"\s*(?:\^\s*\{?\s*(?:\\circ|∘)\s*\}?|°|º)\s*(?:[CF](?![A-Za-z]))?|\\degree")
_FRACTION = re.compile(r"\\[dtc]?frac\s*(?:\{\s*(-?\d+)\s*\}|(\d))\s*(?:\{\s*(-?\d+)\s*\}|(\d))")
_TEXT = re.compile(r"\\(?:text|textbf|textrm|textit|mathrm|mathbf|mbox)\s*\{([^{}]*+)\}")
_MATRIX = re.compile(r"\\begin\{[pbB]?matrix\}((?:(?!\\begin|\\end).)*+)\\end\{[pbB]?matrix\}", re.DOTALL)
_TIME = re.compile(r"(\d{1,2}):(\d\d)(?::\d\d)?\s*([ap])?\.?\s*(?:m\.?)?", re.IGNORECASE)
_BASED = re.compile(r"(\d[\dA-F]*)_\{?\d+\}?")
"""A number with its base."""
_RATIO = re.compile(r"(\d+) ?: ?([1-9]\d*)")
_GROUPED = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_BRACKETS = {"(": ")", "[": "]", "{": "}"}
_EXPRESSION = re.compile(
    r"(?:[&\d\s+\-*/^().,=\[\]{}_|<>!:·×÷√∞π°≤≥≠±%]|\\[A-Za-z]++|\\[{}|]|(?<![A-Za-z])[A-Za-z](?![A-Za-z])|d[a-z](?![A-Za-z])|sqrt|pi|frac|log|ln|sin|cos|tan|exp)+"
)
_RELATION = re.compile(r"[<>≠]|\\(?:leq?|geq?|neq?|lt|gt)(?![a-z])")
_VARIABLE = re.compile(r"(?<![A-Za-z\\])[a-zA-Z](?<![ei])(?![A-Za-z])")
_NAME = re.compile(r"\s*[A-Za-z](?:\s*_\s*\{?\w\}?)?(?:\([a-z]\))?\s*(?:=|\\in)\s*")


def quick(answer: str, reference: str) -> bool | None:
    """True if two final answers are plainly equal, False if they plainly are not, None if math-verify must look."""
    if not answer or max(len(answer), len(reference)) > MAX_ANSWER_CHARACTERS:
        return False
    if is_in_words(reference):
        return same_words(answer, reference)
    forms = product(answer.split(SAME_AMOUNT), reference.split(SAME_AMOUNT))
    found = {_compared(_tidy(ours), _tidy(theirs)) for ours, theirs in forms}
    return True if True in found else None if None in found else False


def _compared(answer: str, reference: str) -> bool | None:
    found = _same(answer, reference)
    return False if found is None and (is_huge(answer) or is_huge(reference)) else found


def _same(answer: str, reference: str) -> bool | None:
    if _squeezed(answer) == _squeezed(reference):
        return True
    ours, theirs = number(answer), number(reference)
    if ours is not None and theirs is not None:
        return _same_number(answer, ours, theirs)
    times = _TIME.fullmatch(answer.strip()), _TIME.fullmatch(reference.strip())
    if times[0] and times[1]:
        return _same_time(times[0], times[1])
    if bool(times[0]) != bool(times[1]) and (clock := times[0] or times[1]) and clock[2] == "00":
        hour = ours or theirs
        return hour is not None and hour.value == int(clock[1])
    sets = ranges(answer, _end), ranges(reference, _end)
    if sets[0] and sets[1] and any(map(_is_range, (answer, reference))):
        return sets[0] == sets[1]
    if "<" in answer and not _RELATION.search(reference) and not _VARIABLE.search(answer):
        answer = answer.replace("<", ",")
    if bool(_RELATION.search(answer)) != bool(_RELATION.search(reference)):
        return False
    if (based := _BASED.fullmatch(reference)) and answer == based[1]:
        return True
    for ratio, other, value in ((answer, reference, theirs), (reference, answer, ours)):
        if (parts := _RATIO.fullmatch(ratio)) and value and re.fullmatch(r"\d+/\d+", other):
            return value.value * int(parts[2]) == int(parts[1])
    if re.search(r"\d_|:", reference + answer):
        return False
    if theirs is not None and _VARIABLE.search(answer):
        return False
    lists = _elements(answer), _elements(reference)
    if len(lists[0]) > 1 or len(lists[1]) > 1 or _bracket(answer) or _bracket(reference):
        return _same_lists(answer, reference)
    return None if _EXPRESSION.fullmatch(answer) and _EXPRESSION.fullmatch(reference) else False


def _tidy(text: str) -> str:
    r"""LaTeX without what only lays it out: `\left( \dfrac{1}{2} \right)` is `(1/2)`."""
    text = _TEXT.sub(r"\1", _DEGREES.sub("", text)).replace("\\%", "%").replace("\\$", "＄")
    text = _MATRIX.sub(_rows, text.replace("{,}", ",").replace("**", "^"))
    text = re.sub(r"\\(?:left|right|displaystyle)(?![A-Za-z])", "", text)
    text = re.sub(r"(\d)\s*\\([dtc]?frac)(?=\s*[{\d])", r"\1 \\\2", text)
    text = re.sub(
        r"(?<=\d),?\s*(?:with )?(?:an? )?(?:r|remainder)(?: of)?\s*(?=\d+$)", " R ", text, flags=re.IGNORECASE
    )
    text = _FRACTION.sub(lambda m: _ratio(m[1] or m[2], m[3] or m[4]), text)
    text = re.sub(r"\\[dtc]frac", r"\\frac", text)
    return _NAME.sub("", text, count=1) if _NAME.match(text) else text


def _rows(matrix: re.Match[str]) -> str:
    """A matrix as a list of its rows, a row or column as a tuple."""
    rows = [", ".join(cell.strip() for cell in row.split("&")) for row in matrix[1].split("\\\\") if row.strip()]
    if len(rows) == 1 or not any("," in row for row in rows):
        return f"({', '.join(rows)})"
    return f"[{', '.join(f'[{row}]' for row in rows)}]"


def _is_range(text: str) -> bool:
    return bool(_RELATION.search(text) or re.search(r"\\infty|\\cup|∪", text))


def _end(text: str) -> str:
    """The normal form of a range's end."""
    found = number(text)
    return str(found.value) if found else _squeezed(text)


def _ratio(top: str, bottom: str) -> str:
    negative = top.startswith("-") != bottom.startswith("-")
    return f"{'-' if negative else ''}{top.lstrip('-')}/{bottom.lstrip('-')}"


def _squeezed(text: str) -> str:
    text = re.sub(r"(?<=\d)\s+(?=\d)", "␣", re.sub(r"(?<![A-Za-z])[pbB]matrix", "matrix", text))
    text = re.sub(r"\{(\w)\}", r"\1", _SPACES.sub("", text)).replace("\\cdot", "\\times")
    return text.casefold().rstrip(".").strip("\"'")


# ---- numbers --------------------------------------------------------------------------------------------------------


def _same_number(answer: str, ours: Quantity, theirs: Quantity) -> bool:
    if ours.unit and theirs.unit:
        (kind, size), (other, part) = measure(ours.unit), measure(theirs.unit)
        return kind == other and ours.value * size == theirs.value * part
    if ours.currency and theirs.currency and _currency(ours) != _currency(theirs):
        return False
    return any(
        a == b or (ours.percent == theirs.percent and _rounded_alike(answer, a, b))
        for a in _readings(ours, theirs)
        for b in _readings(theirs, ours)
    )


def _readings(one: Quantity, other: Quantity) -> list[Fraction]:
    """Meanings of a number beside another: `50%` is 50 or 0.5 unless the other has a percent sign too."""
    if (one.percent and not other.percent) or (one.minor and not other.minor and not other.currency):
        return [one.value, one.value / 100]
    if one.minor and not other.minor:
        return [one.value / 100]
    return [one.value, 12 * one.value] if one.dozen else [one.value]


def _currency(one: Quantity) -> str:
    names = ["USD＄", "US＄＄", "EUR€", "GBP£", "JPY¥", "CNY¥", "RMB¥", "INR₹", "RS₹", "RS.₹", "RUB₽", "元¥", "円¥"]
    return next((name[-1] for name in names if name[:-1] == one.currency), one.currency)


def _rounded_alike(answer: str, ours: Fraction, theirs: Fraction) -> bool:
    """A decimal answer with at least six places may be rounded: 0.333333 is 1/3."""
    places = len(answer.partition(".")[2].rstrip("% "))
    return places >= 6 and abs(ours - theirs) <= Fraction(1, 10**6)


# ---- times, tuples, lists -------------------------------------------------------------------------------------------


def _same_time(ours: re.Match[str], theirs: re.Match[str]) -> bool:
    def minutes(time: re.Match[str], half: str) -> int:
        hours = int(time[1]) % 12 + (12 if half == "p" else 0) if half else int(time[1])
        return 60 * hours + int(time[2])

    halves = [(time[3] or "").casefold() for time in (ours, theirs)]
    if all(halves) or int(ours[1]) > 12 or int(theirs[1]) > 12:
        return minutes(ours, halves[0]) == minutes(theirs, halves[1])
    return minutes(ours, "") == minutes(theirs, "")


def _bracket(text: str) -> str:
    text = text.strip().replace("\\{", "{").replace("\\}", "}")
    closed = text[:1] in _BRACKETS and text[-1:] in (")", "]", "}") and "," in text
    return text[0] + text[-1] if closed else ""


def _elements(text: str) -> list[str]:
    """The elements of a list or tuple, split at commas outside of brackets."""
    text = re.sub(r"\s+(?:and|or)\s+", ", ", text.strip().replace("\\{", "{").replace("\\}", "}"))
    text = text[1:-1] if _bracket(text) else _GROUPED.sub("", text)
    elements, depth = [""], 0
    for sign in text:
        depth += (sign in "([{") - (sign in ")]}")
        if sign in ",;" and depth == 0:
            elements.append("")
        else:
            elements[-1] += sign
    named = [_NAME.sub("", element).strip() for element in elements if element.strip()]
    return [one for element in named for one in _both_signs(element)]


def _both_signs(element: str) -> list[str]:
    if "\\pm" not in element and "±" not in element:
        return [element]
    return [re.sub(r"\s*(?:\\pm|±)\s*", sign, element, count=1).removeprefix("+") for sign in "+-"]


def _same_lists(answer: str, reference: str) -> bool | None:
    ours, theirs = _elements(answer), _elements(reference)
    if len(theirs) == 1 and not _bracket(answer) and all(_same(one, ours[0]) for one in ours[1:]):
        ours = ours[:1]
    brackets = _bracket(answer), _bracket(reference)
    if len(ours) != len(theirs) or (all(brackets) and brackets[0] != brackets[1]):
        return False
    if "{}" in brackets or not brackets[1]:
        return _same_sets(ours, theirs)
    same = [_same(a, b) for a, b in zip(ours, theirs, strict=True)]
    return False if False in same else (None if None in same else True)


def _same_sets(ours: list[str], theirs: list[str]) -> bool | None:
    left, unsure = list(ours), False
    for wanted in theirs:
        equal = next((one for one in left if _same(one, wanted)), None)
        if equal is not None:
            left.remove(equal)
        elif any(_same(one, wanted) is None for one in left):
            unsure = True
        else:
            return False
    return None if unsure else True
