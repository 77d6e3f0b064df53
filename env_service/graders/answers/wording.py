"""Answers in words: `Tuesday`, `no solution`, `March 14`, `odd`, `(B)`.

A reference in words is looked for in the clause that concludes a text. It must be the only one of its kind there, such as the only
day or name, apart from what is named for comparison: `two days after Sunday`, `more than Ben`, `not Thursday`.
"""

import re

from env_service.graders.answers.sentences import split
from env_service.graders.answers.vocabulary import ANSWER, CONCLUSION, HEDGE, REMARK

MAX_WORDS = 6
"""Words of an answer that says more than its reference."""

EMPTY_SET = re.compile(r"\\(?:emptyset|varnothing)(?![a-z])|∅|\\\{\s*\\\}")
"""The set of no solution."""

_MONTH = (
    r"jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sep(?:t(?:ember)?)?"
    r"|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?"
)
_DAY_FIRST = re.compile(rf"(?:the )?(?P<day>\d{{1,2}})(?:st|nd|rd|th)?(?: of)? (?P<month>{_MONTH})\b", re.IGNORECASE)
_MONTH_FIRST = re.compile(rf"\b(?P<month>{_MONTH})\.? (?:the )?(?P<day>\d{{1,2}})(?:st|nd|rd|th)?\b", re.IGNORECASE)
_YEAR = re.compile(r"(?<=[\dthsdnr]), (?=(?:19|20)\d\d\b)")
_NAMES = re.compile(r"\\[A-Za-z]+|(?:sqrt|frac|pi|sin|cos|tan|log|ln|exp|dollars?|cents?)(?![A-Za-z])")
_CLAUSE = re.compile(
    r"\n|[.;!?](?:\s|$)|[,(:]|\s[-–—]\s"
    r"| (?:because|since|as|which|if|when|although|though|while|whereas|compared|followed|ahead)\b"
)
_SO_FAR = re.compile(
    r"[,;] (?:but|and) (?!not\b)|; (?!not\b)|\bnot (?:[\w']+ ){1,4}but |\s=\s*(?=\D{0,60}[A-Za-z]{2})"
    r"|:\s+(?=(?:[A-Za-z]+ ?){1,3}\W*$)|,\s+(?=on \w+\W*$)|\bi\.e\.,?\s"
)
"""Words before the part of a sentence that concludes it."""
_CIRCUMSTANCE = re.compile(
    r"^[\W_]*(?:[a-z]+ing|if|when|since|because|although|though|while|after|before|for|of|given|as|at|from|between|with)\b"
    r"[^,]*,\s(?:then )?(?=.*\w)",
    re.IGNORECASE,
)
_YES_NO = re.compile(
    r"(?:^|(?<=[.!?\n]\s)|(?<=[,;:→] )|(?<=[\n(])|\b(?:so|thus|hence|therefore|is|say|→)[:,]? )[\s⟪\"'*#>]*"
    r"(?P<said>yes\b|no\b(?!\s+\w))(?!\W{1,3}(?:or|no|yes)\b)",
    re.IGNORECASE,
)
_HEADLINE = re.compile(
    r"\W*(?!(?:sure|okay|ok|great|alright|right|solution|explanation|let's|hello|hi|of course|certainly)\b)"
    r"(?:(?:the )?[A-Z][\w'-]*(?: [A-Z][\w'-]*)?\.\W*|\(?(?-i:[A-J])\)?\W*)",
    re.IGNORECASE,
)
"""A first sentence that is nothing but a name."""
_REASON = re.compile(r",? (?:because|since|as) ")
_LETTERS = re.compile(r"(?<![\w'])\(?([B-HJ]|A(?! [a-z])|(?<=graph )A)\)?(?![\w'-]| ?=)")
_LETTERED_NAME = re.compile(
    r"(?<!\bis )\b(?!Option|Choice|Answer|Letter|So|Thus|Hence|Therefore|Only)[A-Z][a-z]+ [A-J]\b"
)
_OPTIONS = re.compile(r"\b(?:options|choices)\b", re.IGNORECASE)
_CHOOSES = re.compile(
    r"\b(?:choose|pick|option|choice|answer|correct|right|must be|has to be|matche?s|fits|works"
    r"|go with|closest|corresponds? to|it's|it is)\b"
    r"|\b(?:is|leaves|to) (?:\(?[A-J]\)?\W*$|[⟪ ]*\([A-J]\) )",
    re.IGNORECASE,
)
_ARTICLES = re.compile(
    r"^(?:therefore,? |thus,? |so,? |hence,? )?(?:(?:it|there|that|he|she|they) (?:is|are|was) )?(?:(?:an?|the|on|in) )?",
    re.IGNORECASE,
)
_SOLUTIONS = re.compile(r"\b(no (?:real )?solution)s\b", re.IGNORECASE)
_LETTER = re.compile(r"(?:(?:option|choice|answer|letter) )?\(?([A-J])\)?", re.IGNORECASE)
_NAMED_LETTER = re.compile(r"(?:(?!(?i:not|or|and|nor|than)\b)[A-Za-z]+ )?\(?([A-J])\)?")
_ANSWER = re.compile(rf"{ANSWER}\s*:\s*", re.IGNORECASE)
_CHOICE = re.compile(r"(?:(?:option|choice|answer) )?(?:\(([A-J])\)|([A-J])(?:[).:](?!\w)|$))", re.IGNORECASE)
_GOES_ON = re.compile(
    r"[\s.,;!?]*(?!(?:then|followed|not|but not|ahead)\b)"
    r"(?:(?:or|and|but|maybe)\b|(?:[\w'-]+ ?){1,2}(?:,|\b(?:or|and)\b|\W*$))",
    re.IGNORECASE,
)
"""After a name: it is one of several."""
_UNDECIDED = re.compile(
    r"\b(?:not|or|nor|neither|either|never|if|whether|maybe|perhaps|cannot|unless|both|and|but|yes|no|equally|same)\b"
    r"|n't\b|[A-Za-z]/[A-Za-z]",
    re.IGNORECASE,
)
_COMPARED = re.compile(
    r"\b(?:than|from|after|before|past|not|over|of|like|unlike|beats?|since|until|(?<!go )for|behind|without"
    r"|(?<!us )(?<!me )(?<!get )(?<!gets )(?<!goes )(?<!comes )(?<!belongs )(?<!days )to)(?: (?:the|a|an|in|on|that|with))* $",
    re.IGNORECASE,
)
"""Words before a name that is no answer."""
_BESIDE = re.compile(rf"{_COMPARED.pattern}|\b(?:in|at|on|with|by|of)(?: the)? (?:\w+ )?$", re.IGNORECASE)
_SUBJECT = re.compile(r"(?:so|thus|hence|therefore|that|the|an?|only|it's|[,:\s])*", re.IGNORECASE)
_PREDICATE = re.compile(
    r"(?:\b(?:is|are|more|most|fewer|fewest|was|were|be|has|have|obtain|get|called|becomes?|answer|the|choose|pick|go for|go with)"
    r"|['’]s|:|=)\s+"
    r"(?:(?:an?|the|\d+|always|again|also|more|most|clearly|simply|definitely|on|in) )*$",
    re.IGNORECASE,
)
_VERB = re.compile(
    r" (?:is|are|was|were|has|have|had|wins?|won|will|would|gets?|got|function|number|day|degrees?|one|exists?|solutions?"
    r"|appears?|arrives?|costs?|ran)\b"
)
_KINDS = [
    {name.casefold() for name in names.split()}
    for names in (
        "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
        "January February March April May June July August September October November December",
        "red blue green yellow orange purple black white pink brown",
        "true false",
        "odd even",
        "acute obtuse right",
        "scalene isosceles equilateral",
        "increasing decreasing constant",
    )
]
"""Words that exclude each other."""


