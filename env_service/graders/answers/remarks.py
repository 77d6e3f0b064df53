"""Tells remarks that follow a result, and explanations of a result that a text begins with, from the result."""

import re
from fractions import Fraction

from env_service.graders.answers import vocabulary as said
from env_service.graders.answers.candidates import has_number
from env_service.graders.answers.expressions import value_at
from env_service.graders.answers.results import concluded_part, result_of, terse
from env_service.graders.answers.values.amounts import SAME_AMOUNT
from env_service.graders.answers.values.numbers import NUMBER, spelled_small
from env_service.graders.answers.values.sums import MAX_OPERANDS, combines, computes, equated, numbers, values

_EXPLAINED = re.compile(r"\W*(?:explanation|reasoning|working|why|because|steps)\b", re.IGNORECASE)
_EXPLANATION = re.compile(
    r"\W*(?:(?:explanation|reason(?:ing)?|working|why|details|steps)\W*:|here(?:'s| is) (?:why|how)\b)",
    re.IGNORECASE,
)
_HERE_IS_WHY = re.compile(r"\W*here(?:'s| is) (?:why|how)\b", re.IGNORECASE)
_HEADING = re.compile(
    r"(?=[^\d\n]*:\W*$)[^\d\n]*\b(?:breakdown|breaks? down|details?|steps?|calculat\w+|comput\w+|math|arithmetic|work\w*"
    r"|reason\w*|expla\w+|how|why|derivation|justification|rationale)\b",
    re.IGNORECASE,
)
"""A line that announces how a result comes about: `How it breaks down:`."""
_IN_SHORT = re.compile(
    r"\W*(?:in short|(?:to make it |the )?short(?: answer| version)?|quick answer|TL;?DR|bottom line)\W*[:,]\W*",
    re.IGNORECASE,
)
_EXPLAINS = re.compile(
    r"(?:which|where) |[(*_]*(?:proof|indeed|note)\b|(?:that|this)(?:'s| is) (?:what|how|why)\b"
    r"|(?:this|that|it) is an? [^\d,.]*\b(?:since|because)\b"
    r"|(?:this|that|it|here we) (?:assum|suppos)(?:es?|ing|ed)\b"
    r"|(?:this|that|it)(?: is|'s) an? (?:famous |classic )?\d+-\d+-\d+|[^.!]*\byou\b[^.!]*\?$",
    re.IGNORECASE,
)
_REMINDS = re.compile(r"(?:please )?(?:remember|note|notice|recall|keep in mind)\b", re.IGNORECASE)
_UNASKED = re.compile(
    r"\b(?:is|was)(?:n't| not) (?:the question|part of the question|needed|relevant)|\b(?:question|problem) (?:does not|doesn't"
    r"|did not|didn't) ask|\bnot what (?:is|was|we were|we are|they) (?:being )?ask"
    r"|\bbut (?:we|you) (?:only|just) (?:need|want)(?:ed)?\b"
    r"|\bbut [^.\d=]*\b(?:asked|asks|wanted)\b[^\d]*$"
    r"|\b(?:can't|cannot) be (?:further )?(?:simplified|reduced)\b|\bno common factors?\b"
    r"|\bcommon (?:mistake|error)\b|\bextra information\b|\b(?:is|are|was|were)(?:n't| not) (?:included|counted)\b"
    r"|\bas (?:it|they) should\b(?!.*=)|\(not asked\)|\bas a bonus\b"
    r"|\bI could also\b|\b(?:is|are|was)(?:n't| not) (?:asked|needed here)\b|\bin case you wondered\b"
    r"|\bbut the problem (?:told|tells|asked|asks) us to (?:use|round)\b"
    r"|\bby the way\b|\bif you(?:'re| are) (?:curious|interested|wondering)\b|\bby contrast\b"
    r"|^if [^,=]*\b(?:did|had|were|was|could|do|does)n't\b"
    r"|\b(?:is|are|was|were|be) (?:[a-z]+ )?(?:rejected|discarded|extraneous|invalid)\b[^\d]*$",
    re.IGNORECASE,
)
_SUPPOSES = re.compile(
    r"(?=.*\b(?:if|had|without|alone|on (?:his|her|their|its) own|instead|otherwise|originally)\b).*\bwould(?:n't| not)? have\b"
    r"|if [^,]*\b(?:another|instead|one more)\b|(?:its|paying|using)\b[^=]*?\bwould (?:be|give)\b",
    re.IGNORECASE,
)
"""Words in a sentence of what is not the case."""
EXCLAIMS = re.compile(
    r"(?!.*(?:=|\b(?:leav\w*|left|remain\w*|total|so(?! close)|thus|then|altogether|sum|makes?)\b))"
    r"(?:.*!$|.*\b(?:only|just)\b|if .*\b(?:will|would)\b|.*'d\b)",
    re.IGNORECASE,
)
"""A remark on a result once it is stated: `only 5 more and she has 100!`"""
_TICKED = re.compile(r"[✓✔✅☑][^\w\n]*$")
_ALL_BOLD = re.compile(r"⟪[^⟪⟫]*⟫\W*")
_AS_IT_SHOULD = re.compile(
    r"^[^\w\n]*[✓✔✅☑][^\w\n]*\d[^=\n]*="
    r"|=[^=]*(?:[✓✔✅☑]\W*$|\b(?:which|that|this|it)(?: [a-z]+)? (?:agrees?|matche?s?|fits?|works|checks|holds|confirms|correct|right)\b"
    r"|\b(?:as|number|total|amount|value) (?:is )?(?:given|required|expected|stated|wanted|needed|promised|it should)\b)"
    r"|\b(?:add|put|plug|substitut)\w*\b[^.=]*\bback\b",
    re.IGNORECASE,
)
"""Words of a check: `29 + 7 = 36, as it should be`, `adding the 7 back`."""
_BOLD_VALUE = re.compile(r"⟪[^⟪⟫]*\d[^⟪⟫]*⟫")
_PROOF = re.compile(
    r"(?:^|(?<=[a-z(,;:] ))-?[＄€£]?\d[\d.,]*(?: [a-z]+)? = (?=[＄€£]?\d[\d.,]*(?: [a-z]+)? ?[-+*/×·÷] ?[＄€£]?\d[^=]*$)"
)
"""A number that is the result of a calculation which follows it: `42 = 3 × 14`."""
_BRACKETS = re.compile(r"\([^()]*\)")
_SUPPOSED = re.compile(
    r"\b(?:would|could|might|wouldn't)\b|\b(?:he|she|it|they|we|you|i|that|this)'d\b|^\W*if\b|\b(?:say|for example|e\.g\.),",
    re.IGNORECASE,
)
"""Words of a case that is not the one asked."""
_SET_BESIDE = re.compile(
    r"^\W*(?:that|this|it)(?:'s| is| was| means)\b[^.]*\b(?:more|less|fewer|[a-z]+er|as (?:many|much|[a-z]+)) (?:than|as)\b"
    r"|^\W*(?:that|this|it)(?:'s| is) (?:about|roughly|nearly|almost|only|just)\b"
    r"|^\W*(?:that|this|it)(?:'s| is) (?:an?|the) (?:famous|classic|well-known|common|same|\d+-\d+)\b"
    r"|^[^\n]* also (?:works?|squares?|divides|satisf\w+|solves?)\b"
    r"|^\W*\d[\d.,]* [a-z²³]+ (?:is|are) (?:about|roughly|approximately|the same as)\b",
    re.IGNORECASE,
)
"""Words that compare a result."""
_ADDITION = re.compile(
    r"\W*(?:(?:also )?(?:including|counting|adding|with|plus|after|then|finally|for|that|this|her|his|their)|(?:in|at"
    r"|by) (?:the end|all))\b",
    re.IGNORECASE,
)
"""Beginning of a sentence that goes on to another result."""
_STATES = re.compile(
    r"\W*(?:the|his|her|their|its|our|your)\b[^,;.]*?\b(?:is|are|was|were|be)\b[^a-z]*\d|[^\d]*(?:\||:|⟦|→|⇒|\([-\d])|\W*[\d]"
    r"|\W*(?:he|she|it|they|we|you)\b|.*\b(?:is|are) [＄€£]?\d[\d.,]* ?[a-z]*\W*$",
    re.IGNORECASE,
)
"""Beginning of a sentence that states a result in its own right."""
_TRIED_BACK = re.compile(
    r"\W*(?:plug|put|substitut|insert)[a-z]* (?:it|this|that|them|these|(?:the|this|that) [a-z]+|[^ ]*\d) "
    r"(?:back )?(?:in|into|back)\b",
    re.IGNORECASE,
)
_ENOUGH = re.compile(
    r"^\W*the (?:last|other|[a-z]+th|[a-z]+nd|[a-z]+rd)\b[^=]*\b(?:would|will|is|has) (?:only |just |then |even |not )?(?:be "
    r"|have )?(?:partly|half|empty|full|fewer|less|only|just|contain|carry|hold)\b"
    r"|\b(?:(?:that|this|it|which)(?:'s| is| will be| would be)|(?:have|has)) (?:just |more than |plenty |quite "
    r"|easily )?(?:enough|sufficient|plenty)\b(?![^.]*\d)|\b(?:is|are) (?:just |more than |easily )?enough\W*$|\byou're fine\b"
    r"|\b(?:pass(?:ing)? mark|(?:speed|weight|time) limit|threshold"
    r"|cut-?off)\b|\bneeded\b[^.]*\bto (?:pass|win|reach|get)\b",
    re.IGNORECASE,
)
_IN_CONCLUSION = re.compile(r"\W*(?:in (?:conclusion|summary)|to (?:conclude|sum up)|all in all)\b", re.IGNORECASE)
_UNREAL = re.compile(
    r"\b(?:say|for example|e\.g|instead|without|hadn't|had|were|weren't|wasn't|didn't|original\w*|another|would have)\b",
    re.IGNORECASE,
)
"""Words of a case that the problem does not ask about."""
_CLOCK = re.compile(r"\b\d{1,2}:\d\d\b")
_LABELLED = re.compile(r"^\W*(?!step|note|given)[a-z][a-z -]{2,40}:", re.IGNORECASE)
_ALL = re.compile(r"\ball\b(?! together)", re.IGNORECASE)
_OF_THESE = re.compile(r"\W*(?:(?:\d+|half|most|some|each) )?of (?:these|those|them|it)\b", re.IGNORECASE)
"""Beginning of a sentence that tells of a part of what was counted."""
_UNSURE = re.compile(
    r"^\W*(?:but|however|yet|or|although|wait|actually|hmm|oops|no)\b|\b(?:question|problem|asked|wants?|must)\b|:\W*\d",
    re.IGNORECASE,
)
_PREMISES = re.compile(r"\b(?:the fact|assum\w+|constant|each of the|equally)\b", re.IGNORECASE)
_SUMS = re.compile(r"\b(?:adds?|adding|sums?|totals?|together|altogether|makes?|making)\b", re.IGNORECASE)
_UNKNOWN = re.compile(r"(?<![A-Za-z])[A-Za-z] ?=")
_PREMISE = re.compile(r"\W*(?:since|because|as|although|while|with|given)\s[^\n]*?,\s(?=\D*$)", re.IGNORECASE)
"""Beginning of a sentence that has numbers in its subordinate clause alone."""


