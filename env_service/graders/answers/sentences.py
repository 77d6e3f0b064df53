"""The result that a text's last sentence states, where no marker names it.

Of several numbers it is a total or follows `so`; it is in no circumstance or aside (`out of 30`, `at x = 3`), and none of two side by side.
"""

import re
from collections.abc import Iterator
from itertools import pairwise
from math import prod

from env_service.graders.answers import vocabulary as said
from env_service.graders.answers.expressions import assigned, assignments, value_at, value_of, whole_value
from env_service.graders.answers.values.numbers import NUMBER, quantity, spelled_small
from env_service.graders.answers.values.units import UNIT

Candidate = tuple[int, str]
"""Position and text of what may be a result."""
MAX_REMARKS = 5
"""After a result; it is not looked for before more of them."""
MAX_SENTENCE = 1000
"""Characters of a sentence that are read: the end of a longer one."""

_END = re.compile(r"(?<=[.!?])[*_)\"'⟫⟧]*\s+(?=[^a-z\s])|(?<=[。！？।])[⟫⟧]*\s*|\n+|(?<=[.!?]⟫)\s+(?=[A-Z])")
_BULLET = re.compile(r"^\s*(?:[-*•]\s+(?=[^\d\s=])|\(?\d{1,2}[.)]\s+(?=\S)|>+\s*|#+\s+|\|\s*)")
_ITEM = re.compile(r"[\W_]*[^\W\d][^:|=\n]{0,30}(?::|\s[|–—-])[\s⟪]*[＄€£]?\d[\d.,]*[^=.\n]{0,25}")
"""One of several lines that list values: `Pens: ＄6`."""
_TERMINATED = re.compile(r"[.!?。！？।][*_)\"'⟫⟧\]\s]*$|\|\s*$")
_OPEN_END = re.compile(r"[-+*/=×÷,(\\{^:]\s*$|\\boxed\{[^{}]*$")
_STATES = re.compile(
    r"\b(?:is|are|was|equals|be|makes|total of|:)\s+[＄€£]?[\d,.]+\W*$|^(?:the|⟦|⟪)\b.*[⟫⟧)\d%€£]\s*$", re.IGNORECASE
)
_EQUATION = re.compile(r"[\dA-Za-z%)}⟧°]{2,}\s*[=≈]\s*|(?<!_)[\d%)}]\s*[=≈]\s*|(?<![A-Za-z\d\\⟦])(?<!⟦ )[a-z]\s*=\s*")
_ROOT = r"-?[\d.]*\s?\\(?:sqrt|[dt]?frac|pi)(?:\{[^{}]*\}|[\s\d+\-*/^]|\\(?:sqrt|pi))*+"
_POWER = r"\d+(?:\.\d+)?\s?(?:×|\\times|\\cdot|·|\*|x)\s?10\s?\^\s?\{?-?\d+\}?"
_EXACT = re.compile(r"(?:\\pi|\\sqrt\{[^{}]*\}|\d/\d+|\\frac\{\d+\}\{\d+\}) ?⟧?(?=\s*\(?(?:≈|\\approx))")
_DURATION = rf"\d+(?:\.\d+)?\s?{UNIT},?\s(?:and\s)?\d+(?:\.\d+)?\s?{UNIT}(?![A-Za-z])"
_NOT_STATED = re.compile(
    r"(?<=[\w.%⟧⟫€])\s\((?!that is|i\.e)(?=[^()⟦\\]*(?:[A-Za-z]{2}|\d\s?[-+*/×·÷x=]\s?\d|\d\s?%))[^()⟦\\]*\)"  # (3 of each)
    r"|(?:^|\s)(?:at|when|for|if) ⟦?[A-Za-z] ?= ?-?[\d./]+⟧?(?=[\s.,;]|$)"  # at x = 3
    r"|\b(?:between|from) [＄€£]?\d[\d.,]* (?:and|to) [＄€£]?\d[\d,]*"
    r"|\b(?:sum|difference|product|quotient|average|mean|multiple|divisor|factor) (?:of|between)"
    r" [＄€£]?\d[\d.,]*(?:, \d+)*,? and [＄€£]?\d[\d,]*"
)
"""Calculations, parameters and operands that a sentence names beside its result."""
_COPULA = re.compile(r"(?:\b(?:is|are|equals|obtain|get|be)\b|:)\s+", re.IGNORECASE)
_TUPLE = r"[(\[]-?\d[\d.]*(?:, ?-?\d[\d.]*)+[)\]]"
_WHOLE = re.compile(rf"(?<![\d:])\d{{1,3}}(?: ?: ?\d{{1,3}})+|{_DURATION}|{_POWER}|{_ROOT}|{_TUPLE}")
_RATIO = re.compile(r"(?<![\d:])\d{1,3}(?:(?: ?: ?| to )\d{1,3})+")
_JOINED = re.compile(rf"\s*,?\s*{said.OR}\s*", re.IGNORECASE)
_BESIDE = re.compile(
    rf"(?: [a-z]+)?[;,] |; [^.=\d]* (?:is|are) |[^,;:.=]*?\s{said.AND}\s(?!now|the (?:sum|total|difference|product|answer))[^,;:.=]*",
    re.IGNORECASE,
)
_AND = re.compile(rf"\s*,?\s*(?:{said.AND}|,)\s*", re.IGNORECASE)
_COMMA = re.compile(r"\s*,\s*(?:and\s+)?")
_COMPOUND = re.compile(
    r"\s*(?:hours?|hrs?|h|minutes?|feet|foot|years?|weeks?|days?|dollars?|euros?|pounds?),?\s*(?:and\s*)?",
    re.IGNORECASE,
)
_SOLUTIONS = re.compile(
    r"(?<![A-Za-z\d])([a-z]) ?= ?-?\d+(?:[./]\d+)?(?:(?:,? (?:and|or)|,) \1 ?= ?-?\d+(?:[./]\d+)?)+(?=[.\s]|$)"
)
_CLOCK = re.compile(r"\d{1,2}:\d\d\b")
_UNKNOWN = re.compile(r"\bneed to know\b|\bdepend(?:s|ing) on\b|not enough information")
_EXPLAINED = re.compile(r"\W*(?:explanation|reasoning|working|why|because|steps)\b", re.IGNORECASE)
_CLAUSES = re.compile(r"[,;:]\s|\s[-–—]\s|\s(?=\()")