def is_in_words(reference: str) -> bool:
    """True if a reference is a name, a date, yes or no, a letter of choice: nothing that is a value."""
    if re.fullmatch(r"\(?[A-J]\)?", reference) or _DAY_FIRST.fullmatch(reference) or _MONTH_FIRST.fullmatch(reference):
        return True
    return not re.search(r"[\d=<>^_\\]", reference) and bool(re.search(r"[^\W\d_]{2,}", _NAMES.sub("", reference)))


def words_of(text: str) -> str:
    """The words with which a text begins, up to the end of the clause."""
    text = re.sub(r"\\(?:text|textbf|textrm|mathrm|mbox|textit)\s*\{([^{}]*)\}", r"\1", text)
    text = _YEAR.sub(" ", EMPTY_SET.sub("no solution", text))
    text = _ANSWER.sub("", re.sub('[⟦⟧⟪⟫*_`"]', "", text).strip(" :.'=>-"), count=1)
    if choice := _CHOICE.match(text):
        return f"({(choice[1] or choice[2]).upper()})"
    clause = _CLAUSE.search(text)
    if clause and _GOES_ON.match(text, clause.start()) and not re.match(r"(?:yes|no)\b", text, re.IGNORECASE):
        return ""
    text = text[: clause.start()] if clause else text
    return text.strip(" .'")