def is_remark(sentences: list[str]) -> bool:
    """True if the last sentence talks of something else than the result that was stated before it."""
    *before, last = sentences
    if not any(map(has_number, before)):
        return False
    concluded = said.CONCLUSION.search(f" {before[-1]}") or equated(before[-1]) or _is_firm(before)
    if _UNASKED.search(last) or (_SUPPOSES.match(last) and "=" not in last and concluded):
        return True
    if not has_number(last):
        counted = spelled_small(last)
        return has_number(counted) and _goes_beside(before, counted)
    ticked = _TICKED.search(last) and stated_value(before[-1]) in values(last)
    if (ticked or _PROOF.search(last)) and _is_firm(before) and not _leads_on(last):
        return True
    reason = said.REASON.search(last)
    if (
        reason
        and reason.start()
        and not has_number(spelled_small(last[: reason.start()]))
        and not said.THAT_IS.match(last)
    ):
        return "=" not in last
    if _EXPLAINS.match(last) or _PREMISE.match(last) or ("=" not in last and _REMINDS.match(last)):
        return True
    if _exclaims(before, last) or _goes_beside(before, last):
        return True
    if _adds_up(before, last) or _tells_known(before, last):
        return True
    if any(tells(before[-1], last) for tells in (_breaks_down, _leads_back, _confirms)):
        return True
    known = {number[0].strip() for s in before for number in NUMBER.finditer(s)}
    return bool(said.ADDRESS.search(last)) and known.isdisjoint(number[0].strip() for number in NUMBER.finditer(last))


