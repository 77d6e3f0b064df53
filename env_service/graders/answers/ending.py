"""Finds text that follows an answer and is no part of it: the next question, a check, remarks.

`before_next_question`, `unchecked` and `before_trial` cut a text there; `without_remarks` leaves out single sentences.
"""

import re
from collections.abc import Callable
from fractions import Fraction
from itertools import islice

from env_service.graders.answers import vocabulary as said
from env_service.graders.answers.candidates import has_number
from env_service.graders.answers.remarks import concludes_anew
from env_service.graders.answers.results import result_of
from env_service.graders.answers.sentences import split, stated_result
from env_service.graders.answers.values.sums import values

MAX_QUESTIONS = 10
"""Questions, and trials, that are looked at: the first ones."""

_ASIDE = re.compile(
    r"(?:(?<=[.!?⟫⟧\n])|(?<=[.!?] )(?<!i\.e\. )(?<!e\.g\. ))(?<!i\.e\.)(?<!e\.g\.)[ \n]*\((?![A-Za-z]\)"
    r"|or [＄€£]?\d)(?=[^()\n]*[\w.])(?:[^()\n]|\([^()\n]*\))*+\)\.?(?=\s|$)"
)
_NOTE = re.compile(r"^[*_>\s]*\[(?:\d+|[A-Z][^\]\n]{10,})\][^\n]*|^#{1,3} \d+ (?:points|marks)$", re.MULTILINE)
_WITH_TABLE = re.compile(r"\s*([^\n|⟪]*⟪[^⟪⟫\n|]*\d[^⟪⟫\n|]*⟫[^\n|⟪\d]*)\n+(?:\|[^\n]*\n?)++\s*")
"""A line with a number in bold, and a table that shows where it comes from."""
_REFERENCE = re.compile(r"(?<=\S) ?\[\d{1,2}\]")

_ASSIGNED = re.compile(r"(?<![A-Za-z\d)\\] )(?<![A-Za-z\d)\\])[A-Za-z] ?=([^=\n;.]*)")
"""An unknown, and the value that it gets."""
_CONCLUDES_AGAIN = re.compile(
    r"(?<=[.!?\n]) ?(?:so|therefore|thus|hence)\b[^.\n\d]*\d[^\n]*\Z|\n⟪[^⟪⟫\n]*\d[^⟪⟫\n]*⟫\W*\Z"
    r"|\n[^\S\n]*\n[^\n\d=(]*\d[\d.,/]*[^\n\d=(]*\Z",
    re.IGNORECASE,
)


def before_next_question(text: str, stated: int | None) -> str:
    """The text before the first question that follows an answer. `stated`: where its first marker is, if it has one."""
    for count, question in enumerate(said.QUESTION.finditer(text)):
        before = text[: question.start()]
        if (stated is not None and question.start() > stated) or (count < MAX_QUESTIONS and _is_solved(before)):
            return before
    asked = said.NEW_QUESTION.search(text, stated) if stated is not None else None
    return text[: asked.start()] if asked else text


def _is_solved(text: str) -> bool:
    """True if a text ends with a short sentence that states a result, or with one that concludes or computes it."""
    last = next((s for s in reversed(split(text[-2000:])) if re.search(r"\w", s)), "")
    concludes = len(last.split()) <= 5 or "=" in last or said.CONCLUSION.search(f" {last}")
    return has_number(last) and bool(concludes) and bool(stated_result(last))


def unchecked(text: str, states: Callable[[str], object]) -> str:
    """The text before it verifies or tabulates what it has stated. `states`: whether a text has what may be an answer."""
    if tabulated := _WITH_TABLE.fullmatch(text):
        return tabulated[1].rstrip(" :")
    check = next((found for found in said.CHECK.finditer(text) if states(text[: found.start()])), None)
    if not check or _CONCLUDES_AGAIN.search(text, check.start()) or _reconsiders(text[check.start() :]):
        return text
    return text[: check.start()]


def before_trial(text: str) -> str:
    """The text before it tries the result that it has stated, and finds it right."""
    trials = islice(said.TRIAL.finditer(text), MAX_QUESTIONS)
    tried = (text[: t.start()] for t in trials if _finds_right(text[: t.start()], text[t.start() :], "?" in t[0]))
    return next(tried, text)


def _finds_right(before: str, trial: str, asked: bool) -> bool:
    """True if a trial computes with what the text before it states, concludes nothing else and does not deny it."""
    stated = {*values(stated_result(before))} if has_number(before) else set[Fraction]()
    affirmed, used = asked or said.AFFIRMED.search(trial), {*values(trial.rpartition("=")[0] or trial)}
    if not stated or not affirmed or said.DENIED.search(trial) or not stated <= used:
        return False
    assigned = {value for name in _ASSIGNED.finditer(trial) for value in values(name[1])}
    return assigned <= stated and all({*values(result_of(s))} <= stated for s in split(trial) if concludes_anew(s))


def _reconsiders(text: str) -> bool:
    """True if a text comes back to what it has stated, and has a number after that."""
    again = said.RECONSIDERED.search(text)
    return again is not None and has_number(text[again.end() :])


def without_remarks(text: str) -> str:
    """The text without the sentences in brackets, notes and comments that follow its first number."""
    number = re.search(r"\d", text)
    if not number:
        return text
    head, rest = text[: number.end()], text[number.end() :]
    if (closing := said.CLOSING.search(rest)) is not None:
        rest = rest[: closing.start()]
    if _NOTE.search(rest):
        rest = _REFERENCE.sub("", _NOTE.sub("", rest))
    return head + said.COMMENT.sub("", _ASIDE.sub(_full_stop, rest))


def _full_stop(aside: re.Match[str]) -> str:
    """The full stop that ends the sentence in which an aside stands, if one does."""
    inside = aside.string[aside.start() - 1 : aside.start()] not in (".", "!", "?", "\n", "")
    return "." if inside and aside[0].endswith(".") else ""