def stated_result(text: str) -> str:
    """The result that a plain text ends with, "" if it breaks off, asks, or leaves open which of several it is."""
    sentences = [s[-MAX_SENTENCE:] for s in split(text) if re.search(r"\w", s)]
    if len(sentences) > 2 and all(NUMBER.fullmatch(s.rstrip(".")) for s in sentences):
        return ", ".join(sentences)
    for _ in range(MAX_REMARKS):
        if len(sentences) > 1 and _is_remark(sentences):
            sentences.pop()
    if not sentences or broken_off(sentences) or any(map(_UNKNOWN.search, sentences[-2:])):
        return ""
    if len(sentences) > 1 and (headline := _headline(sentences)):
        return headline
    for i, sentence in enumerate(reversed(sentences)):
        if _is_item(sentences[: len(sentences) - i]):
            return ""
        if sentence.rstrip("⟫* ").endswith("?") and has_number(sentence):
            return ""
        if found := result_of(sentence):
            return found
        if has_number(sentence) or i == 3 or not _passes(sentence, first=i == 0):
            break
    return "" if has_number(text) else _words(sentences[-1])


def _is_remark(sentences: list[str]) -> bool:
    """True if the last sentence talks of something else than the result that was stated before it."""
    *before, last = sentences
    if not any(map(has_number, before)) or not has_number(last):
        return False
    if re.match("(?:which|where) |[(*_]*(?:proof|indeed|note)\\b", last, re.IGNORECASE):
        return True
    known = {number[0].strip() for s in before for number in NUMBER.finditer(s)}
    return bool(said.ADDRESS.search(last)) and known.isdisjoint(number[0].strip() for number in NUMBER.finditer(last))


