"""The result that one sentence states, "" if none.

Of several numbers it is a total or follows `so`; it is in no circumstance or aside (`out of 30`, `at x = 3`).
"""

import functools
import re

from env_service.graders.answers import vocabulary as said
from env_service.graders.answers.candidates import candidates, chosen_value, free_candidates, has_number, hidden
from env_service.graders.answers.expressions import assigned, assignments, value_at, value_of, whole_value
from env_service.graders.answers.values.amounts import SAME_AMOUNT, in_each_form
from env_service.graders.answers.values.numbers import NUMBER, quantity, spelled_small
from env_service.graders.answers.values.sums import RECENT

_EQUATION = re.compile(
    r"[\dA-Za-z%)}⟧°]{2,}\s*[=≈]\s*|(?<!_)[\d%)}]\s*[=≈]\s*|(?<![A-Za-z\d\\⟦])(?<!⟦ )[A-Za-z]\s*[=∈]\s*|\bequals\s+(?=\()"
)
_EXACT = re.compile(
    r"(?:[\d)}] ?\\pi|\) ?/ ?\d+|\\sqrt\{[^{}]*\}|\d/\d+|\\frac\{\d+\}\{\d+\}) ?⟧?"
    r"(?=[ a-z]*,?[ a-z']* ?\(?(?:≈|\\approx|(?:or )?(?:roughly|about|approximately) \d))"
)
_NOT_STATED = re.compile(
    r"(?<=[\w.%⟧⟫€])\s\((?!that is|i\.e)(?=[^()⟦\\]*(?:[A-Za-z]{2}|\d\s?[-+*/×·÷x=]\s?[＄€£]?\d|\d\s?%))[^()⟦\\]*\)"  # (3 of each)
    r"|(?:^|\s)(?:[Aa]t|[Ww]hen|[Ff]or|[Ii]f) ⟦?[A-Za-z] ?= ?-?[\d./]+⟧?(?=[\s.,;]|$)(?!(?:,| and|, and) ⟦?[a-z] ?=)"  # at x = 3
    r"|\b(?:between|from) [＄€£]?\d[\d.,:]* (?:and|to) [＄€£]?\d[\d,:]*|(?:(?<=the )"
    r"|(?<=a ))\d[\d.]*(?: ?[a-z]{1,2})? by \d[\d.]*(?: ?[a-z]{1,2})?(?= [a-z])"
    r"|\b(?:discard|reject|ignore)\w* (?:the )?(?:[a-z]+ ){0,3}⟦?[a-z] ?= ?-?[\d./]+⟧?(?=[\s.,;]|$)"
    r"|\bfrom [＄€£]?\d[\d.,]*(?: [a-z]+)? by [＄€£]?\d[\d.,]*%?(?= to )"
    r"|, from [＄€£]?\d[\d.,]*%?(?: [a-z]+)? to [＄€£]?\d[\d.,]*%?(?: [a-z]+)?(?=\.?$)"
    r"|(?<=[a-z]) of [＄€£]?\d[\d.,]* [a-z]+(?= (?:is|has|was|costs?|holds?|weighs?|takes?|needs?) )"
    r"|,? \(?(?:which is|that is|i\.e\.,?|so)? ?(?:the )?(?:choice|option|answer) (?:⟦\\?[a-z]*\{?)?\(?[A-J]\)?(?:\}?⟧)?\)?(?=[.,;]|$)"
    r"|, who (?:is|was|has|had)\b[^,.;]*(?:,|(?=\.|$))"
    r"|\b(?:sum|difference|product|quotient|average|mean|multiple|divisor|factor) (?:of|between)"
    r" [＄€£]?\d[\d.,]*(?:, \d+)*,? and [＄€£]?\d[\d,]*"
)
"""Calculations, parameters and operands that a sentence names beside its result."""
_COPULA = re.compile(
    r"(?:\b(?:is|are|equals|obtain|get|be|(?:factors|written|expressed|factored|represented) as"
    r"|written|reads|to|gives?|yields?|becomes)\b|:)\s+",
    re.IGNORECASE,
)
_SOLUTIONS = re.compile(
    r"(?<![A-Za-z\d])([a-z]) ?= ?(-?\d+(?:[./]\d+)?(?:,? (?:and|or|as well as) (?:\1 ?= ?)?-?\d+(?:[./]\d+)?(?! is\b)"
    r"|, \1 ?= ?-?\d+(?:[./]\d+)?)+)(?=[.,;\s]|$)"
)
_REDUCED = re.compile(
    r"(?<=\d)(?:,? or|,? which is|,? i\.e\.,?|,? which simplifies to| simplifies to| reduces to) (?=\d+(?:\s?:\s?| to )\d)"
)
_OR_RATHER = re.compile(
    r"((?:\d ?[-+*/×÷]|\b(?:half|twice|double|third|quarter|divided by|times|minus|plus|out of|\d of \d+)\b"
    r"|% of\b) ?[^,=.\d]{0,60}\d[^,=.]{0,60}?),? (?:or|which is) (?=[＄€£]?\d)"
)
"""Words before the value of a calculation: `28 - 12, or 16`."""
_WAYS = re.compile(r"\bin (?=\d+ (?:[a-z]+ )?(?:ways|orders)\b)")
_MORE = r"(?:(?:, (?:and )?| and )-?\d[\d.]*)"
_LIST = re.compile(
    rf"(?:(?:\b(?:(?:are|were)(?: therefore| thus| then)?|terms|numbers|values|be)|:)\s+(-?\d[\d.]*{_MORE}+)"
    rf"|\b(?!(?:of|from|for|than|in|on|adding|between|among)\b)[a-z]+\s+(-?\d[\d.]*{_MORE}{{2,}}))(?: [a-z]+){{0,3}}\W*$",
    re.IGNORECASE,
)
_LATER = re.compile(
    r"[,;:]\s(?:(?:and|but|then|minus|plus)\s)*|\s(?:and|but)\s(?=(?:then|so|now|after|in|he|she|it|they|we|there|that|the)\b)"
)
_THEN_IS = re.compile(r"[^,;]*?\s((?:is|are|has|gives|yields|leaves|makes)\s[^,;]*\d)")
_PARALLEL = re.compile(
    r"\W*(?:(?:So|Thus|Therefore|Hence|Then),? )?(?:(?!Then|Now|Thus|There)[A-Z][a-z]+(?: ?[=:] ?| (?:(?:is|has|gets|had|was|pays"
    r"|earns) )?)"
    r"[＄€£]?\d[\d.]*(?: [a-z]+){0,2}(?:, |; |,? and |, and ))+"
    r"[A-Z][a-z]+(?: ?[=:] ?| (?:(?:is|has|gets|had|was|pays|earns) )?)[＄€£]?\d[\d.]*(?: [a-z]+){0,2}\W*"
)
"""Names with their values."""
_ASSIGNED = re.compile(r"\b[a-z] ?= ?-?[\d./]*\d⟧?(?:,| and|, and) ⟦?$")
_ONLY = re.compile(
    r"\bonly [⟦⟪]?(-?\d[\d.,/]*)[⟧⟫]? (?:has|is|works?|satisfies|fits?|meets?|qualifies|divides|fulfils|makes)\b(?!.*\b(?:so|left)\b)",
    re.IGNORECASE,
)
"""The one of several numbers that has some property."""
_TRAILING = re.compile(r",? (?:by|using|via|after|when|where|with|for|because|since|valid|as)\b|[,;]\s|\s\(")
"""Words after an expression that a sentence states."""
_REMAINDER = re.compile(r"(\d+) with (?:an? )?remainder(?: of)? (\d+)\W*$")
_WORDS_ASIDE = re.compile(r"\([^()\d]*\)")
_IS_SHARE = re.compile(
    r"^\W*(?:(?:so|thus|hence|therefore),? )?[⟦＄]*(?P<part>\d[\d.,]*)⟧? (?:is"
    r"|are) [⟪⟦]*(?P<share>\d[\d.,]*%)[⟧⟫]* of [⟦＄]*(?P<whole>\d[\d.,]*?)⟧?\.?$",
    re.IGNORECASE,
)
"""A part, its share and the whole, of which any may be asked."""
_TRIED = re.compile(
    r"(?:try|trying|test|testing|take|taking|for|with)? ?⟦?(?:[a-z] ?= ?)?(-?\d[\d.]*)⟧?[:,](?!.*\bno\b)(?=.*\d).*(?:\byes|✓|✔|✅"
    r"|\bworks|\bcorrect|\bmatches|\bright)\W*$",
    re.IGNORECASE,
)
"""A number that a sentence tries, and finds right."""
_OUT_OF = re.compile(r"\W*(\d+) (?:out of|in) (\d+)\W*")
_COUNTS = re.compile(
    r"[^\d⟦,;]*\b(?:has|have|are|needs?|takes?|gets?) (?:exactly |only )?(?:two|three|four|five|six|seven|eight|nine|ten)\b[^\d⟦,;]*?"
    r"(?=,? (?:because|since)\b)",
    re.IGNORECASE,
)
"""A clause that counts in words, before its reason."""
_PROVED = re.compile(
    r"[^:=]*\b(?:is|be|[a-z] =) [⟪⟦]?(?P<value>-?\d+(?:\.\d+)?)[⟫⟧]?(?: [a-z]+){0,2}: (?P<equation>[^:]*\d ?= ?-?\d[\d.]*\W*$)",
    re.IGNORECASE,
)
"""A result, and after a colon an equation that it makes true: `the number is 7: 7 + 5 = 12`."""
_CONTRARY = re.compile(
    r"[^,;.]*(?:'d|\b(?:would|could|might))\b[^,;.]*[,;] but (?:(?:because|since|as)\b[^,;.\d]*?(?:, |(?=\bthe\b)))?",
    re.IGNORECASE,
)
"""A clause of what would be, before the one that says what is."""
_LABEL = re.compile(r"^[\W_]*[A-Za-z][A-Za-z ]{2,30}:⟫?\s+")
_EQUATIONS = re.compile(r"(⟦[^⟦⟧]*=[^⟦⟧]*⟧(?:(?:,| or|,? and) (?=⟦)⟦[^⟦⟧]*=[^⟦⟧]*⟧)+)[^\d⟦]*$")
"""Several equations at the end of a sentence, each of which is a solution."""
_ONE_BOLD = re.compile(r"[^⟪⟫]*⟪([^⟪⟫]*)⟫[^⟪⟫]*")
_EXACTLY = re.compile(
    r"(?:approximately|about|roughly|around|≈|\\approx) [⟪⟦]*(-?[＄€£]?\d[\d.,]*\d%?)[^\d=]{0,15}?[,(]? ?(?:or|that is),? "
    r"(?:more )?(?:exactly|precisely) [⟪⟦]*([^\s⟫⟧,;]*\d[^\s⟫⟧,;]*?)[⟫⟧.)]*$",
    re.IGNORECASE,
)
"""A rounded value, and the exact one."""
_IN_TURN = re.compile(
    r"\b([a-z]) ?= ?(-?[\d./]*\d)⟧? ?(?:→|⇒|=>|->|,? so|,? then|,? and|,) ?⟦?([a-z]) ?= ?(-?[\d./]*\d)\W*$"
)
"""Two unknowns, of which the last or both may be asked: `x = 2 → y = 5`."""
_ONE_AND_OTHER = re.compile(
    r"\bone (?:[a-z]+ )?is ([^\s,;]+)(?:,| and|, and) the other (?:[a-z]+ )?(?:is )?([^\s,;]+?)\.?$"
)
_COUNT = re.compile(
    r"(?:(?<=, so )|(?<=, leaving )|(?<=[→⇒] ))(?:we |there |are |count |have ){0,3}(?!one\b)[a-z]+ (?:[a-z]+ ){0,2}[a-z]+\W*$"
)
"""A conclusion at the end of a sentence that may count in words: `so five units apart`."""
_OPERATION = re.compile(
    r"\b(?:multipl|add|divid|subtract)(?:e|y|ing|ying|)(?:\s[a-z]+){0,3}\s[＄€£]?\d[\d.,]*(?:\s[a-z]+){0,3}"
    r"\s(?:by|and|from|to|with)\s(?:the\s)?[＄€£]?\d[\d.,]*",
    re.IGNORECASE,
)
"""A calculation in words, without its result."""
_UNSOLVED = re.compile(
    r"^(?!.*(?:\\(?:int|sum|prod|lim)|[∫∑]))[^=≈]*(?:\b[xyzn]\s*[-+/]|[-+/]\s*\d*[xyzn]\b(?!\s*\d)|\d[xyzn]\b(?!\s*\d))[^=≈]*=[^=≈A-Za-z]*$"
)
"""An equation with an unknown that is not bound, and no other."""
_WHILE = re.compile(r",? (?:while|whereas|although|though)\b", re.IGNORECASE)
_CLAIMS = re.compile(
    r"(?!.*\b(?:given|know|equation|step)\b)[^=]*\b(?:is|are|needs?|takes?|gets?|costs?|requires?)\b", re.IGNORECASE
)
_DASH = re.compile(
    r"[⟪]?([-＄€£\d][^\s⟫]*(?: [a-z]+){0,2})[⟫]? [-–—] (?=[a-z']+ [a-z]+)(?![^\n]*(?:=|\b(?:leaves|total|equals)\b))"
)
_DECIDES = re.compile(
    r"(?:→|⇒|=>|->|,? (?:and|so) (?:it's|(?:it|that|he|she) is(?: the [a-z]+ with)?|(?:he|she)'s)|,? so(?: just| only)?)"
    r"\s*[⟪⟦]?[＄€£]?\d[\d.,/:]*(?:\D*|[^\d,]*\b(?:not|rather than|instead of)\b.*)$"
    r"|, so\b[^.]*=\s*[＄€£]?\d[\d.,]*\D*$"
)
"""A result at the end of a sentence that says what is asked."""
_AFTER_COLON = re.compile(r"(?<!\s):\s+([^:=]{1,40})$")
_CLAUSES = re.compile(r"[,;:]\s|\s[-–—]\s|\s(?=\()")