def _exclaims(before: list[str], last: str) -> bool:
    """True if the last sentence goes on about the value that was computed last and then stated, and computes nothing."""
    computed = [result for s in before for result in equated(s)]
    stated = computed and stated_value(before[-1]) == computed[-1]
    new = stated and EXCLAIMS.match(last) and {*computed, *values(before[-1])}.isdisjoint(values(last))
    return bool(new) and not any(computes(value, computed) for value in values(last))


def _goes_beside(before: list[str], last: str) -> bool:
    """True if the last sentence, which neither concludes nor computes, supposes or compares after a firm result."""
    if _refers_back(before, last):
        return True
    beside = _SET_BESIDE.search(last) and not _leads_on(last)
    if _ENOUGH.search(last) and result_of(before[-1]) and not said.SETUP.match(before[-1]) and "=" not in last:
        return True
    if _OF_THESE.match(last) and (equated(before[-1]) or _is_firm(before)) and not _leads_on(last):
        return True
    if beside and "=" in before[-1] and result_of(before[-1]):
        return True
    if _is_derived(before):
        aside = _SUPPOSED.search(last) or _SET_BESIDE.search(last) or _BOLD_VALUE.search(before[0])
        return bool(aside) and not _leads_on(last, total=True)
    at = next((i for i in range(len(before) - 1, max(-1, len(before) - 4), -1) if _is_firm(before[: i + 1])), None)
    if at is None or any(map(_leads_on, before[at + 1 :])):
        return False
    stated = result_of(before[at])
    if _IN_CONCLUSION.match(before[at]):
        return not _leads_on(last, total=True)
    if (
        "(" in stated
        and SAME_AMOUNT not in stated
        and {*values(last)} <= {*values(stated)}
        and not said.CONCLUSION.match(f" {last}")
    ):
        return True
    if _leads_on(last):
        return False
    if _SET_BESIDE.search(last) or (
        _SUPPOSED.search(last) and (_UNREAL.search(last) or not _follows_from(stated, [last]))
    ):
        return True
    if _ADDITION.match(last) or _follows_from(stated, [*before, last]):
        return False
    return bool(_BOLD_VALUE.search(before[at])) or not any(map(_goes_on, [*before[at + 1 :], last]))