def _headline(sentences: list[str]) -> str | None:
    """The value of which the first sentence consists, if all that follows is its explanation."""
    first, *rest = sentences
    value = value_at(re.sub(r"^(?:TL;DR|short answer|it's|it is)\\b:?", "", first, flags=re.IGNORECASE))
    if len(first.split()) > 4 or not value or "=" in first or not NUMBER.match(value) or first.endswith((":", "?")):
        return None
    explained = _EXPLAINED.match(rest[0]) or not any(map(_concludes, rest))
    return value if explained and len(list(NUMBER.finditer(first))) == 1 else None


def _concludes(sentence: str) -> bool:
    return bool(
        said.CONCLUSION.search(f" {sentence}") or said.SUMMARY.search(sentence) or _terse(sentence) or "=" in sentence
    )


def _is_item(sentences: list[str]) -> bool:
    """True if the last two lines are alike, each a name and its value, and neither names a total."""
    return len(sentences) > 1 and all(_ITEM.fullmatch(s) and not said.SUMMARY.search(s) for s in sentences[-2:])


def split(text: str) -> list[str]:
    """The sentences of a text; a line break ends one."""
    pieces, start = list[str](), 0
    for end in _END.finditer(text):
        if "\n" not in end[0] and said.ABBREVIATION.search(text[max(start, end.start() - 12) : end.start()]):
            continue
        pieces.append(text[start : end.start()] + end[0].strip())
        start = end.end()
    return [_BULLET.sub("", piece).strip() for piece in [*pieces, text[start:]]]


def has_number(text: str) -> bool:
    return bool(re.search(r"\d", text))


def _passes(sentence: str, *, first: bool) -> bool:
    """True if a sentence without a number may follow the result."""
    if sentence.rstrip("⟫ ").endswith("?"):
        return bool(said.REMARK.search(sentence))
    return not said.UNFINISHED.search(sentence)


def broken_off(sentences: list[str]) -> bool:
    """True if the last sentence has no end though others have, and does not end in a value either."""
    last = sentences[-1]
    if _TERMINATED.search(last):
        return False
    if said.OPEN_WORD.search(last) or _OPEN_END.search(last) or last.count("⟦") > last.count("⟧"):
        return True
    return any(_TERMINATED.search(s) for s in sentences[:-1]) and not _ends_in_value(last)


def _ends_in_value(line: str) -> bool:
    """True if a line without a full stop is a value, equals one, or states one after a word such as `so`."""
    if (len(line.split()) <= 4 or line.endswith("⟧")) and value_at(line) is not None:
        return True
    equation = re.search(r"=\s*([^=\n]{1,60})$", line)
    if equation and len(equation[1].split()) <= 5 and value_at(equation[1]) is not None:
        return True
    if _STATES.search(line):
        return True
    cue = said.CUE.search(line)
    return bool(cue) and any(at >= cue.end() and not _hidden(line, at) for at, _ in _candidates(line))