@functools.lru_cache(maxsize=RECENT)
def result_of(sentence: str) -> str:
    """The result that one sentence states, "" if none; in each unit in which it states it."""
    return in_each_form(_result_of(_accepted(sentence)), sentence)


def _result_of(sentence: str) -> str:
    if _states_nothing(sentence):
        return ""
    if (counts := _COUNTS.match(sentence)) and said.REASON.match(sentence, counts.end()):
        sentence = counts[0]
    sentence = _COUNT.sub(lambda count: spelled_small(count[0]), sentence)
    if (
        known := _side_by_side(sentence) or _share(sentence) or _before_colon(sentence) or _before_dash(sentence)
    ) is not None:
        return known
    sentence = _tidied(sentence)
    if (whole := _whole(sentence)) is not None:
        return whole
    if not free_candidates(sentence) and "⟦" not in sentence:
        sentence = spelled_small(sentence)
    sentence = _without_aside(_totalled(concluded_part(_main(sentence))), said.REASON)
    if listed := _LIST.search(sentence):
        return _counted(sentence[: listed.start()], re.split(r",? and |, ", listed[1] or listed[2]))
    if (proved := _PROVED.match(sentence)) and _operands(proved["equation"]) & {proved["value"]}:
        return proved["value"]
    if (exact := _EXACT.search(sentence)) is not None:
        sentence = sentence[: exact.end()]
    if (equal := list(_EQUATION.finditer(sentence))) and (value := value_at(sentence[equal[-1].end() :])):
        if not (later := _later(sentence, equal[-1].end())):
            return value
        sentence = later
    sentence = _without_aside(sentence, said.ASIDE)
    free = free_candidates(sentence)
    return chosen_value(sentence, free) if free else ""