def _refers_back(before: list[str], last: str) -> bool:
    """True if the last sentence begins with words for the firm result before it, or for its time, and goes on to none."""
    back, stated = said.THAT_IS.match(last), values(result_of(before[-1]))
    if not stated or not (back or _TRIED_BACK.match(last)) or ("%" in last and stated[0] * 100 in values(last)):
        return False
    time = back["time"] if back else None
    if _TRIED_BACK.match(last):
        return bool(said.AFFIRMED.search(last)) and not said.DENIED.search(last)
    if _leads_on(last) or said.ACTS.search(said.THAT_IS.sub("", last)):
        return False
    operands = [*values(last)]
    explains = len(operands) > 1 and computes(stated[0], operands)
    multiple = any(value != stated[0] and value % stated[0] == 0 for value in operands if stated[0])
    return explains or (_is_firm(before) and (time is not None or not multiple))


def _goes_on(sentence: str) -> bool:
    """True if a sentence is no plain one, or tells of a change or of what has a result of its own."""
    return (
        any(p.match(sentence) for p in (_STATES, said.THAT_IS))
        or bool(said.ACTS.search(sentence))
        or len(sentence.split()) < 4
    )


def _is_derived(sentences: list[str]) -> bool:
    """True if the first sentence states what the others compute."""
    first, *rest = sentences
    stated, computed = stated_value(first), [result for s in rest for result in equated(s)]
    return bool(computed) and stated == computed[-1] and "=" not in first and not _concludes(rest[-1].replace("=", ""))


def _is_firm(sentences: list[str]) -> bool:
    """True if the last sentence states a result in bold, after a word such as `so`, or as it was computed."""
    last = sentences[-1]
    concluded = concluded_part(f" {last}")
    concludes = concluded != f" {last}"
    if not (found := result_of(last)) or (
        "=" in _BRACKETS.sub("", concluded) and not said.CONCLUSION.match(f" {last}")
    ):
        return False
    if _BOLD_VALUE.search(last) or concludes or _LABELLED.match(last) or _IN_CONCLUSION.match(last):
        return True
    computed, stated = [result for s in sentences for result in equated(s)], [*values(found)]
    return bool(stated) and stated == computed[-len(stated) :]