def result_of(sentence: str) -> str:
    """The result that one sentence states, "" if none."""
    if said.REFUSAL.search(sentence) or said.SETUP.match(sentence):
        return ""
    if len({n[0] for n in NUMBER.finditer(sentence)}) > 1 and said.HEDGE.search(_concluded(sentence)):
        return ""
    if has_number(outside := _NOT_STATED.sub("", sentence)):
        sentence = outside
    if re.search(r"\b(?:probability|chance|likelihood)\b", sentence):
        sentence = re.sub(r"(?<=\d) (?:in|out of) (?=\d)", "/", sentence)
    if (whole := assignments(sentence) or _relation(sentence) or _terse(sentence)) is not None:
        return whole
    solutions = _SOLUTIONS.search(sentence)
    if solutions and not has_number(sentence[solutions.end() :]):
        return assigned(re.findall(r"([A-Za-z]) ?= ?([-\d./]*\d)", solutions[0]))
    if (named := _named_whole(sentence)) is not None:
        return named
    sentence = _without_aside(_totalled(_concluded(_main(sentence))), said.REASON)
    if (exact := _EXACT.search(sentence)) is not None:
        sentence = sentence[: exact.end()]
    stated = re.search(r"[,;][^=]*\b(?:is|are|an? \w+ of) [＄€£]?\d[^=]*$", sentence)
    if (
        not stated
        and (equal := list(_EQUATION.finditer(sentence)))
        and (value := value_at(sentence[equal[-1].end() :]))
    ):
        return value
    sentence = _without_aside(sentence, said.ASIDE)
    if not has_number(sentence) and "⟦" not in sentence:
        sentence = spelled_small(sentence)
    found = [c for c in _candidates(sentence) if not said.REFUSED.search(_before(sentence, c[0]))]
    free = [c for c in found if not said.GOVERNED.search(_before(sentence, c[0]))]
    free = _without_circumstances(sentence, free) or free or found
    return _chosen(sentence, free) if free else ""


def _relation(sentence: str) -> str | None:
    """The relations of which a sentence consists: `x < -2 or x > 3`."""
    if not re.search(r"\w\s*(?:[<>]|\\[lg]eq?)", sentence):
        return None
    return whole_value(sentence) or whole_value(re.split(r"\b(?:is|with|that|means)\b", sentence)[-1])


def _named_whole(sentence: str) -> str | None:
    """The expression that a sentence's last `is` or colon names, if nothing follows it."""
    copula = next(reversed([*_COPULA.finditer(sentence)]), None)
    return whole_value(sentence[copula.end() :]) if copula else None


def _without_circumstances(sentence: str, free: list[Candidate]) -> list[Candidate]:
    """The candidates that are no circumstance of another. `for $20` is a price."""
    money = [at for at, text in free if re.search("[＄€£¥]", text) and re.search(r"\bfor\s+$", sentence[:at])][-1:]
    kept, hidden_end = list[Candidate](), -1
    for at, text in free:
        joined = hidden_end >= 0 and re.fullmatch(r"(?: [a-z]+){1,2} and ", sentence[hidden_end:at])
        if at not in money and not _CLOCK.match(sentence, at) and (joined or said.SOFT.search(_before(sentence, at))):
            hidden_end = at + len(text)
        else:
            kept.append((at, text))
    return kept


def _terse(sentence: str) -> str | None:
    """The value of a sentence that is nothing but one, or a calculation."""
    bare = sentence.lstrip(" *_`⟪⟫").rstrip(" .。!*_`⟪⟫")
    if said.REFUSED.search(re.split(r"[\d⟦]", bare, maxsplit=1)[0]) or sentence.endswith("?"):
        return None
    if re.fullmatch(r"(?:⟦[^⟦⟧]*⟧(?:,|\s|and\b|or\b)*)+", bare):
        return value_at(bare)
    short = len(bare.split()) <= 4 and not bare.count("=")
    if said.CONCLUSION.search(bare):
        return None
    if re.match(r"[A-Za-z]\s*(?:=|\\geq|\\leq|[<>])", bare) or short:
        value = value_at(bare)
        if short and value and not re.search(r"\d\D+\d", value) and len(list(NUMBER.finditer(bare))) > 1:
            return None
        return value if value is None or "=" not in value else value_of(value)
    return None


def _concluded(sentence: str) -> str:
    """The part of a sentence after its last `so` that still has a number, or after what says the same."""
    for found in reversed(list(said.CONCLUSION.finditer(sentence))):
        rest = sentence[found.end() :]
        if has_number(rest) and not re.match(r"\s*(?:many|much|far)\b", rest):
            return rest
    return sentence


def _main(sentence: str) -> str:
    """The sentence without the circumstances that it begins with, if a number follows them."""
    while (circumstance := said.CIRCUMSTANCE.match(sentence)) and has_number(sentence[circumstance.end() :]):
        sentence = sentence[circumstance.end() :]
    return sentence


