r"""The final answer of a text: what its last marker names, else what its last sentence states.

    1  what a reasoning model thinks, remarks, and questions that follow the answer, are cut off
    2  markers: ####, \boxed{}, <answer>, `the answer is`, `Answer:`, `A:`, in many languages; the last that names a value counts
    3  what says `wait, that is wrong` takes back the markers before it; so does `wait` if it leads to another result
    4  without a marker: the last sentence's result

A reference is an answer as a whole, unless it has a marker or sentences. If it is words (`Tuesday`, `no solution`, `(B)`),
words are looked for in the same places.

A list of alternatives is an answer of its own, which equals no single number.
"""

import functools
import re
from collections.abc import Callable, Iterable, Iterator

from env_service.graders.answers import vocabulary as said
from env_service.graders.answers.candidates import has_number
from env_service.graders.answers.ending import before_next_question, before_trial, unchecked, without_remarks
from env_service.graders.answers.expressions import value_at, value_of, whole_value
from env_service.graders.answers.plain import plain
from env_service.graders.answers.remarks import first_of_story
from env_service.graders.answers.results import result_of
from env_service.graders.answers.sentences import WITH_SUBJECT, split, stated_result
from env_service.graders.answers.values.amounts import in_each_form
from env_service.graders.answers.values.equations import is_equation, last_equation
from env_service.graders.answers.values.numbers import NUMBER, spelled_small
from env_service.graders.answers.values.units import MIXED
from env_service.graders.answers.vocabulary import ANSWER, IS
from env_service.graders.answers.wording import EMPTY_SET, is_in_words, worded_result, words_of

_PHRASE = re.compile(rf"{ANSWER}(?P<gap>[^\n\d.!?。！？⟦＄€£\\]{{0,60}}?){IS}", re.IGNORECASE)
_BARE = re.compile(
    rf"{ANSWER}[ \t⟫).]*(?=[-+＄€£⟦]?\d|⟦|\n\s*(?:[-+＄€£⟪]?\d|⟦))|(?:(?<=^)|(?<=[\s⟪])(?<!option )(?<!choice ))A(?=:[⟫\s])|<final>",
    re.IGNORECASE,
)
_TAG = re.compile(
    r"<\s*(?:final[_ -]?)?(?:answer|ans|solution|final)\s*>([^<]*)|\[(?:final )?answer\]\s*([^\[]*)|\bfinish\[([^\]\n]*)",
    re.IGNORECASE,
)
_HASHES = re.compile(r"(?<!#)####(?!#)[ \t]*([^\n#]*)")
_SENTENCE = re.compile(r"(?:[A-Za-z']{2,}[ ,]+){3}[A-Za-z]{2,}|^[A-Z][a-z]+ (?:[a-z]+ )*(?:is|has|are|gets?|costs?) ")
_TEXT_INSIDE = re.compile(r"\\(?:text|textbf|textrm|mathrm|mbox)\s*\{([^{}]*)\}")
_PHRASED = re.compile(
    r"\d[\d.]*(?: ?: ?| to )\d+(?! ?[ap]\.?m)|[＄€£]?\d+ (?:dollars?|euros?|pounds?) (?:and )?\d", re.IGNORECASE
)
_MIXED = re.compile(MIXED)
_HEADING = re.compile(rf"^[ \t]*(?:[#*_⟪-][ \t]*)*{ANSWER}[ \t]*[⟫*_:]*[ \t]*\n\s*(?=\S)", re.IGNORECASE | re.MULTILINE)
_LAST_LABEL = re.compile(
    r"^[ \t*_⟪•-]*(?:final |end)?(?:result|ergebnis|resultado|résultat)[⟫*_ ]*:(?=[^\n]*\s*\Z)",
    re.IGNORECASE | re.MULTILINE,
)
_IS_THE_ANSWER = re.compile(
    r"(?:^|[,:.!?]\s|\b(?:so|therefore|thus|hence)\b,?)\s*(?P<value>(?:[^,:!?\n.]|\.(?!\s)){1,60}?)\.?"
    r" (?:(?:is|are|would be) (?:the|our|my) (?:final |correct )?answer"
    r"|(?<=option [A-J] )is (?:correct|right))\b",
    re.IGNORECASE | re.MULTILINE,
)
_GAMBLE = re.compile(
    r"\b(?:otherwise|or else|alternatively|in any other case|if the reference|if\b[^.]*\bif)\b", re.IGNORECASE
)
_OR_IF = re.compile(r"[^\n()]*(\s*\(or (?=[^()]*\d)[^()]*\bif\b[^()]*\))")
"""Another answer in brackets behind one: `(or 34 if the nickel counts)`."""
_COUNTED = re.compile(r"\d+[一-龥ぁ-んァ-ヶ가-힣][^\n。=\d]*\d")
"""A sentence of a language without spaces, which begins with a number and states another."""
_OPEN = re.compile(r"\d\s*[-+*/×÷=]\s*\Z")
_CALCULATION = re.compile(r"\W*[\d.,]+ (?:[a-z]+ )?(?:[-+*/×÷]|times|plus|minus|divided by) [＄€£]?\d[^=]*$")
_WORDED_CALCULATION = re.compile(r"\W*[\d.,]+(?: [a-z]+){1,2} [-+*/×÷] [＄€£]?\d[^=]*= ?[＄€£]?\d")
"""A calculation with units: `3 rooms × 200 sq ft = 600 sq ft`."""
_BRACES = re.compile(r"\\(?:boxed|fbox|framebox|answer|ans)\s*\{|\\boxed\s+(?=[\w\\])|\\[{}]|[{}]")
_THINK = r"(?:\w{1,10}:)?(?:think|thinking|thought|reasoning|scratchpad|analysis|reflection)\s?[>\]▷]"
_THOUGHT = re.compile(
    rf"[<\[◁]/{_THINK}|<\|end_of_thought\|>|<\|channel\|>final[^<\n]{{0,20}}<\|message\|>", re.IGNORECASE
)
_THINKS = re.compile(rf"[<\[◁]{_THINK}|<\|begin_of_thought\|>|<\|channel\|>analysis", re.IGNORECASE)
_TURN = re.compile(
    r"<\|[a-z_]{1,30}\|>(?:assistant)?|</?s>|<eos>|<(?:end|start)_of_turn>(?:model)?|\[/?INST\]", re.IGNORECASE
)
"""Signs by which chat templates begin and end a turn."""
_NEXT_TURN = re.compile(r"(?<=\S)\s*\n\s*(?:Human|User):")
_OPTION = re.compile(
    r"(?:option |choice )?(?:\(([A-J])\)|([A-J])(?:[).:]|(?=[\s⟫*]*(?:$|\n))))[.:,]?[ ⟫*]*(?=[^a-z]|$)", re.IGNORECASE
)
_LETTERED = re.compile(r"\(([A-J])\)\s*(.*)", re.DOTALL)
_OPEN_GROUP = re.compile(r"[\s,;⟦⟧⟪⟫]*(?:and|or|oder)?[\s,;⟦⟧⟪⟫]*", re.IGNORECASE)

