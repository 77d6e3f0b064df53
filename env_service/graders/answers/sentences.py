"""The result that a text states in its last sentence, where no marker names it."""

import re
from collections.abc import Iterator
from itertools import pairwise

from env_service.graders.answers.expressions import assigned, assignments, value_at, value_of, whole_value
from env_service.graders.answers.values.numbers import NUMBER, spelled_small
from env_service.graders.answers.values.units import UNIT
from env_service.graders.answers.vocabulary import (
    ABBREVIATION,
    AND,
    ASIDE,
    CONCLUSION,
    CUE,
    GOVERNED,
    HEDGE,
    OPEN_WORD,
    OR,
    REASON,
    REFUSAL,
    REFUSED,
    REJECTED,
    REMARK,
    SEVERAL,
    SOFT,
    UNFINISHED,
)

Candidate = tuple[int, str]
"""Position and text of what may be a result."""
MAX_SENTENCE = 1000
"""Of a longer one only the end is read."""

_END = re.compile(r"(?<=[.!?])[*_)\"'⟫⟧]*\s+(?=[^a-z\s])|(?<=[。！？।])[⟫⟧]*\s*|\n+|(?<=[.!?]⟫)\s+(?=[A-Z])")
_BULLET = re.compile(r"^\s*(?:[-*•]\s+(?=[^\d\s=])|\(?\d{1,2}[.)]\s+(?=\S)|>+\s*|#+\s+|\|\s*)")
_TERMINATED = re.compile(r"[.!?。！？।:][*_)\"'⟫⟧\]\s]*$|\|\s*$")
_OPEN_END = re.compile(r"[-+*/=×÷,(\\{^]\s*$|\\boxed\{[^{}]*$")
_STATES = re.compile(
    r"\b(?:is|are|was|equals|be|makes|total of|:)\s+[＄€£]?[\d,.]+\W*$|^(?:the|⟦|⟪)\b.*[⟫⟧)\d%€£]\s*$", re.IGNORECASE
)
_EQUATION = re.compile(r"[\dA-Za-z%)}⟧°]{2,}\s*[=≈]\s*|(?<!_)[\d%)}]\s*[=≈]\s*|(?<![A-Za-z\d\\⟦])(?<!⟦ )[a-z]\s*=\s*")
_ROOT = r"-?[\d.]*\s?\\(?:sqrt|[dt]?frac|pi)(?:\{[^{}]*\}|[\s\d+\-*/^]|\\(?:sqrt|pi))*+"
_POWER = r"\d+(?:\.\d+)?\s?(?:×|\\times|\\cdot|·|\*|x)\s?10\s?\^\s?\{?-?\d+\}?"
_EXACT = re.compile(r"(?:\\pi|\\sqrt\{[^{}]*\}|\d/\d+|\\frac\{\d+\}\{\d+\}) ?⟧?(?=\s*\(?(?:≈|\\approx))")
_SHORTFALL = re.compile(r"\bneeds? [＄€£]?\d[\d.,]* more\b")
_DURATION = rf"\d+(?:\.\d+)?\s?{UNIT},?\s(?:and\s)?\d+(?:\.\d+)?\s?{UNIT}(?![A-Za-z])"
_BRACKETED = re.compile(r"\s\((?:it|he|she|they|this|because|since|not|up|down|from|compared)\b[^()]*\)", re.IGNORECASE)
_COPULA = re.compile(r"(?:\b(?:is|are|equals|obtain|get|be)\b|:)\s+", re.IGNORECASE)
_TUPLE = r"[(\[]-?\d[\d.]*(?:, ?-?\d[\d.]*)+[)\]]"
_WHOLE = re.compile(rf"(?<![\d:])\d{{1,3}}(?: ?: ?\d{{1,3}})+|{_DURATION}|{_POWER}|{_ROOT}|{_TUPLE}")
_RATIO = re.compile(r"(?<![\d:])\d{1,3}(?:(?: ?: ?| to )\d{1,3})+")
_CHOICES = re.compile(r"\(?[A-E]\)\s*[^()\n]{1,40}?\(?[B-F]\)\s")
_JOINED = re.compile(rf"\s*,?\s*{OR}\s*", re.IGNORECASE)
_AND = re.compile(rf"\s*,?\s*(?:{AND}|,)\s*", re.IGNORECASE)
_COMMA = re.compile(r"\s*,\s*(?:and\s+)?")
_ASSIGNMENT = re.compile(r"⟦\s*[A-Za-z](?:_\{?\w\}?)?\s*=")
_COMPOUND = re.compile(
    r"\s*(?:hours?|hrs?|h|minutes?|feet|foot|years?|weeks?|days?|dollars?|euros?|pounds?),?\s*(?:and\s*)?",
    re.IGNORECASE,
)
_SAME_AS_SO = re.compile(
    r"\d[^\d;.]{0,60}\band [＄€£]?\d[^;.]{0,60},? i\.e\.,? (?=[＄€£]?\d)"  # 35 to walk and 20 to cycle, i.e. 55
    r"|= ?-?[\d.]+, an? (?:drop|fall|decrease|reduction|rise|increase|gain|growth|change|profit|loss) of (?=\d)"
)
_SOLUTIONS = re.compile(
    r"(?<![A-Za-z\d])([a-z]) ?= ?-?\d+(?:[./]\d+)?(?:(?:,? (?:and|or)|,) \1 ?= ?-?\d+(?:[./]\d+)?)+(?=[.\s]|$)"
)
_ASSIGNMENTS = re.compile(
    r"\bsolutions?\b[^=]*?((?<![A-Za-z])[a-z] ?= ?-?\d+(?:[./]\d+)?(?:(?:,? and|,) [a-z] ?= ?-?\d+(?:[./]\d+)?)+)[.\s]*$"
)
_CLOCK = re.compile(r"\d{1,2}:\d\d\b")
_ARRIVES = re.compile(
    r"\b(?:arriv|start|begin|leav|end|finish|land|return|reach)[a-z]*\b[^.,;]{0,30}\bat\s+$", re.IGNORECASE
)
_CALCULATION = re.compile(r"^[\s\d+\-*/^().,=×÷·xX＄€£%⟦⟧]+$")