def _totalled(sentence: str) -> str:
    """The clause that states a total, if one does."""
    totals = [c for c in _CLAUSES.split(sentence) if has_number(c) and said.TOTAL.search(c)]
    return totals[0] if len(totals) == 1 else sentence


def _without_aside(sentence: str, aside: re.Pattern[str]) -> str:
    """The part of a sentence before the first aside that follows a number which may be the result."""
    candidates = list(_candidates(sentence))
    stated = next((at + len(text) for at, text in candidates if not _hidden(sentence, at)), None)
    early = aside.search(sentence, candidates[0][0] + len(candidates[0][1])) if candidates else None
    if early and early[0][0] == "," and (stated is None or early.start() < stated):
        return sentence[: early.start()]
    found = aside.search(sentence, stated) if stated is not None else None
    return sentence[: found.start()] if found else sentence


def _hidden(text: str, at: int) -> bool:
    return not _CLOCK.match(text, at) and any(
        p.search(_before(text, at)) for p in (said.GOVERNED, said.SOFT, said.REFUSED)
    )


def _before(text: str, at: int) -> str:
    return text[max(0, at - 60) : at]


def _candidates(sentence: str) -> Iterator[Candidate]:
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
        found = (_RATIO if re.search("ratio|odds", sentence) else _WHOLE).search(sentence, start, end)
        stop = found.start() if found else end
        yield from ((n.start(), n[0]) for n in NUMBER.finditer(sentence, start, stop))
        if found:
            yield found.start(), found[0]
        start = found.end() if found else end


def _chosen(sentence: str, free: list[Candidate]) -> str:
    """The value of the last candidate, or of the last in bold, with those before it that make a list with it."""
    bold = [c for c in free if sentence.rfind("⟪", 0, c[0] + 1) > sentence.rfind("⟫", 0, c[0])]
    chosen = bold or free
    at, text = chosen[-1]
    if total := _total(sentence, chosen):
        return total
    start = _list_start(sentence, chosen, at)
    before = [c for c in chosen if c[0] < start]
    if before and before[-1][1] != text and _BESIDE.fullmatch(sentence[before[-1][0] + len(before[-1][1]) : start]):
        return ""
    return value_at(sentence[start:]) or text.strip("⟦⟧ ")


def _total(sentence: str, candidates: list[Candidate]) -> str | None:
    """The first or last of at least three numbers that is the sum or the product of the others."""
    found = [NUMBER.fullmatch(text) for _, text in candidates]
    values = [known.value for number in found if number and (known := quantity(number))]
    if len(values) == len(candidates) > 2:
        if values[-1] in (sum(values[:-1]), prod(values[:-1])):
            return candidates[-1][1]
        (at, text), (last, _) = candidates[-2:]
        if values[0] == sum(values[1:]) and _BESIDE.fullmatch(sentence[at + len(text) : last]):
            return candidates[0][1]
    return None


def _list_start(sentence: str, free: list[Candidate], at: int) -> int:
    """Beginning of the list whose last value stands at `at`."""
    joint = _AND if said.SEVERAL.search(sentence) else None
    if len(free) > 2 and all(_COMMA.fullmatch(sentence[a[0] + len(a[1]) : b[0]]) for a, b in pairwise(free[-3:])):
        joint = _AND
    for place, text in reversed([c for c in free if c[0] < at]):
        between = sentence[place + len(text) : at]
        named = _AND if re.search(r"[a-z] ?=", text) and re.match(r"⟦ ?[a-z] ?=", sentence[at:]) else _COMPOUND
        if not _JOINED.fullmatch(between) and not (joint or named).fullmatch(between):
            break
        at = place
    return at


def _words(sentence: str) -> str:
    """The answer of a sentence without numbers: what something *is*, or the whole."""
    bare = sentence.strip(" .。!*_`\"'⟪⟫")
    return re.sub(r"^.*\s(?:is|are|was|were)\s+(?:(?:an?|the)\s+)?(?=\w)", "", bare)
