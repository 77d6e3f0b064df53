"""The result that a text ends with, where no marker names it: its last sentence's, unless that is a remark."""

import re
from fractions import Fraction
from itertools import permutations

from env_service.graders.answers import vocabulary as said
from env_service.graders.answers.candidates import candidates, has_number, hidden
from env_service.graders.answers.expressions import value_at
from env_service.graders.answers.remarks import explained, first_of_story, headline, is_remark, stated_value
from env_service.graders.answers.results import concluded_part, result_of
from env_service.graders.answers.values.amounts import in_each_form
from env_service.graders.answers.values.numbers import NUMBER
from env_service.graders.answers.values.sums import MAX_OPERANDS, calculated, combines, equated, numbers, values

MAX_REMARKS = 5
"""After a result; it is not looked for before more of them."""
MAX_SENTENCE = 1000
"""Characters of a sentence that are read: the end of a longer one."""

_END = re.compile(
    r"(?<=[.!?])[*_)\"'⟫⟧]*\s+(?=[^a-z\s=≈×·÷<>]|[a-z](?:\s?[-=+*/^]|\s(?:is|must|lies)\b))(?![✓✔✅☑][^\w\n]{0,20}(?:\n|$))|(?<=[。！？।])[⟫⟧]*\s*|\n+|(?<=[.!?]⟫)\s+(?=[A-Z])"
)
_BULLET = re.compile(r"^\s*(?:[-*•]\s+(?=[^\d\s=])|\(?\d{1,2}[.)]\s+(?=\S)|>+\s*|#+\s+|\|\s*)")
_FIRST_NUMBER = re.compile(r"\A(\s*(?!1\.)\d{1,2}\.)\s+(?=[A-Z][a-z])(?!.*\n[ \t]*\d{1,2}[.)]\s)", re.DOTALL)
"""A number that a text begins with, and that counts no item of a list."""
_ITEM = re.compile(r"[\W_]*[^\W\d][^:|=\n]{0,30}(?::|\s[|–—-])[\s⟪⟫]*[＄€£]?\d[\d.,]*[^=.*/×÷+\n]{0,25}")
"""One of several lines that list values: `Pens: ＄6`."""
_TERMINATED = re.compile(r"[.!?。！？।][*_)\"'⟫⟧\]\s✓✔✅☑]*$|\|\s*$")
_OPEN_END = re.compile(r"[-+*/=×÷,(\\{^:]\s*$|\\boxed\{[^{}]*$")
_STATES = re.compile(
    r"\b(?:is|are|was|equals|be|makes|total of|:)\s+[＄€£]?[\d,.]+\W*$|^(?:the|⟦|⟪)\b.*[⟫⟧)\d%€£]\s*$", re.IGNORECASE
)
_UNKNOWN = re.compile(
    r"\b(?:can't|cannot|can not) (?:solve|answer) (?:this|it|that)\b|\ball (?:i|we) know\b|\bneed to know\b|\bdepend(?:s|ing) on\b"
    r"|(?:not|n't|n't have) enough information|insufficient information|^or\b(?![^\d⟦:]*:)|\b(?:is"
    r"|are) unknown\b|(?:don't|do not) know\b|\bgive up\b",
    re.IGNORECASE,
)
_AFFIRMATION = re.compile(
    r"(?<=\d)[.!] ((?:that's |this is |it's |it is )?(?:correct|right|true|yes|it works|works|perfect|good|✓|✔|✅)[.!]?\s*)\Z",
    re.IGNORECASE,
)
"""A closing word that finds right what a sentence says."""
_AT_LAST = re.compile(r"[^:|]*\b(?:after|new|now|final|sale|to pay|you pay|in the end)\b", re.IGNORECASE)
"""The name of a value that the others of a list lead to."""
WITH_SUBJECT = re.compile(
    r"[＄€£]?[\w.,]+ (?:(?!and )[a-z]+ ){0,4}(?:=|is|are|was|were|costs?|weighs?|takes?|needs?|makes?|has|have|holds?|lasts?) [^,;\n]*\d"
)
"""A sentence whose subject has a number: `1 kg of flour costs 30 roubles`."""
_IS = re.compile(r"\b(?:is|are|was|were) [＄€£]?$")
_ASIDE = re.compile(r"\([^()]*\)|\d[\d.]*%")
_BETWEEN = re.compile(r"\b(?:between|with|from|if|when|since|because|as) [^,\d]*$", re.IGNORECASE)
_LEADS_ON = re.compile(
    r"\b(?:leav|left|remain|total|now\b|then\b|after\b|altogether|sum\b|mak(?:e|ing)|thus\b|so (?:he|she|it|they|we|you|that)\b|adds? up)",
    re.IGNORECASE,
)
"""Words of what a result leads to."""
_COMPARES = re.compile(r"\b(?:than|but|not|only|if|while|whereas)\b|n't\b|⟪|:", re.IGNORECASE)
_BOLD = re.compile(r"⟪[^⟪⟫]*⟫")
_NO_SOLUTION = re.compile(
    r"\W*(?:(?:so|thus|hence|therefore|because of this|this means(?: that)?),? )?"
    r"(?:there (?:is|are|exists?)|(?:it|this|the (?:equation|system|problem|inequality)) has)"
    r" no (?:[a-z]+ )?solutions?\W*(?:to (?:the|this) \w+\W*)?",
    re.IGNORECASE,
)
_GIVEN = re.compile(r"\b(?:given|known|facts)\b[^\w\n]*:[^\w\n]*(?:\n[ \t]*[-*•][^\n]*)++\s*\Z", re.IGNORECASE)