def stated_result(text: str) -> str:
    """The result that a plain text ends with, "" if it breaks off, asks, or leaves open which of several it is."""
    sentences = [s[-MAX_SENTENCE:] for s in split(text) if re.search(r"\w", s)]
    if not sentences or broken_off(sentences):
        return ""
    if len(sentences) > 2 and all(NUMBER.fullmatch(s.rstrip(".")) for s in sentences):
        return ", ".join(sentences)
    for i, sentence in enumerate(reversed(sentences)):
        if sentence.rstrip("⟫* ").endswith("?") and has_number(sentence):
            return ""
        if found := result_of(sentence):
            return found
        if has_number(sentence) or i == 3 or not _passes(sentence, first=i == 0):
            break
    return "" if has_number(text) else _words(sentences[-1])


def split(text: str) -> list[str]:
    """The sentences of a text; a line break ends one."""
    pieces, start = list[str](), 0
    for end in _END.finditer(text):
        if "\n" not in end[0] and ABBREVIATION.search(text[max(start, end.start() - 12) : end.start()]):
            continue
        pieces.append(text[start : end.start()] + end[0].strip())
        start = end.end()
    return [_BULLET.sub("", piece).strip() for piece in [*pieces, text[start:]]]


def has_number(text: str) -> bool:
    return bool(re.search(r"\d", text))


def _passes(sentence: str, *, first: bool) -> bool:
    """True if a sentence without a number may follow the result."""
    if sentence.rstrip("⟫ ").endswith("?"):
        return bool(REMARK.search(sentence))
    return not UNFINISHED.search(sentence)


def broken_off(sentences: list[str]) -> bool:
    """True if the last sentence has no end though others have, and does not end in a value either."""
    last = sentences[-1]
    if _TERMINATED.search(last):
        return False
    if OPEN_WORD.search(last) or _OPEN_END.search(last) or last.count("⟦") > last.count("⟧"):
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
    cue = CUE.search(line)
    return bool(cue) and any(at >= cue.end() and not _hidden(line, at) for at, _ in _candidates(line))


def result_of(sentence: str) -> str:
    """The result that one sentence states, "" if none."""
    if _CHOICES.search(sentence) or REJECTED.search(sentence) or REFUSAL.search(sentence):
        return ""
    if len({n[0] for n in NUMBER.finditer(sentence)}) > 1 and HEDGE.search(sentence):
        return ""
    if (whole := assignments(sentence) or _relation(sentence) or _terse(sentence)) is not None:
        return whole
    if solutions := _SOLUTIONS.search(sentence) or _ASSIGNMENTS.search(sentence):
        return assigned(re.findall(r"([A-Za-z]) ?= ?([-\d./]*\d)", solutions[0]))
    if has_number(outside := _BRACKETED.sub("", sentence)):
        sentence = outside
    if (named := _named_whole(sentence)) is not None:
        return named
    sentence = _without_aside(_concluded(sentence), REASON)
    if (exact := _EXACT.search(sentence)) is not None:
        sentence = sentence[: exact.end()]
    if short := _SHORTFALL.search(sentence):
        sentence = sentence[: short.end()]
    if (equal := list(_EQUATION.finditer(sentence))) and (value := value_at(sentence[equal[-1].end() :])):
        return value
    sentence = _without_aside(sentence, ASIDE)
    if not has_number(sentence) and "⟦" not in sentence:
        sentence = spelled_small(sentence)
    found = [c for c in _candidates(sentence) if not REFUSED.search(_before(sentence, c[0]))]
    free = [c for c in found if not GOVERNED.search(_before(sentence, c[0]))]
    free = _without_circumstances(sentence, free) or free or found
    return _chosen(sentence, free) if free else ""


def _relation(sentence: str) -> str | None:
    """The relations of which a sentence consists: `x < -2 or x > 3`."""
    return whole_value(sentence) if re.search(r"\w\s*(?:[<>]|\\[lg]eq?)", sentence) else None