def _states_nothing(sentence: str) -> bool:
    """True if a sentence tells a task, a doubt, values side by side, or a calculation without its result."""
    concluded = concluded_part(sentence)
    return bool(
        said.REFUSAL.search(sentence)
        or (said.SETUP.match(sentence) and not _DECIDES.search(sentence))
        or said.TASK.match(concluded)
        or said.REJECTED.search(_without_aside(concluded, said.REASON))
        or (len({n[0] for n in NUMBER.finditer(sentence)}) > 1 and said.HEDGE.search(_WORDS_ASIDE.sub("", concluded)))
        or _is_open(_without_aside(sentence, said.REASON))
    )


def _is_open(sentence: str) -> bool:
    """True if a sentence is a calculation or an equation that is still to be solved."""
    if "=" not in sentence and has_number(sentence) and not has_number(_OPERATION.sub("", sentence)):
        return True
    return bool(_UNSOLVED.match(re.split(r"[,;:]\s|⟦", sentence.rstrip(" .⟧"))[-1]))


def _accepted(sentence: str) -> str:
    """The sentence without the clauses that reject what they name, if others have a number."""
    if (contrary := _CONTRARY.match(sentence)) and has_number(sentence[contrary.end() :]):
        return sentence[contrary.end() :]
    clauses = re.split(r";\s+", sentence)
    kept = [clause for clause in clauses if not said.REJECTED.search(clause)]
    return "; ".join(kept) if len(kept) < len(clauses) and any(map(has_number, kept)) else sentence