def stated_result(text: str) -> str:
    """The result that a plain text ends with, "" if it breaks off, asks, or leaves open which of several it is."""
    if _GIVEN.search(text):
        return ""
    text = _FIRST_NUMBER.sub(r"\1\n", _AFFIRMATION.sub(r" - \1", text))
    sentences = [s[-MAX_SENTENCE:] for s in split(text) if re.search(r"\w", s)]
    if len(sentences) > 2 and all(NUMBER.fullmatch(s.rstrip(".")) for s in sentences):
        return ", ".join(sentences)
    for _ in range(MAX_REMARKS):
        if len(sentences) > 1 and is_remark(sentences):
            sentences.pop()
    if not sentences or _NO_SOLUTION.fullmatch(sentences[-1]):
        return ""
    if broken_off(sentences) or any(map(_UNKNOWN.search, sentences[-2:])):
        return ""
    if len(sentences) > 1 and (first := headline(sentences) or explained(sentences)):
        return first
    for i, sentence in enumerate(reversed(sentences)):
        if i and is_remark(sentences[: len(sentences) - i]):
            continue
        if _is_item(sentences[: len(sentences) - i]):
            return ""
        if sentence.rstrip("⟫* ").endswith("?") and has_number(sentence):
            return ""
        until = sentences[: len(sentences) - i]
        if found := restated(until) or result_of(sentence):
            return found
        if (
            (has_number(sentence) and not _refers(sentence, until[:-1]))
            or i == 3
            or not _passes(sentence, first=i == 0)
        ):
            break
    return (first_of_story(sentences) or "") if has_number(text) else _words(sentences[-1])


def _is_item(sentences: list[str]) -> bool:
    """True if the last two lines are alike, each a name and its value, and neither names or is a total."""
    alike = len(sentences) > 1 and all(_ITEM.fullmatch(s) and not said.SUMMARY.search(s) for s in sentences[-2:])
    alike = alike and not _AT_LAST.match(sentences[-1])
    return (
        alike
        and len({"⟪" in s for s in sentences[-2:]}) == 1
        and not _is_computed([list(values(s)) for s in sentences])
    )


def _is_computed(values: list[list[Fraction]]) -> bool:
    """True if the only number of the last line is computed from those of the two before it, or adds up all that stand alone."""
    alone = [line[0] for line in values if len(line) == 1]
    if len(alone) < 3 or len(values[-1]) != 1:
        return False
    *others, a, b, last = alone
    return last in (a + b, a - b, a * b, sum(others, a + b)) or a == last * b


