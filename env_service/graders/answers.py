r"""Finds the final answer of a text, and compares two where they are plain.

    thoughts (`<think>...</think>`) ─► stripped
    \boxed{}, ####, <answer>, "answer is", "Answer:" ─► the last of them names the answer
    else, as a fallback ─► the last number of the last sentence

All patterns take time in proportion to the text.
"""

import re
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple

MAX_CHARACTERS = 10_000
"""Characters that are read: the end of a longer text."""
MAX_ANSWER_CHARACTERS = 1000
"""A longer final answer counts as wrong."""
MAX_NUMBER_CHARACTERS = 200
"""A longer number is not compared here."""

# ---- the plain form of a text ---------------------------------------------------------------------------------------

_SIGNS = str.maketrans(
    dict.fromkeys("\r\u200b\ufeff", "")
    | dict.fromkeys("\u00a0\u2007\u2009\u202f\u3000\t", " ")
    | dict.fromkeys("−﹣－‐‑", "-")
    | dict(zip("（），：＝％⁄’·×÷", "(),:=%/'**/", strict=True))
    | {"½": " 1/2", "¼": " 1/4", "¾": " 3/4", "⅓": " 1/3", "⅔": " 2/3", "π": "\\pi "}
)
_SILENT = re.compile(
    r"<<[^<>\n]{0,200}>>|~~[^~\n]{1,200}~~|(?<!\\)\\(?:(?:left|right|displaystyle|q?quad)(?![A-Za-z])|[,;:! ()\[\]])|[`_]{2,3}"
    r"|\^\{\\circ\}|\^\s*\\circ|°"
)
"""A calculator's notes, what is struck out, and signs of LaTeX and Markdown that only lay out."""
_NAMED_SIGNS = (("\\$", "$"), ("\\%", "%"), ("{,}", ","), ("\\times", "*"), ("\\approx", "≈"))
_POWERS = re.compile("[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_POWER_DIGITS = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
_SCIENTIFIC = re.compile(r"(?<![\w.^])(?<!\^\{)(\d+(?:\.\d+)?) ?\* ?10\^(?:\{(-?\d{1,2})\}|(\d))(?!\d)")
_BLANKS = re.compile(r" {2,}| (?=\^)")
_WRITTEN = re.compile(r"\\(?:text|textbf|textrm|textit|mathrm|mathbf|mbox)\s*\{([^{}]*+)\}")
_FRACTION = re.compile(r"\\[dtc]?frac\s*(?:\{\s*(-?[\d.]+)\s*\}|(\d))\s*(?:\{\s*([\d.]+)\s*\}|(\d))")
_ROOT = re.compile(r"√\s*(\d+|[a-z]|\([^()]*\)|\{[^{}]*\})")


def _plain(text: str) -> str:
    text = _POWERS.sub(lambda power: f"^{{{power[0].translate(_POWER_DIGITS)}}}", text.translate(_SIGNS))
    text = _BLANKS.sub(" ", _SILENT.sub("", text))
    for written, sign in _NAMED_SIGNS:
        text = text.replace(written, sign)
    text = _SCIENTIFIC.sub(lambda m: f"{Decimal(m[1]).scaleb(int(m[2] or m[3])):f}", text)
    text = _ROOT.sub(lambda root: rf"\sqrt{{{root[1].strip('(){}')}}}", text)
    text = _FRACTION.sub(lambda m: f" {m[1] or m[2]}/{m[3] or m[4]}", _WRITTEN.sub(r" \1", text))
    return _BLANKS.sub(" ", text)


def _without_thoughts(text: str) -> str:
    return text.rpartition("</think>")[2].partition("<think>")[0]


# ---- the final answer -----------------------------------------------------------------------------------------------

_MARKER = re.compile(
    r"(?P<boxed>\\(?:boxed|fbox)\s*\{)|####(?!#)(?! *[A-Za-z][^\n]*\n\s*\S)|<answer>"
    r"|(?:\banswer(?: to [^\n.:=]{1,80})?,? (?:is|was|equals|comes to|(?:will|would|should|must) be)\b:?"
    r"|\banswers?\W{0,3}[:=]|^\W{0,6}(?:final )?answer\W{0,4}\n|^ *A:)\**",
    re.IGNORECASE | re.MULTILINE,
)
_NEXT_QUESTION = re.compile(r"\n *(?:Question|Q)(?: \d+)?:")
_CHECK = re.compile(
    r"(?:^|[.!?] )\W{0,3}(?:(?:double|quick|as a)[- ])?(?:check|checking|verification|verify)\b",
    re.IGNORECASE | re.MULTILINE,
)
_DIGIT = re.compile(r"\d")
_ASIDE = re.compile(r"(?<=[\w.%$*]) \([^()]*\)(?=[\s.,;!]|$)")
_RESULT = re.compile(r"= ?\W{0,3}(?=\d)")
_SENTENCE_END = re.compile(r"(?<!\bvs)(?<!\b[A-Za-z])[.!?。]+(?=\s|$|\*)|\n")
_BOLD = re.compile(r"\*\*([^*\n]{1,200})\*\*")


class FinalAnswer(NamedTuple):
    text: str
    """The part that the last marker names, else the last sentence."""
    is_marked: bool = False
    number: str = ""
    """The number that a text without a marker states."""


def final_answer(text: str, expected: str, *, fallback: bool = True) -> FinalAnswer:
    """Empty if there is none. Where a number is expected, markers that name none are passed over."""
    text = _plain(_without_thoughts(text)[-MAX_CHARACTERS:])
    if (after := _NEXT_QUESTION.search(text, 1)) is not None:
        text = text[: after.start()]
    if found := _marked(text):
        with_number = next((each for each in found if _DIGIT.search(each)), found[0])
        return FinalAnswer(with_number if _DIGIT.search(expected) else found[0], is_marked=True)
    return _stated(text) if fallback else FinalAnswer("")


def expected_answer(reference: str) -> str:
    """The part of a reference that its marker names, else all of it."""
    text = _plain(reference[-MAX_CHARACTERS:])
    return next(iter(_marked(text)), text).strip(" \n$")


def _marked(text: str) -> list[str]:
    """The texts that markers name, the last one first."""
    found = list[str]()
    for marker in reversed(list(_MARKER.finditer(text))):
        if marker["boxed"]:
            inside = text[marker.end() : _closing(text, marker.end())]
        else:
            inside = _line(text[marker.end() : marker.end() + 2 * MAX_ANSWER_CHARACTERS].partition("</answer>")[0])
        if inside.strip(" .*$"):
            found.append(inside.strip())
    return found


def _closing(text: str, start: int) -> int:
    """Finds where the brace closes that was open at `start`."""
    depth = 1
    for at in range(start, min(len(text), start + MAX_ANSWER_CHARACTERS)):
        depth += (text[at] == "{") - (text[at] == "}")
        if depth == 0:
            return at
    return start


def _line(text: str) -> str:
    """The first sentence."""
    text = text.lstrip(" *\n:")
    end = _SENTENCE_END.search(text)
    return text[: end.start()] if end else text


def _stated(text: str) -> FinalAnswer:
    """The last sentence, and a number of the last sentence that has one: the last computed result if repeated there, else
    its last number. None of a text that breaks off."""
    if (check := _CHECK.search(text)) is not None and _DIGIT.search(text, 0, check.start()):
        text = text[: check.start()]
    ends = [0, *(found.end() for found in _SENTENCE_END.finditer(text)), len(text)]
    spans = [(start, end) for start, end in pairwise(ends) if re.search(r"\w", text[start:end])]
    if not spans:
        return FinalAnswer("")
    last = text[slice(*spans[-1])].strip()
    start, end = next((span for span in reversed(spans) if _DIGIT.search(text, *span)), spans[-1])
    breaks_off = last[-1] in "=,:" or (end != spans[-1][1] and last[-1].isalnum())
    return FinalAnswer(last, number="" if breaks_off else _stated_number(text[start:end], text[:start]))


def _stated_number(sentence: str, text: str) -> str:
    bold = [inside for inside in _BOLD.findall(sentence) if _DIGIT.search(inside)]
    sentence = bold[-1] if bold else sentence
    shorter = _ASIDE.sub("", sentence)
    numbers = _numbers(shorter if _DIGIT.search(shorter) else sentence)
    results = list(_RESULT.finditer(text))
    if results and (computed := _NUMBER.match(text, results[-1].end())) is not None:
        numbers += [number for number in numbers if _amount(number) == _amount(computed[0])][:1]
    return numbers[-1] if numbers else ""


# ---- amounts --------------------------------------------------------------------------------------------------------

_NUMBER = re.compile(
    r"(?P<sign>(?<![\w)\]}.])-\s?)?(?:(?:\b[A-Z]{1,3})?[$€£¥₹]\s?)?(?P<late>-)?(?<![\w^.:])(?<!\d,)"
    r"(?P<number>[1-9]\d{0,2}(?:(?P<comma>[, '])\d{3})(?:(?P=comma)\d{3})*(?!\d)(?:\.\d+)?|[1-9]\d{0,2}(?:\.\d{3})+(?:,\d+|(?=\.\d{3}))"
    r"|(?:\d+(?:\.\d+|(?<![\[({]\d),\d+)?|\.\d+)(?:[eE][-+]?\d{1,2}(?![\w.^]))?)(?![\d:]|,\d)"
    r"(?: (?P<top>\d+)/(?P<bottom>[1-9]\d*)| ?/ ?(?P<below>[1-9]\d*(?:\.\d+)?)(?![\d:]))?(?P<percent> ?%)?"
)
"""A number as people write it: `-$1,234.50`, `3 1/2`, `3/4`, `12,5`, `1.234,50`, `2e-3`, `40 %`."""
_ALTERNATIVES = re.compile(r"\b(?:either|neither|not|between|one of)\b|\d,? or (?:[a-z] ?= ?)?[$€£]?\d", re.IGNORECASE)
_UNIT = r"(?:[A-Za-zÀ-ÿ]{2,}+\.?|[mgshlLCFKVWAJN](?![A-Za-z]))(?:\^\{?-?\d\}?)?"
_UNITS = re.compile(rf"(?:[ /*-]*+{_UNIT}){{0,8}}+\s*[.$€£]*")
_ABOUT = re.compile(
    r"(?:(?:[A-Za-z](?:_\w|\([a-z]\))?\s*=|about|approximately|around|exactly|only|just|~|=)\s*)*+", re.IGNORECASE
)


class Amount(NamedTuple):
    value: Fraction
    is_percent: bool
    is_ratio: bool


def _amounts(text: str) -> Iterator[tuple[Amount, re.Match[str]]]:
    for found in _NUMBER.finditer(text):
        if len(found[0]) > MAX_NUMBER_CHARACTERS:
            continue
        value = _value(found["number"])
        if found["top"]:
            value += Fraction(int(found["top"]), int(found["bottom"]))
        if found["below"]:
            value /= Fraction(found["below"])
        if found["sign"] or found["late"]:
            value = -value
        yield Amount(value, bool(found["percent"]), bool(found["top"] or found["below"])), found


def _numbers(text: str) -> list[str]:
    """None of a text that names alternatives."""
    return [] if _names_alternatives(text) else [number[0] for _, number in _amounts(text)]


def _names_alternatives(text: str) -> bool:
    return _ALTERNATIVES.search(text) is not None and len({amount.value for amount, _ in _amounts(text)}) > 1


def _value(number: str) -> Fraction:
    if re.fullmatch(r"[1-9]\d{0,2}(?:[, ']\d{3})+(?:\.\d+)?", number):
        return Fraction(re.sub("[, ']", "", number))
    if "," in number or number.count(".") > 1:
        return Fraction(number.replace(".", "").replace(",", "."))
    return Fraction(number)


def _amount(text: str) -> Amount | None:
    """The amount that is all of a text, except its unit."""
    text = _bare(text)
    start = _ABOUT.match(text)
    at = start.end() if start else 0
    for amount, found in _amounts(text):
        if not text[at : found.start()].strip("$ ") and _UNITS.fullmatch(text, found.end()):
            return amount
        break
    return None


def _same_amount(ours: Amount, theirs: Amount) -> bool:
    values = [(ours.value, theirs.value)]
    if ours.is_percent != theirs.is_percent:
        values.append((ours.value / 100, theirs.value) if ours.is_percent else (ours.value, theirs.value / 100))
    rounded = Fraction(1, 10**6) if ours.is_ratio != theirs.is_ratio else 0
    return any(abs(one - other) <= rounded * abs(other) for one, other in values)


# ---- equality -------------------------------------------------------------------------------------------------------

_EXPRESSION = re.compile(
    r"(?:[\d\s+\-*/^().,=\[\]{}_|<>!:$&√∞≤≥]|\\[A-Za-z]++|\\[{}|\\]|(?<![A-Za-z])[A-Za-z](?![A-Za-z]))++"
)
_OPTION = re.compile(r"\W*[A-Z]\W*")
_OPTION_NAME = re.compile(r"^[ *]*\(?[A-Ja-j]\) (?=\S)")
_MATH = re.compile(r"\$([^$\n]+)\$")
_LAST_UNITS = re.compile(rf"(?:[ /*-]+{_UNIT})+[ .*]*$")
_STARTS_WITH_NUMBER = re.compile(r"[$€£]?-?\d[\d.,/]*%?(?!\d| ?[-+*/=^:(.]| ?\\)")
_WORD = re.compile(r"[^\W_]+")
_NEGATION = re.compile(r"\b(?:not|no|never|neither|nor|cannot|hardly)\b|n['’]t\b", re.IGNORECASE)
_REASON = re.compile(r" \(|\b(?:because|since|(?:in|for|from) (?=\d))", re.IGNORECASE)
"""Words behind which other numbers may stand."""
_PAIR = re.compile(r"-?\d+,(?!\d{3}$)\d+")
"""A reference that may be a list, so that it is no number with a decimal comma."""


def quick(answer: FinalAnswer, expected: str) -> bool | None:
    """True if plainly equal, False if plainly not, None if math-verify must compare `comparable` texts."""
    if not answer.text or max(len(answer.text), len(expected)) > MAX_ANSWER_CHARACTERS:
        return False
    text, wanted = comparable(answer, expected), _wanted(expected)
    if wanted is not None and (found := _amount(text)) is not None:
        return _same_amount(found, wanted)
    if _squeezed(text) == _squeezed(expected):
        return True
    if not _EXPRESSION.fullmatch(expected) or _OPTION.fullmatch(expected):
        return _same_words(answer, expected)
    return None if _EXPRESSION.fullmatch(text) and not (_is_huge(text) or _is_huge(expected)) else False


def comparable(answer: FinalAnswer, expected: str) -> str:
    """The part of an answer that is of the same kind as what is expected."""
    wanted, text = _wanted(expected), answer.text
    if "≈" in text:
        exact, _, rounded = text.rpartition("≈")
        text = exact if wanted is None or wanted.is_ratio else rounded
    text = _bare(text if _OPTION.fullmatch(expected) else _OPTION_NAME.sub("", text))
    tail = _bare(text.rpartition("=")[2])
    if wanted is None:
        if not _EXPRESSION.fullmatch(text) and _EXPRESSION.fullmatch(expected):
            math = _MATH.findall(answer.text)
            text = _LAST_UNITS.sub("", math[0 if answer.is_marked else -1] if math else tail)
        return _bare(text)
    if answer.is_marked and (_NEGATION.search(text) or _names_alternatives(text)):
        return ""
    if _amount(text) is not None:
        return text
    starts = _STARTS_WITH_NUMBER.match(text)
    if _EXPRESSION.fullmatch(tail) or (_amount(tail) is not None and not starts):
        return tail
    if not answer.is_marked:
        return answer.number
    found = list(_amounts(_REASON.split(text if starts else tail)[0]))
    return found[0][1][0] if len({amount.value for amount, _ in found}) == 1 else ""


def _wanted(expected: str) -> Amount | None:
    return None if _PAIR.fullmatch(expected) else _amount(expected)


def _bare(text: str) -> str:
    return text.lstrip(" *$").rstrip(" .*$€£")


def _squeezed(text: str) -> str:
    return re.sub(r"[\s$]|\\(?=[%$])", "", text).casefold()


def _same_words(answer: FinalAnswer, expected: str) -> bool:
    ours, theirs = ([word.casefold() for word in _WORD.findall(text)] for text in (answer.text, expected))
    if not theirs or ours == theirs:
        return bool(theirs)
    if answer.is_marked and ours[: len(theirs)] == theirs:
        return True
    return ours[-len(theirs) :] == theirs and not _NEGATION.search(" ".join(ours[: -len(theirs)]))


# ---- what takes long to compute -------------------------------------------------------------------------------------

MAX_DIGITS = 20_000
"""Digits of a power that is worth computing."""
MAX_DEPTH = 30
"""Depth of groups within each other: the parser's time grows with the square."""
_LARGE_COUNT = re.compile(
    r"\d{5}[^!]*!|[)}\]!]\s*!|!.*!.*!|\\(?:[td]?binom|choose|sum|prod)(?![A-Za-z]).*\d{5}|\d{5}.*\\choose", re.DOTALL
)
_POWER = re.compile(r"[\d)}\]]\s*\^\s*(?:\{|\((?=[^()]*\)))?")


def _is_huge(text: str) -> bool:
    """True if a text counts to large numbers, has nested or many-digit powers, or is nested deeply."""
    text = text.replace("**", "^")
    depths = accumulate((sign in "({[") - (sign in ")}]") for sign in text)
    if max(depths, default=0) > MAX_DEPTH or _LARGE_COUNT.search(text):
        return True
    size = max(map(len, re.findall(r"\d+", text)), default=1)
    for power in _POWER.finditer(text):
        end = _closing(text, power.end()) if power[0][-1] == "{" else power.end() + 12
        exponent = text[power.end() : end]
        if "^" in exponent or "!" in exponent:
            return True
        size *= prod(max(1, int(number[:9])) for number in re.findall(r"\d+", exponent)[:40])
    return size > MAX_DIGITS
