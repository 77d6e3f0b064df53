r"""Ranges of the real line, however they are written: `x > 3`, `3 < x`, `(3, \infty)`, `x < -2 or x > 3`."""

import re
from collections.abc import Callable

Range = tuple[str, bool, str, bool]
r"""Its ends, each with whether it belongs to it; an end that there is not is `-\infty` or `\infty`."""

_END = r"[^<>=,()\[\]]++(?:\([^()]*+\)[^<>=,()\[\]]*+)?"
_INTERVAL = re.compile(rf"([(\[])({_END}),({_END})([)\]])")
_BETWEEN = re.compile(rf"({_END})(<=?)[a-zA-Z](<=?)({_END})")
_ONE_SIDED = re.compile(rf"[a-zA-Z](<=?|>=?)({_END})")
_TURNED = re.compile(rf"({_END})(<=?|>=?)[a-zA-Z]")
_UNION = re.compile(r"\\cup|∪|\bor\b|\bU\b")
_INFINITE = re.compile(r"\+?\\infty")
_WORDS = [
    (
        r"\b(?:must be|is|be) (?:strictly )?(?:greater|more|larger) than or equal to\b|\b(?:must be|is|be) at least\b",
        ">=",
    ),
    (r"\b(?:must be|is|be) (?:strictly )?(?:less|smaller) than or equal to\b|\b(?:must be|is|be) at most\b", "<="),
    (r"\b(?:must be|is|be) (?:strictly )?(?:greater|more|larger) than\b", ">"),
    (r"\b(?:must be|is|be) (?:strictly )?(?:less|smaller) than\b", "<"),
    (r"\\(?:geq?|geqslant)(?![a-z])|≥", ">="),
    (r"\\(?:leq?|leqslant)(?![a-z])|≤", "<="),
    (r"\\gt(?![a-z])", ">"),
    (r"\\lt(?![a-z])", "<"),
    (r"\\text\s*\{\s*or\s*\}", " or "),
]


def signs_for_words(text: str) -> str:
    """The text with `>=` for `is at least`, `\\geq` and the like."""
    for words, sign in _WORDS:
        text = re.sub(words, sign, text)
    return text


def ranges(text: str, normal: Callable[[str], str]) -> frozenset[Range] | None:
    """The ranges of which a set is the union, their ends in a normal form; None for what is no such set."""
    text = re.sub(r"^\s*[a-zA-Z]\s*(?:\\in(?![a-z])|∈)", "", signs_for_words(text))
    text = re.sub(r"\\(?:left|right)(?![a-z])|\\[,;:! ]", "", text)
    found = [_range(re.sub(r"\s+", "", part), normal) for part in _UNION.split(text)]
    known = [one for one in found if one is not None]
    return frozenset(known) if len(known) == len(found) else None


def _range(part: str, normal: Callable[[str], str]) -> Range | None:
    def end(text: str) -> str:
        return "\\infty" if _INFINITE.fullmatch(text) else normal(text)

    if m := _INTERVAL.fullmatch(part):
        return end(m[2]), m[1] == "[", end(m[3]), m[4] == "]"
    if m := _BETWEEN.fullmatch(part):
        return end(m[1]), m[2] == "<=", end(m[4]), m[3] == "<="
    if m := _ONE_SIDED.fullmatch(part):
        return _half(m[1], end(m[2]))
    if m := _TURNED.fullmatch(part):
        return _half(m[2].translate(str.maketrans("<>", "><")), end(m[1]))
    return None


def _half(sign: str, end: str) -> Range:
    closed = sign.endswith("=")
    return (end, closed, "\\infty", False) if sign[0] == ">" else ("-\\infty", False, end, closed)
