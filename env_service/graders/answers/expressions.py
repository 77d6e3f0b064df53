r"""Values at the beginning of a text: a number with its unit, an expression, a list of them.

`18 dollars per day` is 18, `x = 2\pi/3 radians` is `2\pi/3`, `5 * 6 = 30 km` is 30, `7 or 8` stays a list.
"""

import re

from env_service.graders.answers.values.numbers import NUMBER
from env_service.graders.answers.values.ranges import signs_for_words
from env_service.graders.answers.values.units import UNIT, unit_after
from env_service.graders.answers.vocabulary import AND, FILLER, OR, compiled

_LEAD = compiled(rf"(?:[\s:=*_`\"'⟪⟫~≈>→⇒∴|✅]|\(?{FILLER}\b)++")
_CHOICE = re.compile(
    r"\(?[A-J]\)[.:]?\s+(?=[-\d⟦\\＄€£(])|(?:option|choice)\s+\(?[A-J]\)?[.:,]?\s+(?=\S)", re.IGNORECASE
)
_EXPRESSION = re.compile(
    r"(?:\\(?:begin|end)\{[a-z]+\}|[&\d\s+\-*/^().,=\[\]{}_|<>!:;÷·×√∞π°≤≥≠±≈'%＄]|\\[A-Za-z]++|\\[\\,;! |{}]"
    r"|(?<![A-Za-z])[A-Za-z](?![A-Za-z])|(?:sqrt|frac|log|ln|sin|cos|tan|exp|pi)(?![A-Za-z]))++"
)
_ONLY_EXPRESSION = re.compile(rf"(?:{_EXPRESSION.pattern}|\b(?:or|and)\b)++")
_MATHEMATICAL = re.compile(
    r"\\[A-Za-z{]|±|[a-z]\s*[<>]|\d\s*[<>]|\bpi\b|[=^√∞π_]|\d\s*[-+*/×÷·]|[(\[{][^()\[\]]*[\d,][^()\[\]]*[)\]}]"
    r"|\d[a-zA-Z](?![A-Za-z])|[a-z]\s*[-+*/]\s*[\da-z]|sqrt|log|ln|sin|cos|tan|exp"
)
_GOES_ON = re.compile(
    r"\s*(?:[*/^×÷·+=_√π!<>]|(?:sqrt|pi)\b|-\s*[\d(\\]|\\(?!text|mathrm|mbox|circ|degree|quad|,|\s)[A-Za-z]|[x×]\s*[\d＄(])"
    r"|\(\s*[\da-z][^)]*[-+*/^]|[xyznabktr](?![A-Za-z°/])|[a-z]\s*[-+^=]\s*[\da-z]"
)
_NEXT = re.compile(
    rf"[\s⟫]*(?:,?\s*\(?(?:{OR}|{AND})(?: maybe| possibly| perhaps| even| also)?|\bvs\b\.?"
    r"|\\text\s*\{\s*(?:or|and)\s*\}|[,;|&—–…]|\.\.+|\s)[\s⟪]*(?=[-+(＄€£⟦.]?\d|⟦)"
)
_PAIR = re.compile(
    r"(?P<a>-?\d+(?:\.\d+)?)(?::| : | to )(?P<b>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+(?:\.\d+)?)(?: ?: ?\d+(?:\.\d+)?)?)"
    r"(?P<half>\s*[ap]\.?\s?m\b\.?)?",
    re.IGNORECASE,
)
_MONEY_AND_CENTS = re.compile(
    r"(\d++)\s*(?:(?:dollars?|euros?|pounds?)\s*(?:and\s*)?|and\s(?=\d+ (?:cents?|pence)))(\d{1,2}(?=\s*(?:cents?|pence)\b)"
    r"|\d\d(?![\d.,]|\s*[a-z]))",
    re.IGNORECASE,
)
_LONG_UNIT = rf"(?:{UNIT}|pounds?|lbs?|ounces?|oz)"
_COMPOUND = re.compile(rf"\s*{_LONG_UNIT}\.?,?\s*(?:and\s+)?\d+(?:\.\d+)?\s*{_LONG_UNIT}\b", re.IGNORECASE)
_MEASURED = re.compile(
    rf"\s?{UNIT}(?![A-Za-z])(?:\^\{{\d\}})?\s?(?:[*×·÷+/]|-(?=\s))\s?[＄€£]?\d[^=,;:\n]{{0,60}}=\s*(?=[＄€£]?\d)",
    re.IGNORECASE,
)
"""The rest of a calculation with units behind its first number, up to its result."""
_REMAINDER = re.compile(r",?\s*(?:with )?(?:an? )?(?:r|remainder(?: of)?)\s*(\d+)", re.IGNORECASE)
_ASSIGNMENT = re.compile(r"\s*(?:,\s*)?(?:and|or|,)?\s*(?=[A-Za-z]\s*=)")
_TRAILING = " \t.,;:。，'\"`*_⟪⟫⟧"


