r"""The final answer of a text: what its last marker names, else what its last sentence states.

    1  what a reasoning model thinks, and problems that follow the answer, are cut off
    2  markers: ####, \boxed{}, <answer>, `the answer is`, `Answer:`, `A:`, in many languages; the last that names a value counts
    3  what says `wait, that is wrong` takes back the markers before it
    4  without a marker: the last sentence's result

A list of alternatives is an answer of its own, which equals no single number.
"""

import re
from collections.abc import Iterator

from env_service.graders.answers.expressions import value_at, value_of
from env_service.graders.answers.numbers import spelled_small
from env_service.graders.answers.plain import plain
from env_service.graders.answers.sentences import has_number, split, stated_result
from env_service.graders.answers.vocabulary import (
    ANSWER,
    BEFORE_OTHER_ANSWER,
    CHECK,
    IS,
    NEGATED,
    PARTIAL,
    QUESTION,
    TAKEN_BACK,
)

_PHRASE = re.compile(rf"{ANSWER}(?P<gap>[^\n\d.!?。！？⟦＄€£\\]{{0,60}}?){IS}", re.IGNORECASE)
_BARE = re.compile(
    rf"{ANSWER}[ \t⟫).]*(?=[-+＄€£⟦]?\d|⟦|\n\s*(?:[-+＄€£⟪]?\d|⟦))|(?:(?<=^)|(?<=[\s⟪]))A(?=:[⟫\s])|<final>",
    re.IGNORECASE,
)
_TAG = re.compile(
    r"<\s*(?:final[_ -]?)?(?:answer|ans|solution|final)\s*>([^<]*)|\[(?:final )?answer\]\s*([^\[]*)|\bfinish\[([^\]\n]*)",
    re.IGNORECASE,
)
_HASHES = re.compile(r"(?<!#)####(?!#)[ \t]*([^\n]*)")
_AT_MARKER = re.compile(rf"(?<!is the )(?<!is our )(?<!is my )(?<!final ){ANSWER}[^\w.!]*(?:{IS})?$", re.IGNORECASE)
_BRACES = re.compile(r"\\(?:boxed|fbox|framebox|answer|ans)\s*\{|\\boxed\s+(?=[\w\\])|\\[{}]|[{}]")
_THOUGHT = re.compile(r"</(?:think|thinking|thought|reasoning|scratchpad)>", re.IGNORECASE)
_THINKS = re.compile(r"<(?:think|thinking|thought|reasoning|scratchpad)>", re.IGNORECASE)
_OPTION = re.compile(
    r"(?:option |choice )?(?:\(([A-J])\)|([A-J])(?:[).:]|(?=[\s⟫*]*(?:$|\n))))[.:,]?[ ⟫*]*(?=[^a-z]|$)", re.IGNORECASE
)
_OPEN_GROUP = re.compile(r"[\s,;⟦⟧⟪⟫]*(?:and|or|oder)?[\s,;⟦⟧⟪⟫]*", re.IGNORECASE)

MAX_PHRASES = 20
"""Of more that are followed by words, the last are read."""

Found = tuple[int, str]
"""Position of a marker, and the answer that it names."""


def final_answer(text: str) -> str:
    """The part of a text that is its answer; "" if it decides on none."""
    text = _said(plain(text))
    found = sorted(_markers(text))
    if found and (question := QUESTION.search(text, found[0][0])):
        text = text[: question.start()]
        found = sorted(_markers(text))
    taken_back = 0
    for back in TAKEN_BACK.finditer(text):
        taken_back = back.start()
    kept = [mark for mark in found if mark[0] >= taken_back]
    if kept:
        return kept[-1][1]
    rest = _unchecked(text[taken_back:])
    if (weak := next(_weak(rest), None)) is not None:
        return weak
    if _dangling(rest):
        return ""
    return stated_result(rest)


def _unchecked(text: str) -> str:
    """The text before it verifies what it has stated."""
    check = next((found for found in CHECK.finditer(text) if has_number(text[: found.start()])), None)
    return text[: check.start()] if check else text


def _said(text: str) -> str:
    """The text after its thoughts; nothing if they do not end."""
    *_, said = _THOUGHT.split(text)
    return said if not _THINKS.search(said) else _THINKS.split(said)[0]


# ---- markers that name a value --------------------------------------------------------------------------------------


def _markers(text: str) -> Iterator[Found]:
    yield from _boxes(text)
    for tag in _TAG.finditer(text):
        inside = tag[1] or tag[2] or tag[3] or ""
        if answer := value_at(inside.strip()) or _text_answer(inside):
            yield tag.start(), answer
    for hashes in _HASHES.finditer(text):
        if answer := _hash_answer(hashes[1], last=not text[hashes.end() :].strip()):
            yield hashes.start(), answer
    for marker, value in _phrases(text):
        if answer := _named(value):
            yield marker, answer


def _hash_answer(line: str, *, last: bool) -> str | None:
    if re.match(r"\(?\d{1,2}[.):]\s+[A-Za-z]", line):
        return None
    return value_at(line) or (stated_result(line) or _text_answer(line) if last else None)