def _tidied(sentence: str) -> str:
    """The sentence without what it names beside its result, and with `=` before the value of a calculation."""
    outside = _NOT_STATED.sub("", sentence)
    sentence = _OR_RATHER.sub(r"\1 = ", _REDUCED.sub(" = ", outside if has_number(outside) else sentence))
    sentence = _WAYS.sub("= ", sentence)
    if re.search(r"\b(?:probability|chance|likelihood)\b", sentence):
        sentence = re.sub(r"(?<=\d) (?:in|out of) (?=\d)", "/", sentence)
    return sentence


def _whole(sentence: str) -> str | None:
    """The value of a sentence that is little but an expression, solutions or relations."""
    clause = _LABEL.sub("", concluded_part(f" {sentence}").strip(" ,"))
    solutions = _SOLUTIONS.search(sentence)
    if solutions and not has_number(_without_aside(sentence, said.REASON)[solutions.end() :]):
        return _counted(sentence[: solutions.start()], re.findall(r"-?\d[\d./]*", solutions[2]))
    if (whole := assignments(clause) or _relation(clause) or terse(sentence)) is not None:
        return whole
    if (listed := _EQUATIONS.search(sentence)) and _of_one_name(listed[1]):
        return value_at(listed[1])
    if divided := _REMAINDER.search(sentence):
        return f"{divided[2]}{SAME_AMOUNT}{divided[1]} R {divided[2]}"
    if share := _IS_SHARE.search(sentence):
        return SAME_AMOUNT.join(share.groups())
    if tried := _TRIED.match(sentence):
        return tried[1]
    if part := _OUT_OF.fullmatch(sentence):
        return f"{part[1]}/{part[2]}"
    if only := _ONLY.search(sentence):
        return only[1]
    if exact := _EXACTLY.search(sentence):
        return f"{exact[2]}{SAME_AMOUNT}{exact[1]}"
    if (
        (bold := _ONE_BOLD.fullmatch(sentence))
        and re.search(r"\d.*[a-z]|[a-z].*\d", bold[1])
        and (whole := whole_value(bold[1]))
    ):
        return whole
    if (pair := _IN_TURN.search(sentence)) and pair[1] != pair[3] and not _ASSIGNED.search(sentence[: pair.start()]):
        return f"{pair[4]}{SAME_AMOUNT}{assigned([(pair[1], pair[2]), (pair[3], pair[4])])}"
    if pair := _ONE_AND_OTHER.search(sentence):
        return ", ".join(pair.groups())
    return _after_colon(sentence) or _continued(sentence) or _named_whole(_WHILE.split(concluded_part(sentence))[0])