MAX_PHRASES = 20
"""Phrases followed by words that are read: the last ones."""

Found = tuple[int, str]
"""Position of a marker, and the answer that it names."""


def final_answer(text: str, expected: str = "") -> str:
    """The part of a text that is its answer; "" if it decides on none. `expected`: the reference's answer, whose kind is looked for."""
    if is_in_words(expected):
        return _final(text, functools.partial(_passages, words_of), functools.partial(_worded, expected=expected))
    if is_equation(expected):
        return _final(text, functools.partial(_passages, last_equation), _last_stated_equation)
    return _final(text, _markers, _value_stated, _value_marked)


def _final(
    text: str,
    marked: Callable[[str], Iterable[Found]],
    stated: Callable[[str], str],
    named: Callable[[str, Found], str] = lambda _, mark: mark[1],
) -> str:
    """The answer that the last marker of a text names, or else that the text states, as far as it is not taken back."""
    text = without_remarks(_said(plain(text)))
    found = sorted(marked(text))
    shorter = before_next_question(text, found[0][0] if found else None)
    if len(shorter) < len(text):
        text, found = shorter, sorted(marked(shorter))
    taken_back = max((back.start() for back in said.TAKEN_BACK.finditer(text)), default=0)
    kept = [mark for mark in found if mark[0] >= taken_back]
    return named(text, kept[-1]) if kept else stated(text[taken_back:])


def _value_marked(text: str, mark: Found) -> str:
    return _of_option(text, _reconsidered(text[mark[0] :]) or mark[1])


def _value_stated(text: str) -> str:
    rest = before_trial(unchecked(text, has_number))
    weak = next(_weak(rest), None)
    return weak if weak is not None else stated_result(rest)


def _worded(text: str, expected: str) -> str:
    return worded_result(unchecked(text, re.compile("[A-Za-z]").search), expected)


def _last_stated_equation(text: str) -> str:
    """The last equation that a text is left with: not one of several, none that it doubts or rejects."""
    stating = next((s for s in reversed(split(unchecked(text, last_equation))) if last_equation(s)), "")
    undecided = said.HEDGE.search(stating) or said.REJECTED.search(stating) or re.search(r"\b(?:or|not)\b|n't", stating)
    return last_equation(stating) if not undecided else ""