def lead_removed(text: str) -> str:
    """The text without the signs and words before a value."""
    text = _LEAD.sub("", text, count=1) if _LEAD.match(text) else text
    if choice := _CHOICE.match(text):
        text = text[choice.end() :]
    return _LEAD.sub("", text, count=1) if _LEAD.match(text) else text


def value_at(text: str) -> str | None:
    """The value with which a plain text begins; None if it begins with words."""
    text = lead_removed(text)
    if text.startswith("⟦"):
        return _marked(text)
    text = text.split("\n", 1)[0]
    if pair := _PAIR.match(text):
        return f"{pair['a']}:{re.sub('[ ,]', '', pair['b'])}{pair['half'] or ''}"
    if money := _MONEY_AND_CENTS.match(re.sub(r"^[＄€£]", "", text)):
        return f"{money[1]}.{money[2]:0>2}"
    number = NUMBER.match(text)
    if number is None:
        return _expression_at(text)
    rest = text[number.end() :]
    if _GOES_ON.match(rest):
        return _expression_at(text) or number[0].strip()
    if computed := _MEASURED.match(rest):
        return value_at(rest[computed.end() :])
    if _NEXT.match(rest):
        return _list_at(text, number.end())
    if compound := _COMPOUND.match(rest):
        return number[0] + compound[0]
    if remainder := _REMAINDER.match(rest):
        return f"{number[0]} R {remainder[1]}"
    return number[0].strip() + unit_after(rest)


def _marked(text: str) -> str | None:
    """The value of text that begins with ⟦math⟧, and of what continues its list."""
    end = text.find("⟧")
    inside = text[1:end] if end > 0 else text[1:]
    if not inside.strip() or "\\boxed" in inside:
        return None
    rest = text[end + 1 :] if end > 0 else ""
    if inside.rstrip().endswith(("=", "≈", ":")) or re.match(r"\s*[=≈]", rest):
        return value_at(rest)
    values = [value_of(inside)]
    while following := _NEXT.match(rest):
        rest = rest[following.end() :]
        if not rest.startswith("⟦"):
            break
        inside, _, rest = rest[1:].partition("⟧")
        values.append(value_of(inside))
    if len(values) == 1 and re.match(r"\s*%|\s*percent\b", rest):
        return values[0] + "%"
    return ", ".join(values)


def _list_at(text: str, end: int) -> str:
    """A list of numbers from the beginning of a text, of which the first ends at `end`."""
    values = [text[:end].strip()]
    while following := _NEXT.match(text, end):
        number = NUMBER.match(text, following.end())
        if number is None:
            break
        values.append(number[0].strip())
        end = number.end()
        if (unit := re.compile(r"\s*[A-Za-z]+").match(text, end)) and _NEXT.match(text, unit.end()):
            end = unit.end()
    return ", ".join(values)


def _expression_at(text: str) -> str | None:
    found = _EXPRESSION.match(text)
    if not found or not _MATHEMATICAL.search(found[0]) or not re.search(r"[\dA-Za-z∞π]", found[0]):
        return None
    end = found.end()
    # a letter or bracket that belongs to the words after it
    inside = re.sub(r"\s+(?:a|I|[(\[{])\s*$", "", found[0]).strip()
    if re.search(r"\\text\s*\{?$", inside):
        return value_of(text)
    if re.match(r"\s*[A-Za-z]{2}", text[end:]) and re.search(r"[-+*/=]$", inside):
        return None
    if computed := _MEASURED.match(text, found.start() + len(inside)):
        return value_at(text[computed.end() :])
    if further := _ASSIGNMENT.match(text, end) or _ASSIGNMENT.match(text, found.start() + len(inside)):
        return f"{value_of(inside)}, {value_at(text[further.end() :])}"
    value = value_of(inside)
    return value + unit_after(text, found.start() + len(inside)) if NUMBER.fullmatch(value) else value or None