def _of_one_name(equations: str) -> bool:
    """True if equations name the same on their left sides, as solutions do."""
    return len(set(re.findall(r"⟦\s*([^=⟦⟧]*?)\s*=", equations))) == 1


def _operands(equation: str) -> set[str]:
    """The numbers of an equation, unless it comes to one of them."""
    known, _, result = equation.rpartition("=")
    return {number[0].strip() for number in NUMBER.finditer(known)} - {
        number[0].strip() for number in NUMBER.finditer(result)
    }


def _side_by_side(sentence: str) -> str | None:
    """The values of a sentence that gives each of several names one, which are an answer together."""
    if not _PARALLEL.fullmatch(sentence) or said.SUMMARY.search(re.split("[,;]| and ", sentence)[-1]):
        return None
    return ", ".join(number[0].strip() for number in NUMBER.finditer(sentence))


def _share(sentence: str) -> str | None:
    """The fraction or percentage with which a sentence of three numbers ends, if it is the first of them over the second."""
    part, whole, share = (
        [*NUMBER.finditer(sentence), None, None, None][:3] if sentence.count(" of ") else (None, None, None)
    )
    if not part or not whole or not share or NUMBER.search(sentence, share.end()) or not re.search("[/%]", share[0]):
        return None
    amounts = [known.value / (100 if known.percent else 1) for n in (part, whole, share) if (known := quantity(n))]
    return share[0].strip() if len(amounts) == 3 and amounts[0] == amounts[1] * amounts[2] else None