def _of_option(text: str, answer: str) -> str:
    """The value of an answer that is an option: its own, or the one listed in the text; any other answer as it is."""
    if not (option := _LETTERED.fullmatch(answer)) or option[2]:
        return option[2] if option else answer
    listed = re.search(rf"(?<![A-Za-z]){option[1]}[).:]\s+(?=[-\d⟦＄€£\\])", text, re.IGNORECASE)
    return (value_at(text[listed.end() :]) if listed else None) or answer


def expected_answer(reference: str) -> str:
    """The answer that a reference says: the whole of one without markers and sentences."""
    text = plain(reference).strip()
    if "\n" in text or any(_markers(text)) or _SENTENCE.search(_TEXT_INSIDE.sub("", text)):
        return final_answer(reference)
    bare = _TEXT_INSIDE.sub(r"\1", text).strip("⟦⟧⟪⟫ ")
    if (measured := plain(bare)) and _MIXED.fullmatch(measured):
        return measured
    if is_in_words(bare) or is_equation(bare):
        return bare
    if EMPTY_SET.fullmatch(bare):
        return "no solution"
    return (value_at(bare) if _PHRASED.match(bare) else None) or value_of(text.strip("⟦⟧⟪⟫ ")) or bare


def _reconsidered(text: str) -> str | None:
    """The result that a text states after it came back to its answer, if it does."""
    again = next(reversed([*said.RECONSIDERED.finditer(text)]), None)
    if again is None or again.start() == 0:
        return None
    rest = unchecked(text[again.end() :], has_number)
    return stated_result(rest) if has_number(rest) else None


def _said(text: str) -> str:
    """The text after its thoughts; nothing if they do not end."""
    *_, said = _THOUGHT.split(_NEXT_TURN.split(text)[0])
    said = next((part for part in _TURN.split(said) if part.strip()), "")
    return said if not _THINKS.search(said) else _THINKS.split(said)[0]


# ---- markers that name a value --------------------------------------------------------------------------------------


def _markers(text: str) -> Iterator[Found]:
    yield from _boxes(text)
    for tag in _TAG.finditer(text):
        inside = tag[1] or tag[2] or tag[3] or ""
        if answer := value_at(inside.strip()) or (stated_result if has_number(inside) else _text_answer)(inside):
            yield tag.start(), answer
    for hashes in _HASHES.finditer(text):
        if answer := _hash_answer(hashes[1], last=not text[hashes.end() :].strip()):
            yield hashes.start(), answer
    text = _without_boxes(text)
    for marker, value in _phrases(text):
        if answer := _named(value):
            yield marker, answer
    for marker, line in _labels(text):
        if answer := _named(line) or value_at(spelled_small(line)):
            yield marker, answer
    for stated in _IS_THE_ANSWER.finditer(text):
        if answer := _named_before(stated["value"]):
            yield stated.start("value"), answer


def _named_before(value: str) -> str | None:
    """The value that stands before `is the answer`, if it is nothing but one."""
    option = _OPTION.fullmatch(value)
    return f"({(option[1] or option[2]).upper()})" if option else whole_value(value)


def _passages(read: Callable[[str], str], text: str) -> Iterator[Found]:
    """Positions of all that names an answer, and what is read there."""
    for begin, _, inside in _braced(text):
        yield begin, read(inside)
    for tag in _TAG.finditer(text):
        yield tag.start(), read(tag[1] or tag[2] or tag[3] or "")
    for hashes in _HASHES.finditer(text):
        yield hashes.start(), read(hashes[1])
    text = _without_boxes(text)
    for marker, value in (*_phrases(text), *_labels(text)):
        if negated := said.NEGATED.match(value):
            value = value[negated.end() :] if negated["none"] is None else ""
        value = value.strip(" *_:⟪⟫`\"'=\n").split("\n", 1)[0]
        if value and "\\boxed" not in value and not re.fullmatch(r"[\W\d]+", found := read(value)):
            yield marker, found
    for stated in _IS_THE_ANSWER.finditer(text):
        yield stated.start("value"), read(stated["value"])


def _hash_answer(line: str, *, last: bool) -> str | None:
    if re.match(r"\(?\d{1,2}[.):]\s+[A-Za-z]", line):
        return None
    return value_at(line) or (stated_result(line) or _text_answer(line) if last else None)


