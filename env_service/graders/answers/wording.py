"""Answers in words: `Tuesday`, `no solution`, `March 14`, `odd`, `(B)`."""

import re

from env_service.graders.answers.sentences import split
from env_service.graders.answers.vocabulary import ANSWER, CONCLUSION

MAX_WORDS = 6
"""Words of an answer that says more than its reference."""

_MONTH = (
    r"jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sep(?:t(?:ember)?)?"
    r"|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?"
)
_DAY_FIRST = re.compile(rf"(?:the )?(?P<day>\d{{1,2}})(?:st|nd|rd|th)?(?: of)? (?P<month>{_MONTH})\b", re.IGNORECASE)
_MONTH_FIRST = re.compile(rf"\b(?P<month>{_MONTH})\.? (?:the )?(?P<day>\d{{1,2}})(?:st|nd|rd|th)?\b", re.IGNORECASE)
_NAMES = re.compile(r"\\[A-Za-z]+|(?:sqrt|frac|pi|sin|cos|tan|log|ln|exp|dollars?|cents?)(?![A-Za-z])")
_CLAUSE = re.compile(r"\n|[.;!?](?:\s|$)|[,(:]| (?:because|since|as|which|with) ")
_COPULA = re.compile(r"(?:\b(?:is|are|was|were|obtain|get|be|has|have)\b|:|=)\s", re.IGNORECASE)
_HAS = re.compile(
    r"[\W_]*(?:so |therefore,? |thus,? |hence,? )?(?!(?:it|he|she|we|they|this|there|the)\b)\w+ (?:has|have|had) ",
    re.IGNORECASE,
)
_LETTERS = re.compile(r"(?<![\w'])\(?([B-HJ]|A(?! [a-z]))\)?(?![\w'-])")
_CHOOSES = re.compile(r"\b(?:choose|pick|option|choice|answer|correct|right|must be)\b(?!.*\bnot\b)", re.IGNORECASE)
_ARTICLES = re.compile(
    r"^(?:therefore |thus |so |hence )?(?:(?:it|there|that|he|she|they) (?:is|are|was) )?(?:(?:an?|the|on|in) )?",
    re.IGNORECASE,
)
_LETTER = re.compile(r"(?:(?!not|or|and|nor|than)[A-Za-z]+ )?\(?([A-J])\)?")
_ANSWER = re.compile(rf"{ANSWER}\s*:\s*", re.IGNORECASE)
_CHOICE = re.compile(r"(?:(?:option|choice|answer) )?(?:\(([A-J])\)|([A-J])(?:[).:](?!\w)|$))", re.IGNORECASE)
_GOES_ON = re.compile(
    r"[\s.,;!?]*(?:(?:or|and|but|maybe)\b|(?:[\w'-]+ ?){1,2}(?:,|\b(?:or|and)\b|\W*$))", re.IGNORECASE
)
"""After a name: it is one of several."""
_FURTHER = re.compile(
    r" (?:is|are|was|were|has|have|had|wins?|won|will|gets?|function|number|day|degrees?|one|exists?|solutions?)\b"
)
"""Words that may follow those of the reference."""
_UNDECIDED = re.compile(
    r"\b(?:not|or|nor|neither|either|and|than|never|but|after|before|until|if|maybe|perhaps|cannot|unless|both|yes|no)\b|n't\b|/"
)


def is_in_words(reference: str) -> bool:
    """True if a reference is a name, a date, yes or no, a letter of choice: nothing that is a value."""
    if re.fullmatch(r"\(?[A-J]\)?", reference) or _DAY_FIRST.fullmatch(reference) or _MONTH_FIRST.fullmatch(reference):
        return True
    return not re.search(r"[\d=<>^_\\]", reference) and bool(re.search(r"[^\W\d_]{2,}", _NAMES.sub("", reference)))


def words_of(text: str) -> str:
    """The words with which a text begins, up to the end of the clause."""
    text = re.sub(r"\\(?:text|textbf|textrm|mathrm|mbox|textit)\s*\{([^{}]*)\}", r"\1", text)
    text = _ANSWER.sub("", re.sub('[⟦⟧⟪⟫*_`"]', "", text).strip(" :.'=>-"), count=1)
    if choice := _CHOICE.match(text):
        return f"({(choice[1] or choice[2]).upper()})"
    clause = _CLAUSE.search(text)
    if clause and _GOES_ON.match(text, clause.start()) and not re.match(r"(?:yes|no)\b", text, re.IGNORECASE):
        return ""
    text = text[: clause.start()] if clause else text
    return text.strip(" .'")


def worded_result(text: str) -> str:
    """The words that a text ends with: what something is, or the whole of its last sentence."""
    if len(text) < 80 and _CHOICE.match(text.strip()):
        return words_of(text)
    last = CONCLUSION.split(split(text.strip())[-1])[-1]
    letters = {letter[1] for letter in _LETTERS.finditer(last)}
    if len(letters) == 1 and (_CHOOSES.search(last) or len(last.split()) < 3):
        return f"({letters.pop()})"
    for sentence in reversed([s for s in split(text) if re.search(r"\w", s)][-1:]):
        sentence = re.sub(r"^(?:so|thus|hence|therefore),? (?=(?:yes|no)\b)", "", sentence, flags=re.IGNORECASE)
        if re.match(r"\W*(?:yes|no)\b", sentence, re.IGNORECASE) or not (named := _COPULA.search(sentence)):
            return words_of(sentence)
        return words_of(sentence[: named.start()] if _HAS.match(sentence) else sentence[named.end() :])
    return ""


def same_words(answer: str, reference: str) -> bool:
    """True if an answer says what a reference says, and little besides."""
    if letter := _LETTER.fullmatch(reference):
        return bool(found := _LETTER.fullmatch(words_of(answer))) and found[1] == letter[1]
    ours, theirs = _normal(answer), _normal(reference)
    if ours == theirs:
        return True
    further = ours.removeprefix(theirs)
    return (
        further != ours
        and bool(_FURTHER.match(further))
        and len(ours.split()) <= MAX_WORDS
        and not _UNDECIDED.search(further)
    )


def _normal(text: str) -> str:
    for date in (_DAY_FIRST, _MONTH_FIRST):
        text = date.sub(lambda m: f"{m['month'][:3]} {int(m['day'])}", text, count=1)
    return " ".join(_ARTICLES.sub("", words_of(text)).casefold().split())