def worded_result(text: str, expected: str = "") -> str:
    """The words that conclude a text: its yes or no, its letter, the main clause of the last sentence with words of the kind expected."""
    if len({letter[1] for letter in _LETTERS.finditer(text)}) == 1 and len(text) < 80 and _CHOICE.match(text.strip()):
        return words_of(text)
    sentences = [s for s in split(text.strip()) if re.search(r"\w", s)]
    while len(sentences) > 1 and REMARK.search(sentences[-1]) and not _YES_NO.search(sentences[-1]):
        sentences.pop()
    sentences = _up_to_kind(sentences, expected)
    if not sentences or sentences[-1].rstrip("⟫ ").endswith("?") or HEDGE.search(_OPTIONS.sub("", sentences[-1])):
        return ""
    if decided := [found["said"] for found in _YES_NO.finditer("\n".join(sentences))]:
        return decided[-1]
    if len(sentences) > 1 and _HEADLINE.fullmatch(sentences[0]):
        return words_of(sentences[0])
    last = CONCLUSION.split(" " + re.sub("[⟪⟫]", "", sentences[-1]))[-1].lstrip(" ,:")
    return _chosen_letter(_main_clause(_REASON.split(last)[0])) or words_of(_main_clause(last))


def _up_to_kind(sentences: list[str], expected: str) -> list[str]:
    """The sentences up to the last that names one of the kind of an expected word, such as a day; all if none does."""
    kind = next((kind for kind in _KINDS if expected.casefold() in kind), set[str]())
    naming = (at for at, s in reversed([*enumerate(sentences)]) if kind & {*re.findall(r"\w+", s.casefold())})
    return sentences[: next(naming, len(sentences) - 1) + 1]


def _chosen_letter(clause: str) -> str | None:
    """The only letter of choice that a clause names, if it chooses one."""
    letters = {letter[1] for letter in _LETTERS.finditer(_LETTERED_NAME.sub("", clause))}
    chooses = _CHOOSES.search(clause) or len(clause.split()) < 3
    return f"({letters.pop()})" if len(letters) == 1 and chooses and not _UNDECIDED.search(clause) else None


def _main_clause(sentence: str) -> str:
    *_, sentence = _SO_FAR.split(_CIRCUMSTANCE.sub("", sentence, count=1))
    return _CIRCUMSTANCE.sub("", sentence, count=1)


def same_words(answer: str, reference: str) -> bool:
    """True if an answer says what a reference says, and nothing else of its kind."""
    if letter := _LETTER.fullmatch(reference):
        return bool(found := _NAMED_LETTER.fullmatch(words_of(answer))) and found[1] == letter[1]
    ours, theirs = _normal(answer), _normal(reference)
    return ours.casefold() == theirs.casefold() or _states(ours, theirs)


def _states(clause: str, wanted: str) -> bool:
    """True if a clause states some words, and decides for them alone."""
    found = next(
        (
            at
            for at in re.finditer(rf"(?<![\w-]){re.escape(wanted)}(?![\w-])", clause, re.IGNORECASE)
            if not _COMPARED.search(clause[: at.start()])
        ),
        None,
    )
    if found is None or wanted.casefold() in ("yes", "no"):
        return False
    before, after = clause[: found.start()], clause[found.end() :]
    if _UNDECIDED.search(f"{before}|{after}"):
        return False
    rivals = _rivals(clause, wanted)
    is_predicate = bool(_PREDICATE.search(before)) and len(after.split()) < MAX_WORDS
    if rivals is not None:
        return (is_predicate and not after) or not any(word.casefold() not in wanted.casefold() for word in rivals)
    return is_predicate or bool(_SUBJECT.fullmatch(before) and _VERB.match(after))


def _rivals(clause: str, wanted: str) -> list[str] | None:
    """The words of a clause that may be its answer, of the kind of those wanted; None if their kind is not known."""
    if date := re.fullmatch(r"[A-Z]{3}\d+", wanted):
        names = re.finditer(r"\b[A-Z]{3}\d+\b", clause)
    elif kind := next((kind for kind in _KINDS if wanted.casefold() in kind), None):
        names = (word for word in re.finditer(r"\w+", clause) if word[0].casefold() in kind)
    elif wanted[:1].isupper():
        names = re.finditer(r"(?<=\s)[A-Z]\w+|^[A-Z]\w+(?= [A-Z])", clause)
    else:
        return None
    compared = _COMPARED if date or wanted.casefold() in _KINDS[0] else _BESIDE
    return [name[0] for name in names if not compared.search(clause[: name.start()])]


def _normal(text: str) -> str:
    """The words of a clause without articles, dates in the form `MAR14`."""
    for date in (_DAY_FIRST, _MONTH_FIRST):
        text = date.sub(lambda m: f"{m['month'][:3].upper()}{int(m['day'])}", text)
    return " ".join(_ARTICLES.sub("", words_of(_SOLUTIONS.sub(r"\1", text))).split())