def _leads_on(sentence: str, *, total: bool = False) -> bool:
    """True if a sentence concludes, computes, doubts or emphasises something, or names a total, unless it may."""
    if (
        "=" in _PROOF.sub("", sentence)
        or _BOLD_VALUE.search(sentence)
        or _UNSURE.match(sentence)
        or concludes_anew(sentence)
    ):
        return True
    if said.HEDGE.search(sentence) or said.REFUSAL.search(sentence) or sentence.endswith(("?", ":")):
        return True
    return (
        not total
        and bool(said.SUMMARY.search(_ALL.sub("", sentence)))
        and not (_SUPPOSED.search(sentence) or _SET_BESIDE.search(sentence))
    )


def _follows_from(found: str, sentences: list[str]) -> bool:
    """True if a number of the last sentence may be computed from a result with another number of the text."""
    known, new = [*values(found)][:1], [*values(spelled_small(_CLOCK.sub("", sentences[-1])))]
    others = {value for s in sentences for value in values(spelled_small(_CLOCK.sub("", s)))}
    return not known or any(combines(known[0], other, value) for other in others for value in new if value != other)


def _adds_up(before: list[str], last: str) -> bool:
    """True if the last sentence adds up its numbers to one that was given, after a firm result."""
    *parts, total = [*values(last)] or [Fraction(0)]
    given = numbers(before) - {*[result for s in before for result in equated(s)][-1:]}
    sums = {sum(parts), sum(parts) + (stated_value(before[-1]) or 0)}
    return bool(parts and _SUMS.search(last)) and total in given and total in sums - {*parts} and _is_firm(before)


def _tells_known(before: list[str], last: str) -> bool:
    """True if the last sentence has only numbers from before a result: it tells what was assumed, or the result was in bold."""
    computed, told = [result for s in before for result in equated(s)][-1:], {*values(last)}
    if _ALL_BOLD.fullmatch(before[-1]) and told and not _leads_on(last):
        return told | {*values(before[-1])} <= numbers(before[:-1])
    if "=" in last or not computed or not told or not told <= numbers(before) - {*computed}:
        return False
    if _BOLD_VALUE.search(before[-1]) and not _BOLD_VALUE.search(last) and [stated_value(before[-1])] == computed:
        return True
    return bool(_PREMISES.search(last)) and [stated_value(before[-1])] == computed and not _leads_on(last)


def _breaks_down(stating: str, last: str) -> bool:
    """True if the numbers of the last sentence, which concludes nothing, are the parts of what the one before it states."""
    parts = list(values(last))
    few = 2 if not result_of(last) else 3
    return (
        len(parts) >= few
        and not said.GIVES_AWAY.search(last)
        and not _concludes(last)
        and stated_value(stating) == sum(parts)
    )


def _leads_back(stating: str, last: str) -> bool:
    """True if the last sentence gives as a reason an equation for what the one before it states: `since 12 × 12 = 144`."""
    return bool(said.REASON.search(last)) and stated_value(stating) in [*equated(last)][-1:] == [*values(last)][-1:]


def _confirms(stating: str, last: str) -> bool:
    """True if the last sentence computes something from what the one before it states, and says that it is as it should be."""
    stated = stated_value(stating) if _AS_IT_SHOULD.search(last) else None
    return stated is not None and (stated in values(last.rpartition("=")[0]) or computes(stated, [*values(last)]))


def stated_value(sentence: str) -> Fraction | None:
    """The one number that a sentence states as its result."""
    known = [*values(result_of(sentence))]
    return known[0] if len(known) == 1 else None