def _named_whole(sentence: str) -> str | None:
    """The expression that a sentence's last `is` or colon names, if nothing follows it."""
    copula = None
    for found in _COPULA.finditer(sentence):
        copula = found
    return whole_value(sentence[copula.end() :]) if copula else None


def _without_circumstances(sentence: str, free: list[Candidate]) -> list[Candidate]:
    """Those not said to be the circumstance of another; `for $20` is a price, and no circumstance."""
    money = [at for at, text in free if re.search("[＄€£¥]", text) and re.search(r"\bfor\s+$", sentence[:at])][-1:]
    kept, hidden_end = list[Candidate](), -1
    for at, text in free:
        joined = hidden_end >= 0 and re.fullmatch(r"(?: [a-z]+){1,2} and ", sentence[hidden_end:at])
        if at not in money and not _is_arrival(sentence, at) and (joined or SOFT.search(_before(sentence, at))):
            hidden_end = at + len(text)
        else:
            kept.append((at, text))
    return kept


def _is_arrival(sentence: str, at: int) -> bool:
    return bool(_CLOCK.match(sentence, at) and _ARRIVES.search(_before(sentence, at)))


def _terse(sentence: str) -> str | None:
    """The value of a sentence that is nothing but one, or a calculation."""
    bare = sentence.lstrip(" *_`⟪⟫").rstrip(" .。!*_`⟪⟫")
    if REFUSED.search(re.split(r"[\d⟦]", bare, maxsplit=1)[0]) or sentence.endswith("?"):
        return None
    if re.fullmatch(r"(?:⟦[^⟦⟧]*⟧(?:,|\s|and\b|or\b)*)+", bare):
        return value_at(bare)
    if bare.startswith("⟦") and bare.endswith("⟧") and bare.count("⟦") == 1:
        return value_of(bare[1:-1])
    if re.match(r"\\[a-z]+\s*[\d{]", bare):
        return value_of(bare)
    short = len(bare.split()) <= 4 and not bare.count("=")
    if _CALCULATION.match(bare) or re.match(r"[A-Za-z]\s*(?:=|\\geq|\\leq|[<>])", bare) or short:
        value = value_at(bare)
        if short and value and NUMBER.fullmatch(value) and len(list(NUMBER.finditer(bare))) > 1:
            return None
        return value if value is None or "=" not in value else value_of(value)
    return None


def _concluded(sentence: str) -> str:
    """The part of a sentence after its last `so` that still has a number, or after what says the same."""
    if other := _SAME_AS_SO.search(sentence):
        return sentence[other.end() :]
    for found in reversed(list(CONCLUSION.finditer(sentence))):
        rest = sentence[found.end() :]
        if has_number(rest) and not re.match(r"\s*(?:many|much|far)\b", rest):
            return rest
    return sentence


def _without_aside(sentence: str, aside: re.Pattern[str]) -> str:
    """The part of a sentence before the first aside that follows a number which may be the result."""
    stated = next((at + len(text) for at, text in _candidates(sentence) if not _hidden(sentence, at)), None)
    found = aside.search(sentence, stated) if stated is not None else None
    return sentence[: found.start()] if found else sentence


def _hidden(text: str, at: int) -> bool:
    return any(pattern.search(_before(text, at)) for pattern in (GOVERNED, SOFT, REFUSED))


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
        found = (_RATIO if "ratio" in sentence else _WHOLE).search(sentence, start, end)
        stop = found.start() if found else end
        yield from ((n.start(), n[0]) for n in NUMBER.finditer(sentence, start, stop))
        if found:
            yield found.start(), found[0]
        start = found.end() if found else end


def _chosen(sentence: str, free: list[Candidate]) -> str:
    """The value of the last candidate, or of the last in bold, with those before it that make a list with it."""
    bold = [c for c in free if sentence.rfind("⟪", 0, c[0] + 1) > sentence.rfind("⟫", 0, c[0])]
    at, text = (bold or free)[-1]
    return value_at(sentence[_list_start(sentence, bold or free, at) :]) or text.strip("⟦⟧ ")


def _list_start(sentence: str, free: list[Candidate], at: int) -> int:
    """Beginning of the list whose last value stands at `at`."""
    joint = _AND if SEVERAL.search(sentence) else None
    if len(free) > 2 and all(_COMMA.fullmatch(sentence[a[0] + len(a[1]) : b[0]]) for a, b in pairwise(free[-3:])):
        joint = _AND
    for place, text in reversed([c for c in free if c[0] < at]):
        between = sentence[place + len(text) : at]
        assigned = _ASSIGNMENT.match(text) and _ASSIGNMENT.match(sentence, at)
        if not _JOINED.fullmatch(between) and not ((joint or (assigned and _AND)) or _COMPOUND).fullmatch(between):
            break
        at = place
    return at


def _words(sentence: str) -> str:
    """The answer of a sentence without numbers: what something *is*, or the whole."""
    bare = sentence.strip(" .。!*_`\"'⟪⟫")
    if yes := re.match(r"(?:yes|no)\b(?=,)", bare, re.IGNORECASE):
        return yes[0]
    return re.sub(r"^.*\s(?:is|are|was|were)\s+(?:(?:an?|the)\s+)?(?=\w)", "", bare)