def _before_colon(sentence: str) -> str | None:
    """The one number of a clause before a colon, if a calculation that it is no part of explains it: `6 buses: 5 × 48 = 240`."""
    stated, _, reason = sentence.partition(": ")
    known, used = [*NUMBER.finditer(stated)], [number[0].strip() for number in NUMBER.finditer(reason)]
    explains = "=" in reason and len(used) > 3 and not re.search(r"[=→⇒:]\s*[^\s\d]?\d[\d.,]*\D*$", reason)
    if len(known) != 1 or not explains or not _CLAIMS.match(stated) or concluded_part(reason) != reason:
        return None
    return value_at(stated[known[0].start() :]) if known[0][0].strip() not in used else None


def _before_dash(sentence: str) -> str | None:
    """The value that stands before a dash at the beginning of a sentence, if words explain it: `7 - there are 28 at 4 tables`."""
    dash = _DASH.match(sentence)
    return (
        value_at(dash[1])
        if dash and len([*NUMBER.finditer(dash[1])]) == 1 and concluded_part(sentence) == sentence
        else None
    )


def _after_colon(sentence: str) -> str | None:
    """The value with which a sentence ends, if nothing but it and a word or two follow a colon: `24 less 5: 19`."""
    end = _AFTER_COLON.search(sentence)
    alone = end and len(end[1].split()) <= 3 and len(list(candidates(end[1]))) == 1
    return value_at(end[1]) if end and alone else None


def _continued(sentence: str) -> str | None:
    """The expression that a line goes on to with `=`, or a sentence with an arrow: `= (x - 2)^2 - 3`."""
    clause = concluded_part(f" {sentence}").strip(" ,")
    clause = _main(clause)
    return whole_value(clause.removeprefix("=")) if clause != sentence.strip(" ,") or clause.startswith("=") else None


def _relation(sentence: str) -> str | None:
    """The relations of which a sentence consists: `x < -2 or x > 3`."""
    sentence = _main(sentence)
    if not re.search(
        r"\w\s*(?:[<>]|\\[lg]eq?)|\b[a-z] (?:must be|is) (?:at|greater|less|more|larger|smaller)\b", sentence
    ):
        return None
    return whole_value(sentence) or whole_value(
        re.split(r"\b(?:is|with|that|means|for|when|if|namely)\b", sentence)[-1]
    )


def _named_whole(sentence: str) -> str | None:
    """The expression that a sentence's last `is` or colon names, if nothing follows it."""
    copula = next(reversed([*_COPULA.finditer(sentence)]), None)
    if not copula:
        return None
    rest = sentence[copula.end() :]
    first = _TRAILING.split(rest)[0]
    told = said.REASON.split(rest, maxsplit=1)[0]
    alone = re.search(r"(?<![A-Za-z\\])[a-z](?![A-Za-z])", first) and not has_number(told[len(first) :])
    return whole_value(rest) or (whole_value(first) if alone else None)