def _phrases(text: str) -> Iterator[tuple[int, str]]:
    """Each `the answer is`, and the text after it."""
    for phrase in _PHRASE.finditer(text):
        if BEFORE_OTHER_ANSWER.search(text[max(0, phrase.start() - 40) : phrase.start()]) or PARTIAL.search(
            phrase["gap"]
        ):
            continue
        yield phrase.start(), text[phrase.end() : phrase.end() + 400]
    for bare in _BARE.finditer(text):
        if bare[0] != "a" and not re.search(r"\bB:", text[bare.end() : bare.end() + 80]):
            yield bare.start(), text[bare.end() : bare.end() + 400]


def _named(value: str) -> str | None:
    """The value right after a marker, if it is decided there."""
    if negated := NEGATED.match(value):
        return None if negated["none"] is not None else _named(value[negated.end() :])
    same_line = value.split("\n", 1)[0]
    value = value if not same_line.strip(" *_:⟪⟫`\"'=") else same_line
    head = value.lstrip(" \n*_:⟪⟫`\"'=").split("\n\n", 1)[0]
    if "\\boxed" in head.split("\n", 1)[0]:
        return None
    if _is_calculation_of_more(head) or re.match(r"[^.!\n]*\?", head):
        return None
    if option := _OPTION.match(head):
        return f"({(option[1] or option[2]).upper()}) {value_at(head[option.end() :]) or _text_answer(head[option.end() :])}".strip()
    return value_at(head) or value_at(spelled_small(head.split("\n", 1)[0]))


def _is_calculation_of_more(head: str) -> bool:
    """True if a worked solution follows the marker, rather than its answer."""
    first, *further = [s for s in split(head) if s.strip(" ⟦⟧")] or [""]
    return bool(further) and bool(re.match(r"[^=\n]*\d\s*[-+*/×÷x][^=\n]*=", first)) and has_number(further[0])


def _boxes(text: str) -> Iterator[Found]:
    r"""Position and value of each \boxed{}; those that only commas, `and` or `or` part are one."""
    group, start, end = list[str](), 0, -1
    for begin, stop, inside in sorted(_braced(text)):
        if begin < end:
            continue
        if group and _OPEN_GROUP.fullmatch(text[end:begin]):
            group.append(_boxed_value(inside))
        else:
            if group:
                yield start, _joined(group)
            group, start = [_boxed_value(inside)], begin
        end = stop
    if group:
        yield start, _joined(group)


def _boxed_value(inside: str) -> str:
    inside = re.sub(r"\\(?:boxed|fbox)\s*\{", "", inside)
    if has_number(inside) and (prose := re.fullmatch(r"\s*\\text\s*\{([^{}]*\s[^{}]*\s[^{}]*)\}\s*", inside)):
        return stated_result(prose[1])
    return value_of(inside)


def _joined(group: list[str]) -> str:
    return group[0] if len(set(group)) == 1 else ", ".join(group)


def _braced(text: str) -> Iterator[tuple[int, int, str]]:
    """Begin, end and inside of each box whose braces match."""
    open_braces = list[tuple[int, int]]()  # where it begins, where its inside begins; -1 for a brace that is no box
    for brace in _BRACES.finditer(text):
        if brace[0] in ("\\{", "\\}"):
            continue
        if brace[0] == "}":
            if open_braces and (begun := open_braces.pop())[0] >= 0 and text[begun[1] : brace.start()].strip():
                yield begun[0], brace.end(), text[begun[1] : brace.start()]
        elif brace[0] == "{":
            open_braces.append((-1, brace.end()))
        elif brace[0].endswith("{"):
            open_braces.append((brace.start(), brace.end()))
        elif single := re.compile(r"\d+|\w|\\[a-z]+").match(text, brace.end()):
            yield brace.start(), single.end(), single[0]


# ---- markers before words -------------------------------------------------------------------------------------------


def _weak(text: str) -> Iterator[str]:
    """Answers that words after a marker give, the last first: `the answer is that Tom has 5 left`, `Answer: north`."""
    for _, value in reversed(list(_phrases(text))[-MAX_PHRASES:]):
        if "\\boxed" in value:
            continue
        paragraph = value.lstrip(" *_:⟪⟫`\"'=\n").split("\n\n", 1)[0]
        if re.match(r"\W*(?:\w+ )?between\b", paragraph):
            yield ""
            continue
        if NEGATED.match(value) or not paragraph.strip():
            continue
        if answer := stated_result(paragraph) if has_number(paragraph) else _text_answer(paragraph):
            yield answer


def _text_answer(text: str) -> str:
    first = re.split(r"\n|[.;!](?:\s|$)|[,(]| because | since ", text.strip(" *_:⟪⟫`\"'=\n"), maxsplit=1)[0]
    return first.strip(" .。*_:⟪⟫⟦⟧`\"'")


def _dangling(text: str) -> bool:
    """True if the text breaks off at a marker."""
    tail = text.rstrip(" ⟦⟧⟪⟫*:＄\n")
    if re.search(r"\\boxed\s*\{[^{}]*$", tail):
        return True
    return bool(_AT_MARKER.search(tail[-80:]))