# ---- the inside of math ---------------------------------------------------------------------------------------------

_TEXT_NAMES = r"\\(?:text|textbf|textrm|textit|mathrm|mathbf|mathbb|mbox|bm|boldsymbol|operatorname)\s*"
_UNIT_TEXT = re.compile(
    rf"(?:\\[,;:! ]|\s|~)*{_TEXT_NAMES}\{{(?:[^{{}}\d]|(?<=m)\d|(?<=\^)\d)*+\}}(?:\s*\^\s*\{{?\d\}}?)?"
    rf"(?:\s*/\s*{_TEXT_NAMES}\{{[^{{}}]*+\}})?[\s.]*$"
    rf"|(?<=[\d\s])(?:\\[,;:! ]|\s|~)*\\[dt]?frac\s*(?:\{{\s*(?:{_TEXT_NAMES}\{{[^{{}}\d]*+\}}|[a-z]{{1,4}})\s*\}}){{2}}[\s.]*$"
    r"|(?<=\d)(?:\\[,;:! ]|\s|~)*(?:\\Omega|Ω)[\s.]*$"
)
_TEXT_COMMAND = re.compile(rf"{_TEXT_NAMES}\{{([^{{}}]*+)\}}")
_SPACES = re.compile(r"(?<!\\)\\(?:[,;:! ]|(?:qquad|quad|displaystyle|left|right|[bB]ig[lr]?)(?![a-z]))|~")
_EMPHASIS = re.compile(
    r"\\(?:text)?color\s*\{\w+\}|\\(?:underline|bf|bm|boldsymbol|mathit|rm|mathbf(?=\s*\{\s*\\))(?![a-zA-Z])"
)
_SEPARATOR = re.compile(
    r"(?<!\\)(?:,(?!\d{3}(?!\d))|;)|\\text\s*\{\s*,?\s*(?:and|or)\s*,?\s*\}|\b(?:and|or)\b|\\(?:quad|qquad)(?![a-z])"
)
_EQUALITY = re.compile(
    r"(?<![<>!\\])=(?!=)|\\(?:equiv|implies|Rightarrow|rightarrow|to|therefore)(?![A-Za-z])|⇒|→|∴|\\in(?![a-z])|∈"
)
_UNITS = re.compile(
    r"\s*(?!(?:pi|sqrt)\b)(?:(?:[^\W\d_]{2,}|[µ°º一-龥][^\W\d_]*|(?<=\s)[A-Zmsghl])(?:\s?[/^]\s?\{?-?[\dA-Za-z]+\}?)*(?:\s[A-Za-z ]*)?)?"
)
_ASSIGNED = re.compile(r"[\s⟦⟧]*([A-Za-z](?:_\{?\w\}?)?)\s*(?:=|\bis\b)([^=A-Za-z]+)")
_STEP = re.compile(r"^\d|[-+*/]")
"""A left side that is an expression, and no name."""
_LIMITS = re.compile(r"(\\(?:sum|int|lim|prod)(?![a-z]))\s*_\s*\{[^{}]*\}")
_APPROXIMATE = re.compile(r"\\approx(?![a-z])|≈")


def value_of(inside: str) -> str:
    """The value of the inside of math: what its last equation equals, without units."""
    inside = re.sub("[⟦⟧⟪⟫]", "", inside).rstrip(_TRAILING).lstrip(_TRAILING.replace(".", ""))
    parts = [part for part in _SEPARATOR.split(inside) if part.strip(" \\")]
    if len(parts) > 1 and all(_EQUALITY.search(part) for part in parts):
        return assigned(_named([(_EQUALITY.split(part, maxsplit=1)[0].strip(), value_of(part)) for part in parts]))
    whole = _right_side(inside).strip()
    inside = _bare(_without_unit_text(whole))
    number = NUMBER.match(inside)
    if not number or not _UNITS.fullmatch(inside, number.end()):
        return inside
    return number[0].strip() + (unit_after(whole, len(number[0])) if whole.startswith(number[0]) else "")