def headline(sentences: list[str]) -> str | None:
    """The value of which the first sentence consists, if all that follows is its explanation."""
    if (announced := _announced(sentences)) is not None:
        return announced
    first, *rest = sentences
    if _comes_back(first, rest):
        return result_of(first)
    if any(map(said.RECONSIDERED.match, rest)):
        return None
    explains = (_HERE_IS_WHY.match(rest[0]) and not any(map(_leads_to, rest))) or not any(map(concludes_anew, rest))
    if _EXPLANATION.match(rest[0]) and not first.endswith((":", "?")) and explains:
        return result_of(first) if not _is_given(first, rest) else None
    if (short := _IN_SHORT.match(first)) and not any(map(concludes_anew, rest)):
        return result_of(first[short.end() :])
    value = value_at(re.sub(r"^(?:it's|it is)\b:?", "", first, flags=re.IGNORECASE))
    if (
        len(first.split()) > 4
        or said.REJECTED.search(first)
        or not value
        or "=" in first
        or not NUMBER.match(value)
        or first.endswith((":", "?"))
    ):
        return None
    explained = _EXPLAINED.match(rest[0]) or not any(map(_concludes, rest)) or _is_explained(value, rest)
    return value if explained and len(list(NUMBER.finditer(first))) == 1 else None


def _comes_back(first: str, rest: list[str]) -> bool:
    """True if the last number of a text is the one that its first sentence states, and from which nothing was computed."""
    stated, end = stated_value(first), next(reversed([*NUMBER.finditer(rest[-1])]), None)
    if stated is None or "=" in first or end is None or [*values(end[0])] != [stated] or first.endswith((":", "?")):
        return False
    computed = {result for s in rest for result in equated(s)}
    led = stated in computed or (not computed and len(first.split()) <= 4 and value_at(first) is not None)
    return led and not said.GOVERNED.search(rest[-1][: end.start()]) and not any(map(said.RECONSIDERED.match, rest))


def _leads_to(sentence: str) -> bool:
    """True if a sentence begins with `so`, or has a number in bold."""
    return bool(said.CONCLUSION.match(f" {sentence}") or _BOLD_VALUE.search(sentence))


def _is_explained(value: str, rest: list[str]) -> bool:
    """True if sentences that conclude nothing, and whose last computes nothing, have the numbers that a value is computed from."""
    known, operands = [*values(value)], [v for s in rest for v in values(s)]
    goes_on = (
        "=" in rest[-1]
        or any(map(concludes_anew, rest))
        or said.SUMMARY.search(rest[-1])
        or not said.TASK.match(rest[-1])
    )
    return len(known) == 1 and not goes_on and known[0] not in operands and computes(known[0], operands)


def _announced(sentences: list[str]) -> str | None:
    """The result before a line that announces how it comes about, or before its parts alone, if it does follow from them."""
    at = next((at for at, s in enumerate(sentences[1:], 1) if _HEADING.match(s)), 1)
    stating, rest = sentences[at - 1], sentences[at:]
    stated, parts = stated_value(stating), [result for s in rest for result in equated(s)]
    if stated is None or len(parts) < 2 or any(map(concludes_anew, rest)) or _is_given(stating, rest):
        return None
    announced = _HEADING.match(rest[0]) and (stated == parts[-1] or computes(stated, parts))
    added = stated == sum(parts) and not any(map(_UNKNOWN.search, rest))
    return result_of(stating) if announced or added else None


def _is_given(first: str, rest: list[str]) -> bool:
    """True if what the first sentence states is computed with, and another result follows from it."""
    stated, results = set(values(result_of(first))), [r for s in rest for r in equated(s)]
    return bool(results) and stated.isdisjoint(results) and not stated.isdisjoint(v for s in rest for v in values(s))


def explained(sentences: list[str]) -> str | None:
    """The number that is left as the first sentence says, if the others tell what it is computed from, and conclude nothing."""
    first, *rest = sentences
    return first_of_story(sentences) if said.STILL.search(first) and not any(map(_concludes, rest)) else None


def first_of_story(sentences: list[str]) -> str | None:
    """The result that the first sentence states, if the others tell of the numbers that it is computed from."""
    first, *rest = sentences
    known, further = list(values(result_of(first))), [value for s in rest for value in values(s)]
    if len(known) != 1 or "=" in first or not 2 <= len(further) <= MAX_OPERANDS or any(map(concludes_anew, rest)):
        return None
    one_by_one = len(list(values(rest[-1]))) < 2
    return result_of(first) if computes(known[0], further) and not one_by_one else None


def concludes_anew(sentence: str) -> bool:
    return concluded_part(f" {sentence}") != f" {sentence}" and bool(result_of(sentence))


def _concludes(sentence: str) -> bool:
    sums_up = said.SUMMARY.search(sentence) and has_number(sentence) and result_of(sentence)
    return bool(concludes_anew(sentence) or sums_up or terse(sentence) or "=" in sentence)