def terse(sentence: str) -> str | None:
    """The value of a sentence that is nothing but one, or a calculation."""
    bare = sentence.lstrip(" *_`⟪⟫").rstrip(" .。!*_`⟪⟫")
    if said.REFUSED.search(re.split(r"[\d⟦]", bare, maxsplit=1)[0]) or sentence.endswith("?"):
        return None
    if re.fullmatch(r"(?:⟦[^⟦⟧]*⟧(?:,|\s|and\b|or\b)*)+", bare):
        return value_at(bare)
    short = len(bare.split()) <= 4 and not re.search(r"=|\\pi\s+is\b", bare)
    if said.CONCLUSION.search(bare):
        return None
    if re.match(r"[A-Za-z]\s*(?:=|\\geq|\\leq|[<>])", bare) or short:
        value = value_at(bare)
        if short and value and not re.search(r"\d\D+\d", value) and len(list(NUMBER.finditer(bare))) > 1:
            return None
        return value if value is None or "=" not in value else value_of(value)
    return None


@functools.lru_cache(maxsize=RECENT)
def concluded_part(sentence: str) -> str:
    """The part of a sentence after its last `so` that still has a number, or after what says the same."""
    for found in reversed(list(said.CONCLUSION.finditer(sentence))):
        rest = sentence[found.end() :]
        if has_number(rest) and not re.match(r"\s*(?:many|much|far)\b", rest):
            return rest
    return sentence


def _main(sentence: str) -> str:
    """The sentence without the circumstances that it, or its last part, begins with, if a number follows them."""
    sentence = re.sub(r"^.*;\s+(?:if|when|once|after|in|with) [^,;]*, (?=.*\d)", "", sentence)
    sentence = re.sub(r"^[^:=]*:\s+(?=(?:since|because|as)\s[^,;:]*,.*\d)", "", sentence)
    while (circumstance := said.CIRCUMSTANCE.match(sentence)) and has_number(sentence[circumstance.end() :]):
        sentence = sentence[circumstance.end() :]
    return sentence


def _totalled(sentence: str) -> str:
    """The clause that states a total, if one does."""
    totals = [c for c in _CLAUSES.split(sentence) if has_number(c) and said.TOTAL.search(c)]
    return totals[0] if len(totals) == 1 and "=" not in sentence.partition(totals[0])[2] else sentence


def _counted(before: str, values: list[str]) -> str:
    """The values that a sentence lists, and their number if it says it before them."""
    counted = re.search(rf"\b(?:are|is|has|have|makes?) (?:only |exactly )?{len(values)}\b", spelled_small(before))
    return f"{len(values)}{SAME_AMOUNT}{', '.join(values)}" if counted else ", ".join(values)


def _later(sentence: str, end: int) -> str:
    """The clause after an equation that states another result, "" if none."""
    aside = next(
        (a for a in said.ASIDE.finditer(sentence, end) if not re.match(r"\W*(?:and )?after|\s+\d+ of", a[0])), None
    )
    rest = sentence[end : aside.start() if aside else None]
    clauses = _LATER.split(rest)
    if verb := _THEN_IS.match(clauses[0]):
        clauses.insert(1, clauses[0][verb.start(1) :])
    stating = (
        c
        for c in clauses[1:]
        if len(c.split()) > 1 and not re.match(r"an? \d", c) and any(not hidden(c, at) for at, _ in candidates(c))
    )
    return next(stating, "")


def _without_aside(sentence: str, aside: re.Pattern[str]) -> str:
    """The part of a sentence before the first aside that follows a number which may be the result."""
    known = list(candidates(sentence))
    stated = next((at + len(text) for at, text in known if not hidden(sentence, at)), None)
    early = aside.search(sentence, known[0][0] + len(known[0][1])) if known else None
    if early and early[0][0] == "," and (stated is None or early.start() < stated):
        return sentence[: early.start()]
    found = aside.search(sentence, stated) if stated is not None else None
    return sentence[: found.start()] if found else sentence