def _named(values: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The values without the steps that lead to the last: `2n = 46, n = 23` names 23, and so does `a = 20, b = 3, a + b = 23`."""
    last, earlier = values[-1][0], values[:-1]
    named_sum = re.search(r"[A-Za-z)]\s*[-+*/]\s*\w", last) and not any(_STEP.search(name) for name, _ in earlier)
    if named_sum or (re.search(r"[\d)] ?[-+*/×·÷]", last) and not re.search("[A-Za-z]", last)):
        return values[-1:]
    return [one for one in values if not _STEP.search(one[0])] if not _STEP.search(last) else values


def assigned(values: list[tuple[str, str]]) -> str:
    """The values of names: of several names a tuple in their order, of one name a list."""
    listed = ", ".join(value for _, value in (sorted(values) if _distinct(values) else values))
    return f"({listed})" if _distinct(values) else listed


def assignments(text: str) -> str | None:
    """The values of a text that is nothing but several `x = 3`."""
    parts = [_ASSIGNED.fullmatch(part) for part in _SEPARATOR.split(text.strip(" .*_⟪⟫⟦⟧"))]
    known = [part for part in parts if part]
    return assigned([(part[1], value_of(part[2])) for part in known]) if len(known) == len(parts) > 1 else None


def _distinct(values: list[tuple[str, str]]) -> bool:
    names = {name for name, _ in values}
    return len(names) == len(values) and all(re.fullmatch("[A-Za-z]", name) for name in names)


def whole_value(text: str) -> str | None:
    """The value of a text that is nothing but an expression; None for any other."""
    text = signs_for_words(text.strip(" .*_⟪⟫"))
    if not _ONLY_EXPRESSION.fullmatch(text) or not _MATHEMATICAL.search(text) or not re.search(r"\d", text):
        return None
    return value_at(text) if re.search(r"\bor\b.*=|=.*\bor\b", text) else value_of(text)


def _right_side(inside: str) -> str:
    """The right side of the last equation in math: the exact one if it has an approximate one too."""
    without_limits = _LIMITS.sub(r"\1", inside)
    if without_limits != inside and not _EQUALITY.search(without_limits):
        return inside
    inside = without_limits
    inside = re.sub(r"\\?[bp]mod\b.*|\(mod\b.*", "", inside)
    exact, *approximate = _APPROXIMATE.split(inside)
    computed = re.search(r"\d\s*(?:·|×|\*|\\cdot|\\times)|(?:·|×|\*|\\cdot|\\times)\s*\d", _EQUALITY.split(exact)[-1])
    formula = approximate and re.search(r"(?<![A-Za-z\\])[a-z](?![A-Za-z])", _EQUALITY.split(exact)[-1])
    is_value = not computed and not formula and re.search(r"\\(?:pi|sqrt|[dt]?frac|ln|log)", exact)
    sides = _EQUALITY.split(exact if is_value else [exact, *approximate][-1])
    return sides[-2] if len(sides) > 1 and re.fullmatch(r"\s*[A-Za-z]\s*", sides[-1]) else sides[-1]


def _without_unit_text(inside: str) -> str:
    shorter = _UNIT_TEXT.sub("", inside)
    return _TEXT_COMMAND.sub(r"\1", shorter if re.search(r"[\dA-Za-z]", shorter) else inside)


def _bare(inside: str) -> str:
    """Math without spaces and braces that only lay it out, and with LaTeX's names for `pi` and `sqrt(2)`."""
    inside = re.sub(r" {2,}", " ", _SPACES.sub(" ", inside)).rstrip(_TRAILING)
    inside = inside.strip(_TRAILING.replace(".", "")).rstrip("\\ ")
    inside = _EMPHASIS.sub("", inside)
    while braced := re.fullmatch(r"\{([^{}]*+)\}", inside):
        inside = braced[1].strip()
    inside = re.sub(r"(\d++)\s+\((?:\1|[A-Za-z -]*)\)$", r"\1", inside)
    inside = re.sub(r"(?<![A-Za-z])\\?sqrt\(([^()]*)\)", r"\\sqrt{\1}", inside)
    inside = re.sub(r"(?<=[\dA-Za-z)])\*(?=[A-Za-z(])", "", inside.replace("**", "^"))
    return re.sub(r"(?<![A-Za-z\\])(pi|sqrt)(?![A-Za-z])", r"\\\1", inside)