def split(text: str) -> list[str]:
    """The sentences of a text; a line break ends one."""
    pieces, start = list[str](), 0
    for end in _END.finditer(text):
        if "\n" not in end[0] and said.ABBREVIATION.search(text[max(start, end.start() - 12) : end.start()]):
            continue
        pieces.append(text[start : end.start()] + end[0].strip())
        start = end.end()
    return [_BULLET.sub("", piece).strip() for piece in [*pieces, text[start:]]]


def _passes(sentence: str, *, first: bool) -> bool:
    """True if a sentence without a number may follow the result."""
    if sentence.rstrip("⟫ ").endswith("?"):
        return bool(said.REMARK.search(sentence))
    return not said.UNFINISHED.search(sentence)


def _refers(sentence: str, before: list[str]) -> bool:
    """True if the only number of a sentence that states none is the one stated right before it, and it is not doubted."""
    doubts = said.HEDGE.search(sentence) or said.REFUSAL.search(sentence) or said.DENIED.search(sentence)
    return bool(before) and not doubts and {*values(sentence)} == {stated_value(before[-1])}


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
    return bool(cue) and any(at >= cue.end() and not hidden(line, at) for at, _ in candidates(line))


def _words(sentence: str) -> str:
    """The answer of a sentence without numbers: what something *is*, or the whole."""
    bare = sentence.strip(" .。!*_`\"'⟪⟫")
    return re.sub(
        r"^.*\s(?:is|are|was|were|(?:diverges|tends|goes) to)\s+\+?(?:(?:an?|the)\s+)?(?=-?[\w⟦\\])", "", bare
    ).strip("⟦⟧")


def restated(sentences: list[str]) -> str | None:
    """The number that was computed last, if the last sentence states it once, beside none that was computed before.

    The others are what it was computed from, or follow it, unless the sentence leads on to one of them."""
    *before, last = sentences
    computed = _computed_last(before)
    stated = [found for found in candidates(last) if computed and [*values(found[1])] == computed]
    others = {*values(last)} - {*computed}
    if len(stated) != 1 or "=" in last or _is_undecided(last, stated[0][0]):
        return None
    (at, text), bold = stated[0], [*values(" ".join(_BOLD.findall(last)))]
    said_before, rest = last[:at], last[at:]
    if bold == computed:
        return value_at(rest)
    if bold or said.TASK.match(last) or others & calculated(before) or said_before.count("(") > said_before.count(")"):
        return None
    if not others:
        sums_up = said.CONCLUSION.match(f" {last}") and not result_of(last)
    elif others <= numbers(before) and not _COMPARES.search(last):
        sums_up = True
    elif has_number(said_before) or hidden(last, at) or _BETWEEN.search(said_before) or WITH_SUBJECT.match(rest):
        sums_up = False
    else:
        multiplied = not _IS.search(said_before) and _is_multiplied(computed[0], sentences, rest)
        concluded = computed[0] in values(concluded_part(f" {last}"))
        leads_on = _LEADS_ON.search(rest) or any(
            combines(computed[0], a, b) for a, b in permutations([*others][:MAX_OPERANDS], 2)
        )
        sums_up = not multiplied and (concluded or not leads_on)
    further = NUMBER.search(rest, len(text))
    return in_each_form(value_at(rest[: further.start() if further else None]) or "", last) if sums_up else None


def _is_multiplied(computed: Fraction, sentences: list[str], rest: str) -> bool:
    """True if the rest of a text has the product of what was computed and of another number, or of a week's days."""
    factors = {*numbers(sentences), Fraction(7)} - {Fraction(1)}
    return computed > 1 and any(
        value / computed in factors for value in values(_ASIDE.sub("", rest)) if value > computed
    )


def _computed_last(sentences: list[str]) -> list[Fraction]:
    """The value that the last equation of sentences comes to, or that its sentence concludes."""
    computing = next((s for s in reversed(sentences) if equated(s)), "")
    concluded = stated_value(computing) if concluded_part(computing) != computing else None
    return [*equated(computing)][-1:] if concluded is None else [concluded]


def _is_undecided(sentence: str, at: int) -> bool:
    """True if a sentence doubts or refuses what stands at a place, or says that it is not the result."""
    doubts = (p.search(sentence) for p in (said.HEDGE, said.REFUSAL, said.REJECTED))
    return any(doubts) or bool(said.REFUSED.search(sentence[:at]))