def _phrases(text: str) -> Iterator[tuple[int, str]]:
    """Each `the answer is`, and the text after it."""
    for phrase in _PHRASE.finditer(text):
        if said.BEFORE_OTHER_ANSWER.search(text[max(0, phrase.start() - 40) : phrase.start()]) or said.PARTIAL.search(
            phrase["gap"]
        ):
            continue
        yield phrase.start(), text[phrase.end() : phrase.end() + 400]
    for bare in _BARE.finditer(text):
        before, after = text[max(0, bare.start() - 40) : bare.start()], text[bare.end() : bare.end() + 80]
        if bare[0] != "a" and not re.search(r"\bB:", after) and not said.BEFORE_OTHER_ANSWER.search(before):
            yield bare.start(), text[bare.end() : bare.end() + 400]


def _labels(text: str) -> Iterator[tuple[int, str]]:
    """Each heading `Answer` and closing line `Result:`, and the text after it."""
    for label in (*_HEADING.finditer(text), *_LAST_LABEL.finditer(text)):
        yield label.start(), text[label.end() : label.end() + 400].split("\n", 1)[0]


def _named(value: str) -> str | None:
    """The value right after a marker, if it is decided there."""
    if negated := said.NEGATED.match(value):
        return None if negated["none"] is not None else _named(value[negated.end() :])
    other, same_line = _OR_IF.match(value), value.split("\n", 1)[0]
    value = value if not same_line.strip(" *_:⟪⟫`\"'=") else same_line
    head = value.lstrip(" \n*_:⟪⟫`\"'=").split("\n\n", 1)[0]
    if "\\boxed" in head.split("\n", 1)[0]:
        return None
    if _is_calculation_of_more(head) or _COUNTED.match(head) or _OPEN.search(head) or re.match(r"[^.!\n]*\?", head):
        return None
    sentence = split(head)[0]
    if other:
        sentence += other[1]
    if _CALCULATION.match(sentence) and said.CONCLUSION.search(sentence):
        return None
    if _WORDED_CALCULATION.match(sentence) or WITH_SUBJECT.match(sentence):
        return result_of(sentence) or None
    if (
        _GAMBLE.search(sentence)
        or other
        or (said.HEDGE.search(sentence) and len(set(re.findall(r"\d[\d.,]*\b", sentence))) > 1)
    ):
        return ", ".join(number[0] for number in NUMBER.finditer(sentence)) or None
    if option := _OPTION.match(head):
        return f"({(option[1] or option[2]).upper()}) {value_at(head[option.end() :]) or _text_answer(head[option.end() :])}".strip()
    named = value_at(head) or value_at(spelled_small(head.split("\n", 1)[0])) or whole_value(sentence)
    return named and in_each_form(named, sentence)


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
    if has_number(inside) and re.match(r"\s*\\text\s*\{\s*[A-Za-z]{2}", inside):
        prose = _TEXT_INSIDE.sub(r"⟧\1⟦", f"⟦{inside}⟧")
        return stated_result(re.sub(r"⟦\W*⟧", "", prose).replace("＄⟦", "⟦＄"))
    return value_of(inside)


def _joined(group: list[str]) -> str:
    return group[0] if len(set(group)) == 1 else ", ".join(group)


def _without_boxes(text: str) -> str:
    """The text with nothing inside of its boxes, as long as before."""
    pieces, end = list[str](), 0
    for begin, stop, _ in sorted(_braced(text)):
        if begin >= end:
            pieces += [text[end:begin], "\\boxed".ljust(stop - begin)]
            end = stop
    return "".join([*pieces, text[end:]])


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
        if answer := _told(paragraph) if has_number(paragraph) else _text_answer(paragraph):
            yield answer


def _told(paragraph: str) -> str:
    """The result that a paragraph after a marker states: in its first sentence, if it is explained by the others."""
    first, *rest = sentences = split(paragraph)
    if rest and not any(map(_goes_on, rest)) and (found := result_of(first)):
        return found
    return (first_of_story(sentences) if rest else None) or stated_result(paragraph)


def _goes_on(sentence: str) -> bool:
    """True if a sentence after an answer computes, concludes or comes back to it, rather than explains it."""
    begins = said.CONCLUSION.match(f" {sentence}") or said.RECONSIDERED.match(sentence) or said.TOTAL.search(sentence)
    return (
        "=" in sentence
        or bool(begins)
        or bool(re.match(r"\W*(?:then|but|now|or|next|finally)\b", sentence, re.IGNORECASE))
    )


def _text_answer(text: str) -> str:
    first = re.split(r"\n|[.;!](?:\s|$)|[,(]| because | since ", text.strip(" *_:⟪⟫`\"'=\n"), maxsplit=1)[0]
    return first.strip(" .。*_:⟪⟫⟦⟧`\"'")
